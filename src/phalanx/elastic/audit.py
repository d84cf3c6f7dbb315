"""Checks the audit log of a job: ``python -m phalanx.elastic.audit DIR``.

Reads the ``audit-*.jsonl`` files of all workers and proves, or says why not, that the committed steps are 0, 1, 2, ...
without a gap; that in each of them every slot was computed, by exactly one worker; and that in every finished epoch
each sample was committed exactly once (with ``tail="drop"``: at most once; with an order of the user's that repeats
samples, only their number is known). It trusts nothing but the records.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.elastic._records import read_lines

Lineage = tuple[int, ...]


@dataclass
class Verdict:
    """What the log shows; ``problems`` is empty when the guarantee holds."""

    num_steps: int = 0
    num_epochs: int = 0
    num_samples: int = 0
    num_dropped: int = 0
    """Slots that were computed for steps, or attempts of steps, that did not count in the end."""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.problems:
            return "AUDIT FAILED\n" + "\n".join(f"  {problem}" for problem in self.problems)
        return (
            f"audit clean: {self.num_steps} steps, {self.num_epochs} whole epochs, {self.num_samples} samples, "
            f"each exactly once; {self.num_dropped} slot computations were dropped and issued again"
        )


def check(records: Iterable[dict[str, Any]]) -> Verdict:
    """Check the records of all workers together."""
    verdict = Verdict()
    jobs: list[dict[str, Any]] = []
    computed: dict[tuple[int, Lineage, int], list[list[int]]] = {}
    winner: dict[int, tuple[Lineage, int]] = {}
    for record in records:
        if record["kind"] == "job":
            jobs.append({key: value for key, value in record.items() if key != "worker"})
        elif record["kind"] == "slot":
            key = (record["step"], tuple(record["lineage"]), record["slot"])
            computed.setdefault(key, []).append(record["indices"])
        elif record["kind"] == "commit":
            found = (tuple(record["lineage"]), record["epoch"])
            winner[record["step"]] = max(found, winner.get(record["step"], found))
    if not jobs:
        verdict.problems.append("no job record: no worker began")
        return verdict
    if any(job != jobs[0] for job in jobs):
        verdict.problems.append(
            f"workers ran different jobs: {jobs[0]} and {next(j for j in jobs if j != jobs[0])}"
        )
    _check_steps(verdict, jobs[0], computed, winner)
    return verdict


def _check_steps(
    verdict: Verdict,
    job: dict[str, Any],
    computed: dict[tuple[int, Lineage, int], list[list[int]]],
    winner: dict[int, tuple[Lineage, int]],
) -> None:
    seen: dict[int, Counter[int]] = {}
    num_per_epoch: Counter[int] = Counter()
    num_used = 0
    if sorted(winner) != list(range(len(winner))):
        gaps = sorted(set(range(max(winner) + 1)) - set(winner))
        verdict.problems.append(f"steps {gaps[:5]} were never committed but later ones were")
    for step, (lineage, epoch) in sorted(winner.items()):
        num_per_epoch[epoch] += 1
        for slot in range(job["num_slots"]):
            attempts = computed.get((step, lineage, slot), [])
            if len(attempts) != 1:
                verdict.problems.append(
                    f"step {step} slot {slot} was computed by {len(attempts)} workers in lineage {list(lineage)}; "
                    "expected 1"
                )
                continue
            num_used += 1
            seen.setdefault(epoch, Counter()).update(attempts[0])
    verdict.num_steps = len(winner)
    verdict.num_dropped = sum(map(len, computed.values())) - num_used
    for epoch, counts in sorted(seen.items()):
        verdict.num_samples += counts.total()
        may_repeat = job.get("may_repeat", False)
        repeated = [index for index, count in counts.items() if count > 1]
        if repeated and not may_repeat:
            verdict.problems.append(
                f"epoch {epoch}: {len(repeated)} samples committed twice, e.g. {repeated[:5]}"
            )
        if num_per_epoch[epoch] < job["steps_per_epoch"]:
            continue
        verdict.num_epochs += 1
        missing = job["num_samples_per_epoch"] - (counts.total() if may_repeat else len(counts))
        if missing:
            verdict.problems.append(
                f"epoch {epoch}: {missing} of {job['num_samples_per_epoch']} samples never committed"
            )


def check_directory(directory: Path) -> Verdict:
    """Check the ``audit-*.jsonl`` files of a log directory."""
    return check(record for path in sorted(directory.glob("audit-*.jsonl")) for record in read_lines(path))


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print(
            "usage: python -m phalanx.elastic.audit DIR   (DIR holds the audit-*.jsonl files of a job)",
            file=sys.stderr,
        )
        return 2
    verdict = check_directory(Path(arguments[0]))
    print(verdict)
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    sys.exit(main())
