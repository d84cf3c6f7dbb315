"""ManagedParameter: one parameter of a unit, as the shard that users see and as the whole that forward computes with.

Owns both objects and the places in modules where one or the other is registered. The shard is a DTensor whose local
tensor lies in the unit's storage; the whole lies in the gathered flat vector, and is a plain parameter, or a DTensor on
the remaining axes if tensor parallelism has distributed it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from phalanx._torch_private import module_parameters
from phalanx.fsdp.unit._mesh_axes import DataParallelAxes, sharded_spec
from phalanx.fsdp.unit._released import close, reopen
from phalanx.fsdp.unit._unit_memory import alias
from phalanx.tensor import DTensor
from phalanx.tensor.core._dtensor import wrap
from phalanx.tensor.layout._placement import chunk_sizes, chunk_starts
from phalanx.tensor.layout._spec import Spec


class ManagedParameter:
    """One parameter; the same object may stand in several places."""

    def __init__(
        self,
        name: str,
        places: list[tuple[nn.Module, str]],
        original: nn.Parameter,
        axes: DataParallelAxes,
        dim: int,
        device: torch.device,
    ) -> None:
        self.name = name
        self.places = places
        self.dim = dim
        self.spec, self.inner_spec = sharded_spec(axes, original, dim, name)
        whole = original.detach()
        if isinstance(whole, DTensor):
            whole = whole._local
        self.shape = tuple(whole.shape)  # what is gathered: of a tensor-parallel parameter, this rank's shard
        self.numel = math.prod(self.shape)
        group = axes.shard_group
        piece = _piece(whole, dim, group.size, group.rank)
        moved = piece if piece.is_meta else piece.to(device)
        own = moved.clone(memory_format=torch.contiguous_format) if moved is piece else moved.contiguous()
        self.local_shape = tuple(own.shape)
        self.sharded = _parameter(own, self.spec, original.requires_grad)
        self.sharded.__dict__.update(_kept(original))
        self.whole: nn.Parameter | None = None

    @property
    def local(self) -> Tensor:
        """This rank's piece: where gradients of the shard are found."""
        sharded: Any = self.sharded
        found: Tensor = sharded._local
        return found

    @property
    def leaf(self) -> Tensor:
        """What autograd accumulates the whole gradient of."""
        assert self.whole is not None, "the unit was gathered before"
        whole: Any = self.whole
        return whole._local if isinstance(whole, DTensor) else whole

    def make_whole(self, flat: Tensor, start: int) -> None:
        """Make the parameter that forward uses, in the gathered memory."""
        there = alias(flat, start, self.shape)
        if self.inner_spec is None:
            self.whole = nn.Parameter(there, self.sharded.requires_grad)
        else:
            self.whole = _parameter(there, self.inner_spec.with_dtype(flat.dtype), self.sharded.requires_grad)
        self.whole.__dict__.update(_kept(self.sharded))

    def forget_alias(self) -> None:
        """Let operations on a distributed whole share a new alias from here on, on every rank.

        Whether an old one is used again depends on the address that the memory came back at, which differs by rank; and
        an older alias sums its gradient later in backward.
        """
        if isinstance(self.whole, DTensor):
            self.whole._alias = None

    def close(self, unit: str, rank: int) -> None:
        """Refuse computations with the whole parameter from here on, its memory being gone."""
        if self.whole is not None:
            for tensor in {self.whole, self.leaf}:
                close(tensor, unit, self.name, rank)

    def reopen(self) -> None:
        if self.whole is not None:
            for tensor in {self.whole, self.leaf}:
                reopen(tensor)

    def register(self, parameter: nn.Parameter) -> None:
        """Put ``parameter`` into all its places."""
        for module, key in self.places:
            _set(module, key, parameter)

    def put_back(self) -> None:
        """Put the shard where the whole parameter is; what users put there instead stays."""
        whole = self.whole
        if whole is not None:
            for module, key in self.places:
                if module_parameters(module).get(key) is whole:
                    _set(module, key, self.sharded)

    def replaced(self) -> nn.Parameter | None:
        """Return what users put in the shard's place, if they did."""
        for module, key in self.places:
            found = module_parameters(module).get(key)
            if found is not self.sharded and found is not self.whole:
                return found if found is not None else nn.Parameter(torch.empty(0))
        return None

    def take_over(self, found: nn.Parameter, where: str) -> None:
        """Manage ``found`` in place of the shard; it must be laid out alike (``load_state_dict(assign=True)``)."""
        if not isinstance(found, DTensor) or found._spec.with_dtype(self.spec.dtype) is not self.spec:
            kind = repr(found._spec) if isinstance(found, DTensor) else f"a plain {type(found).__name__}"
            raise RuntimeError(
                f"rank {self.spec.mesh.get_rank()}: parameter {self.name!r} of {where} was replaced by {kind}; "
                f"expected a DTensor laid out as {self.spec!r}. Change modules before fully_shard, or load_state_dict()"
            )
        self.sharded = found
        self.register(found)


def _set(module: nn.Module, key: str, parameter: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module_parameters(module)[key] = parameter
    else:  # recurrent layers keep a list of their weights
        setattr(module, key, parameter)


def _parameter(local: Tensor, spec: Spec, requires_grad: bool) -> nn.Parameter:
    made: Any = nn.Parameter(wrap(local, spec), requires_grad=requires_grad)
    found: nn.Parameter = made
    return found


def _kept(parameter: Tensor) -> dict[str, Any]:
    """Return attributes that users set on a parameter; they follow it."""
    return {name: value for name, value in parameter.__dict__.items() if not name.startswith("_")}


def _piece(whole: Tensor, dim: int, num_ranks: int, rank: int) -> Tensor:
    start, size = chunk_starts(whole.shape[dim], num_ranks)[rank], chunk_sizes(whole.shape[dim], num_ranks)[rank]
    return whole.narrow(dim, start, size)
