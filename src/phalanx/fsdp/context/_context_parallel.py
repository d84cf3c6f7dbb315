"""``context_parallel``: a block in which each rank holds a part of the sequence, and attention sees all of it.

Owns the block, ``context_parallel_unshard`` and the rotate method. Inside: buffers are cut (``_sequence_buffers.py``),
attention is intercepted (``_interception.py``). Everything else in a model works on single positions and needs nothing.
Gradients of parameters are those of this rank's positions; to add them up over the context's ranks is the work of
whatever reduces gradients, on a mesh that includes them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.comm import DeviceMesh
from phalanx.fsdp.context._block_exchange import EXCHANGES
from phalanx.fsdp.context._interception import AttentionMode, SequenceContext
from phalanx.fsdp.context._sequence_buffers import SequenceBuffers, agree
from phalanx.fsdp.context._sequence_layout import SequenceLayout
from phalanx.tensor.core._modes import settings


class _Rotation:
    """Module state on purpose: the name and meaning of ``set_rotate_method`` are torch's."""

    method = "allgather"


class _Entered(threading.local):
    """The context that this thread (one simulated rank, or the process) is in."""

    context: SequenceContext | None = None


_entered = _Entered()


def set_rotate_method(rotate_method: str) -> None:
    """Choose how keys and values travel in contexts that are entered from now on: ``allgather`` or ``alltoall``.

    ``allgather`` (the default) fetches those of all ranks at once, ``alltoall`` passes them on from rank to rank.

    >>> set_rotate_method("alltoall")
    >>> set_rotate_method("allgather")
    """
    if rotate_method not in EXCHANGES:
        raise NotImplementedError(
            f"set_rotate_method({rotate_method!r}): expected one of {', '.join(sorted(EXCHANGES))}"
        )
    _Rotation.method = rotate_method


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
    length: int | None = None,
    load_balance: bool = True,
) -> Iterator[None]:
    """Hold a part of the sequence on each rank of ``mesh``, which has one axis, inside the block.

    ``buffers`` (inputs, labels, tables of positions; the same on all ranks) are cut in place along ``buffer_seq_dims``
    to this rank's positions, and are whole again at the end, but for ``no_restore_buffers``.
    ``torch.nn.functional.scaled_dot_product_attention`` attends to the positions of all ranks. Backward runs inside the
    block too, since it reads the buffers.

    ``load_balance``: rank r holds the r-th chunk from the front and the r-th from the back, so that a causal mask gives
    all ranks the same work; else one run of positions. ``length``: of the sequence, where it differs from that of the
    buffers; tables that are longer are cut from their first ``length`` positions.

    >>> with context_parallel(mesh["cp"], buffers=[ids, labels], buffer_seq_dims=[1, 1]):    # doctest: +SKIP
    ...     loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens
    ...     loss.backward()

    Raises ``ValueError`` or ``TypeError`` on all ranks of the mesh for buffers that cannot be cut or are not the same
    everywhere; ``RuntimeError`` at the end if a buffer was written to that is restored.
    """
    _check_mesh(mesh)
    if _entered.context is not None:
        raise RuntimeError(f"rank {mesh.get_rank()}: context_parallel inside context_parallel; expected one at a time")
    kept = no_restore_buffers or set()
    cut = SequenceBuffers(buffers or (), buffer_seq_dims or ())
    context = _agreed(mesh, cut, kept, length, load_balance)
    cut.cut(context.layout.positions(mesh.get_local_rank()))

    def refuse_recompute() -> None:
        if _entered.context is not context:
            raise RuntimeError(
                f"rank {mesh.get_rank()}: a checkpointed forward that ran inside context_parallel is to run again, but "
                f"the context has ended; call backward inside the block"
            )

    checks, settings.before_recompute = settings.before_recompute, (*settings.before_recompute, refuse_recompute)
    _entered.context = context
    written: list[int] = []
    try:
        with AttentionMode(context):
            yield
        written = cut.written(kept)
    finally:
        _entered.context, settings.before_recompute = None, checks
        cut.restore(kept)
    if written:
        raise RuntimeError(
            f"rank {mesh.get_rank()}: context_parallel: buffers {written} were written inside the block. What was "
            f"written is lost, and may have been another rank's part: DDP that synchronises buffers gives rank 0's to "
            f"all (pass forward_sync_buffers=False). Buffers that are to be kept so belong into no_restore_buffers"
        )


def is_entered() -> bool:
    """Return whether this thread is inside ``context_parallel``."""
    return _entered.context is not None


def _check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"context_parallel got a {type(mesh).__name__}; expected a phalanx.DeviceMesh of one axis")
    if mesh.ndim != 1:
        raise ValueError(
            f"rank {mesh.get_rank()}: context_parallel got {mesh!r} of {mesh.ndim} axes; expected one: "
            f'slice it, as in mesh["cp"], or flatten it'
        )


def _agreed(
    mesh: DeviceMesh, buffers: SequenceBuffers, kept: set[Tensor], length: int | None, load_balance: bool
) -> SequenceContext:
    """Return what all ranks are about to do; raises on all of them if one cannot."""
    method, description, layout = _Rotation.method, [], None
    failure: Exception | None = None
    try:
        found = buffers.check(length, kept)
        layout = SequenceLayout(length=found, num_ranks=mesh.size(), balanced=load_balance)
        description = [f"{layout}, {method}", *buffers.describe()]
    except (ValueError, TypeError) as error:
        failure = type(error)(f"rank {mesh.get_rank()}: context_parallel: {error}")
    agree(mesh, description, failure)
    assert layout is not None, "without one there was an error"
    return SequenceContext(mesh=mesh, layout=layout, method=method)


def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int], *, load_balance: bool | None = None
) -> list[Tensor]:
    """Return the whole of tensors (outputs, for example) that hold this rank's positions in ``seq_dims``.

    ``load_balance`` is that of the context, and need not be said inside of it. No gradient flows back. One all-gather
    for each tensor, and one for their sizes, which need not be equal on all ranks.

    >>> (logits,) = context_parallel_unshard(mesh["cp"], [logits], [1])      # doctest: +SKIP
    """
    _check_mesh(mesh)
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"rank {mesh.get_rank()}: {len(buffers)} buffers and {len(seq_dims)} seq_dims; expected one per buffer"
        )
    if load_balance is None:
        context = _entered.context
        load_balance = context is None or context.mesh != mesh or context.layout.balanced
    group = mesh.get_group()
    sizes = torch.empty(group.size, len(buffers), dtype=torch.int64)
    own = torch.tensor([tensor.shape[dim] for tensor, dim in zip(buffers, seq_dims, strict=True)], dtype=torch.int64)
    group.all_gather_into_tensor(sizes, own)
    with torch.no_grad():
        return [
            _unshard(mesh, tensor.detach(), dim, sizes[:, index].tolist(), load_balance)
            for index, (tensor, dim) in enumerate(zip(buffers, seq_dims, strict=True))
        ]


def _unshard(mesh: DeviceMesh, tensor: Tensor, dim: int, sizes: list[int], balanced: bool) -> Tensor:
    group = mesh.get_group()
    layout = SequenceLayout(length=sum(sizes), num_ranks=group.size, balanced=balanced)
    expected = [layout.size(rank) for rank in range(group.size)]
    if sizes != expected:
        raise ValueError(
            f"rank {mesh.get_rank()}: context_parallel_unshard got {sizes} positions in dim {dim} on the ranks; a "
            f"sequence of {sum(sizes)} is held as {expected}"
        )
    parts = [tensor.new_empty(*tensor.shape[:dim], n, *tensor.shape[dim:][1:]) for n in sizes]
    group.all_gather(parts, tensor)
    return torch.cat(parts, dim).index_select(dim, layout.restoring_order().to(tensor.device))
