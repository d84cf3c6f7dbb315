"""What both samplers are built from: a dataset's length and the order over it, checked once.

Owns the meaning of ``shuffle``, ``order``, ``block_size`` and ``seed``.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Literal

import torch

from phalanx.data._order import DEFAULT_BLOCK_SIZE, BlockShuffled, Order, Sequential, Shuffled
from phalanx.data._wrapped_orders import OrderLike, as_order

Shuffle = bool | Literal["block"]


def length_of(dataset: Any) -> int:
    if not isinstance(dataset, Sized):
        raise TypeError(
            f"dataset {type(dataset).__name__} has no length; a sampler needs one with __len__ (an iterable "
            "dataset is split by the dataset itself)"
        )
    length = len(dataset)
    if length < 1:
        raise ValueError(f"dataset {type(dataset).__name__} is empty; there is nothing to sample")
    return length


def order_over(length: int, shuffle: Shuffle, order: OrderLike | None, block_size: int | None) -> Order:
    """The order that the arguments of a sampler ask for, over a dataset of ``length``."""
    if shuffle not in (True, False, "block"):
        raise ValueError(f"shuffle is {shuffle!r}; expected True, False or 'block'")
    if block_size is not None and (shuffle != "block" or order is not None):
        raise ValueError(f"block_size={block_size} needs shuffle='block' and no order of your own")
    if order is not None:
        wrapped = as_order(order)
        if wrapped.bound > length:
            raise ValueError(
                f"order {wrapped.name} gives indices up to {wrapped.bound - 1}, but the dataset's length is "
                f"{length}"
            )
        return wrapped
    if shuffle == "block":
        return BlockShuffled(length, DEFAULT_BLOCK_SIZE if block_size is None else block_size)
    return Shuffled(length) if shuffle else Sequential(length)


def checked_seed(seed: int | torch.Generator) -> int:
    """A number; a generator counts with the seed that it was given."""
    return int(seed.initial_seed()) if isinstance(seed, torch.Generator) else int(seed)
