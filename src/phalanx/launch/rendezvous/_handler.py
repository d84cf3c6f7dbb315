"""Offers a participant to an agent: the handler that all built-in backends share, with a thread that drives it.

Owns threads and time; decisions are ``_decide``'s, store traffic is ``_participant``'s. The background thread
refreshes the lease, follows the records and leads; agent threads only wait for what it learns. Everything
shared lies behind one condition. A store that is lost is never waited for: every blocked call ends with
``RendezvousConnectionError``.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phalanx.comm._background import Background
from phalanx.comm.stores._interface import Store
from phalanx.comm.stores._sealed import SealedStore
from phalanx.comm.stores._signing import Signer
from phalanx.errors import StoreError, StoreLost
from phalanx.launch.rendezvous._decide import Rules
from phalanx.launch.rendezvous._interface import (
    GenerationEnd,
    GenerationHandler,
    GenerationWatch,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from phalanx.launch.rendezvous._leader import describe
from phalanx.launch.rendezvous._own_secret import OwnSecret
from phalanx.launch.rendezvous._participant import Participant
from phalanx.launch.rendezvous._store_records import (
    end_generation,
    read_count,
    read_record,
    ring,
    write_once,
)
from phalanx.launch.rendezvous._waiting import due_after, waiting_line
from phalanx.protocol import (
    CLOSED,
    NODES,
    WAITING,
    Broken,
    Closing,
    Members,
    NodeRecord,
    RecordError,
    timeouts,
)

if TYPE_CHECKING:
    from phalanx.launch.rendezvous._etcd_keeper import EtcdKeeper

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HandlerOptions:
    """How long things may take, in seconds."""

    join_timeout: float = timeouts.JOIN
    close_timeout: float = timeouts.CLOSE
    lease: float = timeouts.LEASE


class StoreRendezvousHandler(GenerationHandler):
    """A rendezvous on a store. ``store`` is in the job's namespace; ``close_store`` ends what the backend
    opened."""

    def __init__(
        self,
        backend: str,
        run_id: str,
        store: Store,
        rules: Rules,
        node: NodeRecord,
        *,
        options: HandlerOptions,
        signer: Signer,
        store_url: str,
        is_host: bool = False,
        close_store: Callable[[], None] | None = None,
        secret_file: str = "",
        own_secret: OwnSecret | None = None,
        master: tuple[str, int] | None = None,
        job: str = "",
        keeper: EtcdKeeper | None = None,
    ) -> None:
        self._backend = backend
        self._run_id = run_id
        self._job = job or run_id
        self._store = store
        self._agent_store = SealedStore(store.clone(), signer)
        self._signer = signer
        self._options = options
        self._store_url = store_url
        self._is_host = is_host
        self._keeper = keeper
        self._close_store = close_store
        self._secret_file = secret_file
        self._own_secret = own_secret
        self._participant = Participant(store, signer, rules, node, lease=options.lease)
        self._changed = threading.Condition()
        self._thread: Background | None = None
        self._stopping = False
        self._failure: RendezvousError | None = None
        self._generation: int | None = None
        self._port: int | None = None if master is None else master[1]
        self._held: socket.socket | None = None  # keeps the port that was offered for the workers' store

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return False

    @property
    def store_url(self) -> str:
        return self._store_url if self._keeper is None else self._keeper.url(self._store_url)

    @property
    def job(self) -> str:
        return self._job

    @property
    def is_host(self) -> bool:
        return self._is_host or (self._keeper is not None and self._keeper.is_sole)

    @property
    def join_timeout(self) -> float:
        return self._options.join_timeout

    @property
    def secret_file(self) -> str:
        return self._secret_file if self._own_secret is None else self._own_secret.keep()

    @property
    def node_id(self) -> str:
        """The id of this node in ``RendezvousInfo.nodes``."""
        return self._participant.node.id

    def set_local_size(self, local_size: int, worker_ids: tuple[str, ...] = (), role: str = "") -> None:
        if local_size < 1:
            raise ValueError(f"local_size is {local_size}; expected at least 1")
        if worker_ids and len(worker_ids) != local_size:
            raise ValueError(f"{len(worker_ids)} worker ids for {local_size} workers; expected one for each")
        with self._changed:
            self._participant.node = replace(
                self._participant.node, local_size=local_size, worker_ids=tuple(worker_ids), role=role
            )

    def set_bootstrap_port(self, port: int | None) -> None:
        self._port = port

    @property
    def has_fixed_port(self) -> bool:
        return self._port is not None

    # -- forming ---------------------------------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        try:
            with self._changed:
                members, rank = self._join()
        except StoreLost as error:
            raise self._lost(error) from error
        except RecordError as error:
            raise RendezvousStateError(f"node {self.node_id} cannot join job {self._run_id!r}: {error}") from error
        self._generation = members.generation
        return describe(members, rank, self._agent_store)

    def _join(self) -> tuple[Members, int]:
        participant, facts = self._participant, self._participant.facts
        wants = 0 if self._generation is None else self._generation + 1
        self._raise_if_over()  # before a port is held: nobody would release it after shutdown
        port = self._hold_port() if self._port is None else self._port
        since, num_lines = time.monotonic(), 0
        participant.register(wants, port, time.monotonic())
        self._start_thread()
        with suppress(RecordError):  # the thread meets it as well, and deals with it
            participant.look_if_leading(time.monotonic())
        while True:
            self._raise_if_over()
            if (found := participant.membership(wants)) is not None:
                return found
            waited = time.monotonic() - since
            self._check_fixed_rank(waited)
            if facts.evicted:
                participant.register(wants, port, time.monotonic())
            if waited >= self._options.join_timeout and not participant.node.last_choice:
                raise self._timed_out()
            if waited >= due_after(num_lines):
                num_lines += 1
                self._say_for_whom()
            self._changed.wait(max(0.1, min(self._options.join_timeout, due_after(num_lines)) - waited))

    def _say_for_whom(self) -> None:
        participant, keeper = self._participant, self._keeper
        log.warning(
            "%s",
            waiting_line(
                self._backend,
                self._store_url if keeper is None else f"etcd://{keeper.endpoint}",
                self._run_id,
                participant.rules,
                present=self._present(),
                fixed_rank=participant.node.fixed_rank,
                is_spare=participant.is_spare,
                is_first=participant.facts.latest is None,
                settings="" if keeper is None else f"embedded={keeper.size}",
            ),
        )

    def _present(self) -> list[str]:
        return [key[len(NODES) :] for key in self._store.items(NODES)]

    def _hold_port(self) -> int:
        """Return a free port for the workers' bootstrap store, and nobody else's until then.

        The socket is bound but never listens: the system gives its port to no one who asks for any, and a
        server that names it may listen (both allow reuse). Only Linux shares like that; elsewhere the port is
        free now and might be taken when the store wants it, which is rare and loud.
        """
        self._release_port()
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("", 0))
        port = int(self._held.getsockname()[1])
        if sys.platform != "linux":
            self._release_port()
        return port

    def _release_port(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def _raise_if_over(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._stopping:
            raise RendezvousClosedError(f"this handler of job {self._run_id!r} was shut down")
        facts = self._participant.facts
        if self._thread is None:
            self._participant.look_closed()
        if facts.closed:
            why = f"the rendezvous of job {self._run_id!r} is closed: {facts.closed}"
            if self._generation is None and facts.outcome == "succeeded":
                raise RendezvousGracefulExitError(
                    f"job {self._run_id!r} has ended ({facts.closed}); node {self.node_id} came too late to take part. "
                    f"To run it again use another --rdzv-id, or come {self._options.close_timeout:g} s after its end"
                )
            if self._participant.is_spare and facts.outcome != "failed":
                raise RendezvousGracefulExitError(f"{why}; node {self.node_id} was a spare and not needed")
            raise RendezvousClosedError(why, outcome=facts.outcome)

    def _check_fixed_rank(self, waited: float) -> None:
        if (holder := self._participant.holder_of_rank(waited)) is not None:
            raise RendezvousStateError(
                f"node rank {self._participant.node.fixed_rank} of job {self._run_id!r} is taken by "
                f"{holder.id}; give every node its own --node-rank"
            )

    def _timed_out(self) -> RendezvousTimeoutError:
        participant = self._participant
        present = self._present()
        participant.leave()
        return RendezvousTimeoutError(
            f"job {self._run_id!r}: no generation with node {self.node_id} within "
            f"{self._options.join_timeout:g} s; {len(present)} node(s) are there, at least "
            f"{participant.rules.min_nodes} are needed: {', '.join(sorted(present)[:16])}. "
            "Start the missing ones or raise join_timeout"
        )

    # -- the background thread -------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        if self._thread is None:
            name = f"phalanx-rdzv-{self.node_id}"
            self._thread = Background(self._run, name, on_failure=self._fail, final=(StoreLost,))
            self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            with self._changed:
                until = self._participant.step(time.monotonic())
                self._changed.notify_all()
            self._participant.pause(max(0.0, until - time.monotonic()))
        self._end(None)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, StoreLost):
            self._end(self._lost(error))
        else:
            self._end(RendezvousStateError(f"node {self.node_id} of job {self._run_id!r} failed: {error!r}"))

    def _end(self, failure: RendezvousError | None) -> None:
        """Note that the thread is over: everybody who waits for what it learns has to hear of it."""
        with self._changed:
            if failure is not None and not self._stopping:
                self._failure = failure
            self._changed.notify_all()
        self._participant.close_watch()

    def _lost(self, error: StoreLost) -> RendezvousConnectionError:
        return RendezvousConnectionError.lost(f"node {self.node_id}", self._run_id, error)

    # -- the rest of a job's life ----------------------------------------------------------------------------

    def is_closed(self) -> bool:
        if self._participant.facts.closed:
            return True
        try:
            return self._read_closed() is not None
        except StoreLost as error:
            raise self._lost(error) from error

    def _read_closed(self) -> Closing | None:
        return read_record(self._store, self._signer, CLOSED, Closing)

    def set_closed(self) -> None:
        self.close_as("", "")

    def close_as(self, outcome: str, reason: str) -> None:
        text = f"closed by node {self.node_id}" + (f": {reason}" if reason else "")
        closing = Closing(reason=text, outcome=outcome, time=time.time())
        try:
            if write_once(self._store, self._signer, CLOSED, closing):
                ring(self._store, self._signer)
        except StoreLost as error:
            raise self._lost(error) from error

    def num_nodes_waiting(self) -> int:
        try:
            return read_count(self._store, self._signer, WAITING) or 0
        except StoreLost as error:
            raise self._lost(error) from error

    def break_generation(self, generation: int, broken: Broken) -> None:
        self._end_generation(generation, "broken", broken)

    def want_generation(self, generation: int, cause: Broken) -> None:
        self._end_generation(generation, "wanted", cause)

    def _end_generation(self, generation: int, kind: str, cause: Broken) -> None:
        try:
            end_generation(self._store, self._signer, generation, kind, cause)
        except StoreLost as error:
            raise self._lost(error) from error

    def watch_generation(self, generation: int) -> GenerationWatch:
        return _HandlerWatch(self, generation)

    def _end_of(self, generation: int) -> GenerationEnd | None:
        """Return why a generation is over for this node, gravest first. Needs ``_changed``."""
        facts = self._participant.facts
        end = facts.ends.get(generation)
        if self._failure is not None:
            return GenerationEnd(kind="lost", reason=str(self._failure))
        if facts.closed:
            return GenerationEnd(kind="closed", reason=facts.closed)
        if end is not None and end.kind == "broken":
            return end
        if facts.evicted:
            return GenerationEnd(kind="lost", reason=f"the lease of node {self.node_id} ran out")
        if facts.latest is not None and facts.latest.generation > generation:
            return GenerationEnd(kind="broken", reason=f"generation {facts.latest.generation} has formed")
        return end

    def become_last_choice(self) -> None:
        with self._changed:
            self._participant.node = replace(self._participant.node, last_choice=True)

    def withdraw(self) -> None:
        try:
            with self._changed:
                self._participant.leave()
        except StoreLost as error:  # nothing is lost for this node: its lease runs out
            log.warning("node %s could not say that it leaves: %s", self.node_id, error)

    def has_others(self) -> bool:
        return any(node != self.node_id for node in self._present())

    def shutdown(self) -> bool:
        with self._changed:
            if self._stopping:
                return True
            self._stopping = True
            told = self._leave()
            self._changed.notify_all()
        self._participant.interrupt()
        if self._thread is not None:
            self._thread.join(timeout=60.0)
        self._release_port()
        if self._keeper is not None:
            self._keeper.close()
        self._agent_store.close()
        if self._close_store is not None:
            self._close_store()
        if self._own_secret is not None:
            self._own_secret.remove()
        return told

    def _leave(self) -> bool:
        try:
            self._participant.leave()
            if self._keeper is None and not self._is_host:
                return self._failure is None  # the last word: a store that waited for it may be gone by now
            is_closed = self._read_closed() is not None
            if self._keeper is not None and not self._keeper.part() and is_closed:
                self._keeper.wait_until_alone(self._options.close_timeout)
            elif self._is_host and is_closed:
                self._wait_for_others()
        except StoreError as error:
            log.warning("node %s could not say that it leaves: %s", self.node_id, error)
            return False
        return self._failure is None

    def _wait_for_others(self) -> None:
        """Linger where the store ends with this process: let the others read that the job is closed, and leave."""
        deadline = time.monotonic() + self._options.close_timeout
        with self._store.watch(NODES) as watch:
            while self._store.items(NODES) and time.monotonic() < deadline:
                watch.wait(min(1.0, max(0.0, deadline - time.monotonic())))


class _HandlerWatch(GenerationWatch):
    def __init__(self, handler: StoreRendezvousHandler, generation: int) -> None:
        self._handler = handler
        self._generation = generation
        self._closed = False

    def wait(self, timeout: float | None = None) -> GenerationEnd | None:
        handler = self._handler
        with handler._changed:
            handler._changed.wait_for(self._is_over, timeout)
            return None if self._closed else handler._end_of(self._generation)

    def _is_over(self) -> bool:
        return self._closed or self._handler._stopping or self._handler._end_of(self._generation) is not None

    def close(self) -> None:
        with self._handler._changed:
            self._closed = True
            self._handler._changed.notify_all()
