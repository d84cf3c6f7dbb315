"""Shows what moved between two runs of the benchmarks, or between two trees measured in turns.

    python -m benchmarks.compare OLD.json NEW.json        two files of benchmarks/results
    python -m benchmarks.compare                          the two newest
    python -m benchmarks.compare --old TREE [--new TREE] [--rounds 5] [--full] [name ...]

A tree is a folder with ``src`` or a commit. Each round runs a benchmark once on either tree, who is first changing;
the benchmarks are those of this tree, only ``phalanx`` is that of the other. Reported are medians over rounds of
new over old, lowest and highest: below 1 the new one is quicker. Beside it stands the same for what torch or gloo
needed in those very runs, which no change of ours can have moved: that is the noise. With it goes new over old after
both were divided by it. A figure has *moved* when every round agrees in which direction, and the median differs by more
than a tenth and by more than the noise. What was found is stored as ``benchmarks/results/compare-OLD-NEW.json``.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import _results
from benchmarks.__main__ import QUICK, known, run
from benchmarks._results import Figure, Stored, busy_with_others, commit_of, machine, runs

ROOT = Path(__file__).parent.parent
NOTICED = 0.1
"""A difference that is worth a word."""


@dataclass(frozen=True)
class Change:
    """One figure, old and new: a ratio new over old for each round."""

    name: str
    ours: Sequence[float]
    theirs: Sequence[float] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.ours)

    @property
    def noise(self) -> float:
        """How far the median of what nobody changed is from 1; 0 where there is nothing to compare with."""
        return abs(statistics.median(self.theirs) - 1) if self.theirs else 0.0

    @property
    def normalized(self) -> float | None:
        """New over old, each divided by what theirs took in the same run."""
        if not self.theirs:
            return None
        return statistics.median(a / b for a, b in zip(self.ours, self.theirs, strict=True))

    @property
    def moved(self) -> bool:
        """
        >>> Change("x", [1.2, 1.3, 1.25]).moved, Change("x", [0.9, 1.3, 1.25]).moved
        (True, False)
        >>> Change("x", [1.2, 1.3, 1.25], [1.3, 1.3, 1.2]).moved
        False
        """
        agree = all(ratio > 1 for ratio in self.ours) or all(ratio < 1 for ratio in self.ours)
        values = [self.median] if self.normalized is None else [self.median, self.normalized]
        return agree and all(abs(value - 1) > max(NOTICED, self.noise) for value in values)

    def row(self) -> dict[str, object]:
        """It for JSON: the ratios of all rounds, and what they come to."""
        return {
            "ours": [float(f"{ratio:.4g}") for ratio in self.ours],
            "theirs": [float(f"{ratio:.4g}") for ratio in self.theirs],
            "median": float(f"{self.median:.4g}"),
            "moved": self.moved,
        }

    def __str__(self) -> str:
        def spread(ratios: Sequence[float]) -> str:
            return f"{statistics.median(ratios):5.2f} ({min(ratios):.2f}-{max(ratios):.2f})"

        cells = f"{self.name:58s} {spread(self.ours):>18s}"
        if self.theirs:
            cells += f" {spread(self.theirs):>18s} {self.normalized:7.2f}"
        return cells + ("  MOVED" if self.moved else "")


def changes(pairs: Sequence[tuple[dict[str, Figure], dict[str, Figure]]]) -> Iterator[Change]:
    """Every figure that all rounds have, old and new."""
    names = [name for name in pairs[0][0] if all(name in side for pair in pairs for side in pair)]
    for name in names:
        both = [(old[name], new[name]) for old, new in pairs]
        if not all(old.ours and new.ours for old, new in both):
            continue
        theirs = [new.theirs / old.theirs for old, new in both if old.theirs and new.theirs]
        ours = [new.ours / old.ours for old, new in both]
        yield Change(name, ours, theirs if len(theirs) == len(ours) else ())


def show(found: Sequence[Change]) -> None:
    print(f"{'new over old':58s} {'ours':>18s} {'theirs (noise)':>18s} {'divided':>7s}")
    for change in found:
        print(change)
    if found:
        mean = statistics.geometric_mean(change.median for change in found)
        normalized = [change.normalized for change in found if change.normalized]
        divided = f"{statistics.geometric_mean(normalized):40.2f}" if normalized else ""
        print(f"{'geometric mean':58s} {mean:5.2f}{divided}")
    print(f"moved: {sum(change.moved for change in found)} of {len(found)}", flush=True)


@contextmanager
def source_of(tree: str) -> Iterator[Path]:
    """The ``src`` of a folder, or of a commit of this repository."""
    if (Path(tree) / "src").is_dir():
        yield (Path(tree) / "src").resolve()
        return
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", tree, "src"], capture_output=True)
    if packed.returncode:
        raise SystemExit(f"{tree} is neither a folder with src nor a commit: {packed.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory(prefix="phalanx-compare-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder) / "src"


def in_turns(
    name: str, sources: Sequence[Path], rounds: int, options: list[str]
) -> list[tuple[dict[str, Figure], dict[str, Figure]]]:
    """(old, new) figures of each round in which both ended well."""
    pairs = []
    for number in range(rounds):
        found: dict[Path, dict[str, Figure] | None] = {}
        for source in sources if number % 2 else reversed(sources):
            found[source] = run(name, options, {"PYTHONPATH": str(source)}, quiet=True)
        old, new = (found[source] for source in sources)
        if old is None or new is None:
            print(f"{name}, round {number + 1}: {'the old' if old is None else 'the new'} tree's run failed")
        else:
            pairs.append((old, new))
    return pairs


def compare_trees(options: argparse.Namespace) -> int:
    failed = False
    found: dict[str, list[Change]] = {}
    others: dict[str, float] = {}
    with ExitStack() as stack:
        sources = [stack.enter_context(source_of(tree)) for tree in (options.old, options.new)]
        for name in options.names or known():
            print(f"\n== {name}, {options.rounds} rounds of {options.old} and {options.new}", flush=True)
            with busy_with_others() as busy:
                pairs = in_turns(name, sources, options.rounds, [] if options.full else QUICK[name])
            if pairs:
                found[name], others[name] = list(changes(pairs)), busy["others"]
                show(found[name])
            failed |= len(pairs) < options.rounds
    print(f"\nstored as {store(options.old, options.new, found, others)}")
    return int(failed)


def store(old: str, new: str, found: dict[str, list[Change]], others: dict[str, float]) -> Path:
    """Keep what moved between two trees, with the machine and the cores that others used; the file's path."""
    names = [commit_of(Path(tree)) if Path(tree).is_dir() else tree for tree in (old, new)]
    content = {
        "format": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "old": names[0],
        "new": names[1],
        "machine": machine(),
        "others": others,
        "rows": {benchmark: {change.name: change.row() for change in rows} for benchmark, rows in found.items()},
    }
    _results.FOLDER.mkdir(exist_ok=True)
    label = "-".join(re.sub(r"[^\w.]+", "_", name).strip("_") for name in names)
    path = _results.FOLDER / f"compare-{label}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def compare_files(old: Stored, new: Stored) -> int:
    for side, stored in (("old", old), ("new", new)):
        print(f"{side}: {stored.path.name}, {stored.content['commit']}, {stored.content['machine']['cpu']}")
    if old.content["machine"] != new.content["machine"]:
        print("the machines differ: compare what is divided by theirs, not the times")
    for name in old.content["figures"]:
        if name in new.content["figures"]:
            print(f"\n== {name}")
            show(list(changes([(old.figures(name), new.figures(name))])))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", help="tree or commit; runs the benchmarks")
    parser.add_argument("--new", default=str(ROOT), help="tree or commit; default: this tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--full", action="store_true", help="the benchmarks as make bench runs them: hours")
    parser.add_argument("names", nargs="*", help="benchmarks, or two files of results")
    options = parser.parse_args()
    if options.old:
        return compare_trees(options)
    files = [Path(name) for name in options.names] or runs()[-2:]
    if len(files) != 2:
        parser.error(f"expected two files of results, or --old; got {len(files)}")
    return compare_files(*map(Stored.read, files))


if __name__ == "__main__":
    sys.exit(main())
