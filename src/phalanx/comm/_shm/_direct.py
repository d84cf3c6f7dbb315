"""The collectives on shared tensors: nothing is copied in, peers work on the tensors themselves.

Plan of each, as phases on every rank:

1. meet: all name where their tensor lies. If one is not in shared memory, all go through slots instead.
2. work: read the peers' tensors (all_gather, broadcast, reduce_scatter, all_to_all), or, in all_reduce, reduce this
   rank's share of the elements across all ranks' tensors in pieces that fit the cache and write it into all of them.
   Shares do not overlap, so nobody reads what another writes.
3. meet again: when all are done, the tensors belong to their ranks again.

Only tensors above one slot's size come here; for smaller ones the copy costs less than the second meeting.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from phalanx.comm._shm import _collectives as through_slots
from phalanx.comm._shm._calls import record
from phalanx.comm._shm._collectives import flat, nbytes_of, shares
from phalanx.comm._shm._engine import Steps
from phalanx.comm._shm._fold import Fold
from phalanx.comm._shm._regions import NOWHERE, Place, Regions, span
from phalanx.comm._shm._syscalls import copy_bytes
from phalanx.comm._shm._window import Window
from phalanx.comm._transport import ReduceOp

PIECE_BYTES = 256 * 1024
"""What is reduced at a time: the pieces of two ranks fit a core's second-level cache."""

_PLACE_WORDS = range(1, 1 + len(NOWHERE))


def _meet(
    w: Window, call: int, place: Place, sizes: Sequence[int] | None = None
) -> Generator[int, None, tuple[list[Place], list[list[int]]] | None]:
    """Phase 1: everybody's place and row of sizes, or None when a tensor is not in shared memory."""
    n = w.claim()
    while token := w.busy(n):
        yield token
    if sizes is not None:
        w.write_sizes(n, sizes)
    w.post(n, call, *place)
    while token := w.missing(n):
        yield token
    w.check(n, call)
    places = [Place(*(w.detail(n, rank, i) for i in _PLACE_WORDS)) for rank in range(w.size)]
    rows = [] if sizes is None else [[w.size_for(n, rank, dst) for dst in range(w.size)] for rank in range(w.size)]
    w.took(n)
    return (places, rows) if all(place.entry for place in places) else None


def _part(w: Window) -> Steps:
    """Phase 3."""
    n = w.claim()
    while token := w.busy(n):
        yield token
    w.post(n)
    while token := w.missing(n):
        yield token
    w.took(n)


def all_reduce(w: Window, regions: Regions, tensor: Tensor, fold: Fold, op: ReduceOp) -> Steps:
    nbytes, itemsize, dtype = nbytes_of(tensor), tensor.element_size(), tensor.dtype
    call = record("all_reduce", dtype, op, nbytes=nbytes)
    met = yield from _meet(w, call, regions.place(tensor.data_ptr(), nbytes))
    if met is None:
        yield from through_slots.all_reduce(w, tensor, fold, op)
        return
    bounds = shares(tensor.numel(), w.size, 64 // itemsize)
    lo, hi = bounds[w.rank], bounds[w.rank + 1]
    if hi > lo:
        views = [
            flat(tensor)[lo:hi]
            if rank == w.rank
            else regions.view(rank, place, dtype, (hi - lo) * itemsize, lo * itemsize)
            for rank, place in enumerate(met[0])
        ]
        for pieces in zip(*(view.split(PIECE_BYTES // itemsize) for view in views), strict=True):
            fold.in_place(pieces)
        del views, pieces
    yield from _part(w)


def reduce_scatter(
    w: Window, regions: Regions, output: Tensor, inputs: Sequence[Tensor], fold: Fold, op: ReduceOp
) -> Steps:
    sizes = [nbytes_of(t) for t in inputs]
    dtype, itemsize = output.dtype, output.element_size()
    where = span(inputs)
    place = NOWHERE if where is None else regions.place(*where)
    met = yield from _meet(w, record("reduce_scatter", dtype, op, nbytes=sum(sizes)), place)
    if met is None:
        yield from through_slots.reduce_scatter(w, output, inputs, fold, op)
        return
    before, own = sum(sizes[: w.rank]), sizes[w.rank]
    if own:
        views = [
            flat(inputs[rank]) if rank == w.rank else regions.view(rank, place, dtype, own, before)
            for rank, place in enumerate(met[0])
        ]
        for out, *pieces in zip(*(v.split(PIECE_BYTES // itemsize) for v in (flat(output), *views)), strict=True):
            fold.into(out, pieces)
        del views, pieces
    yield from _part(w)


def all_gather(w: Window, regions: Regions, outputs: Sequence[Tensor], tensor: Tensor) -> Steps:
    sizes = [nbytes_of(t) for t in outputs]
    place = regions.place(tensor.data_ptr(), sizes[w.rank]) if sizes[w.rank] else NOWHERE
    met = yield from _meet(w, record("all_gather", tensor.dtype, nbytes=sum(sizes)), place)
    if met is None:
        yield from through_slots.all_gather(w, outputs, tensor)
        return
    for rank, output in enumerate(outputs):
        if rank != w.rank:
            _copy(regions, rank, met[0][rank], output)
        elif output.data_ptr() != tensor.data_ptr():
            copy_bytes(output.data_ptr(), tensor.data_ptr(), sizes[rank])
    yield from _part(w)


def all_to_all(w: Window, regions: Regions, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
    """Always meets: that small parts here are large ones elsewhere is only known then."""
    sizes = [nbytes_of(t) for t in inputs]
    where = span(inputs)
    place = NOWHERE if where is None else regions.place(*where)
    met = yield from _meet(w, record("all_to_all", inputs[0].dtype), place, sizes)
    if met is None:
        yield from through_slots.all_to_all(w, outputs, inputs)
        return
    places, rows = met
    for rank, output in enumerate(outputs):
        through_slots.check_size("all_to_all", w, rank, rows[rank][w.rank], nbytes_of(output))
        if rank == w.rank:
            copy_bytes(output.data_ptr(), inputs[rank].data_ptr(), sizes[rank])
        else:
            _copy(regions, rank, places[rank], output, sum(rows[rank][: w.rank]))
    yield from _part(w)


def broadcast(w: Window, regions: Regions, tensor: Tensor, src: int) -> Steps:
    nbytes = nbytes_of(tensor)
    place = regions.place(tensor.data_ptr(), nbytes) if w.rank == src else NOWHERE
    n = w.claim()
    call = record("broadcast", tensor.dtype, None, src, nbytes)
    while token := w.busy(n):
        yield token
    w.post(n, call, *place)
    if w.rank != src:
        while token := w.missing_from(n, src):
            yield token
        w.check(n, call, (src,))
        place = Place(*(w.detail(n, src, i) for i in _PLACE_WORDS))
    w.took(n)
    if not place.entry:
        yield from through_slots.broadcast(w, tensor, src)
        return
    if w.rank != src:
        _copy(regions, src, place, tensor)
    yield from _part(w)


def _copy(regions: Regions, rank: int, place: Place, output: Tensor, offset: int = 0) -> None:
    nbytes = nbytes_of(output)
    if nbytes:
        view = regions.view(rank, place, torch.uint8, nbytes, offset)
        copy_bytes(output.data_ptr(), view.data_ptr(), nbytes)
