"""Keeps what benchmarks measure: each records its figures by name, ``python -m benchmarks`` makes one file of them.

A figure is a time (or an amount) of ours and, where there is one, what torch or gloo needed for the same in the same
run; ``ratio`` is theirs over ours, so above 1 we are ahead. ``low`` and ``high`` are the extremes of ours.
Files lie in ``benchmarks/results``: ``tools.tables`` makes the tables of the documents from them, ``compare`` shows
what moved between two.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
VARIABLE = "PHALANX_BENCH_FIGURES"
"""Names the file to which the processes of a benchmark append their figures, one JSON object a line."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One thing measured, in ``unit``: less is better."""

    name: str
    unit: str
    ours: float
    theirs: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Theirs over ours.

        >>> Figure(name="x", unit="s", ours=2.0, theirs=5.0).ratio
        2.5
        """
        return self.theirs / self.ours if self.theirs is not None and self.ours else None


def record(name: str, unit: str, ours: float, theirs: float | None = None, **more: Any) -> None:
    """Keep a figure, when somebody collects them. Names read ``benchmark/case/...``."""
    figure = Figure(name=name, unit=unit, ours=ours, theirs=theirs, **more)
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a") as file:
            file.write(json.dumps(asdict(figure)) + "\n")


def read_figures(path: Path) -> dict[str, Figure]:
    """What the processes of one run have recorded, by name."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {figure.name: figure for figure in (Figure(**json.loads(line)) for line in lines)}


def machine() -> dict[str, Any]:
    """Where this runs: what a reader needs to judge the figures."""
    cpu = "unknown"
    if (info := Path("/proc/cpuinfo")).exists():
        names = [line.partition(":")[2] for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = " ".join(names[0].split()) if names else platform.machine()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def commit_of(tree: Path) -> str:
    """The commit that a tree stands at, with a plus sign if it was changed since; "unknown" outside of git."""
    git = ["git", "-C", str(tree)]
    found = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    if found.returncode:
        return "unknown"
    changed = subprocess.run([*git, "status", "--porcelain", "src", "benchmarks/*.py"], capture_output=True, text=True)
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "")


def ticks_of_all() -> float:
    """Processor seconds that all processes have used since the machine started; 0 where it cannot be known."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    _, user, nice, system, _, _, irq, softirq, _ = stat.read_text().split(maxsplit=8)
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


@contextmanager
def busy_with_others() -> Iterator[dict[str, float]]:
    """How many cores others used during the block, put into the dict that it is given when it ends."""
    said: dict[str, float] = {}

    def own() -> float:
        times = os.times()
        return sum(times[:4])  # this process and its children that have ended

    began, before = time.monotonic(), ticks_of_all() - own()
    yield said
    used = ticks_of_all() - own() - before
    said["others"] = round(max(0.0, used / max(time.monotonic() - began, 1e-9)), 2)


def runs() -> list[Path]:
    """The files of stored runs, the newest last; comparisons of two trees lie beside them."""
    return sorted(FOLDER.glob("[0-9]*.json"))


def write(figures: dict[str, dict[str, Figure]], others: dict[str, float], tree: Path) -> Path:
    """Store one run: figures by benchmark and name; the file's path."""
    now = datetime.datetime.now(datetime.timezone.utc)
    commit = commit_of(tree)
    content = {
        "format": 1,
        "date": now.isoformat(timespec="seconds"),
        "commit": commit,
        "machine": machine(),
        "others": others,
        "figures": {
            benchmark: {
                name: {key: value for key, value in _row(figure).items() if value not in (None, "")}
                for name, figure in found.items()
            }
            for benchmark, found in figures.items()
        },
    }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{now:%Y%m%d-%H%M%S}-{commit.rstrip('+')}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _row(figure: Figure) -> dict[str, Any]:
    values = {key: value for key, value in asdict(figure).items() if key != "name"} | {"ratio": figure.ratio}
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()}


@dataclass(frozen=True)
class Stored:
    """A file of results."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Stored:
        content = json.loads(path.read_text())
        if content.get("format") != 1:
            raise ValueError(f"{path} has format {content.get('format')!r}; expected 1")
        return cls(path, content)

    def figures(self, benchmark: str) -> dict[str, Figure]:
        rows = self.content["figures"].get(benchmark, {})
        return {
            name: Figure(name=name, **{key: value for key, value in row.items() if key != "ratio"})
            for name, row in rows.items()
        }


def newest_with(benchmark: str, prefix: str = "") -> Stored:
    """The newest stored run that has figures of a benchmark, some of them under names that begin with ``prefix``."""
    for path in reversed(runs()):
        stored = Stored.read(path)
        if any(name.startswith(prefix) for name in stored.content["figures"].get(benchmark, ())):
            return stored
    raise FileNotFoundError(f"no run in {FOLDER} has figures of {benchmark}; run `python -m benchmarks {benchmark}`")
