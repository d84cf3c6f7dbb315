"""Says in one line what an event tells, for people: the page's list, ``phalanx events``, the live block. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from phalanx.events._agent_events import (
    ActionAsked,
    GenerationEnded,
    GenerationFormed,
    GoodputTold,
    JobEvent,
    JobRestarted,
    JobWentBack,
    LimitReached,
    NodeNoticed,
    ShutDown,
    WorkerExited,
    WorkerFailed,
    WorkerHung,
    WorkerReplaced,
    WorkerStarted,
)
from phalanx.events._event_types import (
    AnyEvent,
    CellsHeld,
    CellsMoved,
    GroupLost,
    NonFiniteFound,
    RolledBack,
    RoundFormed,
    Saved,
    SaveFailed,
    SlotsDealt,
    StateReceived,
    StateSent,
    StepSkipped,
    TrainingEvent,
    TrainingFinished,
    TrainingLeft,
    TrainingStarted,
    WrongBitsFound,
)
from phalanx.events._free_event import Event

MAX_CHARACTERS = 500
MAX_NAMES = 8


def in_words(event: AnyEvent) -> str:
    """Return what an event says, in one line.

    >>> in_words(WorkerExited(job="j", worker_id="n.b", rank=1, local_rank=1, pid=7, exit_code=-9))
    'worker n.b (rank 1) ended: SIGKILL'
    """
    text = (_of_agent(event) if isinstance(event, JobEvent) else _of_worker(event)) or _fields(event)
    return text[:MAX_CHARACTERS]


def _of_agent(event: JobEvent) -> str:
    if isinstance(event, WorkerFailed):
        return f"rank {event.rank} ({event.worker_id}) failed, {event.cause}: {event.message}"
    if isinstance(event, WorkerStarted):
        return f"worker {event.worker_id} started as rank {event.rank} on {event.host}, pid {event.pid}"
    if isinstance(event, WorkerExited):
        return f"worker {event.worker_id} (rank {event.rank}) ended: {exit_in_words(event.exit_code)}"
    if isinstance(event, WorkerHung):
        return f"worker {event.worker_id} hung for {event.seconds:g} s"
    if isinstance(event, WorkerReplaced):
        return f"worker {event.worker_id} takes the place of {event.old_worker_id}, rank {event.rank}"
    if isinstance(event, GenerationFormed):
        return f"generation {event.generation}: {_num(event.num_workers, 'worker')} on {_num(event.num_nodes, 'node')}"
    if isinstance(event, JobRestarted):
        return f"restart {event.restart_count} of {event.max_restarts}: {event.reason}"
    if isinstance(event, NodeNoticed):
        left = "" if event.seconds is None else f", {event.seconds:.0f} s left"
        return f"{event.host} is to go ({event.source}): {event.reason}{left}"
    if isinstance(event, (GenerationEnded, ShutDown, LimitReached)):
        return event.reason
    if isinstance(event, ActionAsked):
        return f"{event.action} {event.detail}, asked by {event.by}"
    if isinstance(event, JobWentBack):
        return f"went back from step {event.from_step} to step {event.to_step}"
    return event.text if isinstance(event, GoodputTold) else ""


def _of_worker(event: AnyEvent) -> str:
    if isinstance(event, Event):
        return event.name
    if isinstance(event, TrainingStarted):
        return f"{event.worker} has built its job"
    if isinstance(event, RoundFormed):
        return f"{event.worker} is one of {_num(len(event.workers), 'worker')} after {1e3 * event.seconds:.0f} ms"
    if isinstance(event, SlotsDealt):
        return f"slots {', '.join(map(str, event.sizes))} from step {event.step} on: {event.gain:.2f} times as fast"
    if isinstance(event, GroupLost):
        return f"{event.worker} lost its group at step {event.step}: {event.reason}"
    if isinstance(event, StateSent):
        return f"{event.worker} sent its state to {event.to}, {event.bytes:,} bytes"
    if isinstance(event, StateReceived):
        return f"{event.worker} took the state of step {event.step} from {event.source}"
    if isinstance(event, CellsMoved):
        return f"{event.worker} moved {_num(event.cells, 'cell')}, {event.bytes:,} bytes; {event.left} left"
    if isinstance(event, CellsHeld):
        with_whom = f"with {names(event.mirrors)}" if event.mirrors else "alone"
        return f"{event.worker} holds {_num(event.cells, 'cell')}, {event.unprotected} of them unprotected, {with_whom}"
    if isinstance(event, Saved):
        return f"step {event.step} saved to {event.path}{', and read back' if event.verified else ''}"
    if isinstance(event, SaveFailed):
        return f"step {event.step} could not be saved: {event.error}"
    if isinstance(event, NonFiniteFound):
        return f"step {event.step} is not finite: {event.reaction}"
    if isinstance(event, StepSkipped):
        return f"step {event.step} is left out: {event.reason}"
    if isinstance(event, RolledBack):
        return f"step {event.step} led back to the save of step {event.to}: {event.reason}"
    if isinstance(event, WrongBitsFound):
        where = [event.what, *([f"slot {event.slot}"] if event.slot is not None else [])]
        where += [f"{event.parameter}[{event.element}]"] if event.parameter else []
        return f"{event.culprit or 'nobody knows who'} has wrong bits in step {event.step}: {', '.join(where)}"
    if isinstance(event, TrainingFinished):
        return f"{event.worker} finished after step {event.step}"
    if isinstance(event, TrainingLeft):
        return f"{event.worker} left after step {event.step}, as it was told"
    return ""


def _fields(event: AnyEvent) -> str:
    """Return all that an event says, for those without words of their own."""
    said = {name: value for name, value in vars(event).items() if name not in ("time", "job", "host", "machine")}
    who = event.worker if isinstance(event, TrainingEvent) else event.host if isinstance(event, JobEvent) else ""
    return f"{who} {', '.join(f'{name} {value}' for name, value in said.items() if name != 'worker')}".strip()


def round_in_words(event: RoundFormed) -> str:
    """Return what changed with a round, told once by whoever tells first.

    >>> event = RoundFormed(worker="n.a", generation=1, round=0, workers=("n.a", "n.c"), joined=("n.c",), left=("n.b",),
    ...                     step=7, seconds=0.02)
    >>> round_in_words(event)
    'generation 1.0: 2 workers from step 7 on; joined n.c; left n.b; took 20 ms'
    """
    words = [
        f"generation {event.generation}.{event.round}: {_num(len(event.workers), 'worker')} from step {event.step} on"
    ]
    words += [f"{what} {names(who)}" for what, who in (("joined", event.joined), ("left", event.left)) if who]
    return "; ".join([*words, f"took {1e3 * event.seconds:.0f} ms"])


def names(workers: Sequence[str]) -> str:
    """
    >>> names([str(i) for i in range(10)])
    '0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
    """
    more = f" and {len(workers) - MAX_NAMES} more" if len(workers) > MAX_NAMES else ""
    return ", ".join(workers[:MAX_NAMES]) + more


def exit_in_words(code: int) -> str:
    """
    >>> exit_in_words(0), exit_in_words(-15), exit_in_words(3)
    ('done', 'SIGTERM', 'exit code 3')
    """
    if code < 0 and -code in {one.value for one in signal.Signals}:
        return signal.Signals(-code).name
    return f"exit code {code}" if code else "done"


def _num(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
