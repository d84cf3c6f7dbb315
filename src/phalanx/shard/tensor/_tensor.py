"""ShardedTensor: a global shape whose pieces live on the ranks of a group; each rank holds its own shards.

Owns the wrapper class: what it tells about itself, making and copying, pickling, gradients. Operations come in through
``__torch_function__`` and are looked up in ``ops._dispatch``. Autograd runs on the local tensors; the wrapper has no
data, and what slips past the interception is refused.

Invariants: ``_metadata`` is the same on all ranks; ``_local_shards`` are this rank's entries of it, in its order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx._devices import of
from phalanx._torch_private import make_wrapper_subclass
from phalanx.comm import Group
from phalanx.comm.torch_interop._dcp import HeldBox, Spread
from phalanx.shard.exchange._gather import GatheredTensor, check_out, gather_tensors, gather_to_file
from phalanx.shard.exchange._groups import as_group, check_rank_in_group, owner_of
from phalanx.shard.exchange._reshard import reshard_shards
from phalanx.shard.exchange._shard import Shard
from phalanx.shard.layout._metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from phalanx.shard.tensor import _local
from phalanx.shard.tensor._pickling import ProcessGroupState, rebuild
from phalanx.shard.tensor._sharding_spec import ShardingSpec, infer_spec

_NO_RPC = (
    "ShardedTensor: no RRefs to remote shards (init_rrefs): RPC unpickles what comes from the network, which nothing "
    "here does; use gather() or reshard() to bring shards to a rank"
)


class ShardedTensor(torch.Tensor, Spread):
    """A tensor sharded by a ``ShardingSpec``.

    >>> spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])        # doctest: +SKIP
    >>> weight = ShardedTensor(spec, 10, 4)                              # doctest: +SKIP
    >>> weight.local_tensor().shape                                      # doctest: +SKIP
    torch.Size([5, 4])
    """

    _local_shards: list[Shard]
    _metadata: ShardedTensorMetadata
    _sharding_spec: ShardingSpec
    _process_group: Group

    ProcessGroupState = ProcessGroupState
    __array_ufunc__ = None  # numpy must not turn ``sharded + array`` into a plain array

    def __new__(
        cls,
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: Any = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        if not isinstance(sharding_spec, ShardingSpec):
            raise ValueError(f"Expecting ShardingSpec but got: {type(sharding_spec)}")
        if layout != torch.strided:
            raise ValueError(f"Only torch.strided layout is currently supported, found {layout}")
        if memory_format != torch.contiguous_format:
            raise ValueError(
                f"Only torch.contiguous_format memory_format is currently supported, found {memory_format}"
            )
        if init_rrefs:
            raise RuntimeError(_NO_RPC)
        group = as_group(process_group)
        kind = dtype or torch.get_default_dtype()
        properties = TensorProperties(kind, layout, requires_grad, memory_format, pin_memory)
        metadata = sharding_spec.build_metadata(_local.flatten_size(size), properties)
        mine = [entry for entry in metadata.shards_metadata if owner_of(entry, group) == group.rank]
        shards = [Shard(_empty(entry, properties), entry) for entry in mine]
        return cls._wrap(shards, metadata, sharding_spec, group)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: ``__new__`` returns it complete."""

    @classmethod
    def _wrap(
        cls, shards: list[Shard], metadata: ShardedTensorMetadata, spec: ShardingSpec, group: Group
    ) -> ShardedTensor:
        """Wrap what is known to fit."""
        properties = metadata.tensor_properties
        tensor = make_wrapper_subclass(cls, metadata.size, dtype=properties.dtype, requires_grad=False)
        tensor._local_shards, tensor._metadata = shards, metadata
        tensor._sharding_spec, tensor._process_group = spec, group
        result: ShardedTensor = tensor
        return result

    # ---- from what the ranks have

    @classmethod
    def _init_from_local_shards(
        cls, local_shards: list[Shard], *global_size: Any, process_group: Any = None, init_rrefs: bool = False
    ) -> ShardedTensor:
        """Collective: the ranks tell each other what they hold."""
        if init_rrefs:
            raise RuntimeError(_NO_RPC)
        group = as_group(process_group)
        told = _local.describe_local(local_shards, _local.size_or_none(global_size), group)
        metadata = _local.agree(group.all_gather_values(told))
        return cls._wrap(local_shards, metadata, infer_spec(metadata.shards_metadata, metadata.size), group)

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: Tensor,
        sharding_spec: ShardingSpec,
        *global_size: Any,
        process_group: Any = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """Return no collective: the spec says what this rank's tensor is."""
        if not local_tensor.is_contiguous():
            raise ValueError("local_tensor is not a contiguous Tensor; call .contiguous() on it")
        group = as_group(process_group)
        properties = TensorProperties.create_from_tensor(local_tensor)
        metadata = sharding_spec.build_metadata(_local.flatten_size(global_size), properties)
        mine = [entry for entry in metadata.shards_metadata if owner_of(entry, group) == group.rank]
        if len(mine) > 1 or (not mine and local_tensor.numel()):
            raise ValueError(
                f"rank {group.rank}: {sharding_spec} gives this rank {len(mine)} shards, but there is one "
                f"local tensor; use init_from_local_shards"
            )
        shards = [Shard(local_tensor, entry) for entry in mine]
        return cls._init_from_local_shards_and_global_metadata(
            shards, metadata, process_group=group, init_rrefs=init_rrefs, sharding_spec=sharding_spec
        )

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: list[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: Any = None,
        init_rrefs: bool = False,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensor:
        """Return no collective: all ranks pass the same metadata."""
        if init_rrefs:
            raise RuntimeError(_NO_RPC)
        group, metadata = as_group(process_group), sharded_tensor_metadata
        _local.check_against(local_shards, metadata, group)
        spec = sharding_spec or infer_spec(metadata.shards_metadata, metadata.size)
        return cls._wrap(local_shards, metadata, spec, group)

    # ---- what it is

    def metadata(self) -> ShardedTensorMetadata:
        return self._metadata

    def sharding_spec(self) -> ShardingSpec:
        return self._sharding_spec

    def local_shards(self) -> list[Shard]:
        """Return this rank's shards; empty if it has none."""
        return self._local_shards

    def local_tensor(self) -> Tensor:
        """Return the tensor of this rank's only shard."""
        if len(self._local_shards) != 1:
            raise NotImplementedError(
                f"rank {self._process_group.rank}: local_tensor() needs exactly one local shard, there are "
                f"{len(self._local_shards)}; use local_shards()"
            )
        return self._local_shards[0].tensor

    def remote_shards(self) -> dict[int, list[Any]]:
        raise RuntimeError(_NO_RPC)

    def is_pinned(self, device: Any = None) -> bool:
        return self._metadata.tensor_properties.pin_memory

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch declares attributes as plain variables
        """Of this rank's shards."""
        for shard in self._local_shards:
            return shard.tensor.device
        placement = self._metadata.shards_metadata[0].placement
        return torch.device("cpu") if placement is None else torch.device(placement.device().type)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # see device
        return self._metadata.tensor_properties.dtype

    @property
    def requires_grad(self) -> bool:
        return self._metadata.tensor_properties.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedTensor:
        for shard in self._local_shards:
            shard.tensor.requires_grad_(requires_grad)
        properties = replace(self._metadata.tensor_properties, requires_grad=requires_grad)
        self._metadata = replace(self._metadata, tensor_properties=properties)
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]  # see device
        return all(shard.tensor.is_leaf for shard in self._local_shards)

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]  # see device
        return next((shard.tensor.grad_fn for shard in self._local_shards if shard.tensor.grad_fn), None)

    @property
    def grad(self) -> ShardedTensor | None:
        """The local shards' gradients, as a sharded tensor of the same layout that shares their memory."""
        grads = [shard.tensor.grad for shard in self._local_shards]
        if all(grad is None for grad in grads):
            return None
        tensors = [
            torch.zeros_like(shard.tensor) if grad is None else grad
            for shard, grad in zip(self._local_shards, grads, strict=True)
        ]
        return self._with_tensors(tensors)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and not (isinstance(value, ShardedTensor) and same_layout(self, value)):
            raise TypeError("the gradient of a ShardedTensor is a ShardedTensor of the same layout, or None")
        for index, shard in enumerate(self._local_shards):
            shard.tensor.grad = None if value is None else value._local_shards[index].tensor

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    # ---- moving and copying

    def gather(  # type: ignore[override]  # another meaning than Tensor.gather, as in torch
        self,
        dst: int = 0,
        out: Tensor | str | Path | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
        *,
        max_bytes: int | None = None,
    ) -> None:
        """Gather the full tensor on rank ``dst`` of the group, in ``out``: a tensor, or the path of a safetensors file.

        Moves in rounds of at most ``max_bytes`` (default 64 MB), which bounds the memory beside ``out``. With ``dtype``
        the values pass through that dtype; ``enforce_dtype`` is accepted, values are always converted to ``out``'s.
        """
        group = self._process_group
        check_rank_in_group(group, "dst", dst)
        source = self if dtype is None else self.to(dtype)
        if isinstance(out, (str, Path)):
            if group.rank == dst:
                gather_to_file(group, source._metadata, source._local_shards, Path(out), max_bytes)
                return
            out = None
        check_out(group.rank, dst, self._metadata.size, out)
        gather_tensors(group, [GatheredTensor(source._metadata, source._local_shards, out)], dst, max_bytes)

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Move this tensor to another layout, in place; any spec to any spec, one collective. Returns self."""
        if not isinstance(resharding_spec, ShardingSpec):
            raise ValueError(f"Expecting ShardingSpec but got: {type(resharding_spec)}")
        if any(shard.tensor.is_leaf and shard.tensor.grad is not None for shard in self._local_shards):
            raise RuntimeError(
                f"rank {self._process_group.rank}: reshard() of a tensor that has gradients would drop them; "
                f"set .grad to None first"
            )
        if resharding_spec == self._sharding_spec:
            return self
        before = self._metadata
        after = resharding_spec.build_metadata(before.size, before.tensor_properties)
        self._local_shards = reshard_shards(self._local_shards, before, after, self._process_group)
        self._metadata, self._sharding_spec = after, resharding_spec
        return self

    def to(self, *args: Any, process_group: Any = None, **kwargs: Any) -> ShardedTensor:
        """As ``Tensor.to`` for every shard; self if nothing changes. A device without index is each rank's own."""
        probe = self._template().to(*args, **kwargs)
        unchanged = probe.dtype == self.dtype and probe.device == self.device
        if unchanged and not kwargs.get("copy") and process_group is None:
            return self
        kwargs["copy"] = True
        moved = self._with_tensors([shard.tensor.to(*args, **kwargs) for shard in self._local_shards], probe)
        if process_group is not None:
            moved._process_group = as_group(process_group)
        return moved

    def cpu(
        self, memory_format: torch.memory_format = torch.preserve_format, process_group: Any = None
    ) -> ShardedTensor:
        check_format(memory_format)
        return self.to("cpu", process_group=process_group)

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Any = None,
    ) -> ShardedTensor:
        check_format(memory_format)
        return self.to(device or of("cuda").current(), non_blocking=non_blocking, process_group=process_group)

    def _with_tensors(self, tensors: Sequence[Tensor], like: Tensor | None = None) -> ShardedTensor:
        """Return the same layout over other local tensors, which may have another dtype or device.

        On a rank without shards ``like`` tells dtype and device, so that metadata stays the same everywhere.
        """
        properties, entries = self._metadata.tensor_properties, self._metadata.shards_metadata
        like = tensors[0] if tensors else like
        if like is not None:
            properties = replace(properties, dtype=like.dtype, requires_grad=like.requires_grad)
            if like.device != self.device:
                entries = [_moved(entry, like.device) for entry in entries]
        mine = [entry for entry in entries if owner_of(entry, self._process_group) == self._process_group.rank]
        shards = [Shard(tensor, entry) for tensor, entry in zip(tensors, mine, strict=True)]
        metadata = ShardedTensorMetadata(entries, self._metadata.size, properties)
        return type(self)._wrap(shards, metadata, self._sharding_spec, self._process_group)

    def _template(self) -> Tensor:
        """Return an empty tensor like the local ones: what an operation does to dtypes can be tried on it."""
        properties = self._metadata.tensor_properties
        return torch.empty(
            (0,) * len(self._metadata.size),
            dtype=properties.dtype,
            device=self.device,
            requires_grad=properties.requires_grad,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) in memo:
            known: ShardedTensor = memo[id(self)]
            return known
        result = self._with_tensors([copy.deepcopy(shard.tensor, memo) for shard in self._local_shards])
        result._metadata = replace(result._metadata, tensor_properties=self._metadata.tensor_properties)
        if isinstance(self, torch.nn.Parameter):
            result._is_param = True  # how torch marks a parameter that is a subclass
        memo[id(self)] = result
        return result

    # ---- the rest

    def __reduce_ex__(self, protocol: Any) -> Any:
        tensors = [shard.tensor.detach() for shard in self._local_shards]
        place = ProcessGroupState.of(self._process_group)
        is_param = isinstance(self, torch.nn.Parameter)
        return rebuild, (type(self), tensors, self._metadata, self._sharding_spec, place, is_param)

    # ---- what ``torch.distributed.checkpoint`` asks (see ``comm.torch_interop._dcp``): each local shard is one box

    def _held_boxes(self, purpose: str) -> list[HeldBox]:
        return [
            HeldBox(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes), shard.tensor.detach())
            for shard in self._local_shards
        ]

    def _whole(self) -> Tensor:
        group = self._process_group
        full = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.gather(0, full if group.rank == 0 else None)
        if full.numel():
            group.broadcast(full, 0)
        return full

    def _cut_from(self, whole: Tensor) -> Tensor:
        for box in self._held_boxes("load"):
            where = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
            box.tensor.copy_(whole[where])
        return self

    def _distributed_from(self, whole: Tensor) -> Tensor:
        spec = self._sharding_spec
        return ShardingSpec.shard(spec, whole.detach().contiguous(), 0, self._process_group)

    def _over(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        return self._with_tensors([function(shard.tensor.detach()) for shard in self._local_shards])

    # ---- Python's and torch's protocols

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        return f"ShardedTensor({self._metadata})"

    _dispatch: ClassVar[Callable[..., Any]]
    """``ops._dispatch.dispatch``, put here by ``phalanx.shard``: operations make tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ShardedTensor._dispatch(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's is a C function
        raise RuntimeError(
            f"{func} reached a ShardedTensor below autograd, where it is not sharded; use its local_shards(), "
            f"gather() it, or convert it with to_dtensor()"
        )


def _empty(entry: ShardMetadata, properties: TensorProperties) -> Tensor:
    assert entry.placement is not None, "owner_of has asked for it"
    return torch.empty(
        entry.shard_sizes,
        dtype=properties.dtype,
        device=entry.placement.device(),
        requires_grad=properties.requires_grad,
        pin_memory=properties.pin_memory,
    )


def _moved(entry: ShardMetadata, device: torch.device) -> ShardMetadata:
    assert entry.placement is not None, "a sharded tensor's shards are placed"
    return ShardMetadata(entry.shard_offsets, entry.shard_sizes, entry.placement.on(device))


def check_format(memory_format: torch.memory_format | None) -> None:
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise RuntimeError(
            f"Only `torch.contiguous_format` or `torch.preserve_format` is supported, got {memory_format}"
        )


def same_layout(a: ShardedTensor, b: ShardedTensor) -> bool:
    """Return whether the shards of both lie in the same boxes on the same ranks."""
    if a._metadata.shards_metadata is b._metadata.shards_metadata and a._process_group is b._process_group:
        return True
    return (
        a._metadata.size == b._metadata.size
        and a._process_group.ranks == b._process_group.ranks
        and a._metadata.shards_metadata == b._metadata.shards_metadata
    )
