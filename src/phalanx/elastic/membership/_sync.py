"""Brings the workers of a new round to one state: that of the most advanced.

Phases: 1. everybody tells how far it is, what it runs and on what (one small gather); 2. a pure choice of the source;
3. the source streams its state to those who are behind, one after the other; all others go on at once. A worker that
fails meanwhile makes the whole round fail; nothing was changed in the source, and who was behind still is.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from phalanx._devices import HOST, Device, of
from phalanx.elastic.checkpoint._saving import no_readable_save
from phalanx.elastic.checkpoint._state import digest
from phalanx.elastic.checkpoint._stream import receive_state, send_state
from phalanx.elastic.membership._committed_steps import check_setback
from phalanx.elastic.membership._coordinator import Coordinator
from phalanx.elastic.membership._rounds import Membership, choose_source
from phalanx.elastic.membership._training import Training
from phalanx.errors import PhalanxError
from phalanx.events._event_types import StateReceived, StateSent, StepsRepeated
from phalanx.protocol import FRESH

MAX_NAMED = 3
"""How many differing tensors an error describes before it only counts them."""


class WorkersDiffer(PhalanxError):
    """Workers of one job run different jobs, or should have the same bits and have not."""


class BitsWarning(UserWarning):
    """The result may not have the same bits as on other workers or before; it is as right as theirs."""


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return what the bits of a computation depend on, besides its inputs: of the processors, and of the accelerator
    that has the model."""
    device = device_of(model)
    return {
        **HOST.bits_depend_on(),
        "machine": platform.machine(),
        **({} if device.is_host else device.bits_depend_on()),
    }


def device_of(model: nn.Module) -> Device:
    first = next(model.parameters(), None)
    return HOST if first is None else of(first)


def warn_not_deterministic(model: nn.Module) -> None:
    """Say what would keep a job on an accelerator from giving the same bits twice; nothing on the processors."""
    device = device_of(model)
    remedy = device.not_deterministic()
    if remedy:
        warnings.warn(
            f"the model is on {device.kind}, whose kernels may give other bits for the same inputs: two runs, or a run "
            f"with a lost worker and one without, then differ in the last digits. For equal bits {remedy}",
            BitsWarning,
            stacklevel=3,
        )


def differences(one: dict[str, Any], other: dict[str, Any]) -> str:
    """In what two fingerprints differ; empty when they do not.

    >>> differences({"threads": 1, "torch": "2"}, {"threads": 4, "torch": "2"})
    'threads 1 and 4'
    """
    names = dict.fromkeys([*one, *other])
    pairs = [(name, one.get(name, "none"), other.get(name, "none")) for name in names]
    return ", ".join(f"{name} {mine} and {theirs}" for name, mine, theirs in pairs if mine != theirs)


def bring_level(job: Training, coordinator: Coordinator, membership: Membership) -> None:
    """Make this worker's state that of the round's most advanced worker. Raises as collectives do."""
    mine: dict[str, Any] = {
        "step": FRESH if job.is_fresh else job.step,
        "job": job.identity(),
        "machine": fingerprint(job.model),
        "evaluations": [job.num_evaluations, job.last_evaluation],
        "attempt": job.attempt,
        "pace": job.dealing.pace,
        "came": job.regrouping.came_at(membership),
    }
    told = membership.group.all_gather_values(mine) if membership.group is not None else [mine]
    check_same(membership, told, job)
    job.regrouping.choose_writer(membership, [one["came"] for one in told])
    source = _find_source(job, coordinator, membership, [one["step"] for one in told])
    if membership.group is None:
        return
    job.dealing.pace = told[source]["pace"]
    if told[source]["step"] != FRESH:
        job.attempt = told[source]["attempt"]  # each may have loaded the same state by itself
    behind = [
        rank
        for rank, one in enumerate(told)
        if rank != source and (one["step"] == FRESH or one["step"] < told[source]["step"])
    ]
    if membership.rank == source:
        for rank in behind:
            begins_alike = job.is_fresh or told[rank]["step"] != FRESH
            state = job.state_dict() if begins_alike else job.state_for_newcomers()
            size = send_state(membership.group, state, rank)
            job.events.write(StateSent(to=membership.workers[rank], bytes=size))
    elif membership.rank in behind:
        job.take_over(receive_state(membership.group, source))
        job.events.write(StateReceived(step=job.step, source=membership.workers[source]))
    elif max(told, key=_num_evaluations)["evaluations"][0] > job.num_evaluations:
        # It was cut off from an evaluation that the others completed.
        job.count_evaluation(max(told, key=_num_evaluations)["evaluations"][1])
    if job.run.verify:
        _verify(job, membership.workers, membership.group.all_gather_values(_digests(job)))


def _find_source(job: Training, coordinator: Coordinator, membership: Membership, steps: list[int]) -> int:
    """Return whose state counts. The disk is looked at only if no worker has a state, since checking a save takes
    time."""
    if max(steps) != FRESH:
        return choose_source(steps)
    source, _ = find_saved(job, coordinator, membership)
    if source == membership.rank and not job.load_save():
        job.begin_attempt()
    return source


def find_saved(job: Training, coordinator: Coordinator, membership: Membership) -> tuple[int, int]:
    """Return who can read the newest save, and the step of it (``FRESH``: there is none); all workers call it.

    Says and counts that the job goes back to it, or refuses to (``StepsLost``); ``NoReadableSave`` if there are saves
    and none can be read.
    """
    saved = job.saving.newest_step()
    mine: dict[str, Any] = {
        "step": FRESH if saved is None else saved,
        "committed": coordinator.committed_steps.num_committed(),
        "problems": job.saving.problems(),
    }
    told = membership.group.all_gather_values(mine) if membership.group is not None else [mine]
    source = choose_source([one["step"] for one in told])
    if told[source]["step"] == FRESH and any(one["problems"] for one in told):
        problems = {worker: one["problems"] for worker, one in zip(membership.workers, told, strict=True)}
        raise no_readable_save(job.saving.options, problems)
    after = max(job.step, told[source]["step"])  # a job that its loop has set to a later step begins there
    go_back(job, coordinator, membership, max(one["committed"] for one in told), after)
    return source, told[source]["step"]


def go_back(
    job: Training,
    coordinator: Coordinator,
    membership: Membership,
    before: int,
    after: int,
    cause: str = "all workers were lost",
) -> None:
    """Say and count that the job begins before its last step, or refuse: its workers are new, or have lost state."""
    # A launcher that restarts all workers does so because its user asked for it.
    may_begin_again = job.run.begin_again or not coordinator.can_change
    has_saves = job.saving.options is not None
    if check_setback(before, after, has_saves=has_saves, may_begin_again=may_begin_again) and membership.rank == 0:
        job.events.write(StepsRepeated(step=after, before=before))
        coordinator.committed_steps.go_back(before, after, cause)


def _num_evaluations(told: dict[str, Any]) -> int:
    return int(told["evaluations"][0])


def _digests(job: Training) -> dict[str, str]:
    state = job.state_dict()
    parts = state["parts"]
    named = {"position": state["sampler"], "optimizer": parts["optimizer"]}
    if job.loop_state:  # who took its last step over has yet to change the optimizer's options as the others have
        named["optimizer"] = parts["optimizer"]["state"]
    for kind in ("model", "buffers", "others"):
        named |= {f"{kind} {name}": value for name, value in parts[kind].items()}
    return {name: digest(value) for name, value in named.items()}


def _verify(job: Training, workers: tuple[str, ...], told: list[dict[str, str]]) -> None:
    for worker, one in zip(workers, told, strict=True):
        different = [name for name, value in told[0].items() if one.get(name) != value]
        if different:
            raise WorkersDiffer(
                f"after a regroup at step {job.step}, workers {workers[0]} and {worker} differ in "
                f"{', '.join(different)}"
            )


def check_same(membership: Membership, told: list[dict[str, Any]], job: Training) -> None:
    for worker, one in zip(membership.workers, told, strict=True):
        for name, value in told[0]["job"].items():
            if one["job"][name] == value:
                continue
            if name == "model":
                _tell_models_apart(membership, worker, job)
            else:
                raise WorkersDiffer(
                    f"{name} is {_short(value)} on worker {membership.workers[0]} and {_short(one['job'][name])} on "
                    f"{worker}; all workers must run the same script with the same arguments"
                )
        if listed := differences(told[0]["machine"], one["machine"]):
            warnings.warn(
                f"workers {membership.workers[0]} and {worker} differ in {listed}: the result depends on which of them "
                "computes what. For equal bits run them alike (RunOptions(threads=1) sets the threads)",
                BitsWarning,
                stacklevel=2,
            )


def _tell_models_apart(membership: Membership, worker: str, job: Training) -> NoReturn:
    """Return all workers have seen that the models differ, so all of them exchange what they are, and raise."""
    assert membership.group is not None, "a worker alone cannot differ"
    models = membership.group.all_gather_values(describe_model(job.model))
    first = membership.workers[0]
    told = tell_apart(first, models[0], worker, models[membership.workers.index(worker)])
    raise WorkersDiffer(f"the models differ: {told}; all workers must run the same script with the same arguments")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else text[:200] + "..."


def describe_model(model: nn.Module) -> dict[str, str]:
    """Return every parameter and buffer in order: what it is, and its dtype and shape."""
    found = {
        f"parameter {name}": _describe(param) + ("" if param.requires_grad else ", frozen")
        for name, param in model.named_parameters()
    }
    return found | {f"buffer {name}": _describe(buffer) for name, buffer in model.named_buffers()}


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def tell_apart(first: str, one: Mapping[str, str], second: str, other: Mapping[str, str]) -> str:
    """In what the models of two workers differ.

    >>> tell_apart("a", {"parameter w": "float32 (2,)"}, "b", {"parameter w": "float32 (3,)", "buffer n": "int64 ()"})
    'parameter w is float32 (2,) on worker a and float32 (3,) on b; buffer n is only on b'
    """
    found = []
    for name in [*one, *(name for name in other if name not in one)]:
        if name not in other:
            found.append(f"{name} is only on {first}")
        elif name not in one:
            found.append(f"{name} is only on {second}")
        elif one[name] != other[name]:
            found.append(f"{name} is {one[name]} on worker {first} and {other[name]} on {second}")
    if not found:
        mine, theirs = next(pair for pair in zip(one, other, strict=True) if pair[0] != pair[1])
        return f"parameters and buffers come in another order: {mine} on worker {first} where {theirs} is on {second}"
    more = f"; {len(found) - MAX_NAMED} more differ" if len(found) > MAX_NAMED else ""
    return "; ".join(found[:MAX_NAMED]) + more
