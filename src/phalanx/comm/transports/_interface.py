"""Defines what carries bytes between the ranks of one group: the interface that every transport implements.

Owns the interface, the ``Work`` handle, and ``GroupSpec``: what a rank must know to connect to the others.
Implementations: c10d (``_c10d``), shared memory on one host (``shm``), both together (``_two_level``), one of them per
kind of device (``_by_device``), ranks in one process (``simulation._threads``). Callers (``Group``, and transports made
of others) have checked the arguments before: tensors are contiguous, of a supported dtype, sizes fit, ranks are in
range, ``op`` is known.

Invariants:
- A transport belongs to one generation and never reads another's keys.
- Every rank calls the same collectives in the same order; calls are matched by order.
- With ``async_op=False`` a call returns a finished ``Work`` (or raises); with ``async_op=True`` it returns at once, and
  the tensors must not be touched until ``wait``.
- A failure raises ``PeerLost``, ``PeerTimeout`` or ``GroupAborted`` from the call or ``Work.wait``; after the first
  failure the transport is dead and every later call raises the same error.
- ``abort(cause)`` may come from any thread, returns promptly, and wakes whoever waits with ``cause``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from phalanx.comm.stores._interface import Store

DEFAULT_TIMEOUT = 1800.0
Interrupt = Callable[[], "BaseException | None"]
"""Asked every few milliseconds while a group forms; an error that it returns is raised there."""

Arrived = Callable[[int], object]
"""Called with the rank that a message came from."""


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Says which group a rank joins, and as which rank: everything that two ranks need to find each other."""

    store: Store
    rank: int
    size: int
    timeout: float
    job: str
    generation: int

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of a group of {self.size}; expected a rank in [0, world_size)")


class ReduceOp(str, Enum):
    """How values of several ranks become one. Members compare equal to, and hash as, their names in lower case."""

    __hash__ = str.__hash__  # Enum's own is written in Python and shows in every collective

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


class Work(ABC):
    """A collective under way.

    >>> work = group.all_reduce(gradient, async_op=True)     # doctest: +SKIP
    >>> work.wait()                                          # doctest: +SKIP
    """

    @abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Block until the result is in place. ``PeerTimeout`` after ``timeout`` seconds (default: the group's)."""

    @abstractmethod
    def is_done(self) -> bool:
        """Return whether ``wait`` would return or raise at once."""


class Done(Work):
    """The handle of what is finished already."""

    def wait(self, timeout: float | None = None) -> None:
        return

    def is_done(self) -> bool:
        return True


class Transport(ABC):
    """Collectives among ``size`` ranks; see the module's invariants. Ranks are ranks of this group."""

    name: str
    rank: int
    size: int
    compares_calls = False
    """Whether ranks that call different collectives, or with other sizes, all hear of it, whatever they called."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, async_op: bool) -> Work: ...

    @abstractmethod
    def reduce(self, tensor: Tensor, op: ReduceOp, dst: int, *, async_op: bool) -> Work:
        """Only ``dst``'s tensor holds the result; the others' contents are left as they were."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int, *, async_op: bool) -> Work: ...

    @abstractmethod
    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, async_op: bool) -> Work:
        """``outputs[r]`` has the shape of rank r's tensor; shapes may differ between ranks."""

    @abstractmethod
    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor, *, async_op: bool) -> Work:
        """Equal shapes; ``output`` holds them one after the other."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, *, async_op: bool) -> Work:
        """``inputs[r]`` is what this rank contributes to rank r's output; shapes may differ between r."""

    @abstractmethod
    def reduce_scatter_tensor(self, output: Tensor, tensor: Tensor, op: ReduceOp, *, async_op: bool) -> Work: ...

    @abstractmethod
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, async_op: bool) -> Work:
        """``inputs[r]`` goes to rank r; ``outputs[r]`` comes from it; shapes may all differ."""

    def all_to_all_flat(self, output: Tensor, tensor: Tensor, *, async_op: bool) -> Work:
        """``all_to_all`` of the equal parts of two contiguous tensors of one size, which is not zero."""
        outputs, inputs = output.view(self.size, -1).unbind(), tensor.view(self.size, -1).unbind()
        return self.all_to_all(outputs, inputs, async_op=async_op)

    @abstractmethod
    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, *, async_op: bool) -> Work: ...

    @abstractmethod
    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, *, async_op: bool) -> Work: ...

    @abstractmethod
    def send(self, tensor: Tensor, dst: int, tag: int, *, async_op: bool) -> Work: ...

    @abstractmethod
    def recv(self, tensor: Tensor, src: int, tag: int, *, async_op: bool) -> Work: ...

    @abstractmethod
    def recv_any(self, tensor: Tensor, tag: int, arrived: Arrived, *, async_op: bool) -> Work:
        """Receive from whichever rank sends first with this tag; ``arrived`` is called with it before ``wait`` ends."""

    @abstractmethod
    def barrier(self, *, async_op: bool) -> Work: ...

    def shared_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor whose memory this transport reads and writes in place where it can."""
        return torch.empty(tuple(shape), dtype=dtype)

    def dead_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose processes are known to be dead, also after the end of the group. Nothing where some
        cannot be seen from here: then nobody can tell all that live from all that do not."""
        return ()

    @abstractmethod
    def abort(self, cause: BaseException) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Release everything; the ranks need not call it together."""
