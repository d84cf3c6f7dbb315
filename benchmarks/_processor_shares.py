"""Gives processes shares of a processor, by a cgroup each: a machine that is really slower, not one that sleeps.

Of cgroup v1 or v2, whichever this process may write to. The quota of a group holds for periods of ``PERIOD``, so short
that a slot spans several. What is made is removed by ``close``, and nothing else is touched.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD = 10_000
"""Microseconds."""


class NoShares(RuntimeError):
    """This process may not give shares."""


class ProcessorShare:
    """The group of one process.

    ``ProcessorShare(name)`` makes it and takes this process in; ``set(0.5)`` gives it half a processor.
    """

    def __init__(self, name: str, root: Path = ROOT) -> None:
        self.path, self._home, self._is_v2 = _make(name, root)
        try:
            self.set(1.0)
            (self.path / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            self.path.rmdir()
            raise NoShares(f"{self.path} cannot be used ({error.strerror})") from error

    def set(self, share: float) -> None:
        """From now on this process gets so much of one processor, at most."""
        quota = round(share * PERIOD)
        if self._is_v2:
            (self.path / "cpu.max").write_text(f"{quota} {PERIOD}")
        else:
            (self.path / "cpu.cfs_period_us").write_text(str(PERIOD))
            (self.path / "cpu.cfs_quota_us").write_text(str(quota))

    def close(self) -> None:
        """Go back to where the process was, and remove the group."""
        (self._home / "cgroup.procs").write_text(str(os.getpid()))
        self.path.rmdir()


def _make(name: str, root: Path) -> tuple[Path, Path, bool]:
    """Return a new group, the one in which this process is now, and whether they are of version 2."""
    tried = []
    for place, file, is_v2 in ((root / "cpu", "cpu.cfs_quota_us", False), (root, "cpu.max", True)):
        parent = place / _own_group(is_v2).lstrip("/")
        if not (parent / "cgroup.procs").exists():
            continue
        try:
            path = parent / name
            path.mkdir()
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
            continue
        if (path / file).exists():
            return path, parent, is_v2
        path.rmdir()
        tried.append(f"{parent}: its groups have no {file}")
    raise NoShares(
        f"no cgroup gives this process shares of a processor ({'; '.join(tried) or f'none under {root}'}); expected a "
        "writable one with the cpu controller: run as root, in a container with its own writable cgroup, or without "
        "--how cgroup"
    )


def _own_group(is_v2: bool) -> str:
    """Return the group of this process, of version 2 or of version 1's cpu controller."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if (number == "0") if is_v2 else ("cpu" in controllers.split(",")):
            return path
    return "/"
