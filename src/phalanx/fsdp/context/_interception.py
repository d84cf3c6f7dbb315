"""Calls of ``scaled_dot_product_attention`` inside a context: checked, and computed over all ranks.

Owns ``AttentionMode``, a mode of this rank's thread, so that a call is seen however the function was imported, and
simulated ranks do not see each other's. Attention that could not be computed over all ranks is refused, since on this
rank's positions alone it would run and be wrong: attention with a mask or dropout, ``flex_attention``, the kernels
below ``scaled_dot_product_attention``, ``multi_head_attention_forward`` that is asked for its weights.

DTensors: their local tensors are computed with. On the axis of the context they are ``Shard`` on the positions; on
others (heads on a tensor-parallel axis, the batch on a data-parallel one) ``Shard`` on leading dims or ``Replicate``,
alike for queries, keys and values. The result is laid out as the queries are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from phalanx.comm import DeviceMesh
from phalanx.fsdp.context._attention import Attention, sequence_attention
from phalanx.fsdp.context._sequence_layout import SequenceLayout
from phalanx.tensor import DTensor, Replicate, Shard
from phalanx.tensor.dispatch._inline_python import inlined

_REFUSED = frozenset(
    {
        "flex_attention",
        "flex_attention_backward",
        "_native_multi_head_attention",
        "_transformer_encoder_layer_fwd",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)
# Functions of torch that run attention, or code of the user that may (in backward: a checkpointed forward).
_CALLING_BACK = frozenset(
    {F.multi_head_attention_forward, torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
)
_HEADS, _POSITIONS, _WIDTH = -3, -2, -1  # dims of queries, keys and values


class SdpaCall(NamedTuple):
    """The arguments of ``scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


@dataclass(frozen=True, kw_only=True)
class SequenceContext:
    """What a context has settled: the ranks, who holds what, and how blocks travel."""

    mesh: DeviceMesh
    layout: SequenceLayout
    method: str

    @property
    def where(self) -> str:
        """How errors begin."""
        return f"rank {self.mesh.get_rank()}: scaled_dot_product_attention inside context_parallel"


class AttentionMode(TorchFunctionMode):
    """Attention over all ranks of ``context`` while it is entered."""

    def __init__(self, context: SequenceContext) -> None:
        super().__init__()
        self.context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").partition(".")[0]  # aten's are called ``name.default``
        if name == "scaled_dot_product_attention":
            return _attention(self.context, SdpaCall(*args, **(kwargs or {})))
        if func in _CALLING_BACK:
            return self._calling_back(func, types, args, kwargs or {})
        if name in _REFUSED:
            raise NotImplementedError(
                f"rank {self.context.mesh.get_rank()}: {name} inside context_parallel would see the positions of this "
                f"rank only; call torch.nn.functional.scaled_dot_product_attention"
            )
        return func(*args, **(kwargs or {}))

    def _calling_back(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the body of a Python function, in which attention is intercepted again: a mode is left while it acts."""
        if func is F.multi_head_attention_forward and kwargs.get("need_weights", True):
            raise NotImplementedError(
                f"rank {self.context.mesh.get_rank()}: multi_head_attention_forward inside context_parallel with "
                f"need_weights=True would make weights of this rank's positions only; pass need_weights=False"
            )
        with self:
            if DTensor in types:
                return DTensor.__torch_function__(func, types, args, kwargs)
            body = inlined(func)
            assert body is not None, "it is written in Python and checks for overrides"
            return body(*args, **kwargs)


def _attention(context: SequenceContext, call: SdpaCall) -> Tensor:
    query = call.query
    if not any(isinstance(tensor, DTensor) for tensor in call[:3]):
        return scaled_dot_product_attention(context, call)
    local: dict[str, Any] = {name: _local(context, name, query, getattr(call, name)) for name in call._fields[:3]}
    result = scaled_dot_product_attention(context, call._replace(**local))
    assert isinstance(query, DTensor), "checked with the others"
    return DTensor.from_local(result, query.device_mesh, query.placements, run_check=False)


def scaled_dot_product_attention(context: SequenceContext, call: SdpaCall) -> Tensor:
    """Compute attention on local tensors; modes around the context see a call by this name."""
    if has_torch_function(call[:3]):
        seen: Tensor = handle_torch_function(scaled_dot_product_attention, call[:3], context, call)
        return seen
    call = _autocast(call)
    check(context, call)
    query, key, value = call[:3]
    what = Attention(
        group=context.mesh.get_group(),
        layout=context.layout,
        method=context.method,
        causal=call.is_causal,
        scale=1 / math.sqrt(query.shape[_WIDTH]) if call.scale is None else call.scale,
    )
    out = sequence_attention(_four_dims(query), _four_dims(key), _four_dims(value), what)
    return out.reshape(*query.shape[:_WIDTH], value.shape[_WIDTH])


def _autocast(call: SdpaCall) -> SdpaCall:
    """Do what autocast would do to the arguments of the function that is not called now."""
    device = call.query.device.type
    if not torch.is_autocast_enabled(device):
        return call
    dtype = torch.get_autocast_dtype(device)
    return call._replace(
        **{name: t if (t := getattr(call, name)).dtype is torch.float64 else t.to(dtype) for name in call._fields[:3]}
    )


def _four_dims(tensor: Tensor) -> Tensor:
    if tensor.dim() <= 3:  # without heads: (batch, positions, width), or (positions, width)
        return tensor.reshape(-1, 1, *tensor.shape[_POSITIONS:])
    return tensor.flatten(0, _HEADS - 1)


def check(context: SequenceContext, call: SdpaCall) -> None:
    """Refuse what cannot be computed exactly."""
    where, rank = context.where, context.mesh.get_local_rank()
    if call.attn_mask is not None:
        raise NotImplementedError(
            f"{where} got attn_mask of shape {tuple(call.attn_mask.shape)}; only is_causal=True or no mask can be "
            f"computed over ranks that hold parts of the sequence"
        )
    if call.dropout_p:
        raise NotImplementedError(
            f"{where} got dropout_p={call.dropout_p}; expected 0: dropped elements would depend on who holds which "
            f"positions. Put dropout behind the output projection, or set it to 0"
        )
    query, key, value = shapes = [tuple(tensor.shape) for tensor in call[:3]]
    if len({tensor.dtype for tensor in call[:3]}) > 1 or not call.query.is_floating_point():
        dtypes = ", ".join(str(tensor.dtype) for tensor in call[:3])
        raise TypeError(f"{where} got query, key, value of {dtypes}; expected one floating dtype")
    leading = [shape[:_HEADS] if len(shape) > 3 else shape[:_POSITIONS] for shape in shapes]
    if min(map(len, shapes)) < 2 or len(set(leading)) > 1 or query[-1] != key[-1] or key[:-1] != value[:-1]:
        raise ValueError(
            f"{where} got query {query}, key {key}, value {value}; expected (batch, heads, positions, width) with one "
            f"batch, keys as wide as queries, and as many values as keys"
        )
    if len(query) > 3 and query[_HEADS] != key[_HEADS] and (not call.enable_gqa or query[_HEADS] % key[_HEADS]):
        raise ValueError(
            f"{where} got {query[_HEADS]} heads of queries and {key[_HEADS]} of keys with enable_gqa="
            f"{call.enable_gqa}; expected as many, or a multiple with enable_gqa=True"
        )
    expected = context.layout.size(rank)
    for name, found in (("query", query[_POSITIONS]), ("key", key[_POSITIONS])):
        if found != expected:
            raise ValueError(
                f"{where} got {found} positions in {name}; expected {expected}, this rank's part of a sequence of "
                f"{context.layout.length} on {context.layout.num_ranks} ranks. Is the input among the buffers of the "
                f"context? Attention on another sequence belongs outside of it"
            )


def _local(context: SequenceContext, name: str, query: Tensor, tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor that is laid out as attention over the context's ranks needs it."""
    where = context.where
    if not isinstance(tensor, DTensor) or not isinstance(query, DTensor):
        raise TypeError(
            f"{where} got {name} as a {type(tensor).__name__} and query as a {type(query).__name__}; "
            f"expected DTensors or plain tensors for all three"
        )
    mesh, ranks = tensor.device_mesh, context.mesh.get_group().ranks
    if mesh != query.device_mesh or tensor.placements != query.placements:
        raise ValueError(
            f"{where} got {name} as {tensor._spec!r} and query as {query._spec!r}; expected one layout for all three"
        )
    for axis, placement in enumerate(tensor.placements):
        if mesh.size(axis) == 1:  # every placement on it is the whole
            continue
        of_context = mesh.get_group(axis).ranks == ranks
        fits = isinstance(placement, Replicate) and not of_context
        if isinstance(placement, Shard) and type(placement) is Shard:
            dim = placement.dim % tensor.dim() - tensor.dim()
            fits = dim == _POSITIONS if of_context else dim < _POSITIONS
        if not fits:
            raise ValueError(
                f"{where} got {name} as {tensor._spec!r}: {placement!r} on axis {axis}; expected "
                + (
                    f"Shard({tensor.dim() - 2}), the positions"
                    if of_context
                    else "Shard on batch or heads, or Replicate"
                )
                + ". Redistribute it first"
            )
    return tensor.to_local()
