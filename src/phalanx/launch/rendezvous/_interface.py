"""Defines what an agent needs of a rendezvous, and every backend gives.

Owns values, the handler interface and its errors; no store is touched here. Words: a *node* runs one agent; a
*generation* is one agreed membership, numbered from 0. All members of a generation see the same ``nodes`` in
the same order, so global worker ranks follow from it without another exchange.

::

    RendezvousError (PhalanxError)
    ├── RendezvousClosedError         the job is over; nobody can join any more
    ├── RendezvousTimeoutError        not enough nodes came in time
    ├── RendezvousConnectionError     the store cannot be reached (any more)
    ├── RendezvousStateError          the records contradict what this node was told
    └── RendezvousGracefulExitError   a spare node that was never needed; not a failure
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from phalanx.errors import PhalanxError, StoreLost
from phalanx.protocol import Broken, MemberNode, Members, NodeInfo, timeouts


class RendezvousError(PhalanxError, RuntimeError):
    """Root of what can go wrong while nodes agree on a generation."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous was closed: the job has ended. ``outcome``: ``succeeded``, ``failed``, or empty if unknown."""

    def __init__(self, message: str, *, outcome: str = "") -> None:
        super().__init__(message)
        self.outcome = outcome


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """The generation did not form in time."""


class RendezvousConnectionError(RendezvousError, ConnectionError):
    """The store behind the rendezvous cannot be reached."""

    @classmethod
    def lost(cls, node: str, run_id: str, error: StoreLost) -> RendezvousConnectionError:
        """Make the error for a store that went away in the middle of a job."""
        return cls(
            f"{node} lost the store of job {run_id!r} at {error.address}: {error}. With the c10d and static "
            "backends it lives in the agent that serves the endpoint; is that one still running?"
        )


class RendezvousStateError(RendezvousError):
    """The records in the store are impossible or contradict this node's configuration."""


class RendezvousGracefulExitError(RendezvousError):
    """This node was a spare and the job ended without needing it. Exit with code 0."""


class RendezvousParameters:
    """How to reach a rendezvous, and the backend's own configuration.

    >>> params = RendezvousParameters("c10d", "node0:29400", "job7", 1, 4, join_timeout=60, is_host="true")
    >>> params.get_as_int("join_timeout"), params.get_as_bool("is_host"), params.get("lease", 15)
    (60, True, 15)
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise ValueError("the rendezvous backend has no name; expected one such as 'c10d' or 'static'")
        if min_nodes < 1:
            raise ValueError(f"min_nodes is {min_nodes}; expected at least 1")
        if max_nodes < min_nodes:
            raise ValueError(f"max_nodes is {max_nodes}; expected at least min_nodes, {min_nodes}")
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.local_addr = local_addr
        self.config = dict(kwargs)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a configuration key, or ``default``."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Read the value of a key as true or false; numbers and the usual words are understood."""
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        if text in ("1", "true", "t", "yes", "y", "on"):
            return True
        if text in ("0", "false", "f", "no", "n", "off"):
            return False
        raise ValueError(f"rendezvous configuration {key}={value!r}; expected true or false")

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Read the value of a key as a whole number."""
        value = self.get(key, default)
        if value is None:
            return None
        try:
            return int(value)
        except (TypeError, ValueError):
            raise ValueError(f"rendezvous configuration {key}={value!r}; expected a whole number") from None

    def get_as_float(self, key: str, default: float) -> float:
        """Read the value of a key as a number of seconds."""
        value = self.get(key, default)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(f"rendezvous configuration {key}={value!r}; expected a number") from None


@dataclass(frozen=True)
class RendezvousStoreInfo:
    """Where the workers' bootstrap store is or will be: the first node's address and a free port there."""

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"

    master_addr: str
    master_port: int

    @staticmethod
    def build(rank: int, store: Any, local_addr: str | None, server_port: int | None = None) -> RendezvousStoreInfo:
        """Agree on it through a c10d store that all nodes of the generation share: the first node tells the others.

        For handlers of your own; without ``server_port`` the port is one that is free on the first node now.
        """
        address, port = RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY
        if rank == 0:
            store.set(address, (local_addr or socket.getfqdn()).encode())
            store.set(port, str(server_port or _free_port()).encode())
        return RendezvousStoreInfo(store.get(address).decode(), int(store.get(port)))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class RendezvousInfo:
    """An agreed generation as one of its nodes sees it. Only ``rank`` and ``store`` differ between nodes.

    A handler of your own gives the first four; what follows then is filled in for it.
    """

    store: Any
    """The job's store, in the namespace ``job_prefix(run_id)``, closed by ``handler.shutdown()``; of a handler of your
    own: a c10d store that all nodes of the generation share."""
    rank: int
    world_size: int
    bootstrap_store_info: RendezvousStoreInfo
    generation: int = 0
    nodes: tuple[NodeInfo, ...] = ()
    agreed: Members | None = None
    """The record that all nodes have agreed on, where the handler has one."""

    @property
    def node(self) -> NodeInfo:
        """This node."""
        return self.nodes[self.rank]

    @property
    def num_workers(self) -> int:
        """The number of workers of all nodes."""
        return self.nodes[-1].base_rank + self.nodes[-1].local_size

    def role_place(self) -> tuple[int, int]:
        """Among the workers of this node's role: the rank of its first one, and how many there are in all."""
        same = [node for node in self.nodes if node.role == self.node.role]
        before = sum(node.local_size for node in same if node.base_rank < self.node.base_rank)
        return before, sum(node.local_size for node in same)

    def members(self) -> Members:
        """Return the record of it at ``members_key``, which workers and agents read."""
        if self.agreed is not None:
            return self.agreed
        port = self.bootstrap_store_info.master_port
        nodes = (
            MemberNode(n.id, 0, n.host, n.addr, port, n.local_size, n.topology, n.role, n.worker_ids)
            for n in self.nodes
        )
        return Members(self.generation, tuple(nodes))


@dataclass(frozen=True, kw_only=True)
class GenerationEnd:
    """Why an agent should leave its generation.

    ``kind`` is ``broken`` (over now: workers were lost, or a node's lease ran out; those are named in
    ``broken``), ``wanted`` (nodes wait to be admitted; the generation runs on until everybody calls
    ``next_rendezvous``), ``closed`` (the job is over) or ``lost`` (the store cannot be reached, or this
    node's own lease ran out).
    """

    kind: str
    reason: str
    broken: Broken | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


class GenerationWatch(ABC):
    """Tells when a generation is over. Use from any thread."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> GenerationEnd | None:
        """Block until the generation is over and say why; None after ``timeout`` seconds (None: no limit).

        Woken by the store, not by polling. Once over, every later call returns the same at once, except that
        ``wanted`` may turn into something graver.
        """

    @abstractmethod
    def close(self) -> None:
        """Wake all waiters (they get None) and stop watching."""


class RendezvousHandler(ABC):
    """One node's part in forming generations: what a handler of your own has to offer.

    What else an agent needs (news of the end of a generation, a store of the job) is made of it, see ``adapted``;
    the built-in backends offer it themselves (``GenerationHandler``).
    """

    @abstractmethod
    def get_backend(self) -> str:
        """Return the name under which the backend is registered."""

    @abstractmethod
    def get_run_id(self) -> str:
        """Return the job that this rendezvous is for."""

    @property
    def use_agent_store(self) -> bool:
        """Whether ``bootstrap_store_info`` names a c10d TCPStore that an agent already serves to the
        workers."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Leave the current generation and block until this node is a member of the next one."""

    @abstractmethod
    def is_closed(self) -> bool:
        """Return whether the job is over."""

    @abstractmethod
    def set_closed(self) -> None:
        """End the job for all nodes: nobody joins any more, who waits is sent away."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait and could be admitted by a new generation; 0 when the job is at max_nodes."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Leave, give up the lease and close connections; False when the store could not be told."""


class GenerationHandler(RendezvousHandler):
    """A handler that numbers its generations and tells when one is over.

    >>> handler = get_rendezvous_handler(params)         # doctest: +SKIP
    >>> handler.set_local_size(8)                        # doctest: +SKIP
    >>> info = handler.next_rendezvous()                 # doctest: +SKIP
    >>> end = handler.watch_generation(info.generation).wait()   # doctest: +SKIP
    """

    @property
    @abstractmethod
    def store_url(self) -> str:
        """URL of the job's store for workers on this node, as in ``PHALANX_STORE``."""

    @property
    def join_timeout(self) -> float:
        """How many seconds ``next_rendezvous`` may take; workers give up waiting for a new group sooner."""
        return timeouts.JOIN

    @property
    def secret_file(self) -> str:
        """The file of the job's secret when the configuration names one: workers sign and verify too."""
        return ""

    @abstractmethod
    def set_local_size(self, local_size: int, worker_ids: tuple[str, ...] = (), role: str = "") -> None:
        """Say how many workers this node runs, optionally their ids and role; counts from the next join on."""

    @abstractmethod
    def set_bootstrap_port(self, port: int | None) -> None:
        """Set the port for the workers' bootstrap store, should this node come first; None: a free one at each
        join."""

    @property
    def has_fixed_port(self) -> bool:
        """Whether the workers' bootstrap store must be at one certain port."""
        return False

    def close_as(self, outcome: str, reason: str) -> None:
        """``set_closed``, and say how the job ended (``succeeded`` or ``failed``) and why, where that can be told."""
        self.set_closed()

    @property
    def job(self) -> str:
        """The name under which the job's records lie in the store: the run id, but for a job that is run anew."""
        return self.get_run_id()

    @property
    def is_host(self) -> bool:
        """Whether the job's store ends with this process."""
        return False

    def become_last_choice(self) -> None:
        """Take part from the next join on only if there are too few others."""

    def withdraw(self) -> None:
        """Take part no more: the next generation forms without this node. What it serves it goes on serving."""

    def has_others(self) -> bool:
        """Return whether other nodes take part; True where nobody can tell."""
        return True

    @abstractmethod
    def break_generation(self, generation: int, broken: Broken) -> None:
        """End a generation at once for all agents and, through ``broken_key``, their workers. Idempotent."""

    @abstractmethod
    def want_generation(self, generation: int, cause: Broken) -> None:
        """Ask for a new generation when it suits the workers, through ``wanted_key``; wakes all agents.
        Idempotent."""

    @abstractmethod
    def watch_generation(self, generation: int) -> GenerationWatch:
        """Notice, without polling, that a generation is over."""
