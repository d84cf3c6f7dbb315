"""Checks the audit log of a job: ``phalanx.elastic.audit``.

Reads the ``audit-*.jsonl`` files of all workers and proves, or says why not, that the committed steps follow one
another without a gap; that in each of them every slot was computed, by exactly one worker; and that in every finished
epoch each sample was committed exactly once (with ``tail="drop"``: at most once; with an order of the user's that
repeats samples, only their number is known). It trusts nothing but the records.

A job that went back to a save has several *attempts* in its log. What counts is the last one, before it what its save
was made of, and so on: steps that an attempt did beyond the save that the next one took were thrown away. A log that
begins in the middle (its save comes from elsewhere) proves the steps from there on, and says so. Torn lines are left
out; what they said is then missing, which shows as any other gap does.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx._fields import Fields
from phalanx.events._writer import parse_lines
from phalanx.watch._files import find_event_files

Lineage = tuple[int, ...]
MAX_LISTED = 20
"""Problems of one kind that are listed; the rest is counted."""


@dataclass
class Verdict:
    """What the log shows; ``problems`` is empty when the guarantee holds."""

    num_steps: int = 0
    first_step: int = 0
    """Where the log begins: 0, or the step of a save that comes from elsewhere."""
    num_epochs: int = 0
    num_samples: int = 0
    num_dropped: int = 0
    """Slots that were computed for steps, or attempts of steps, that did not count in the end."""
    left_out: dict[int, list[int]] = field(default_factory=dict)
    """By step: the samples that are in no weights, since the step was skipped or led back to an earlier save."""
    num_torn: int = 0
    """Lines that are no records: cut short by a kill or a full disk."""
    has_ended: bool = False
    """Whether some worker wrote that the loop was over; without, more may have happened than the log says."""
    problems: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Return whether the log holds the job from its first to its last step, and the guarantee holds."""
        return self.has_ended and not self.problems and not self.first_step

    def __str__(self) -> str:
        torn = f"; {self.num_torn} torn lines were left out" if self.num_torn else ""
        if self.problems:
            return "AUDIT FAILED\n" + "\n".join(f"  {problem}" for problem in self.problems) + torn
        where = f" from step {self.first_step} on (what was before is not in this log)" if self.first_step else ""
        end = "" if self.has_ended else "; NO END: the job still runs, was killed, or could not write its last lines"
        clean = "audit clean" if self.has_ended else "audit clean as far as it goes"
        return (
            f"{clean}: {self.num_steps} steps{where}, {self.num_epochs} whole epochs, {self.num_samples} samples, "
            f"each exactly once; {self.num_dropped} slot computations were dropped and issued again{torn}{end}"
        )


@dataclass
class _Log:
    """The records of all workers, sorted by kind."""

    jobs: list[dict[str, int]] = field(default_factory=list)
    computed: dict[tuple[int, Lineage, int], list[list[int]]] = field(default_factory=dict)
    commits: dict[int, dict[int, tuple[Lineage, int]]] = field(default_factory=dict)
    """By attempt and step: the lineage that counts, and its epoch."""
    began: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    """By attempt: its first step, and the attempt whose save it took."""
    ends: dict[int, int] = field(default_factory=dict)
    """By attempt: how many steps were committed when its loop was over."""
    skips: dict[int, tuple[Lineage, int]] = field(default_factory=dict)
    """By the step that was committed without an update: its lineage, and the first step that is left out with it."""
    num_lost: int = 0
    num_odd: int = 0

    def take(self, record: Any) -> None:
        """Sort in one record; ``ValueError`` when it is none of ours."""
        fields = Fields(record, "a record")
        kind = fields.text("kind")
        if kind == "job":
            names = ("num_slots", "steps_per_epoch", "num_samples_per_epoch")
            may_repeat = {"may_repeat": int(fields.flag("may_repeat", default=False))}
            self.jobs.append({name: fields.integer(name, low=0) for name in names} | may_repeat)
        elif kind == "attempt":
            parent = None if fields.get("parent") is None else fields.integer("parent", low=0)
            self.began[fields.integer("attempt", low=0)] = (fields.integer("step", low=0), parent)
        elif kind == "slot":
            key = (fields.integer("step", low=0), _lineage(fields), fields.integer("slot", low=0))
            self.computed.setdefault(key, []).append(fields.integers("indices"))
        elif kind == "commit":
            found = (_lineage(fields), fields.integer("epoch", low=0))
            steps = self.commits.setdefault(found[0][0], {})
            step = fields.integer("step", low=0)
            steps[step] = max(found, steps.get(step, found))
        elif kind == "skip":
            found = (_lineage(fields), fields.integer("first", low=0))
            step = fields.integer("step", low=0)
            self.skips[step] = max(found, self.skips.get(step, found))
        elif kind == "end":
            self.ends[_lineage(fields)[0]] = fields.integer("step", low=0)
        elif kind == "lost":
            self.num_lost += fields.integer("lines", low=0)
        else:
            raise ValueError(f"a record of the unknown kind {kind!r}")


def _lineage(fields: Fields) -> Lineage:
    lineage = tuple(fields.integers("lineage", low=0))
    if not lineage:
        raise ValueError("a record with an empty lineage")
    return lineage


def check(records: Iterable[Any], *, num_torn: int = 0) -> Verdict:
    """Check the records of all workers together."""
    verdict = Verdict(num_torn=num_torn)
    log = _Log()
    for record in records:
        try:
            log.take(record)
        except ValueError:
            log.num_odd += 1
    if log.num_odd:
        verdict.problems.append(f"{log.num_odd} records are not ones that a job writes")
    if log.num_lost:
        verdict.problems.append(f"the log is incomplete: {log.num_lost} lines could not be written")
    if not log.jobs:
        verdict.problems.append("no job record: no worker began")
        return verdict
    if other := next((job for job in log.jobs if job != log.jobs[0]), None):
        verdict.problems.append(f"workers ran different jobs: {log.jobs[0]} and {other}")
    winner = _winners(verdict, log)
    _check_gaps(verdict, winner)
    _note_left_out(verdict, log, winner)
    _check_samples(verdict, log.jobs[0], _check_slots(verdict, log, winner))
    return verdict


def _winners(verdict: Verdict, log: _Log) -> dict[int, tuple[Lineage, int]]:
    """Return the commit that counts for every step: the last attempt's, below its first step those of the one before
    it."""
    winner: dict[int, tuple[Lineage, int]] = {}
    attempt = max(log.commits, default=None)
    if attempt is None:
        return winner
    end = log.ends.get(attempt)
    verdict.has_ended = end is not None
    if end is not None and end > max(log.commits[attempt]) + 1:
        verdict.problems.append(
            f"the log is incomplete: the job ended after step {end - 1}, the last commit here is of step "
            f"{max(log.commits[attempt])}"
        )
    limit: int | None = None
    while attempt is not None:
        steps = log.commits[attempt]
        first, parent = log.began.get(attempt, (min(steps), None))
        winner |= {step: found for step, found in steps.items() if first <= step and (limit is None or step < limit)}
        limit = verdict.first_step = first
        earlier = [one for one in log.commits if one < attempt and first - 1 in log.commits[one]]
        if parent is None and attempt not in log.began:
            parent = max(earlier, default=None)  # its record is lost: the nearest that fits
        attempt = parent if first and parent in log.commits and parent < attempt else None
    return winner


def _check_gaps(verdict: Verdict, winner: dict[int, tuple[Lineage, int]]) -> None:
    verdict.num_steps = len(winner)
    ordered = sorted(winner)
    gaps = [
        (before + 1, after)
        for before, after in zip([verdict.first_step - 1, *ordered], ordered, strict=False)
        if after > before + 1
    ]
    for begin, end in gaps[:MAX_LISTED]:
        missing = list(range(begin, min(end, begin + 5)))
        verdict.problems.append(f"steps {missing} were never committed but later ones were")
    _count_more(verdict, len(gaps), "gaps")


def _note_left_out(verdict: Verdict, log: _Log, winner: dict[int, tuple[Lineage, int]]) -> None:
    """Say which samples were committed but are in no weights. A skip counts if its commit does."""
    left_out = {
        each
        for step, (lineage, first) in log.skips.items()
        if winner.get(step, ((), 0))[0] == lineage
        for each in range(min(first, step), step + 1)
    }
    for (step, lineage, _), attempts in sorted(log.computed.items()):
        if step in left_out and winner.get(step, ((), 0))[0] == lineage:
            verdict.left_out.setdefault(step, []).extend(attempts[0])


def _check_slots(
    verdict: Verdict, log: _Log, winner: dict[int, tuple[Lineage, int]]
) -> dict[int, tuple[int, Counter[int]]]:
    """By epoch: how many steps of it were committed, and how often each sample was."""
    seen: dict[int, tuple[int, Counter[int]]] = {}
    num_used = num_wrong = 0
    slots: dict[tuple[int, Lineage], dict[int, list[list[int]]]] = {}
    for (step, lineage, slot), attempts in log.computed.items():
        slots.setdefault((step, lineage), {})[slot] = attempts
    for step, (lineage, epoch) in sorted(winner.items()):
        count, samples = seen.get(epoch, (0, Counter()))
        here = slots.get((step, lineage), {})
        right = {slot: attempts[0] for slot, attempts in here.items() if len(attempts) == 1}
        wrong = _wrong_slots(log.jobs[0]["num_slots"], here)
        for slot, number in wrong[:MAX_LISTED]:
            num_wrong += 1
            if num_wrong <= MAX_LISTED:
                verdict.problems.append(
                    f"step {step} slot {slot} was computed by {number} workers in lineage {list(lineage)}; expected 1"
                )
        num_used += len(right)
        for indices in right.values():
            samples.update(indices)
        seen[epoch] = (count + 1, samples)
    _count_more(verdict, num_wrong, "slots that were not computed once")
    verdict.num_dropped = sum(map(len, log.computed.values())) - num_used
    return seen


def _wrong_slots(num_slots: int, here: dict[int, list[list[int]]]) -> list[tuple[int, int]]:
    """Slots of a step that were not computed once, and how often they were; a few of them will do."""
    wrong = [(slot, len(attempts)) for slot, attempts in here.items() if len(attempts) != 1 or slot >= num_slots]
    if len(here) < num_slots:
        wrong += [(slot, 0) for slot in range(min(num_slots, len(here) + MAX_LISTED)) if slot not in here]
    return sorted(wrong)


def _check_samples(verdict: Verdict, job: dict[str, int], seen: dict[int, tuple[int, Counter[int]]]) -> None:
    for epoch, (num_steps, counts) in sorted(seen.items()):
        verdict.num_samples += counts.total()
        may_repeat = job["may_repeat"]
        repeated = [index for index, count in counts.items() if count > 1]
        if repeated and not may_repeat:
            verdict.problems.append(f"epoch {epoch}: {len(repeated)} samples committed twice, e.g. {repeated[:5]}")
        if num_steps < job["steps_per_epoch"]:
            continue
        verdict.num_epochs += 1
        missing = job["num_samples_per_epoch"] - (counts.total() if may_repeat else len(counts))
        if missing:
            verdict.problems.append(
                f"epoch {epoch}: {missing} of {job['num_samples_per_epoch']} samples never committed"
            )


def _count_more(verdict: Verdict, count: int, what: str) -> None:
    if count > MAX_LISTED:
        verdict.problems.append(f"and {count - MAX_LISTED} more {what}")


def check_directory(directory: Path) -> Verdict:
    """Check the ``audit-*.jsonl`` files of a log directory."""
    return check_files(sorted(directory.glob("audit-*.jsonl")))


def check_files(paths: Iterable[Path]) -> Verdict:
    """Check audit logs together, as those of one job."""
    records: list[dict[str, Any]] = []
    num_torn = 0
    unreadable = []
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError as error:
            unreadable.append(f"{path} cannot be read: {error}")
            continue
        found, num_bad = parse_lines(data)
        records += found
        num_torn += num_bad + (not data.endswith(b"\n") and bool(data))
    verdict = check(records, num_torn=num_torn)
    verdict.problems += unreadable
    return verdict


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


MAX_CHECKED = 256 << 20
"""Bytes of audit logs that are checked beside a running job."""


def audit_record(directory: Path, workers: Collection[str] = ()) -> dict[str, Any]:
    """Return what the audit logs beside the events of a job say, for JSON; empty when there are none.

    Several folders are those of several runs, each of which must hold; or of one job whose workers wrote to several,
    which then holds together. ``workers`` are those of the job: what fails, but lacks the logs of some of them (which
    are on other machines), has not been checked.
    """
    folders = {Path(os.path.realpath(path)).parent for path in find_event_files(directory)} | {directory}
    logs = {folder: files for folder in sorted(folders) if (files := sorted(folder.glob("audit-*.jsonl")))}
    if not logs:
        return {}
    everything = [path for files in logs.values() for path in files]
    if sum(path.stat().st_size for path in everything) > MAX_CHECKED:
        return {"text": f"too long to check here: python -m phalanx.elastic.audit {' or '.join(map(str, logs))}"}
    verdicts = {folder: check_files(files) for folder, files in logs.items()}
    if len(logs) > 1 and any(one.problems for one in verdicts.values()):
        together = check_files(everything)
        if not together.problems:
            verdicts = {directory: together}
    holds = not any(one.problems for one in verdicts.values())
    missing = sorted(set(workers) - {path.stem.removeprefix("audit-") for path in everything})
    if missing and not holds:
        names = ", ".join([*missing[:3], *["..."][: len(missing) > 3]])
        return {
            "text": f"cannot be checked here: the logs of {len(missing)} worker(s) ({names}) are not in "
            f"{' or '.join(map(str, logs))}; bring all into one directory: python -m phalanx.elastic.audit DIR"
        }
    return {
        "text": "; ".join(str(one) if len(verdicts) == 1 else f"{folder}: {one}" for folder, one in verdicts.items()),
        "holds": holds,
        "steps": sum(one.num_steps for one in verdicts.values()),
        "samples": sum(one.num_samples for one in verdicts.values()),
    }
