"""Digests a tensor as a tree over its blocks, so that workers that hold ranges of it find one digest without a gather.

The leaves are the sha256 of blocks of ``BLOCK`` elements in row-major order, the inner nodes that of their two
children; the tree is the fixed one of ``reduce._slots``. Whoever holds a range that begins and ends at blocks (cells
do) digests the largest subtrees inside it: a few for each range, 32 bytes each. All of them together give the root, on
any number of workers the same as from the tensor in one place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.elastic.reduce._norm_blocks import BLOCK, num_blocks
from phalanx.elastic.reduce._slots import Node, children, cover, fold


@dataclass(frozen=True)
class TensorDigest:
    """Stands for a tensor in a state whose digest is asked for: what ``digest`` would take in of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    root: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> TensorDigest:
        flat = tensor.detach().reshape(-1)
        return cls(tensor.dtype, tuple(tensor.shape), root_of(flat.numel(), range_nodes(flat, 0, flat.numel())))


def range_nodes(values: Tensor, begin: int, size: int) -> dict[Node, bytes]:
    """Digest the elements from ``begin`` on of a tensor of ``size`` elements: the subtrees that lie inside the range.

    >>> tensor = torch.arange(5000.0)
    >>> whole = range_nodes(tensor, 0, 5000)
    >>> some = {**range_nodes(tensor[:2048], 0, 5000), **range_nodes(tensor[2048:], 2048, 5000)}
    >>> root_of(5000, some) == root_of(5000, whole), sorted(some)
    (True, [(0, 2), (2, 4), (4, 5)])
    """
    end = begin + values.numel()
    if begin % BLOCK or (end % BLOCK and end != size) or end > size:
        raise ValueError(f"elements {begin} to {end} of {size}; expected a range of blocks of {BLOCK}")
    data = values.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
    first, step = begin // BLOCK, BLOCK * values.element_size()
    leaves = [hashlib.sha256(data[at : at + step]).digest() for at in range(0, len(data), step)]

    def subtree(node: Node) -> bytes:
        if node[1] - node[0] == 1:
            return leaves[node[0] - first]
        left, right = children(node)
        return _join(subtree(left), subtree(right))

    if not leaves:
        return {}
    return {node: subtree(node) for node in cover(num_blocks(size), range(first, first + len(leaves)))}


def root_of(size: int, nodes: Mapping[Node, bytes]) -> bytes:
    """Return the root over the nodes of all ranges of a tensor of ``size`` elements; ``ValueError`` if one lacks."""
    return fold(num_blocks(size), nodes, _join) if size else hashlib.sha256(b"").digest()


def _join(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(left + right).digest()
