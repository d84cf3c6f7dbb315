"""Runs the collectives through slots, as generators (see ``_engine``): tensors of any size stream through in pieces.

All take contiguous tensors and touch them by address, so autograd's version counters stay as they are. How many
steps a collective has must come out alike on every rank: from sizes that all know, or from the first step's records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.comm.transports._interface import ReduceOp
from phalanx.comm.transports.shm._calls import record
from phalanx.comm.transports.shm._engine import Steps
from phalanx.comm.transports.shm._fold import Fold
from phalanx.comm.transports.shm._syscalls import copy_bytes
from phalanx.comm.transports.shm._window import Window
from phalanx.errors import CollectiveMismatch

ALONE_BYTES = 32 * 1024
"""Up to here every rank reduces everything by itself (one meeting); above, each reduces its share (two)."""


def num_pieces(nbytes: int, piece: int) -> int:
    """Return how many pieces; at least one, since also an empty collective is a meeting."""
    return max(1, -(-nbytes // piece))


def nbytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def flat(tensor: Tensor) -> Tensor:
    """Return one dimension, without a version counter of its own to disturb."""
    return tensor.data.view(-1)


def shares(count: int, size: int, unit: int = 16) -> list[int]:
    """Bounds of ``size`` contiguous shares of ``count`` elements, cut at multiples of ``unit``; size + 1 numbers."""
    share = -(-count // (size * unit)) * unit
    return [min(count, i * share) for i in range(size + 1)]


def barrier(w: Window) -> Steps:
    n = w.claim()
    call = record("barrier")
    while token := w.busy(n):
        yield token
    w.post(n, call)
    while token := w.missing(n):
        yield token
    w.check(n, call)
    w.took(n)


Piece = Callable[[int, int], None]
"""What is done with piece ``i`` at step ``n``."""


def stream(w: Window, call: int, count: int, put: Piece | None, take: Piece | None, src: int | None = None) -> Steps:
    """``count`` steps, one per piece: put mine, take the others' (or only ``src``'s).

    While the others' piece is missing, later ones are put ahead as far as slots are free: a rank that was kept from
    running finds work for several pieces at once.
    """
    first = w.claim(count)
    posted = 0
    for i in range(count):
        while posted <= i:
            if token := w.busy(first + posted):
                yield token
                continue
            if put is not None:
                put(first + posted, posted)
            w.post(first + posted, 0 if posted else call)
            posted += 1
        n = first + i
        if take is not None:
            while token := w.missing(n) if src is None else w.missing_from(n, src):
                if posted < count and not w.busy(first + posted):
                    if put is not None:
                        put(first + posted, posted)
                    w.post(first + posted)
                    posted += 1
                else:
                    yield token
            if i == 0:
                w.check(n, call, None if src is None else (src,))
            take(n, i)
        w.took(n)


def all_reduce(w: Window, tensor: Tensor, fold: Fold, op: ReduceOp) -> Steps:
    nbytes = nbytes_of(tensor)
    call = record("all_reduce", tensor.dtype, op, nbytes=nbytes)
    if w.size > 2 and nbytes > min(ALONE_BYTES, w.slot_bytes):
        return _all_reduce_in_shares(w, tensor, fold, call)
    if nbytes <= w.slot_bytes:
        return _all_reduce_small(w, tensor, fold, call)
    put, take, count = _whole_pieces(w, tensor, fold)
    return stream(w, call, count, put, take)


def _all_reduce_small(w: Window, tensor: Tensor, fold: Fold, call: int) -> Steps:
    """Yield what ``stream`` does for one piece, without its overhead: latency counts here."""
    n = w.claim()
    while token := w.busy(n):
        yield token
    w.put(n, tensor.data_ptr(), nbytes_of(tensor))
    w.post(n, call)
    while token := w.missing(n):
        yield token
    w.check(n, call)
    target = flat(tensor)
    fold.into(target, _with_own(w, w.views(n, tensor.dtype, tensor.numel()), target))
    w.took(n)


def _with_own(w: Window, values: list[Tensor], out: Tensor) -> list[Tensor]:
    """Return the values to combine into ``out``, which holds this rank's: of two ranks, read it there, not from its
    slot.

    Of more, the tree's inner nodes use ``out`` before its value is needed.
    """
    if w.size != 2:
        return values
    return [out, values[1]] if w.rank == 0 else [values[0], out]


def _whole_pieces(w: Window, tensor: Tensor, fold: Fold) -> tuple[Piece, Piece, int]:
    """Return every rank puts each piece, and who takes reduces it."""
    nbytes, dtype = nbytes_of(tensor), tensor.dtype
    address, piece = tensor.data_ptr(), w.slot_bytes
    count = num_pieces(nbytes, piece)
    target = flat(tensor)
    parts = (target,) if count == 1 else torch.split(target, piece // tensor.element_size())

    def put(n: int, i: int) -> None:
        w.put(n, address + i * piece, min(piece, nbytes - i * piece))

    def take(n: int, i: int) -> None:
        out = parts[i]
        fold.into(out, _with_own(w, w.views(n, dtype, out.numel()), out))

    return put, take, count


def _all_reduce_in_shares(w: Window, tensor: Tensor, fold: Fold, call: int) -> Steps:
    """Yield two steps per piece: all put it, each reduces its share of it and puts that, all collect the shares.

    The steps of two pieces overlap: in(0) in(1) out(0) in(2) out(1) ... in(c-1) out(c-2) out(c-1), so that what a rank
    waits for was mostly posted one step ago.
    """
    nbytes, itemsize, dtype = nbytes_of(tensor), tensor.element_size(), tensor.dtype
    address, piece = tensor.data_ptr(), w.slot_bytes
    count = num_pieces(nbytes, piece)
    parts = torch.split(flat(tensor), piece // itemsize)
    first = w.claim(2 * count)
    for i in range(count):
        n_in, n_out = first + max(0, 2 * i - 1), first + min(2 * i + 2, 2 * count - 1)
        for j in (0, 1) if i == 0 else (i + 1,):
            if j < count:
                n = first + max(0, 2 * j - 1)
                while token := w.busy(n):
                    yield token
                _put_for_others(w, n, address + j * piece, parts[j].numel(), itemsize)
                w.post(n, 0 if j else call)
        bounds = shares(parts[i].numel(), w.size)
        lo, hi = bounds[w.rank], bounds[w.rank + 1]
        while token := w.missing(n_in):
            yield token
        if i == 0:
            w.check(n_in, call)
        while token := w.busy(n_out):
            yield token
        if hi > lo:
            values = w.views(n_in, dtype, hi - lo, lo * itemsize).copy()
            values[w.rank] = parts[i][lo:hi]
            fold.into(w.views(n_out, dtype, hi - lo, lo * itemsize)[w.rank], values)
        # Only now all steps up to in(i) are read: out(i - 1) has the number behind it.
        w.took(n_in if i == 0 else n_in + 1)
        w.post(n_out)
        while token := w.missing(n_out):
            yield token
        for rank in range(w.size):
            lo, hi = bounds[rank] * itemsize, bounds[rank + 1] * itemsize
            if hi > lo:
                w.get(n_out, rank, address + i * piece + lo, hi - lo, lo)
    w.took(first + 2 * count - 1)


def _put_for_others(w: Window, n: int, address: int, count: int, itemsize: int) -> None:
    """Put a piece of ``count`` elements, but for this rank's share, which nobody else reads."""
    bounds = shares(count, w.size)
    lo, hi, end = bounds[w.rank] * itemsize, bounds[w.rank + 1] * itemsize, count * itemsize
    if lo:
        w.put(n, address, lo)
    if hi < end:
        w.put(n, address + hi, end - hi, hi)


def reduce(w: Window, tensor: Tensor, fold: Fold, op: ReduceOp, dst: int) -> Steps:
    call = record("reduce", tensor.dtype, op, dst, nbytes_of(tensor))
    put, take, count = _whole_pieces(w, tensor, fold)
    return stream(w, call, count, put, take if w.rank == dst else None)


def broadcast(w: Window, tensor: Tensor, src: int) -> Steps:
    nbytes = nbytes_of(tensor)
    call = record("broadcast", tensor.dtype, None, src, nbytes)
    address, piece = tensor.data_ptr(), w.slot_bytes

    def put(n: int, i: int) -> None:
        w.put(n, address + i * piece, min(piece, nbytes - i * piece))

    def take(n: int, i: int) -> None:
        w.get(n, src, address + i * piece, min(piece, nbytes - i * piece))

    count = num_pieces(nbytes, piece)
    steps = stream(w, call, count, put, None) if w.rank == src else stream(w, call, count, None, take, src)
    return _holding(steps, tensor)


def _holding(steps: Steps, *tensors: object) -> Steps:
    """Yield the tensors stay alive for as long as their addresses are in use."""
    yield from steps


def all_gather(w: Window, outputs: Sequence[Tensor], tensor: Tensor) -> Steps:
    addresses, sizes = [t.data_ptr() for t in outputs], [nbytes_of(t) for t in outputs]
    call = record("all_gather", tensor.dtype, nbytes=sum(sizes))
    own, piece = tensor.data_ptr(), w.slot_bytes

    def put(n: int, i: int) -> None:
        if i == 0 and addresses[w.rank] != own:
            copy_bytes(addresses[w.rank], own, sizes[w.rank])
        if sizes[w.rank] > i * piece:
            w.put(n, own + i * piece, min(piece, sizes[w.rank] - i * piece))

    def take(n: int, i: int) -> None:
        for rank in w.peers:
            if sizes[rank] > i * piece:
                w.get(n, rank, addresses[rank] + i * piece, min(piece, sizes[rank] - i * piece))

    return _holding(stream(w, call, num_pieces(max(sizes), piece), put, take), outputs, tensor)


def reduce_scatter(w: Window, output: Tensor, inputs: Sequence[Tensor], fold: Fold, op: ReduceOp) -> Steps:
    sizes = [nbytes_of(t) for t in inputs]
    dtype, piece = output.dtype, w.piece_bytes
    call = record("reduce_scatter", dtype, op, nbytes=sum(sizes))
    parts, own = (torch.split(flat(t), piece // t.element_size()) for t in (output, inputs[w.rank]))

    def put(n: int, i: int) -> None:
        put_parts(w, n, i, inputs, sizes)

    def take(n: int, i: int) -> None:
        if sizes[w.rank] > i * piece:
            out = parts[i]
            values = w.views(n, dtype, out.numel(), w.rank * piece).copy()
            values[w.rank] = own[i]
            fold.into(out, values)

    return _holding(stream(w, call, num_pieces(max(sizes), piece), put, take), inputs)


def put_parts(w: Window, n: int, i: int, parts: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Put piece ``i`` of what goes to each peer, side by side in one slot."""
    piece = w.piece_bytes
    for rank in w.peers:
        if sizes[rank] > i * piece:
            w.put(n, parts[rank].data_ptr() + i * piece, min(piece, sizes[rank] - i * piece), rank * piece)


def take_parts(w: Window, n: int, i: int, parts: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Take piece ``i`` of what each peer put for this rank."""
    piece = w.piece_bytes
    for rank in w.peers:
        if sizes[rank] > i * piece:
            address = parts[rank].data_ptr() + i * piece
            w.get(n, rank, address, min(piece, sizes[rank] - i * piece), w.rank * piece)


def gather(w: Window, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int) -> Steps:
    call = record("gather", tensor.dtype, root=dst)
    nbytes, own, piece = nbytes_of(tensor), tensor.data_ptr(), w.slot_bytes
    count = num_pieces(nbytes, piece)
    wanted = {rank: outputs[rank] for rank in w.peers} if outputs is not None else {}
    if outputs is not None:
        copy_bytes(outputs[dst].data_ptr(), own, nbytes)
    i = 0
    while i < count:
        n = w.claim()
        done = i * piece
        while token := w.busy(n):
            yield token
        if nbytes > done and w.rank != dst:
            w.put(n, own + done, min(piece, nbytes - done))
        w.post(n, call if i == 0 else 0, count, nbytes)
        if i == 0 or wanted:
            while token := w.missing(n):
                yield token
        if i == 0:
            w.check(n, call)
            count = max([count, *(w.detail(n, rank, 1) for rank in w.peers)])
        for rank, output in wanted.items():
            size = nbytes_of(output)
            if i == 0:
                check_size("gather", w, rank, w.detail(n, rank, 2), size)
            if size > done:
                w.get(n, rank, output.data_ptr() + done, min(piece, size - done))
        w.took(n)
        i += 1


def scatter(w: Window, output: Tensor, inputs: Sequence[Tensor] | None, src: int) -> Steps:
    call = record("scatter", output.dtype, root=src)
    piece, size = w.piece_bytes, nbytes_of(output)
    sent = [nbytes_of(t) for t in inputs] if inputs is not None else []
    count = num_pieces(max(sent), piece) if inputs is not None else 1
    if inputs is not None:
        copy_bytes(output.data_ptr(), inputs[src].data_ptr(), size)
    i = 0
    while i < count:
        n = w.claim()
        done = i * piece
        while token := w.busy(n):
            yield token
        if inputs is not None:
            put_parts(w, n, i, inputs, sent)
            if i == 0:
                w.write_sizes(n, sent)
            w.post(n, call if i == 0 else 0, count)
        else:
            w.post(n, call if i == 0 else 0, 0)
            while token := w.missing_from(n, src):
                yield token
            if i == 0:
                w.check(n, call, (src,))
                count = w.detail(n, src, 1)
                check_size("scatter", w, src, w.size_for(n, src, w.rank), size)
            if size > done:
                w.get(n, src, output.data_ptr() + done, min(piece, size - done), w.rank * piece)
        w.took(n)
        i += 1


def check_size(kind: str, w: Window, rank: int, sent: int, expected: int) -> None:
    if sent != expected:
        raise CollectiveMismatch(
            f"{kind}: rank {rank} sends {sent} bytes to rank {w.rank}, whose output takes {expected}"
        )
