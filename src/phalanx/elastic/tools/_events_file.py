"""Finds the file that a worker's events go to: in the user's directory, where the agent looks for them, or in both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from phalanx.protocol import ENV_EVENTS


def events_path(log_dir: Path | None, worker: str, environ: Mapping[str, str]) -> Path | None:
    """Return the file of a worker; a link to it lies where the agent looks, if that is another place.

    >>> events_path(Path("logs"), "w", {})
    PosixPath('logs/events-w.jsonl')
    """
    name, agents = f"events-{worker}.jsonl", environ.get(ENV_EVENTS)
    if log_dir is None:
        return Path(agents) / name if agents else None
    path = log_dir / name
    if agents and Path(agents).resolve() != log_dir.resolve():
        try:
            (Path(agents) / name).symlink_to(path.absolute())
        except OSError:  # it is there already, or nobody can look there: the file itself is what counts
            pass
    return path
