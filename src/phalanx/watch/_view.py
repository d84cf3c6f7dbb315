"""Keeps what a job's events add up to, one event after the other, and gives it as JSON: what page and API show.

Everything is bounded: curves and heat map are decimated, lists keep their last entries. One thread at a time.
Times are seconds since 1970, spans are seconds unless a name ends in ``_ms``.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from phalanx.events._agent_events import (
    GenerationEnded,
    GenerationFormed,
    JobRestarted,
    NodeLoad,
    ShutDown,
    WorkerFailed,
)
from phalanx.events._event_types import (
    AnyEvent,
    CellsHeld,
    CellsMoved,
    NonFiniteFound,
    Resumed,
    RolledBack,
    RoundFormed,
    Saved,
    SaveFailed,
    StateSent,
    StepCommitted,
    StepSkipped,
    TrainingFinished,
    TrainingStarted,
    WorkerStepTimes,
    WrongBitsFound,
)
from phalanx.events._free_event import Event
from phalanx.watch._committed import CommittedRange
from phalanx.watch._copies import CopyTable
from phalanx.watch._decimate import Curve, HeatMap
from phalanx.watch._goodput import LOST_CONTACT, Accounts
from phalanx.watch._histogram import REGROUP_BOUNDS, STEP_BOUNDS, Histogram
from phalanx.watch._in_words import in_words, round_in_words
from phalanx.watch._incidents import Incidents
from phalanx.watch._lifelines import Lifelines
from phalanx.watch._nodes import NodeTable
from phalanx.watch._paces import Paces
from phalanx.watch._running_nodes import RunningNodes

VERSION = 1
"""Of the API: a field may be added in a version, never taken away or given another meaning."""
MAX_SAVES = 50
MAX_NEWS = 200
ALIVE = 15.0
"""Seconds without any event after which a job whose end nobody told is no longer called running."""


class JobView:
    """All that is shown of one job."""

    def __init__(self, job: str = "") -> None:
        self.job = job
        self.state = "waiting"
        self.reason = ""
        self.began = 0.0
        self.latest = 0.0
        self.total_steps: int | None = None
        self.num_slots: int | None = None
        self.generation = -1
        self.wanted = 0
        self.num_bad = 0
        """Lines that were no events."""
        self.last_step: StepCommitted | None = None
        self.last_failure: WorkerFailed | None = None
        self.accounts = Accounts()
        self.lifelines = Lifelines()
        self.incidents = Incidents()
        self.curve = Curve()
        self.heat = HeatMap()
        self.paces = Paces()
        self.committed = CommittedRange()
        self.counts: dict[str, Counter[str]] = {"generations": Counter(), "events": Counter()}
        self.step_times = Histogram(STEP_BOUNDS)
        self.regroup_times = Histogram(REGROUP_BOUNDS)
        self.state_bytes = 0
        self.num_restarts = 0
        """Times that all workers were started anew."""
        self._anew: set[int] = set()
        """Generations that ended so, of which no restart was counted yet."""
        self._last_anew = -1
        self.saves: deque[Saved | SaveFailed] = deque(maxlen=MAX_SAVES)
        self.verified: Saved | Resumed | None = None
        """The last save that was read, all of it: when it was written, or by who went on from it."""
        self.num_verified = 0
        self.machines = NodeTable()
        self.running_nodes = RunningNodes()
        self.copies = CopyTable()
        self.collective_bytes: Counter[str] = Counter()
        self.news: deque[dict[str, Any]] = deque(maxlen=MAX_NEWS)

    def take(self, event: AnyEvent) -> None:
        """Add one event."""
        if type(event) is StepCommitted:
            self._take_commit(event)
            return
        time = event.timestamp if isinstance(event, Event) else event.time
        self.counts["events"][event.kind] += 1
        self.latest = max(self.latest, time)
        self.began = min(self.began, time) if self.began else time
        self.accounts.take(event)
        rounds = self.lifelines.newest
        self.lifelines.take(event)
        self.incidents.take(event)
        self.machines.take(event)
        if isinstance(event, WorkerStepTimes):
            self._take_times(event)
        elif not isinstance(event, NodeLoad):
            self._take_other(event)
            self._tell(event, time, is_new_round=self.lifelines.newest > rounds)

    def _tell(self, event: AnyEvent, time: float, *, is_new_round: bool) -> None:
        """Keep what people read; of a round, which each of its workers tells, and of cells the sum is shown. What all
        workers decide alike, and each tells, is kept once."""
        if isinstance(event, (CellsHeld, CellsMoved)) or (isinstance(event, RoundFormed) and not is_new_round):
            return
        text = round_in_words(event) if isinstance(event, RoundFormed) else in_words(event)
        if isinstance(event, TOLD_BY_ALL) and any(one["text"] == text for one in self.news):
            return
        self.news.append({"time": round(time, 3), "kind": event.kind, "text": text})

    def _take_times(self, event: WorkerStepTimes) -> None:
        own = [compute + data for compute, data in zip(event.compute, event.data, strict=False)]
        self.heat.add(event.worker, event.step, own)
        self.paces.take(event)
        self.step_times.add_many([(one + wait) / 1e6 for one, wait in zip(own, event.wait, strict=False)])
        for name, count in (event.collective_bytes or {}).items():
            self.collective_bytes[name] += int(count)

    def _take_commit(self, event: StepCommitted) -> None:
        """Add a committed step: there is one for each step, and only those are asked whom it concerns."""
        time = event.time
        self.counts["events"]["step"] += 1
        self.latest = max(self.latest, time)
        self.began = min(self.began, time) if self.began else time
        self.accounts.take_commit(event)
        if event.worker:
            self.lifelines.see(event.worker, time)
        if self.incidents.found:
            self.incidents.take(event)
        if self.last_step is not None and event.step == self.last_step.step:
            return  # told again by the next first worker
        self.last_step = event
        self.state = "running"
        self.committed.add(event.step)
        self.generation = max(self.generation, event.generation)
        self.curve.add(event.time, event.step, event.loss, event.samples)

    def _take_other(self, event: AnyEvent) -> None:
        is_end = self.running_nodes.ends(event)
        if isinstance(event, TrainingStarted):
            self.total_steps = event.total_steps if event.total_steps is not None else self.total_steps
            self.num_slots = event.num_slots if event.num_slots is not None else self.num_slots
            self.state = "starting" if self.state == "waiting" else self.state
        elif isinstance(event, RoundFormed):
            self.generation = max(self.generation, event.generation)
            if event.worker not in event.joined:
                self.regroup_times.add(event.seconds)
        elif isinstance(event, GenerationFormed):
            self.job = self.job or event.job
            self.generation = max(self.generation, event.generation)
            self.wanted = event.num_wanted or event.num_workers
            self.state = "starting" if self.state == "waiting" else self.state
        elif isinstance(event, GenerationEnded):
            self.counts["generations"][event.how] += 1
            if event.how == "restart" and event.generation > self._last_anew:
                self._last_anew = event.generation
                self._anew.add(event.generation)
        elif isinstance(event, JobRestarted):
            if event.generation in self._anew:  # else its lost workers were replaced, each of which is told
                self.num_restarts += 1
            self._anew.discard(event.generation)  # every agent tells of it
        elif isinstance(event, WorkerFailed):
            if event.cause != LOST_CONTACT:
                self.last_failure = event
        elif isinstance(event, StateSent):
            self.state_bytes += event.bytes
        elif isinstance(event, (Saved, SaveFailed)):
            self.saves.append(event)
            if isinstance(event, Saved) and event.verified:
                self.verified = event
                self.num_verified += 1
        elif isinstance(event, Resumed):
            self.verified = event
        elif isinstance(event, CellsHeld):
            self.copies.take(event)
        elif isinstance(event, TrainingFinished):
            self.state = "finishing"
        elif isinstance(event, ShutDown) and is_end:
            self.state, self.reason = ("succeeded" if event.succeeded else "ended"), event.reason

    # -- what it adds up to -----------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self.state in ("succeeded", "ended")

    def summary(self, now: float) -> dict[str, Any]:
        """Return the first line of the page."""
        step = self.last_step
        state = self.state
        if self.latest and not self.is_over and now - self.latest > ALIVE:
            state = "finished" if state == "finishing" else "silent"
        per_step = self.curve.step_seconds()
        left = None if self.total_steps is None or step is None else max(0, self.total_steps - step.step - 1)
        is_live = not self.is_over and state not in ("finished", "silent")
        account = self.accounts.result(now=now if is_live else None)
        failed = self.last_failure
        return {
            "version": VERSION,
            "job": self.job,
            "state": state,
            "reason": self.reason,
            "now": round(now, 3),
            "began": round(self.began, 3),
            "latest": round(self.latest, 3),
            "step": None if step is None else step.step + 1,
            "total_steps": self.total_steps,
            "eta_seconds": None if left is None or per_step is None or not is_live else round(left * per_step, 1),
            "loss": None if step is None else finite(step.loss),
            "samples_per_second": self.curve.rate(),
            "step_seconds": per_step,
            "workers": len(self.lifelines.members),
            "wanted": max(self.wanted, len(self.lifelines.members)),
            "slots": self.num_slots,
            "generation": self.generation,
            "goodput": account.to_record(),
            "paces": self.paces.rows(self.lifelines.members),
            "last_failure": None
            if failed is None
            else {"time": round(failed.time, 3), "text": f"rank {failed.rank} on {failed.host}: {failed.message}"},
        }

    def commits(self) -> dict[str, Any]:
        """Return what is known of the committed steps."""
        rounds = [one for one in self.lifelines.rounds if one["verified"] is not None]
        return {
            **self.committed.to_record(),
            "repeated": self.counts["events"]["went_back"],
            "digests_compared": len(rounds),
            "digests_equal": all(one["verified"] for one in rounds) if rounds else None,
        }

    def saves_record(self, now: float) -> dict[str, Any]:
        """Return the saves, and what the loss of all workers would cost now."""
        written = [one for one in self.saves if isinstance(one, Saved)]
        last = written[-1] if written else None
        done = None if self.last_step is None else self.last_step.step + 1
        failed = next((one for one in reversed(self.saves) if isinstance(one, SaveFailed)), None)
        still_fails = failed is not None and (last is None or failed.time > last.time)
        per_step = self.curve.step_seconds()
        steps = None if done is None else done - (0 if last is None else last.step)
        return {
            "last_step": None if last is None else last.step,
            "path": None if last is None else last.path,
            "age_seconds": None if last is None else round(now - last.time, 1),
            "at_risk_steps": steps,
            "at_risk_seconds": None if steps is None or per_step is None else round(steps * per_step, 1),
            "verified_step": None if self.verified is None else self.verified.step,
            "count": self.counts["events"]["saved"],
            "problem": failed.error if still_fails and failed is not None else "",
            "written": [
                {"time": round(one.time, 3), "step": one.step, "path": one.path, "verified": bool(one.verified)}
                for one in written
            ],
        }

    def nodes(self) -> list[dict[str, Any]]:
        """Return what the machines are busy with, and which of them are left out."""
        return self.machines.to_records(self.lifelines)

    def copies_record(self) -> dict[str, Any] | None:
        """Return who mirrors whom; None for a job whose workers all hold everything."""
        return self.copies.to_record(self.lifelines.members)

    def workers(self) -> list[dict[str, Any]]:
        """Return a row for each worker, in the order in which they came."""
        return [life.to_record() for life in sorted(self.lifelines.lives.values(), key=lambda life: life.born)]

    def page(self, now: float) -> dict[str, Any]:
        """Return everything that the page shows, in one object."""
        return {
            "summary": self.summary(now),
            "workers": self.workers(),
            "rounds": list(self.lifelines.rounds),
            "series": self.curve.rows(),
            "steptimes": self.heat.to_record(),
            "commits": self.commits(),
            "incidents": [one.to_record() for one in self.incidents.found],
            "saves": self.saves_record(now),
            "nodes": self.nodes(),
            "copies": self.copies_record(),
            "news": list(self.news)[-50:],
        }


def live_block(view: JobView) -> str:
    """Return the lines that a person at a terminal sees; "" before the first step.

    >>> live_block(JobView())
    ''
    """
    step = view.last_step
    if step is None:
        return ""
    total = "" if view.total_steps is None else f"/{view.total_steps}"
    loss = "-" if finite(step.loss) is None else f"{step.loss:.4f}"
    words = [
        f"step {step.step + 1}{total}",
        f"loss {loss}",
        f"{view.curve.rate() or 0.0:.0f} samples/s",
        f"{len(view.lifelines.members)} workers",
        f"generation {view.generation}",
    ]
    told = [one["text"] for one in view.news if one["kind"] in TOLD]
    # A worker's message may be of several lines, or hold what a terminal takes for orders.
    last = ["".join(char if char.isprintable() else " " for char in f"last: {text}") for text in told[-1:]]
    return "\n".join(["  ".join(words), *last])


TOLD = (
    *("worker_failed", "worker_hung", "saved", "save_failed", "action", "left", "went_back"),
    *("nonfinite", "skipped", "rolled_back", "wrong_bits"),
)
"""What the live block tells of below the numbers."""

TOLD_BY_ALL = (NonFiniteFound, StepSkipped, RolledBack, WrongBitsFound)


def finite(value: float | None) -> float | None:
    """Return a number that JSON can say.

    >>> finite(float("nan")), finite(0.5)
    (None, 0.5)
    """
    return value if value is not None and abs(value) < 1e300 else None
