"""Reports everything that can happen to an agent, as values in its queue: the events, and the threads that wait.

Owns the blocking waits: for the rendezvous, for the end of the generation, for requests in the store, for the exit
barrier. Each wait is one daemon thread that posts events and never decides anything. An event carries the number of
the generation it belongs to, so that a late one is recognised and dropped.
"""

from __future__ import annotations

import logging
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.comm import _background as background
from phalanx.comm.stores._complaints import Complaints
from phalanx.errors import StoreError, StoreTimeout
from phalanx.launch.recovery._agent_channel import AgentChannel
from phalanx.launch.rendezvous._interface import GenerationEnd, GenerationHandler, RendezvousInfo
from phalanx.launch.workers._worker_handle import WorkerHandle
from phalanx.preemption import Notice
from phalanx.protocol import LostContact, RecordError, Setbacks, members_key, timeouts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exited:
    """A worker's process has ended."""

    worker: WorkerHandle


@dataclass(frozen=True)
class Formed:
    """This node is part of a new generation."""

    info: RendezvousInfo


@dataclass(frozen=True)
class JoinFailed:
    """The rendezvous raised."""

    error: BaseException


@dataclass(frozen=True)
class Ended:
    """The generation is over, or nodes want to be admitted."""

    generation: int
    end: GenerationEnd


@dataclass(frozen=True)
class Requested:
    """What the store asks of this agent, and its workers' reports."""

    generation: int
    wish: int | None
    stacks: str
    setbacks: Setbacks
    stop: str
    progress: dict[str, bytes | None]


@dataclass(frozen=True)
class Parted:
    """Workers lost contact with one another, and this is what they say."""

    generation: int
    words: tuple[LostContact, ...]


@dataclass(frozen=True)
class AllDone:
    """Every node has finished (``error`` empty), or not in time (``is_late``), or it cannot be known any more."""

    generation: int
    error: str
    is_late: bool = False


@dataclass(frozen=True)
class Signalled:
    """The agent was told to end."""

    signum: signal.Signals


@dataclass(frozen=True)
class Noticed:
    """This machine is about to be taken away."""

    notice: Notice


Event = Noticed | Exited | Formed | JoinFailed | Ended | Requested | Parted | AllDone | Signalled


class Sources:
    """Starts the waits and collects what they report."""

    def __init__(self, handler: GenerationHandler) -> None:
        self._handler = handler
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stop_generation: list[Callable[[], None]] = []
        self.lasting: dict[str, bytes] = {}
        """What this node has said to the others for good; put right when somebody writes over it."""

    def post(self, event: Event) -> None:
        """Put an event in the queue, from any thread or signal handler."""
        self._queue.put(event)

    def next(self, timeout: float) -> Event | None:
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return None

    def join(self) -> None:
        """Wait for the next generation in the background."""
        self.leave_generation()

        def wait() -> None:
            try:
                info = self._handler.next_rendezvous()
            except BaseException as error:  # whatever it is, the agent's thread must hear of it
                self.post(JoinFailed(error))
            else:
                self.post(Formed(info))

        background.start(wait, "phalanx-rendezvous", on_failure=lambda error: self.post(JoinFailed(error)))

    def follow(self, info: RendezvousInfo, interval: float, worker_ids: Callable[[], list[str]]) -> None:
        """Report the end of a generation, and requests in the store every ``interval`` seconds; keep there what others
        wait for."""
        watch = self._handler.watch_generation(info.generation)
        stopped, complaints = threading.Event(), Complaints(log)
        self._stop_generation += [stopped.set, watch.close]

        def wait_end() -> None:
            last = ""
            while not stopped.is_set():
                end = watch.wait(None)
                if end is None or stopped.is_set():
                    return
                if str(end) != last:
                    last = str(end)
                    self.post(Ended(info.generation, end))
                if end.kind != "wanted":
                    return
                stopped.wait(interval)  # "wanted" is answered at once for ever, and may still turn graver

        def poll() -> None:
            try:
                with info.store.clone() as store:  # fails too, when the job is over before this thread has begun
                    channel = AgentChannel(store)
                    members = {members_key(info.generation): info.members().to_json()}
                    while not stopped.wait(interval):
                        channel.put_right({**members, **self.lasting})
                        try:
                            requests = channel.read_requests(info.generation, info.node.id)
                        except RecordError as error:
                            complaints.say("requests", f"ignored what the store asks of this node: {error}")
                            continue
                        ids = worker_ids()
                        progress = channel.read_progress(ids) if ids else {}
                        self.post(Requested(info.generation, *requests, progress))
            except StoreError:
                return  # the rendezvous notices by itself that the store is gone

        def look_for_contact() -> None:
            ids = [worker_id for node in info.nodes for worker_id in node.worker_ids]
            try:
                with info.store.clone() as store:
                    channel = AgentChannel(store)
                    while not stopped.wait(timeouts.CONTACT_INTERVAL):
                        if not channel.has_lost_contact(info.generation):
                            continue
                        words = _hear_out(channel, info.generation, ids, stopped)
                        if words:
                            self.post(Parted(info.generation, tuple(words)))
                            stopped.wait(timeouts.CONTACT_AGAIN)  # the recovery may take in what was said later
            except StoreError:
                return  # as above

        def lost(error: BaseException) -> None:
            if not stopped.is_set():
                reason = f"this agent cannot follow the job any more: {error!r}"
                self.post(Ended(info.generation, GenerationEnd(kind="lost", reason=reason)))

        background.start(wait_end, "phalanx-generation", on_failure=lost, attempts=background.ATTEMPTS)
        background.start(poll, "phalanx-requests", on_failure=lost, attempts=background.ATTEMPTS)
        background.start(look_for_contact, "phalanx-contact", on_failure=lost, attempts=background.ATTEMPTS)

    def leave_generation(self) -> None:
        """Stop following the current generation."""
        for stop in self._stop_generation:
            stop()
        self._stop_generation.clear()

    def wait_for_others(self, info: RendezvousInfo) -> None:
        """Report the end of the job, or that no other node is left, to one that only serves the store any more."""
        watch, stopped = self._handler.watch_generation(sys.maxsize), threading.Event()
        self._stop_generation += [stopped.set, watch.close]

        def wait() -> None:
            end = watch.wait(1.0)
            while end is None and not stopped.is_set() and self._handler.has_others():
                end = watch.wait(1.0)
            told = end or GenerationEnd(kind="closed", reason="no other node is left")
            self.post(Ended(info.generation, told))

        def failed(error: BaseException) -> None:
            self.post(Ended(info.generation, GenerationEnd(kind="lost", reason=repr(error))))

        background.start(wait, "phalanx-others", on_failure=failed)

    def wait_all_done(self, info: RendezvousInfo, timeout: float) -> None:
        """Wait at the exit barrier: report when all nodes have said that they are done."""

        def wait() -> None:
            error, is_late = "", False
            try:
                with info.store.clone() as store:
                    AgentChannel(store).wait_done(info.generation, info.world_size, "done", timeout)
            except StoreError as problem:
                error, is_late = str(problem), isinstance(problem, StoreTimeout)
            self.post(AllDone(info.generation, error, is_late))

        def failed(error: BaseException) -> None:
            self.post(AllDone(info.generation, repr(error)))

        background.start(wait, "phalanx-exit-barrier", on_failure=failed)


def _hear_out(channel: AgentChannel, generation: int, ids: list[str], stopped: threading.Event) -> list[LostContact]:
    """Return what workers say about lost contact, once all of the group have spoken or had the time to."""
    until = time.monotonic() + timeouts.CONTACT_SETTLE
    while True:
        words = channel.read_lost_contact(generation, ids)
        seated = {peer for word in words for peer in word.peers}
        if seated and seated <= {word.by for word in words}:
            return words
        if time.monotonic() >= until or stopped.wait(0.02):
            return words
