"""The collectives through slots, as generators (see ``_engine``): tensors of any size stream through in pieces.

All take contiguous tensors and touch them by address, so autograd's version counters stay as they are. How many
steps a collective has must come out alike on every rank: from sizes that all know, or from the first step's records.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.comm._shm._calls import record
from phalanx.comm._shm._engine import Steps
from phalanx.comm._shm._fold import Fold
from phalanx.comm._shm._syscalls import copy_bytes
from phalanx.comm._shm._window import Window
from phalanx.comm._transport import ReduceOp
from phalanx.errors import CollectiveMismatch

ALONE_BYTES = 32 * 1024
"""Up to here every rank reduces everything by itself (one meeting); above, each reduces its share (two)."""


def num_pieces(nbytes: int, piece: int) -> int:
    """How many pieces; at least one, since also an empty collective is a meeting."""
    return max(1, -(-nbytes // piece))


def nbytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def flat(tensor: Tensor) -> Tensor:
    """One dimension, without a version counter of its own to disturb."""
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


def all_reduce(w: Window, tensor: Tensor, fold: Fold, op: ReduceOp) -> Steps:
    nbytes = nbytes_of(tensor)
    call = record("all_reduce", tensor.dtype, op, nbytes=nbytes)
    if w.size > 2 and nbytes > ALONE_BYTES:
        return _all_reduce_in_shares(w, tensor, fold, call)
    return _all_reduce_alone(w, tensor, fold, call)


def _all_reduce_alone(w: Window, tensor: Tensor, fold: Fold, call: int) -> Steps:
    """One step per piece: all put it, all reduce it. The next piece is put before this one is reduced."""
    nbytes, itemsize, dtype = nbytes_of(tensor), tensor.element_size(), tensor.dtype
    address, piece = tensor.data_ptr(), w.slot_bytes
    count = num_pieces(nbytes, piece)
    first = w.claim(count)
    target = flat(tensor)
    for i in range(count + 1):
        if i < count:
            n = first + i
            while token := w.busy(n):
                yield token
            w.put(n, address + i * piece, min(piece, nbytes - i * piece))
            w.post(n, call if i == 0 else 0)
        if i > 0:
            n = first + i - 1
            while token := w.missing(n):
                yield token
            if i == 1:
                w.check(n, call)
            lo = (i - 1) * piece // itemsize
            out = target if count == 1 else target[lo : lo + piece // itemsize]
            fold.into(out, w.views(n, dtype, out.numel()))
            w.took(n)


def _all_reduce_in_shares(w: Window, tensor: Tensor, fold: Fold, call: int) -> Steps:
    """Two steps per piece: all put it, each reduces its share of it and puts that, all collect the shares."""
    nbytes, itemsize, dtype = nbytes_of(tensor), tensor.element_size(), tensor.dtype
    address, piece = tensor.data_ptr(), w.slot_bytes
    count = num_pieces(nbytes, piece)
    first = w.claim(2 * count)
    for i in range(count):
        n = first + 2 * i
        at, length = address + i * piece, min(piece, nbytes - i * piece)
        while token := w.busy(n):
            yield token
        w.put(n, at, length)
        w.post(n, call if i == 0 else 0)
        while token := w.missing(n):
            yield token
        if i == 0:
            w.check(n, call)
        bounds = shares(length // itemsize, w.size)
        lo, hi = bounds[w.rank], bounds[w.rank + 1]
        while token := w.busy(n + 1):
            yield token
        if hi > lo:
            fold.into(w.views(n + 1, dtype, hi - lo, lo * itemsize)[w.rank], w.views(n, dtype, hi - lo, lo * itemsize))
        w.took(n)
        w.post(n + 1)
        while token := w.missing(n + 1):
            yield token
        for rank in range(w.size):
            lo, hi = bounds[rank] * itemsize, bounds[rank + 1] * itemsize
            if hi > lo:
                w.get(n + 1, rank, at + lo, hi - lo, lo)
        w.took(n + 1)


def reduce(w: Window, tensor: Tensor, fold: Fold, op: ReduceOp, dst: int) -> Steps:
    nbytes, itemsize, dtype = nbytes_of(tensor), tensor.element_size(), tensor.dtype
    call = record("reduce", dtype, op, dst, nbytes)
    address, piece = tensor.data_ptr(), w.slot_bytes
    count = num_pieces(nbytes, piece)
    first = w.claim(count)
    target = flat(tensor)
    for i in range(count):
        n = first + i
        while token := w.busy(n):
            yield token
        w.put(n, address + i * piece, min(piece, nbytes - i * piece))
        w.post(n, call if i == 0 else 0)
        if w.rank == dst:
            while token := w.missing(n):
                yield token
            if i == 0:
                w.check(n, call)
            out = target[i * piece // itemsize : (i + 1) * piece // itemsize]
            fold.into(out, w.views(n, dtype, out.numel()))
        w.took(n)


def broadcast(w: Window, tensor: Tensor, src: int) -> Steps:
    nbytes = nbytes_of(tensor)
    call = record("broadcast", tensor.dtype, None, src, nbytes)
    address, piece = tensor.data_ptr(), w.slot_bytes
    count = num_pieces(nbytes, piece)
    first = w.claim(count)
    for i in range(count):
        n = first + i
        at, length = address + i * piece, min(piece, nbytes - i * piece)
        while token := w.busy(n):
            yield token
        if w.rank == src:
            w.put(n, at, length)
            w.post(n, call if i == 0 else 0)
        else:
            w.post(n, call if i == 0 else 0)
            while token := w.missing_from(n, src):
                yield token
            if i == 0:
                w.check(n, call, (src,))
            w.get(n, src, at, length)
        w.took(n)


def all_gather(w: Window, outputs: Sequence[Tensor], tensor: Tensor) -> Steps:
    addresses, sizes = [t.data_ptr() for t in outputs], [nbytes_of(t) for t in outputs]
    call = record("all_gather", tensor.dtype, nbytes=sum(sizes))
    piece = w.slot_bytes
    count = num_pieces(max(sizes), piece)
    first = w.claim(count)
    own = tensor.data_ptr()
    if addresses[w.rank] != own:
        copy_bytes(addresses[w.rank], own, sizes[w.rank])
    for i in range(count):
        n = first + i
        done = i * piece
        while token := w.busy(n):
            yield token
        if sizes[w.rank] > done:
            w.put(n, own + done, min(piece, sizes[w.rank] - done))
        w.post(n, call if i == 0 else 0)
        while token := w.missing(n):
            yield token
        if i == 0:
            w.check(n, call)
        for rank in w.peers:
            if sizes[rank] > done:
                w.get(n, rank, addresses[rank] + done, min(piece, sizes[rank] - done))
        w.took(n)


def reduce_scatter(w: Window, output: Tensor, inputs: Sequence[Tensor], fold: Fold, op: ReduceOp) -> Steps:
    addresses, sizes = [t.data_ptr() for t in inputs], [nbytes_of(t) for t in inputs]
    dtype, itemsize = output.dtype, output.element_size()
    call = record("reduce_scatter", dtype, op, nbytes=sum(sizes))
    piece = w.piece_bytes
    count = num_pieces(max(sizes), piece)
    first = w.claim(count)
    target = flat(output)
    for i in range(count):
        n = first + i
        done = i * piece
        while token := w.busy(n):
            yield token
        for rank in range(w.size):
            if sizes[rank] > done:
                w.put(n, addresses[rank] + done, min(piece, sizes[rank] - done), rank * piece)
        w.post(n, call if i == 0 else 0)
        while token := w.missing(n):
            yield token
        if i == 0:
            w.check(n, call)
        if sizes[w.rank] > done:
            out = target[done // itemsize : (done + piece) // itemsize]
            fold.into(out, w.views(n, dtype, out.numel(), w.rank * piece))
        w.took(n)


def all_to_all(w: Window, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
    """Sizes of third parties are unknown: the first step's records tell how many steps the longest pair needs."""
    call = record("all_to_all", inputs[0].dtype)
    piece = w.piece_bytes
    sent, taken = [nbytes_of(t) for t in inputs], [nbytes_of(t) for t in outputs]
    count = num_pieces(max(sent), piece)
    copy_bytes(outputs[w.rank].data_ptr(), inputs[w.rank].data_ptr(), taken[w.rank])
    i = 0
    while i < count:
        n = w.claim()
        done = i * piece
        while token := w.busy(n):
            yield token
        for rank in w.peers:
            if sent[rank] > done:
                w.put(n, inputs[rank].data_ptr() + done, min(piece, sent[rank] - done), rank * piece)
        if i == 0:
            w.write_sizes(n, sent)
        w.post(n, call if i == 0 else 0, count)
        while token := w.missing(n):
            yield token
        if i == 0:
            w.check(n, call)
            count = max([count, *(w.detail(n, rank, 1) for rank in w.peers)])
            for rank in w.peers:
                check_size("all_to_all", w, rank, w.size_for(n, rank, w.rank), taken[rank])
        for rank in w.peers:
            if taken[rank] > done:
                w.get(n, rank, outputs[rank].data_ptr() + done, min(piece, taken[rank] - done), w.rank * piece)
        w.took(n)
        i += 1


def gather(w: Window, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int) -> Steps:
    call = record("gather", tensor.dtype, root=dst)
    nbytes, own, piece = nbytes_of(tensor), tensor.data_ptr(), w.slot_bytes
    count = num_pieces(nbytes, piece)
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
        if i == 0 or outputs is not None:
            while token := w.missing(n):
                yield token
        if i == 0:
            w.check(n, call)
            count = max([count, *(w.detail(n, rank, 1) for rank in w.peers)])
            for rank in w.peers if outputs is not None else ():
                check_size("gather", w, rank, w.detail(n, rank, 2), nbytes_of(outputs[rank]))
        for rank in w.peers if outputs is not None else ():
            if (size := nbytes_of(outputs[rank])) > done:
                w.get(n, rank, outputs[rank].data_ptr() + done, min(piece, size - done))
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
            for rank in w.peers:
                if sent[rank] > done:
                    w.put(n, inputs[rank].data_ptr() + done, min(piece, sent[rank] - done), rank * piece)
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
