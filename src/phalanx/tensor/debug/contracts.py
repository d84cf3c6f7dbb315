"""The textbook contract of each scheme: what a step communicates, no more and no less.

Owns the formulas, as pure functions of sizes. ``nbytes`` is always what one collective counts on one rank
(``CommEvent``): the larger of what goes in and what comes out. Add contracts for schemes that are combined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn

from phalanx.tensor.debug._contract import Allowance, CommContract, Limit

__all__ = [
    "column_row_pair",
    "context_parallel",
    "data_parallel",
    "fully_shard",
    "loss_parallel",
    "no_communication",
    "sequence_parallel_pair",
]

Phase = Literal["forward", "backward"]


def _line(module: str, phase: Phase, collective: str, count: Limit, nbytes: int | None) -> Allowance:
    """``count`` collectives of ``nbytes`` each."""
    total = nbytes * count if nbytes is not None and isinstance(count, int) else None
    return Allowance(module=module, phase=phase, collective=collective, count=count, nbytes=total)


def no_communication() -> CommContract:
    """Return the contract of a model that one rank could run alone."""
    return CommContract()


def column_row_pair(module: str, *, nbytes: int | None = None) -> CommContract:
    """Return the contract of tensor parallel layers, one cut by columns and the next by rows, in each ``module``.

    One all-reduce of the block's output in forward, one of its input's gradient in backward; ``nbytes`` of either.

    >>> print(column_row_pair("layers.*.mlp", nbytes=4096))
    layers.*.mlp, forward: 1 all_reduce of 4.1 kB
    layers.*.mlp, backward: 1 all_reduce of 4.1 kB
    """
    return CommContract(*(_line(module, phase, "all_reduce", 1, nbytes) for phase in ("forward", "backward")))


def sequence_parallel_pair(
    module: str,
    *,
    nbytes: int | None = None,
    input_gradient: Literal["all_reduce", "reduce_scatter"] = "reduce_scatter",
) -> CommContract:
    """Return the contract of such a pair between activations that are sharded by position.

    The input is gathered before the columns, the output reduce-scattered behind the rows; backward gathers the gradient
    of the output and reduce-scatters that of the input. ``input_gradient="all_reduce"``: of an input that the model
    gathers itself, by ``redistribute``; its gradient is a tensor of its own, summed on every rank and then cut.
    ``nbytes``: of the whole activation. Activations that pass between blocks as plain tensors are one more small
    all-gather each, of their sizes; as DTensors they are not.
    """
    return CommContract(
        _line(module, "forward", "all_gather", 1, nbytes),
        _line(module, "forward", "reduce_scatter", 1, nbytes),
        _line(module, "backward", "all_gather", 1, nbytes),
        _line(module, "backward", input_gradient, 1, nbytes),
    )


def loss_parallel(*, rows: int, itemsize: int = 4) -> CommContract:
    """Return the contract of cross entropy on logits that are sharded by class: three numbers per row, forward only."""
    return CommContract(_line("", "forward", "all_reduce", 3, rows * itemsize))


def data_parallel(model: nn.Module, *, metadata: int = 4096) -> CommContract:
    """Return the contract of DDP: every byte of gradient is reduced once, in backward, in any number of buckets.

    ``metadata``: bytes that may ride along (who used which parameter, weights of ranks, padding). It holds from
    the fourth step on: behind the first and the third, ranks agree on the order and size of buckets.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    return CommContract(
        Allowance(
            phase="backward",
            collective="all_reduce",
            count=range(1, len(trained) + 2),
            nbytes=range(gradients, gradients + metadata + 1),
        )
    )


def context_parallel(
    module: str,
    *,
    num_ranks: int,
    block_nbytes: int,
    gradient_nbytes: int | None = None,
    method: str = "allgather",
    entered: bool = True,
) -> CommContract:
    """Return the contract of attention over ranks that hold parts of a sequence, one call in each ``module``.

    ``block_nbytes``: keys and values of one rank; ``gradient_nbytes``: the same in the dtype of their gradients
    (float32 at least). ``method`` as in ``set_rotate_method``. ``entered``: the step enters the context, where buffers
    are compared.
    """
    gradient = block_nbytes if gradient_nbytes is None else gradient_nbytes
    hops = num_ranks - 1
    if method == "alltoall":
        lines = [
            _line(module, "forward", "all_to_all", hops, block_nbytes),
            _line(module, "backward", "all_to_all", hops, block_nbytes),
            _line(module, "backward", "all_to_all", hops, gradient),
        ]
    elif method == "allgather":
        lines = [
            _line(module, "forward", "all_gather", min(hops, 1), num_ranks * block_nbytes),
            _line(module, "backward", "all_gather", min(hops, 1), num_ranks * block_nbytes),
            _line(module, "backward", "reduce_scatter", min(hops, 1), num_ranks * gradient),
        ]
    else:
        raise ValueError(f"method is {method!r}; expected alltoall or allgather")
    if entered and hops:
        lines.append(_line("", "forward", "all_gather", 1, 24 * num_ranks))
    return CommContract(*lines)


def fully_shard(
    units: Mapping[str, int],
    *,
    reshard_after_forward: bool | int = True,
    shard_ranks: int | None = None,
    gradient_ratio: float = 1.0,
    padding: int = 0,
) -> CommContract:
    """Return the contract of fully sharded units: module -> bytes of its own parameters, as they are gathered.

    Each unit is gathered for forward, and once more for backward if it is given up in between (by a number: among so
    many ranks, the same bytes); its gradient is reduce-scattered once. ``shard_ranks``: on a (replicate, shard) mesh
    how many ranks a shard axis has, each of which all-reduces its part of the gradient with the replicas. With tensor
    parallel inside, bytes are those of a rank's shards, and contracts are added. ``gradient_ratio``: bytes of a reduced
    gradient for each of a gathered parameter (2 for bfloat16 parameters whose gradients are reduced in float32).
    ``padding``: bytes that a unit may be filled up by.
    """
    lines = []
    for module, nbytes in units.items():
        gathered, reduced = (range(int(n), int(n) + padding + 1) for n in (nbytes, nbytes * gradient_ratio))
        lines.append(Allowance(module=module, phase="forward", collective="all_gather", count=1, nbytes=gathered))
        if reshard_after_forward:
            lines.append(Allowance(module=module, phase="backward", collective="all_gather", count=1, nbytes=gathered))
        lines.append(Allowance(module=module, phase="backward", collective="reduce_scatter", count=1, nbytes=reduced))
        if shard_ranks is not None:
            part = range(-(-reduced.start // shard_ranks), (reduced.stop - 1) // shard_ranks + 1)
            lines.append(Allowance(module=module, phase="backward", collective="all_reduce", count=1, nbytes=part))
    return CommContract(*lines)
