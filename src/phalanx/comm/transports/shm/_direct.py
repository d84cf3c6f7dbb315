"""Runs the collectives on shared tensors: nothing is copied in, peers work on the tensors themselves.

Plan of each, as phases on every rank:

1. meet: all name where their tensor lies. If one is not in shared memory, all go through slots instead (in an
   all_to_all, only that one does).
2. work: read the peers' tensors (all_gather, broadcast, reduce_scatter, all_to_all), or, in all_reduce, reduce this
   rank's share of the elements across all ranks' tensors in pieces that fit the cache and write it into all of them.
   Shares do not overlap, so nobody reads what another writes.
3. meet again: when all are done, the tensors belong to their ranks again.

Only tensors above ``DIRECT_BYTES`` come here; for smaller ones the copy costs less than the second meeting.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from phalanx.comm.transports._interface import ReduceOp
from phalanx.comm.transports.shm import _collectives as by_slots
from phalanx.comm.transports.shm._calls import record
from phalanx.comm.transports.shm._collectives import flat, nbytes_of, shares
from phalanx.comm.transports.shm._engine import Steps
from phalanx.comm.transports.shm._fold import Fold
from phalanx.comm.transports.shm._regions import NOWHERE, RegionAddress, Regions, span
from phalanx.comm.transports.shm._syscalls import copy_bytes
from phalanx.comm.transports.shm._window import Window

DIRECT_BYTES = 512 * 1024
"""Above this size (or a smaller slot's) it is worth asking whether all ranks' tensors are in shared memory."""

PIECE_BYTES = 256 * 1024
"""What is reduced at a time: the pieces of two ranks fit a core's second-level cache."""


def _place_of(w: Window, n: int, rank: int) -> RegionAddress:
    return RegionAddress(*(w.detail(n, rank, i) for i in range(1, 1 + len(NOWHERE))))


def _meet(w: Window, call: int, place: RegionAddress) -> Generator[int, None, list[RegionAddress] | None]:
    """Phase 1: everybody's place, or None when a tensor is not in shared memory."""
    n = w.claim()
    while token := w.busy(n):
        yield token
    w.post(n, call, *place)
    while token := w.missing(n):
        yield token
    w.check(n, call)
    places = [_place_of(w, n, rank) for rank in range(w.size)]
    w.took(n)
    return places if all(place.entry for place in places) else None


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
    places = yield from _meet(w, call, regions.place(tensor.data_ptr(), nbytes))
    if places is None:
        yield from by_slots.all_reduce(w, tensor, fold, op)
        return
    bounds = shares(tensor.numel(), w.size, 64 // itemsize)
    lo, hi = bounds[w.rank], bounds[w.rank + 1]
    if hi > lo:
        views = [
            flat(tensor)[lo:hi]
            if rank == w.rank
            else regions.view(rank, place, dtype, (hi - lo) * itemsize, lo * itemsize)
            for rank, place in enumerate(places)
        ]
        for pieces in zip(*(torch.split(view, PIECE_BYTES // itemsize) for view in views), strict=True):
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
    places = yield from _meet(w, record("reduce_scatter", dtype, op, nbytes=sum(sizes)), place)
    if places is None:
        yield from by_slots.reduce_scatter(w, output, inputs, fold, op)
        return
    before, own = sum(sizes[: w.rank]), sizes[w.rank]
    if own:
        views = [
            flat(inputs[rank]) if rank == w.rank else regions.view(rank, place, dtype, own, before)
            for rank, place in enumerate(places)
        ]
        for out, *pieces in zip(
            *(torch.split(v, PIECE_BYTES // itemsize) for v in (flat(output), *views)), strict=True
        ):
            fold.into(out, pieces)
        del views, pieces
    yield from _part(w)


def all_gather(w: Window, regions: Regions, outputs: Sequence[Tensor], tensor: Tensor) -> Steps:
    sizes = [nbytes_of(t) for t in outputs]
    place = regions.place(tensor.data_ptr(), sizes[w.rank]) if sizes[w.rank] else NOWHERE
    places = yield from _meet(w, record("all_gather", tensor.dtype, nbytes=sum(sizes)), place)
    if places is None:
        yield from by_slots.all_gather(w, outputs, tensor)
        return
    for rank, output in enumerate(outputs):
        if rank != w.rank:
            _copy(regions, rank, places[rank], output)
        elif output.data_ptr() != tensor.data_ptr():
            copy_bytes(output.data_ptr(), tensor.data_ptr(), sizes[rank])
    yield from _part(w)


def all_to_all(w: Window, regions: Regions, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
    """Sizes of third parties are unknown, so the first meeting decides; it carries the first pieces already.

    What a rank has in shared memory the others read there, whatever the other ranks' tensors are.
    """
    sent, expected = [nbytes_of(t) for t in inputs], [nbytes_of(t) for t in outputs]
    where = span(inputs)
    small = max(sent) <= min(w.piece_bytes, DIRECT_BYTES // w.size)
    place = NOWHERE if where is None or small else regions.place(*where)
    put = [0] * w.size if place.entry else sent
    call = record("all_to_all", inputs[0].dtype)
    n = w.claim()
    while token := w.busy(n):
        yield token
    by_slots.put_parts(w, n, 0, inputs, put)
    w.write_sizes(n, sent)
    w.post(n, call, *place)
    while token := w.missing(n):
        yield token
    w.check(n, call)
    places = [_place_of(w, n, rank) for rank in range(w.size)]
    rows = [[w.size_for(n, rank, dst) for dst in range(w.size)] for rank in range(w.size)]
    for rank in range(w.size):
        by_slots.check_size("all_to_all", w, rank, rows[rank][w.rank], expected[rank])
    take = [0 if place.entry else size for place, size in zip(places, expected, strict=True)]
    by_slots.take_parts(w, n, 0, outputs, take)
    w.took(n)
    if outputs[w.rank].data_ptr() != inputs[w.rank].data_ptr():
        copy_bytes(outputs[w.rank].data_ptr(), inputs[w.rank].data_ptr(), sent[w.rank])
    for rank in w.peers:
        if places[rank].entry:
            _copy(regions, rank, places[rank], outputs[rank], sum(rows[rank][: w.rank]))
    longest = max((max(row) for row, place in zip(rows, places, strict=True) if not place.entry), default=0)
    rest = by_slots.num_pieces(longest, w.piece_bytes) - 1
    if rest:
        yield from by_slots.stream(
            w,
            call,
            rest,
            lambda n, i: by_slots.put_parts(w, n, i + 1, inputs, put),
            lambda n, i: by_slots.take_parts(w, n, i + 1, outputs, take),
        )
    if any(place.entry for place in places):
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
        place = _place_of(w, n, src)
    w.took(n)
    if not place.entry:
        yield from by_slots.broadcast(w, tensor, src)
        return
    if w.rank != src:
        _copy(regions, src, place, tensor)
    yield from _part(w)


def _copy(regions: Regions, rank: int, place: RegionAddress, output: Tensor, offset: int = 0) -> None:
    nbytes = nbytes_of(output)
    if nbytes:
        view = regions.view(rank, place, torch.uint8, nbytes, offset)
        copy_bytes(output.data_ptr(), view.data_ptr(), nbytes)
