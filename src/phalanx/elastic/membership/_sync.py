"""Bringing the workers of a new round to one state: that of the most advanced.

Phases: 1. everybody tells how far it is, what it runs and on what (one small gather); 2. a pure choice of the source;
3. the source streams its state to those who are behind, one after the other; all others go on at once. A worker that
fails meanwhile makes the whole round fail; nothing was changed in the source, and who was behind still is.
"""

from __future__ import annotations

import platform
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from phalanx.elastic.checkpoint._saving import no_readable_save
from phalanx.elastic.checkpoint._state import digest
from phalanx.elastic.checkpoint._stream import receive_state, send_state
from phalanx.elastic.membership._committed_steps import check_setback
from phalanx.elastic.membership._identity import describe_model, identity, tell_apart
from phalanx.elastic.membership._rounds import Seat, choose_source
from phalanx.errors import PhalanxError
from phalanx.events._types import StateReceived, StateSent, StepsRepeated
from phalanx.protocol import FRESH

if TYPE_CHECKING:
    from phalanx.elastic._job import Job


class WorkersDiffer(PhalanxError):
    """Workers of one job run different jobs, or should have the same bits and have not."""


class BitsWarning(UserWarning):
    """The result may not have the same bits as on other workers or before; it is as right as theirs."""


def fingerprint() -> dict[str, Any]:
    """What the bits of a computation depend on, besides its inputs."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> str:
    """In what two fingerprints differ; empty when they do not.

    >>> differences({"threads": 1, "torch": "2"}, {"threads": 4, "torch": "2"})
    'threads 1 and 4'
    """
    return ", ".join(
        f"{name} {value} and {other[name]}" for name, value in one.items() if other[name] != value
    )


def bring_level(job: Job, seat: Seat) -> None:
    """Make this worker's state that of the round's most advanced worker. Raises as collectives do."""
    mine: dict[str, Any] = {
        "step": FRESH if job.is_fresh else job.step,
        "job": identity(job),
        "machine": fingerprint(),
        "evaluations": [job.num_evaluations, job.last_evaluation],
        "attempt": job.attempt,
    }
    told = seat.group.all_gather_values(mine) if seat.group is not None else [mine]
    _check_same(seat, told, job)
    source = _find_source(job, seat, [one["step"] for one in told])
    if seat.group is None:
        return
    if told[source]["step"] != FRESH:
        job.attempt = told[source]["attempt"]  # each may have loaded the same state by itself
    behind = [
        rank
        for rank, one in enumerate(told)
        if rank != source and (one["step"] == FRESH or one["step"] < told[source]["step"])
    ]
    if seat.rank == source:
        for rank in behind:
            size = send_state(seat.group, job.state_dict(), rank)
            job.events.write(StateSent(to=seat.workers[rank], bytes=size))
    elif seat.rank in behind:
        job.take_over(receive_state(seat.group, source))
        job.events.write(StateReceived(step=job.step, source=seat.workers[source]))
    elif max(told, key=_num_evaluations)["evaluations"][0] > job.num_evaluations:
        # It was cut off from an evaluation that the others completed.
        job.count_evaluation(max(told, key=_num_evaluations)["evaluations"][1])
    if job.run.verify:
        _verify(job, seat.workers, seat.group.all_gather_values(_digests(job)))


def _find_source(job: Job, seat: Seat, steps: list[int]) -> int:
    """Whose state counts. The disk is looked at only if no worker has a state, since checking a save takes time."""
    if max(steps) != FRESH:
        return choose_source(steps)
    saved = job.saving.newest_step()
    mine: dict[str, Any] = {
        "step": FRESH if saved is None else saved,
        "committed": job.team.roster.ledger.num_committed(),
        "problems": job.saving.problems(),
    }
    told = seat.group.all_gather_values(mine) if seat.group is not None else [mine]
    source = choose_source([one["step"] for one in told])
    if told[source]["step"] == FRESH and any(one["problems"] for one in told):
        problems = {worker: one["problems"] for worker, one in zip(seat.workers, told, strict=True)}
        raise no_readable_save(job.saving.options, problems)
    _go_back(job, seat, max(one["committed"] for one in told), max(0, told[source]["step"]))
    if source == seat.rank and not job.load_save():
        job.begin_attempt()
    return source


def _go_back(job: Job, seat: Seat, before: int, after: int) -> None:
    """The workers are new, but the job may not be: say and count it, or refuse, if they begin before its last step."""
    # A launcher that restarts all workers does so because its user asked for it.
    may_begin_again = job.run.begin_again or not job.team.roster.can_change
    has_saves = job.saving.options is not None
    if check_setback(before, after, has_saves=has_saves, may_begin_again=may_begin_again) and seat.rank == 0:
        job.events.write(StepsRepeated(step=after, before=before))
        job.team.roster.ledger.go_back(before, after)


def _num_evaluations(told: dict[str, Any]) -> int:
    return int(told["evaluations"][0])


def _digests(job: Job) -> dict[str, str]:
    parts = job.state_dict()["parts"]
    named = {"position": job.schedule.state_dict(), "optimizer": parts["optimizer"]}
    for kind in ("model", "buffers", "others"):
        named |= {f"{kind} {name}": value for name, value in parts[kind].items()}
    return {name: digest(value) for name, value in named.items()}


def _verify(job: Job, workers: tuple[str, ...], told: list[dict[str, str]]) -> None:
    for worker, one in zip(workers, told, strict=True):
        different = [name for name, value in told[0].items() if one.get(name) != value]
        if different:
            raise WorkersDiffer(
                f"after a regroup at step {job.step}, workers {workers[0]} and {worker} differ in "
                f"{', '.join(different)}"
            )


def _check_same(seat: Seat, told: list[dict[str, Any]], job: Job) -> None:
    for worker, one in zip(seat.workers, told, strict=True):
        for name, value in told[0]["job"].items():
            if one["job"][name] == value:
                continue
            if name == "model":
                _tell_models_apart(seat, worker, job)
            else:
                raise WorkersDiffer(
                    f"{name} is {_short(value)} on worker {seat.workers[0]} and {_short(one['job'][name])} on "
                    f"{worker}; all workers must run the same script with the same arguments"
                )
        if listed := differences(told[0]["machine"], one["machine"]):
            warnings.warn(
                f"workers {seat.workers[0]} and {worker} differ in {listed}: the result depends on which of them "
                "computes what. For equal bits run them alike (RunOptions(threads=1) sets the threads)",
                BitsWarning,
                stacklevel=2,
            )


def _tell_models_apart(seat: Seat, worker: str, job: Job) -> NoReturn:
    """All workers have seen that the models differ, so all of them exchange what they are, and raise."""
    assert seat.group is not None, "a worker alone cannot differ"
    models = seat.group.all_gather_values(describe_model(job))
    first = seat.workers[0]
    told = tell_apart(first, models[0], worker, models[seat.workers.index(worker)])
    raise WorkersDiffer(
        f"the models differ: {told}; all workers must run the same script with the same arguments"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else text[:200] + "..."
