"""Wraps orders that users bring: index sequences and subsets, samplers, weights, concatenations.

Owns how each becomes a pure function of (seed, epoch, position). These hold what the user gave, so
their memory grows with it, unlike the orders of ``_order``; a sampler and a draw without replacement
also hold the current epoch's list.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from phalanx.data._order import Order, checked_length
from phalanx.data._permutation import Indices, derive_key, random_words

#: What ``order=`` of the samplers takes.
OrderLike = Order | Sequence[int] | npt.NDArray[Any] | torch.Tensor | Iterable[int]


def as_order(given: OrderLike) -> Order:
    """Return an order from whatever describes one: an order, a sequence of indices, or a sampler.

    >>> as_order([4, 2]).length
    2
    """
    if isinstance(given, Order):
        return given
    if isinstance(given, (range, list, tuple, np.ndarray, torch.Tensor)):
        return IndexOrder(given)
    if isinstance(given, Sampler) or (isinstance(given, Iterable) and not isinstance(given, Iterator)):
        return SamplerOrder(given)
    raise TypeError(
        f"order is a {type(given).__name__}; expected an Order, a sequence of indices, or a sampler "
        "(something that can be iterated anew in every epoch)"
    )


def _digest(array: npt.NDArray[Any]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()


class IndexOrder(Order):
    """The given indices, as they stand, in every epoch: a subset, a curriculum, repeated samples.

    Put it into ``Shuffled`` to shuffle a subset. A ``range`` takes no memory.

    >>> IndexOrder([7, 7, 3]).at(0, 0, np.arange(3)).tolist()
    [7, 7, 3]
    """

    def __init__(self, indices: Sequence[int] | npt.NDArray[Any] | torch.Tensor) -> None:
        self.length = checked_length(len(indices))
        self._range = indices if isinstance(indices, range) else None
        self._indices = np.asarray([] if self._range is not None else indices)
        if self._range is not None:
            lowest, highest = sorted((indices[0], indices[-1]))
        else:
            if self._indices.ndim != 1 or self._indices.dtype.kind not in "iu":
                raise TypeError(
                    f"indices have dtype {self._indices.dtype} and shape {self._indices.shape}; "
                    "expected integers in one dimension"
                )
            # A copy: the caller may go on changing theirs, and an order never changes.
            self._indices = self._indices.astype(np.int64, copy=True)
            lowest, highest = self._indices.min(), self._indices.max()
        if lowest < 0:
            raise ValueError(f"indices contain {int(lowest)}; expected no negative index")
        self.bound = int(highest) + 1
        self._name = ""

    @property
    def may_repeat(self) -> bool:
        if self._range is not None:
            return False
        ordered = np.sort(self._indices)
        return bool((ordered[1:] == ordered[:-1]).any())

    @property
    def name(self) -> str:
        if not self._name:
            what = repr(self._range) if self._range is not None else _digest(self._indices)
            self._name = f"indices({what})"
        return self._name

    def at(self, seed: int, epoch: int, positions: Indices) -> Indices:
        if self._range is not None:
            return self._range.start + positions * self._range.step
        return self._indices[positions]


class SamplerOrder(Order):
    """What a sampler of the user's gives, drawn anew in each epoch from (seed, epoch).

    While it is drawn, the global random states of torch, numpy and Python, and the sampler's own
    ``generator`` if it has one, are set from (seed, epoch) and put back afterwards, so that every
    rank, and a resumed run, draws the same list. ``set_epoch`` is called when the sampler has it.
    """

    def __init__(self, sampler: Iterable[int]) -> None:
        if not isinstance(sampler, Sized):
            raise TypeError(f"sampler {type(sampler).__name__} has no length; expected one with __len__")
        self.sampler: Iterable[int] = sampler
        self.length = checked_length(len(sampler))
        self.bound = 0
        self._drawn: tuple[int, int, Indices] | None = None

    @property
    def name(self) -> str:
        return f"sampler({type(self.sampler).__name__},{self.length})"

    def at(self, seed: int, epoch: int, positions: Indices) -> Indices:
        drawn = self._drawn
        if drawn is None or drawn[:2] != (seed, epoch):
            drawn = self._drawn = seed, epoch, self._draw(seed, epoch)
        return drawn[2][positions]

    def _draw(self, seed: int, epoch: int) -> Indices:
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        own = getattr(self.sampler, "generator", None)
        number = int.from_bytes(derive_key("sampler", seed, epoch)[:4], "little")
        with seeded_randomness(number, own if isinstance(own, torch.Generator) else None):
            drawn = np.fromiter(self.sampler, dtype=np.int64)
        if len(drawn) != self.length:
            raise ValueError(
                f"sampler {type(self.sampler).__name__} gave {len(drawn)} indices in epoch {epoch}, but its "
                f"length is {self.length}; positions need an epoch of constant length"
            )
        return drawn


@contextlib.contextmanager
def seeded_randomness(number: int, generator: torch.Generator | None) -> Iterator[None]:
    """Seed every source of randomness that a sampler may use, and put all of them back."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    own_state = generator.get_state() if generator is not None else None
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            random.seed(number)
            np.random.seed(number)
            if generator is not None:
                generator.manual_seed(number)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if generator is not None and own_state is not None:
            generator.set_state(own_state)


class WeightedOrder(Order):
    """Indices drawn with probability proportional to their weight, with or without replacement.

    With replacement each position is drawn on its own. Without, index i stands in the order of
    e_i / w_i, where the e_i are exponential random numbers: the same as drawing one after the other
    from what is left. An index of weight 0 is never drawn.

    >>> WeightedOrder([0.0, 1.0], num_samples=3).at(0, 0, np.arange(3)).tolist()
    [1, 1, 1]
    """

    def __init__(
        self,
        weights: Sequence[float] | npt.NDArray[Any] | torch.Tensor,
        num_samples: int | None = None,
        replacement: bool = True,
    ) -> None:
        self._weights = np.array(weights, dtype=np.float64)
        if self._weights.ndim != 1 or not np.isfinite(self._weights).all() or (self._weights < 0).any():
            raise ValueError("weights must be finite, not negative, and in one dimension")
        positive = int(np.count_nonzero(self._weights))
        if positive == 0:
            raise ValueError(f"all {self._weights.size} weights are 0; expected at least one above 0")
        self.replacement = replacement
        self.bound = self._weights.size
        default = self.bound if replacement else positive
        self.length = checked_length(default if num_samples is None else num_samples)
        if not replacement and self.length > positive:
            raise ValueError(
                f"cannot draw {self.length} samples without replacement: only {positive} weights are above 0"
            )
        self._steps = np.cumsum(self._weights)
        self._last = int(np.flatnonzero(self._weights)[-1])
        self._drawn: tuple[int, int, Indices] | None = None

    @property
    def may_repeat(self) -> bool:
        return self.replacement

    @property
    def name(self) -> str:
        return f"weighted({_digest(self._weights)},{self.length},{'with' if self.replacement else 'without'})"

    def at(self, seed: int, epoch: int, positions: Indices) -> Indices:
        if self.replacement:
            uniform = uniform_at(derive_key("weighted", seed, epoch), positions)
            found = np.searchsorted(self._steps, uniform * self._steps[-1], side="right")
            # Rounding up to the very end may step over trailing zeros: back to the last positive weight.
            return np.asarray(np.minimum(found, self._last), dtype=np.int64)
        drawn = self._drawn
        if drawn is None or drawn[:2] != (seed, epoch):
            drawn = self._drawn = seed, epoch, self._draw(derive_key("weighted", seed, epoch))
        return drawn[2][positions]

    def _draw(self, key: bytes) -> Indices:
        candidates = np.flatnonzero(self._weights)
        uniform = _to_unit(random_words(key, self.bound))[candidates]
        arrival = -np.log1p(-uniform) / self._weights[candidates]
        return candidates[np.argsort(arrival, kind="stable")[: self.length]]


def _to_unit(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    # The 53 bits that a float64 holds: [0, 1).
    unit: npt.NDArray[np.float64] = np.ldexp((words >> np.uint64(11)).astype(np.float64), -53)
    return unit


def uniform_at(key: bytes, positions: Indices) -> npt.NDArray[np.float64]:
    """Return a random number of [0, 1) for each position, a function of key and position alone."""
    first, second = (np.uint64(int.from_bytes(key[i : i + 8], "little")) for i in (0, 8))
    words = positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + first
    # Two rounds of the multiply-xorshift mixer by Stafford (variant 13), with a key between them.
    for between in (second, np.uint64(0)):
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        words = (words ^ (words >> np.uint64(31))) + between
    return _to_unit(words)


class ConcatOrder(Order):
    """One order after the other, over datasets that are concatenated (``torch.utils.data.ConcatDataset``).

    ``sizes`` are the lengths of the datasets; by default each part covers its dataset. Each part gets
    a seed of its own. Put it into ``Shuffled`` to mix the parts.

    >>> ConcatOrder([range(2), IndexOrder([1, 0])]).at(0, 0, np.arange(4)).tolist()
    [0, 1, 3, 2]
    """

    def __init__(self, parts: Sequence[OrderLike], sizes: Sequence[int] | None = None) -> None:
        self.parts = [as_order(part) for part in parts]
        self.sizes = list(sizes) if sizes is not None else [part.bound for part in self.parts]
        if len(self.sizes) != len(self.parts):
            raise ValueError(f"{len(self.parts)} parts but {len(self.sizes)} sizes; expected one per part")
        for number, (part, size) in enumerate(zip(self.parts, self.sizes, strict=True)):
            if size < 1 or part.bound > size:
                raise ValueError(
                    f"part {number} ({part.name}) gives indices up to {part.bound - 1} of a dataset of size "
                    f"{size}; pass sizes=[...] with the length of each dataset"
                )
        self.length = checked_length(sum(part.length for part in self.parts))
        self.bound = sum(self.sizes)
        self._ends = np.cumsum([part.length for part in self.parts])

    @property
    def may_repeat(self) -> bool:
        return any(part.may_repeat for part in self.parts)

    @property
    def name(self) -> str:
        parts = zip(self.parts, self.sizes, strict=True)
        return f"concat({','.join(f'{part.name}:{size}' for part, size in parts)})"

    def at(self, seed: int, epoch: int, positions: Indices) -> Indices:
        number_of = np.searchsorted(self._ends, positions, side="right")
        first_index = list(itertools.accumulate(self.sizes, initial=0))
        result = np.empty_like(positions)
        for number in np.unique(number_of).tolist():
            part, chosen = self.parts[number], number_of == number
            local = positions[chosen] - (self._ends[number] - part.length)
            own_seed = int.from_bytes(derive_key("part", seed, number)[:8], "little")
            result[chosen] = part.at(own_seed, epoch, local) + first_index[number]
        return result
