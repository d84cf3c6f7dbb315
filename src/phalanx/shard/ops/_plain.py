"""Says what a plain tensor beside a sharded one means: the same values on every rank, or each rank's own.

Owns the policy and its check. The default, ``verify``, compares a fingerprint of the plain tensors across the ranks in
one small collective per operation and raises if they differ, because nothing else could tell a wrong result from a
right one. Nothing is remembered between calls: ranks could remember differently, and then wait for one another.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx._torch_private import tree_leaves
from phalanx.comm import Group
from phalanx.shard.exchange._exchange import buffer_device
from phalanx.shard.tensor._tensor import ShardedTensor
from phalanx.tensor import DTensor

Policy = Literal["verify", "equal", "per_rank"]
_POLICIES = ("verify", "equal", "per_rank")
_policy: ContextVar[Policy] = ContextVar("phalanx_shard_plain_inputs", default="verify")


@contextmanager
def plain_inputs(policy: Policy) -> Iterator[None]:
    """What plain tensors mean in operations with sharded tensors inside the block; all ranks must choose the same.

    ``verify`` (the default): equal on all ranks, and compared. ``equal``: equal, taken on trust, which saves a small
    collective per operation. ``per_rank``: each rank's own; the operation runs on the full tensor and gives each rank
    its own plain result, and backward sums the ranks' gradients at the owners of the shards.

    >>> with plain_inputs("per_rank"):                  # doctest: +SKIP
    ...     loss = criterion(model(my_batch), my_labels)
    """
    if policy not in _POLICIES:
        raise ValueError(f"plain_inputs({policy!r}): expected one of {', '.join(_POLICIES)}")
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


def current_policy() -> Policy:
    return _policy.get()


def plain_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the plain tensors among the arguments, by a name to tell the user."""
    found = {}
    for label, value in (*((f"argument {i}", arg) for i, arg in enumerate(args)), *kwargs.items()):
        leaves = [value] if isinstance(value, Tensor) else tree_leaves(value)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and not isinstance(leaf, (ShardedTensor, DTensor)):
                found[label if len(leaves) == 1 else f"{label}, item {position}"] = leaf
    return found


def check_equal(group: Group, op: str, plain: dict[str, Tensor]) -> None:
    """Raise ValueError on every rank unless all ranks pass the same plain tensors."""
    if group.size == 1 or not plain:
        return
    said = {label: _fingerprint(tensor) for label, tensor in plain.items()}
    digest = hashlib.sha256(json.dumps([op, said]).encode()).digest()
    device = buffer_device(group)
    mine = torch.tensor([int.from_bytes(digest[:8], "little", signed=True)], device=device)
    heard = torch.empty(group.size, dtype=torch.int64, device=device)
    group.all_gather_into_tensor(heard, mine)
    if len(set(heard.tolist())) > 1:
        raise ValueError(_difference(group, op, said))


def _fingerprint(tensor: Tensor) -> list[Any]:
    """Shape, dtype and a checksum of the bytes: to tell batches apart, not to resist malice."""
    described = [list(tensor.shape), str(tensor.dtype)]
    if tensor.is_meta:
        return described
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    flat = dense.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return [*described, zlib.crc32(flat.numpy().data)]


def _difference(group: Group, op: str, said: dict[str, list[Any]]) -> str:
    remedy = (
        'if each rank means its own values, run it in `with phalanx.shard.plain_inputs("per_rank"):`; if they should '
        "be equal, broadcast them from one rank first; if they only differ by rounding and that is wanted, use "
        'plain_inputs("equal")'
    )
    told = group.all_gather_values([op, said])
    for rank, (other_op, other) in enumerate(told):
        if other_op != op:
            return (
                f"rank {group.rank} runs {op} on sharded tensors while rank {rank} runs {other_op}; "
                f"all ranks must run the same operations in the same order"
            )
        for label in {**said, **other}:
            if said.get(label) != other.get(label):
                mine, theirs = _told(said.get(label)), _told(other.get(label))
                return (
                    f"{op} of a ShardedTensor: {label}, a plain tensor, is not the same on all ranks: "
                    f"rank {group.rank} has {mine}, rank {rank} has {theirs}; {remedy}"
                )
    return f"{op} of a ShardedTensor: plain tensors differ between other ranks than {group.rank}; {remedy}"


def _told(fingerprint: list[Any] | None) -> str:
    if fingerprint is None:
        return "no tensor there"
    shape, dtype, *checksum = fingerprint
    return f"{dtype} {tuple(shape)}" + (f" with checksum {checksum[0]:08x}" if checksum else "")
