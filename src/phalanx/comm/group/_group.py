"""Group: the ranks of one generation.

Owns the life of the group: building, subgroups, the end. What its ranks do together is in ``_group_collectives``, what
torch calls on it, since it is a process group of torch's too, in ``_torch_calls``. ``ranks`` maps ranks of this group
to the root group's.

Invariants: a group belongs to one job and one generation; after the first failure every call raises it again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx.comm.failure._liveness import Identity
from phalanx.comm.failure._mismatch import CallChecker
from phalanx.comm.group import _context, _torch_world
from phalanx.comm.group._group_collectives import Collectives
from phalanx.comm.group._monitored_barrier import monitored_barrier
from phalanx.comm.stores import Store
from phalanx.comm.transports._creation import Connection, SubgroupMaker, connect_ranks, wrap_process_group
from phalanx.comm.transports._interface import DEFAULT_TIMEOUT, GroupSpec, Interrupt, Transport
from phalanx.errors import GroupAborted
from phalanx.world import World

# One group for each process group that was wrapped, so that torch's tables do not grow with every wrapping.
_wrapped: weakref.WeakKeyDictionary[dist.ProcessGroup, Group] = weakref.WeakKeyDictionary()


class Group(Collectives):
    """A set of ranks that exchange tensors.

    >>> import torch
    >>> from phalanx.comm import simulate
    >>> def main(group):
    ...     tensor = torch.tensor([float(group.rank)])
    ...     group.all_reduce(tensor)
    ...     return tensor.item()
    >>> simulate(4).run(main)
    [6.0, 6.0, 6.0, 6.0]

    It is a process group to torch as well, whose functions and libraries take it (``dist.all_reduce(group=...)``).
    """

    __slots__ = (
        "__dict__",
        "_lock",
        "_make_subgroup",
        "_num_subgroups",
        "_on_end",
        "_root",
        "_subgroups",
        "generation",
        "identities",
        "job",
        "label",
        "numbered_by_torch",
        "rank_token",
        "ranks",
        "store",
        "timeout",
        "world_size",
    )

    def __init__(
        self,
        transport: Transport,
        *,
        ranks: Sequence[int],
        make_subgroup: SubgroupMaker,
        timeout: float = DEFAULT_TIMEOUT,
        job: str = "local",
        generation: int = 0,
        store: Store | None = None,
        checker: CallChecker | None = None,
        parent: Group | None = None,
        world_size: int | None = None,
        label: str = "",
        identities: Mapping[int, Identity] | None = None,
    ) -> None:
        super().__init__(transport, checker)
        self.identities = dict(identities or {})
        """The ranks' processes, where they are known."""
        self.ranks = tuple(ranks)
        self.timeout = timeout
        self.job = job
        self.generation = generation
        self.store = store
        self.rank_token = _context.rank_token()
        self.label = label
        """Which subgroup it is; nothing for a root."""
        self.world_size = self.size() if world_size is None else world_size
        """How many ranks ``ranks`` are numbered among."""
        self.numbered_by_torch: bool = world_size is not None if parent is None else parent.numbered_by_torch
        self._root = None if parent is None else parent.root
        self._make_subgroup = make_subgroup
        self._num_subgroups: dict[tuple[int, ...], int] = {}
        self._subgroups: list[Group] = []
        self._on_end: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    # -- building ---------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        *,
        backend: str = "auto",
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        job: str = "local",
        generation: int = 0,
        interrupt: Interrupt | None = None,
        identities: Mapping[int, Identity] | None = None,
    ) -> Group:
        """Join generation ``generation`` of ``job`` as ``rank``; returns when all ``world_size`` ranks have.

        ``backend``: ``auto`` (the fastest for where the ranks are), or a c10d backend by name (``gloo``, ``nccl``...).
        ``interrupt`` is asked every few milliseconds while this waits; an error that it returns is raised here.
        ``identities`` are the ranks' processes, given by all of them or by none: then nobody asks who the others are.
        Raises ``PeerTimeout`` naming the ranks that never came, ``PeerLost`` when one dies while the group forms.

        >>> group = Group.create(connect("tcp://10.0.0.1:29500"), rank=0, world_size=2)   # doctest: +SKIP
        """
        spec = GroupSpec(
            store=store, rank=rank, size=world_size, timeout=_seconds(timeout), job=job, generation=generation
        )
        group = cls._over(connect_ranks(spec, backend, interrupt or (lambda: None), identities))
        _torch_world.register(group)
        return group

    @classmethod
    def wrap(cls, process_group: dist.ProcessGroup) -> Group:
        """Return a group over a c10d process group that the caller made and keeps the ownership of."""
        if isinstance(process_group, Group):
            return process_group
        known = _wrapped.get(process_group)
        if known is None or known._ended is not None:
            known = _wrapped[process_group] = cls._over(wrap_process_group(process_group))
            _torch_world.register(known)
        return known

    @classmethod
    def for_torch(cls, spec: GroupSpec, store: dist.Store, ranks: Sequence[int]) -> Group:
        """Return a group that torch asked for, and registers and destroys itself: ``ranks`` are ranks of torch's
        default group (none: this becomes it), ``store`` is what torch gave for it."""
        connection = connect_ranks(spec, "auto", lambda: None)
        if ranks:
            connection = replace(connection, ranks=ranks, world_size=dist.get_world_size())
        group = cls._over(connection)
        group._torch_store = store
        return group

    @classmethod
    def _over(cls, connection: Connection) -> Group:
        return cls(
            connection.transport,
            ranks=connection.ranks,
            make_subgroup=connection.make_subgroup,
            timeout=connection.timeout,
            job=connection.job,
            generation=connection.generation,
            store=connection.store,
            checker=connection.checker,
            world_size=connection.world_size,
            label=connection.label,
            identities=connection.identities,
        )

    def subgroup(
        self, ranks: Sequence[int], *, backend: str | None = None, timeout: float | timedelta | None = None
    ) -> Group | None:
        """Return a group of some ranks of this one, in the given order; None on ranks that are not in it.

        Only the members need to call it; they must all ask for the same lists in the same order. ``backend`` and
        ``timeout`` are this group's unless given.
        """
        members = tuple(ranks)
        if not members or len(set(members)) != len(members) or not all(0 <= r < self.size for r in members):
            raise ValueError(
                f"rank {self.rank}: subgroup of {list(members)}; expected distinct ranks in [0, {self.size})"
            )
        if self.rank not in members:
            return None
        self._check_alive()
        with self._lock:
            count = self._num_subgroups.get(members, 0)
            self._num_subgroups[members] = count + 1
        key = f"sub/{'-'.join(map(str, members))}/{count}"
        seconds = self.timeout if timeout is None else _seconds(timeout)
        other = {
            **({} if backend is None else {"backend": backend}),
            **({} if timeout is None else {"timeout": seconds}),
        }

        def make_subgroup(grand: tuple[int, ...], name: str, **wanted: Any) -> Transport:
            return self._make_subgroup(tuple(members[r] for r in grand), f"{key}/{name}", **{**other, **wanted})

        child = Group(
            self._make_subgroup(members, key, **other),
            ranks=[self.ranks[r] for r in members],
            make_subgroup=make_subgroup,
            timeout=seconds,
            job=self.job,
            generation=self.generation,
            store=None if self.store is None else self.store.namespace(key),
            checker=None if self._checker is None else self._checker.for_subgroup(members, key),
            parent=self,
            world_size=self.world_size,
            label=f"{self.label}/{key}" if self.label else key,
        )
        with self._lock:
            self._subgroups.append(child)
        _torch_world.register(child)
        return child

    def make_default(self) -> None:
        """Also become torch's default process group, so that ``torch.distributed`` calls keep working."""
        self._on_end.append(_torch_world.make_default(self))
        for group in self._with_subgroups():
            _torch_world.register(group)

    def _with_subgroups(self) -> Iterator[Group]:
        yield self
        for child in self._subgroups:
            yield from child._with_subgroups()

    # -- what it is -------------------------------------------------------------------------------------------

    @property
    def backend(self) -> str:
        return self._transport.name

    @property
    def root(self) -> Group:
        """The group that this one is a part of, through however many others; itself if of none."""
        return self if self._root is None else self._root

    def dead_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose processes are known to be dead, also after the end of the group.

        Only a group on one host knows: it is empty for one whose ranks are on several.
        """
        return self._transport.dead_ranks()

    @property
    def world(self) -> World:
        return World(rank=self.rank(), size=self.size(), job=self.job, generation=self.generation)

    def __repr__(self) -> str:
        return (
            f"Group(rank={self.rank}, size={self.size}, generation={self.generation}, "
            f"job={self.job!r}, backend={self.backend!r})"
        )

    def monitored_barrier(
        self, timeout: float | timedelta | None = None, wait_all_ranks: bool = True, *, device_ids: object = None
    ) -> None:
        """Wait like ``barrier``, but ``PeerTimeout`` names every rank that did not come within ``timeout`` seconds.

        All of them are named whatever ``wait_all_ranks`` says; ``torch.distributed.monitored_barrier`` comes here too.
        """
        limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._after_queued()
        monitored_barrier(self, self.timeout if limit is None else limit)

    # -- the end ----------------------------------------------------------------------------------------------

    def abort(self, cause: BaseException | None = None) -> None:
        """End the group at once, from any thread; whoever waits in it gets ``cause`` (default ``GroupAborted``)."""
        self._end(
            cause
            or GroupAborted(
                f"rank {self.rank}: the group of generation {self.generation} was aborted; "
                f"form the next generation's group to go on"
            ),
            abort=True,
        )

    def close(self) -> None:
        """Release what the group holds. The ranks need not call it together; the peers see this one leave."""
        self._end(
            GroupAborted(f"rank {self.rank}: the group of generation {self.generation} was closed"),
            abort=False,
        )

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _end(self, cause: BaseException, *, abort: bool) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = cause
            self._guarded = True
            children, self._subgroups = self._subgroups, []
            callbacks, self._on_end = self._on_end, []
        _torch_world.forget(self)
        for child in children:
            child._end(cause, abort=abort)
        if abort:
            self._transport.abort(cause)
        else:
            self._transport.close()
        if self._calls is not None:
            self._calls.stop()
        for callback in callbacks:
            callback()

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise self._ended


def _seconds(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if seconds <= 0:
        raise ValueError(f"timeout is {seconds} s; expected a positive number of seconds")
    return seconds


_torch_world.teach_torch(Group)
