"""Group: the ranks of one generation, and the one place that every collective passes through.

Owns the life of the group (building, subgroups, the end), events for observers and the optional cross-rank check
(``PHALANX_DEBUG=collectives``). The collectives themselves are in ``_collectives``, the bytes are carried by a
``Transport``. Ranks in the arguments are ranks of this group; ``ranks`` maps them to the root group's.

Invariants: a group belongs to one job and one generation; after the first failure every call raises it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.comm.group import _context, _observe, _values
from phalanx.comm.group._collectives import Collectives
from phalanx.comm.transports._interface import ReduceOp, Transport
from phalanx.errors import GroupAborted
from phalanx.world import World

if TYPE_CHECKING:
    import torch.distributed as dist

    from phalanx.comm.failure._mismatch import CallChecker
    from phalanx.comm.stores import Store

Interrupt = Callable[[], "BaseException | None"]
SubgroupMaker = Callable[[tuple[int, ...], str], Transport]
DEFAULT_TIMEOUT = 1800.0


class Group(Collectives):
    """A set of ranks that exchange tensors.

    >>> from phalanx.comm import simulate
    >>> def main(group):
    ...     tensor = torch.tensor([float(group.rank)])
    ...     group.all_reduce(tensor)
    ...     return tensor.item()
    >>> simulate(4).run(main)
    [6.0, 6.0, 6.0, 6.0]
    """

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
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.ranks = tuple(ranks)
        self.timeout = timeout
        self.job = job
        self.generation = generation
        self.store = store
        self.rank_token = _context.rank_token()
        self._transport = transport
        self._make_subgroup = make_subgroup
        self._checker = checker
        self._num_subgroups: dict[tuple[int, ...], int] = {}
        self._subgroups: list[Group] = []
        self._on_end: list[Callable[[], None]] = []
        self._ended: BaseException | None = None
        self._guarded = checker is not None
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
    ) -> Group:
        """Join generation ``generation`` of ``job`` as ``rank``; returns when all ``world_size`` ranks have.

        ``backend``: ``auto`` (the fastest for where the ranks are), or a c10d backend by name (``gloo``, ``nccl``...).
        ``interrupt`` is asked every few milliseconds while this waits; an error that it returns is raised here.
        Raises ``PeerTimeout`` naming the ranks that never came, ``PeerLost`` when one dies while the group forms.

        >>> group = Group.create(connect("tcp://10.0.0.1:29500"), rank=0, world_size=2)   # doctest: +SKIP
        """
        from phalanx.comm.transports._create import (
            Place,
            create_group,
        )  # the builders know all transports; they import Group

        place = Place(
            store=store, rank=rank, size=world_size, timeout=_seconds(timeout), job=job, generation=generation
        )
        return create_group(place, backend, interrupt or (lambda: None))

    @classmethod
    def wrap(cls, process_group: dist.ProcessGroup) -> Group:
        """A group over a c10d process group that the caller made and keeps the ownership of."""
        from phalanx.comm.transports._create import wrap_group

        return wrap_group(process_group)

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """A group of some ranks of this one, in the given order; None on ranks that are not in it.

        Only the members need to call it; they must all ask for the same lists in the same order.
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
        child = Group(
            self._make_subgroup(members, key),
            ranks=[self.ranks[r] for r in members],
            make_subgroup=lambda grand, name: self._make_subgroup(
                tuple(members[r] for r in grand), f"{key}/{name}"
            ),
            timeout=self.timeout,
            job=self.job,
            generation=self.generation,
            store=None if self.store is None else self.store.namespace(key),
            checker=None if self._checker is None else self._checker.for_subgroup(members, key),
        )
        with self._lock:
            self._subgroups.append(child)
        return child

    def make_default(self) -> None:
        """Also become torch's default process group, so that ``torch.distributed`` calls keep working."""
        from phalanx.comm.transports._create import make_torch_default

        self._on_end.append(make_torch_default(self))

    # -- what it is -------------------------------------------------------------------------------------------

    @property
    def backend(self) -> str:
        return self._transport.name

    @property
    def world(self) -> World:
        return World(rank=self.rank, size=self.size, job=self.job, generation=self.generation)

    def __repr__(self) -> str:
        return (
            f"Group(rank={self.rank}, size={self.size}, generation={self.generation}, "
            f"job={self.job!r}, backend={self.backend!r})"
        )

    # -- values and memory ---------------------------------------------------------------------------------------

    def broadcast_value(self, value: Any, src: int = 0) -> Any:
        """``src``'s value on every rank. The value is JSON: None, bool, numbers, text, lists, dicts with text keys."""
        return _values.broadcast_value(self, value, src)

    def all_gather_values(self, value: Any) -> list[Any]:
        """Every rank's value (JSON), in the order of the ranks."""
        return _values.all_gather_values(self, value)

    def shared_empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor in memory that collectives of this group can use without copying it first."""
        return self._transport.shared_empty(shape, dtype)

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
        for child in children:
            child._end(cause, abort=abort)
        if abort:
            self._transport.abort(cause)
        else:
            self._transport.close()
        for callback in callbacks:
            callback()

    # -- the one place ----------------------------------------------------------------------------------------

    def _enter(
        self,
        name: str,
        sides: Sequence[Tensor | Sequence[Tensor]],
        op: ReduceOp | None = None,
        root: int | None = None,
    ) -> None:
        """What precedes every collective: is the group alive, who looks, do the ranks agree."""
        if self._ended is not None:
            raise self._ended
        if _observe._observers:
            _observe.emit(self, name, sides, "" if op is None else op.value)
        if self._checker is not None:
            self._checker.check(name, sides, "" if op is None else op.value, root)

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise self._ended


def _seconds(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if seconds <= 0:
        raise ValueError(f"timeout is {seconds} s; expected a positive number of seconds")
    return seconds
