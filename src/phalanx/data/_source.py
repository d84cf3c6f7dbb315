"""Checks once what both samplers are built from: a dataset's length and the order over it.

Owns the meaning of ``shuffle``, ``order``, ``block_size`` and ``seed``, and which datasets can be sampled at all: those
whose ``len`` is that of the whole and whose ``[i]`` gives any sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from phalanx.data._order import DEFAULT_BLOCK_SIZE, BlockShuffled, Order, Sequential, Shuffled
from phalanx.data._wrapped_orders import OrderLike, as_order
from phalanx.data.shards._shard_order import ShardOrder

Shuffle = bool | Literal["block", "shards"]
#: Lanes of ``shuffle="shards"`` where there are no slots. Not the number of replicas: any number has the same order.
DEFAULT_LANES = 8


def length_of(dataset: Any) -> int:
    """Return the number of samples of a dataset whose samples can be asked for by number; others are refused."""
    kind = type(dataset).__name__
    check_indexable(dataset)
    if not isinstance(dataset, Sized):
        raise TypeError(f"dataset {kind} has no length; a sampler needs one with __len__")
    length = len(dataset)
    if length < 1:
        raise ValueError(f"dataset {kind} is empty; there is nothing to sample")
    return length


def check_indexable(dataset: Any) -> None:
    """Refuse what is not a map of numbers to samples, and say what to use instead.

    An iterable dataset is refused even if it has a length and ``[i]``: those that stream divide themselves over the
    ranks, so that their length is this rank's share while ``[i]`` counts over all, and a sampler would leave out the
    samples of all other ranks.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise TypeError(
            f"dataset is a {kind}, which gives batches in an order of its own; pass the dataset that it reads "
            "(loader.dataset) and give batch size, collate_fn and number of workers beside it"
        )
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not _can_index(dataset)):
        raise TypeError(
            f"dataset {kind} is iterable: it deals its samples out by itself, so that its length, if it has one, may "
            "be this rank's share. Expected a map-style dataset: all samples counted by __len__, any of them from "
            "__getitem__. Use the map-style form of the source, or, if dataset[i] gives any sample of all, wrap it in "
            "a torch.utils.data.Dataset whose __len__ is the number of all samples. To keep it iterable, give it to a "
            "DataLoader without a sampler"
        )
    if isinstance(dataset, Mapping) and 0 not in dataset:
        keys = ", ".join(repr(key) for key in list(dataset)[:5])
        raise TypeError(f"dataset is a {kind} with keys {keys}; pass one of its values, such as its training split")


def _can_index(dataset: Any) -> bool:
    if hasattr(dataset, "__getitems__"):
        return True
    method = getattr(type(dataset), "__getitem__", None)
    return method is not None and method is not Dataset.__getitem__  # which only raises


def check_shuffle(shuffle: Shuffle, order: OrderLike | None, block_size: int | None) -> None:
    """Refuse arguments that contradict each other, whatever the dataset."""
    if shuffle not in (True, False, "block", "shards"):
        raise ValueError(f"shuffle is {shuffle!r}; expected True, False, 'block' or 'shards'")
    if block_size is not None and (shuffle != "block" or order is not None):
        raise ValueError(f"block_size={block_size} needs shuffle='block' and no order of your own")
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size is {block_size}; expected at least 1")


def order_over(dataset: Any, shuffle: Shuffle, order: OrderLike | None, block_size: int | None) -> Order:
    """Return the order that the arguments of a sampler ask for."""
    check_shuffle(shuffle, order, block_size)
    length = len(dataset)
    if order is not None:
        wrapped = as_order(order)
        if wrapped.bound > length:
            raise ValueError(
                f"order {wrapped.name} gives indices up to {wrapped.bound - 1}, but the dataset's length is {length}"
            )
        return _checked_for(dataset, wrapped)
    if shuffle == "shards":
        if not hasattr(dataset, "shards"):
            raise TypeError(
                f"shuffle='shards' needs a dataset that has shards; {type(dataset).__name__} has none. Wrap its source "
                "in a ShardedDataset, or use shuffle='block' for blocks of neighbours"
            )
        return _checked_for(dataset, ShardOrder(dataset))
    if shuffle == "block":
        return _checked_for(dataset, BlockShuffled(length, DEFAULT_BLOCK_SIZE if block_size is None else block_size))
    return _checked_for(dataset, Shuffled(length) if shuffle else Sequential(length))


def _checked_for(dataset: Any, order: Order) -> Order:
    if getattr(dataset, "is_replayed", False) and not isinstance(order, Sequential):
        raise ValueError(
            f"dataset {type(dataset).__name__} is replayed from its beginning for every step back, so order "
            f"{order.name} would read it over and over; use shuffle=False, and shuffle where the samples come from"
        )
    return order


def adjust_cache(dataset: Any, order: Order) -> None:
    """Tell a dataset that keeps shards near how many that has to be; it refuses if it may not keep so many."""
    if (adjust := getattr(dataset, "adjust_cache", None)) is not None:
        adjust(order)


def checked_seed(seed: int | torch.Generator) -> int:
    """Return a number; a generator counts with the seed that it was given."""
    return int(seed.initial_seed()) if isinstance(seed, torch.Generator) else int(seed)
