"""Placements: how one mesh axis holds a tensor. Pure values that never communicate.

Owns ``Shard``, ``StridedShard``, ``Replicate``, ``Partial``, ``MaskPartial`` and the arithmetic of chunks. A tensor
on an n-axis mesh has n placements, one per axis; a dim that several axes shard is sharded by the first axis, each piece
by the next, and so on. Chunks are as ``torch.chunk`` makes them: all of the rounded-up size, the last ones smaller
or empty.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

REDUCE_OPS = ("sum", "avg", "min", "max", "product")
LINEAR_OPS = ("sum", "avg")
IDEMPOTENT_OPS = ("avg", "min", "max")  # of equal contributions each is the value


class _Interned(type):
    """Makes one object of equal placements, so that a comparison is ``is``, and a hash is free."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        return _known.setdefault((cls, made._fields()), made)


_known: dict[tuple[type, tuple[Any, ...]], Placement] = {}


class Placement(metaclass=_Interned):
    """How one mesh axis holds a tensor; see ``Shard``, ``Replicate``, ``Partial``."""

    __slots__ = ("__weakref__",)

    def __eq__(self, other: object) -> bool:  # torch.compile asks for one; what is equal is one object
        return self is other

    __hash__ = object.__hash__

    def is_shard(self, dim: int | None = None) -> bool:
        return False

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return False

    def _fields(self) -> tuple[Any, ...]:
        return ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._fields()

    def __iter__(self) -> Iterator[Placement]:
        """Yield one placement is good for a mesh of one axis, wherever a list of them is expected."""
        yield self

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self!r} is a value and cannot be changed")


class Shard(Placement):
    """The axis shards tensor dimension ``dim`` into chunks, one per rank.

    >>> Shard(0)
    S(0)
    """

    __slots__ = ("dim",)
    dim: int

    def __init__(self, dim: int) -> None:
        try:
            object.__setattr__(self, "dim", operator.index(dim))
        except TypeError:
            raise TypeError(f"{type(self).__name__} needs the number of a dim, got {dim!r}") from None

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def _fields(self) -> tuple[Any, ...]:
        return (self.dim,)

    @staticmethod
    def local_shard_size_and_offset(curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:
        """Return how large the chunk of ``rank`` is and where it begins in what is cut.

        >>> Shard.local_shard_size_and_offset(5, num_chunks=4, rank=2)
        (1, 4)
        """
        return chunk_sizes(curr_local_size, num_chunks)[rank], chunk_starts(curr_local_size, num_chunks)[rank]

    def on_dim(self, dim: int) -> Shard:
        """Shard another dimension in the same way."""
        return Shard(dim)

    def __repr__(self) -> str:
        return f"S({self.dim})"


class StridedShard(Shard):
    """The axis shards each of ``split_factor`` chunks of ``dim``, as FSDP does to a dim that tensor parallel has
    sharded.

    >>> indices_of(6, [(StridedShard(0, split_factor=2), 3, 1)])
    [1, 4]
    """

    __slots__ = ("split_factor",)
    split_factor: int

    def __init__(self, dim: int, split_factor: int) -> None:
        super().__init__(dim)
        if split_factor < 1:
            raise ValueError(f"StridedShard needs split_factor >= 1, got {split_factor}")
        object.__setattr__(self, "split_factor", operator.index(split_factor))

    def _fields(self) -> tuple[Any, ...]:
        return (self.dim, self.split_factor)

    def on_dim(self, dim: int) -> Shard:
        return StridedShard(dim, self.split_factor)

    def __repr__(self) -> str:
        return f"_S({self.dim}, {self.split_factor})"


class Replicate(Placement):
    """Every rank of the axis holds the same values.

    >>> Replicate()
    R
    """

    __slots__ = ()

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "R"


class Partial(Placement):
    """Every rank of the axis holds a contribution; the value is their ``reduce_op``.

    >>> Partial("sum")
    P(sum)
    """

    __slots__ = ("reduce_op",)
    reduce_op: str
    ALL_REDUCE_OPS: ClassVar[tuple[str, ...]] = REDUCE_OPS
    LINEAR_REDUCE_OPS: ClassVar[tuple[str, ...]] = ("sum", "avg")

    def __init__(self, reduce_op: str = "sum") -> None:
        if reduce_op not in REDUCE_OPS:
            raise ValueError(f"Partial knows {', '.join(REDUCE_OPS)}; got {reduce_op!r}")
        object.__setattr__(self, "reduce_op", reduce_op)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def _fields(self) -> tuple[Any, ...]:
        return (self.reduce_op,)

    def __repr__(self) -> str:
        return f"P({self.reduce_op})"


class MaskPartial(Partial):
    """A sum of which each element has one contributor: what a row-sharded embedding gives. Others hold zero."""

    __slots__ = ()

    def __init__(self, reduce_op: Literal["sum"] = "sum") -> None:
        if reduce_op != "sum":
            raise ValueError(f"MaskPartial is a sum, got {reduce_op!r}")
        super().__init__(reduce_op)

    def __repr__(self) -> str:
        return "MaskP"


REPLICATE = Replicate()
PARTIAL_SUM = Partial("sum")
MASK_PARTIAL = MaskPartial()


@lru_cache(maxsize=4096)
def chunk_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Sizes of ``parts`` chunks of ``length``, rounded up, the last ones smaller or empty.

    >>> chunk_sizes(5, 4)
    (2, 2, 1, 0)
    """
    full = -(-length // parts)
    return tuple(max(0, min(full, length - full * i)) for i in range(parts))


@lru_cache(maxsize=4096)
def chunk_starts(length: int, parts: int) -> tuple[int, ...]:
    """Say where each chunk begins (``length`` for the empty ones behind the end)."""
    full = -(-length // parts)
    return tuple(min(length, full * i) for i in range(parts))


def indices_of(length: int, shards: Sequence[tuple[Shard, int, int]]) -> list[int]:
    """Return the global indices one rank holds of a dim, after each axis that shards it (placement, ranks on the axis,
    coordinate).

    The naive reference of all layout arithmetic: correct for every nesting, linear in ``length``.
    """
    held = list(range(length))
    for placement, parts, coordinate in shards:
        blocks = placement.split_factor if isinstance(placement, StridedShard) else 1
        pieces: list[int] = []
        for start, size in zip(chunk_starts(len(held), blocks), chunk_sizes(len(held), blocks), strict=True):
            at = start + chunk_starts(size, parts)[coordinate]
            pieces += held[at : at + chunk_sizes(size, parts)[coordinate]]
        held = pieces
    return held


def ranges_of(length: int, shards: Sequence[tuple[Shard, int, int]]) -> list[tuple[int, int]]:
    """``indices_of(length, shards)`` as ranges (start, size), neighbours joined, without the list.

    >>> ranges_of(6, [(StridedShard(0, split_factor=2), 3, 1)])
    [(1, 1), (4, 1)]
    """
    held = [(0, length)] if length else []
    for placement, parts, coordinate in shards:
        count = sum(size for _, size in held)
        blocks = placement.split_factor if isinstance(placement, StridedShard) else 1
        pieces: list[tuple[int, int]] = []
        for start, size in zip(chunk_starts(count, blocks), chunk_sizes(count, blocks), strict=True):
            begin = start + chunk_starts(size, parts)[coordinate]
            for piece in _within(held, begin, begin + chunk_sizes(size, parts)[coordinate]):
                if pieces and sum(pieces[-1]) == piece[0]:
                    pieces[-1] = (pieces[-1][0], pieces[-1][1] + piece[1])
                else:
                    pieces.append(piece)
        held = pieces
    return held


def _within(held: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Return the ranges of the indices at positions ``begin`` to ``end`` of what is held."""
    position = 0
    for start, size in held:
        first, last = max(begin, position), min(end, position + size)
        if first < last:
            yield start + first - position, last - first
        position += size


def held_size(length: int, shards: Sequence[tuple[Shard, int, int]]) -> int:
    """``len(indices_of(length, shards))`` without the list."""
    for placement, parts, coordinate in shards:
        if isinstance(placement, StridedShard):
            blocks = chunk_sizes(length, placement.split_factor)
            length = sum(chunk_sizes(size, parts)[coordinate] for size in blocks)
        else:
            length = chunk_sizes(length, parts)[coordinate]
    return length


def inner_shard(length: int, mesh_shape: Sequence[int], placements: Sequence[Placement], axis: int) -> Shard | None:
    """Say how ``axis`` shards what all other axes leave of its dim; None if that cannot be said, for shards inside of
    its own.

    A strided shard can be made of what later axes leave just as well, if sizes are even (or happen to fit):
    (_S(0, 2), S(0)) on 2 by 2 ranks is S(0) on the second axis, and each of its shards sharded by the first.
    """
    shard = placements[axis]
    assert isinstance(shard, Shard), f"axis {axis} of {placements} cuts nothing"
    others = [
        (other, p, mesh_shape[other])
        for other, p in enumerate(placements)
        if isinstance(p, Shard) and p.dim == shard.dim and other != axis and mesh_shape[other] > 1
    ]
    inside = [parts for other, _, parts in others if other > axis]
    if not inside:
        return shard
    if not isinstance(shard, StridedShard) or shard.split_factor % math.prod(inside):
        return None
    lengths = {length}
    for other, p, parts in others:
        if other < axis:
            lengths = {held_size(n, [(p, parts, c)]) for n in lengths for c in range(parts)}
        elif type(p) is not Shard:
            return None
    rest = shard.split_factor // math.prod(inside)
    if not all(_lies_inside(n, shard.split_factor, mesh_shape[axis], tuple(inside)) for n in lengths):
        return None
    return Shard(shard.dim) if rest == 1 else StridedShard(shard.dim, rest)


@lru_cache(maxsize=4096)
def _lies_inside(length: int, blocks: int, parts: int, inside: tuple[int, ...]) -> bool:
    """Return whether splitting each of ``blocks`` in ``parts`` and then all by ``inside`` leaves complete pieces of
    blocks, the same that are left the other way round. Even sizes do.
    """
    sizes = chunk_sizes(length, blocks)
    pieces = [chunk_sizes(size, parts) for size in sizes]
    rest = blocks // math.prod(inside)
    for number, coordinate in enumerate(itertools.product(*map(range, inside))):
        own = slice(number * rest, (number + 1) * rest)
        later = [(Shard(0), n, c) for n, c in zip(inside, coordinate, strict=True)]
        if chunk_sizes(held_size(length, later), rest) != sizes[own]:
            return False
        for i in range(parts):
            if held_size(sum(p[i] for p in pieces), later) != sum(p[i] for p in pieces[own]):
                return False
    return True


def normalize(placements: Sequence[Placement] | Placement, num_axes: int, num_dims: int) -> tuple[Placement, ...]:
    """Check one placement per axis and make shard dims non-negative."""
    if not isinstance(placements, Iterable):
        raise TypeError(f"expected a list of placements, one for each mesh axis, got {placements!r}")
    given = tuple(placements)
    if len(given) != num_axes:
        raise ValueError(f"a mesh of {num_axes} axes needs {num_axes} placements, one for each axis, got {list(given)}")
    result: list[Placement] = []
    for placement in given:
        if not isinstance(placement, Placement):
            raise TypeError(
                f"expected a Placement of phalanx.tensor such as Shard(0), Replicate() or Partial(), "
                f"got {placement!r}, a {type(placement).__module__}.{type(placement).__qualname__}"
            )
        if isinstance(placement, Shard):
            if not -num_dims <= placement.dim < num_dims:
                fits = f"expected a dim from {-num_dims} to {num_dims - 1}" if num_dims else "it has none to cut"
                raise IndexError(f"{placement!r} is out of range for a tensor of {num_dims} dims: {fits}")
            if placement.dim < 0:
                placement = placement.on_dim(placement.dim + num_dims)
        result.append(placement)
    return tuple(result)
