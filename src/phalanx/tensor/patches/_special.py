"""Torch functions that are not computations on elements: metadata, autograd, random numbers, lists of tensors.

Owns the table of special handlers, which come before rules. A handler gets (func, args, kwargs) as torch gave them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from phalanx.tensor.core._copied_views import check_writable
from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.core._strides import is_contiguous, strides_of
from phalanx.tensor.dispatch import _autograd, _foreach
from phalanx.tensor.dispatch._composite import COMPOSITE, FUNCTIONAL
from phalanx.tensor.dispatch._fallback import run_replicated, write_out
from phalanx.tensor.dispatch._raw_memory import NAMES as RAW_NAMES
from phalanx.tensor.dispatch._raw_memory import raw_memory
from phalanx.tensor.dispatch._run import run_rule
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.layout._without_modes import unseen
from phalanx.tensor.ops._names import OpName, op_name, torch_keywords
from phalanx.tensor.ops.rules import DIRECT_PYTHON
from phalanx.tensor.random._ops import REFUSED, random_handler

# Libraries of operations that communicate, whose functions do not say where they come from.
_COLLECTIVES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "symm_mem::")

Handler = Callable[[Any, Any, Any], Any]

# Answered from the local tensor alone: true of the whole if true of a part.
_FROM_LOCAL = frozenset(["is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference",
"element_size", "get_device", "is_cuda.get", "is_cpu.get", "is_sparse.get", "is_sparse_csr.get",
"is_quantized.get", "is_mkldnn.get", "is_xpu.get", "is_mps.get", "is_nested.get", "is_ipu.get", "is_maia.get",
"is_mtia.get", "is_vulkan.get", "is_xla.get", "layout.get", "itemsize.get", "output_nr.get", "retains_grad.get",
"is_hpu.get", "is_pinned", "is_shared", "storage_type", "storage_offset",
"names.get", "has_names", "is_coalesced", "_is_zerotensor", "_is_view", "name.get", "volatile.get", "_cdata.get",
"suggest_memory_format", "has_symint.get"])  # fmt: skip


def _is_complex(func: Any, args: Any, kwargs: Any) -> bool:
    """Optimizers ask this of every parameter, at every step."""
    tensor: DTensor = args[0] if args else kwargs["input"]
    return tensor._spec.dtype.is_complex


def _from_local(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0]._local, *args[1:], **(kwargs or {}))


def _stride(func: Any, args: Any, kwargs: Any) -> Any:
    strides = strides_of(args[0])
    dims = (args[1:] or (None,))[0] if not kwargs else kwargs.get("dim")
    return strides if dims is None else strides[dims]


def _is_contiguous(func: Any, args: Any, kwargs: Any) -> bool:
    shape, strides = args[0].shape, strides_of(args[0])
    if kwargs or len(args) > 1:  # another memory format
        with unseen():
            whole = torch.empty_strided(shape, strides, dtype=args[0].dtype, device="meta")
            return bool(func(whole, *args[1:], **(kwargs or {})))
    return is_contiguous(shape, strides)


def _shape_answer(func: Any, args: Any, kwargs: Any) -> Any:
    return getattr(args[0], {"nelement": "numel", "ndimension": "dim"}.get(func.__name__, func.__name__))(
        *args[1:], **(kwargs or {})
    )


def _nbytes(func: Any, args: Any, kwargs: Any) -> int:
    return int(args[0].numel() * args[0].dtype.itemsize)


def _is_same_size(func: Any, args: Any, kwargs: Any) -> bool:
    return bool(args[0].shape == args[1].shape)


def _set_data(func: Any, args: Any, kwargs: Any) -> None:
    args[0].data = args[1]


def _set(func: Any, args: Any, kwargs: Any) -> DTensor:
    """``x.set_(y)``, by which parametrizations replace what they are registered on."""
    if kwargs or len(args) != 2 or type(args[1]) is not DTensor:
        raise NotImplementedError("set_ on a DTensor takes another DTensor: its storage is this rank's part")
    tensor: DTensor = args[0]
    tensor.data = args[1]
    return tensor


def _refuse(reason: str) -> Handler:
    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError(f"{getattr(func, '__name__', func)} on a DTensor: {reason}")

    return handler


def _of_whole(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].full_tensor(), *args[1:], **(kwargs or {}))


def _share_memory(func: Any, args: Any, kwargs: Any) -> DTensor:
    tensor: DTensor = args[0]
    tensor._local.share_memory_()
    return tensor


def _new(func: Any, args: Any, kwargs: Any) -> DTensor:
    """``x.new_zeros(size)``: replicated, unless the size is x's own, which keeps x's layout."""
    tensor: DTensor = args[0]
    options = dict(kwargs or {})
    size = options.pop("size", None)
    rest = list(args[1:])
    if size is None:
        if func.__name__ == "new_full" or (rest and isinstance(rest[0], (list, tuple, torch.Size))):
            size = rest.pop(0)
        else:
            size, rest = tuple(rest), []
    size = (size,) if isinstance(size, int) else tuple(int(n) for n in size)
    like = tensor._spec.cotangent if size == tuple(tensor.shape) else None
    spec = like or Spec.of(tensor._spec.mesh, tensor._spec.replicated.placements, size, tensor.dtype)
    return wrap(func(tensor._local.detach(), spec.local_shape, *rest, **options), spec)


def _factory_out(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.eye(n, out=x)`` and others that take no tensor besides: the same values on every rank."""
    options = dict(kwargs or {})
    out = options.pop("out", None)
    made = None if out is None else func(*args, **options)
    if made is None or isinstance(made, DTensor):  # of tensors: linspace(start, end)
        return run_replicated(func, args, kwargs)
    return write_out(
        wrap(made, Spec.of(out._spec.mesh, out._spec.replicated.placements, made.shape, made.dtype)), out
    )


def _as_other(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.view_as(y)`` is ``x.view(y.shape)``, and so on."""
    other = args[1] if len(args) > 1 else kwargs["other"]
    return getattr(args[0], func.__name__.removesuffix("_as"))(other.shape)


def _new_tensor(func: Any, args: Any, kwargs: Any) -> DTensor:
    local = func(args[0]._local.detach(), *args[1:], **(kwargs or {}))
    mesh = args[0]._spec.mesh
    return wrap(local, Spec.of(mesh, args[0]._spec.replicated.placements, local.shape, local.dtype))


def _reshape_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.t_()``, ``x.unsqueeze_(0)`` and the like: the view becomes the tensor itself."""
    name, options = op_name(func), torch_keywords(kwargs or {})
    tensor: DTensor = args[0]
    check_writable(tensor, name.base, anywhere=False)
    view = getattr(torch.Tensor, name.base)(*args, **options)
    if view._stale is not None:
        raise NotImplementedError(
            f"{name.base}_ on {tensor._spec!r} would have to move its data: use {name.base}() and the tensor it returns"
        )
    if name.base == "squeeze":  # by number: a local dim of size one may be a cut of a longer one
        gone = [d for d in range(-tensor.ndim, 0) if tensor.shape[d] == 1]
        dims = args[1] if len(args) > 1 else options.get("dim", gone)
        chosen = {d % max(1, tensor.ndim) - tensor.ndim for d in ([dims] if isinstance(dims, int) else dims)}
        tensor._local.squeeze_(tuple(d for d in gone if d in chosen))
    else:
        func(tensor._local, *args[1:], **options)
    tensor._spec = view._spec
    return tensor


def _to(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.to(y)`` and ``x.type_as(y)`` take nothing of y but its dtype."""
    other = args[1] if len(args) > 1 else (kwargs or {}).get("other")
    if isinstance(other, torch.Tensor):
        options = {name: value for name, value in (kwargs or {}).items() if name != "other"}
        return run_rule(torch.Tensor.to, (args[0], other.dtype, *args[2:]), options)
    return run_rule(func, args, kwargs)


def _type(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.type()`` is a name, ``x.type(dtype)`` a cast."""
    return run_rule(func, args, kwargs) if kwargs or len(args) > 1 else func(args[0]._local)


# In place, these change the shape. Handlers are found once for each function, so their other forms pay nothing.
_IN_PLACE: dict[str, Handler] = {
    **dict.fromkeys(("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze"), _reshape_in_place),
    "as_strided": _refuse("its memory is this rank's part; use as_strided and the tensor it returns"),
}

TABLE: dict[str, Handler] = {
    **dict.fromkeys(_FROM_LOCAL, _from_local),
    **dict.fromkeys(("size", "dim", "numel", "nelement", "ndimension", "__len__"), _shape_answer),
    "is_complex": _is_complex,
    **dict.fromkeys(RAW_NAMES, raw_memory),
    **dict.fromkeys(("to", "type_as"), _to),
    "type": _type,
    "stride": _stride,
    "is_contiguous": _is_contiguous,
    "nbytes.get": _nbytes,
    "is_same_size": _is_same_size,
    "data.set": _set_data,
    "resize": _refuse("its global shape is fixed; make a new one"),
    "resize_as": _refuse("its global shape is fixed; make a new one"),
    "set": _set,
    "share_memory": _share_memory,
    "__dlpack__": _of_whole,
    **dict.fromkeys(
        ("_make_dual", "_unpack_dual"),
        _refuse("forward-mode differentiation is not distributed; use torch.autograd.functional.jvp"),
    ),
    "_amp_foreach_non_finite_check_and_unscale": _foreach.unscale,
    **dict.fromkeys(("eye", "zeros", "ones", "full", "arange", "linspace", "logspace"), _factory_out),
    "new_empty": _new,
    "new_zeros": _new,
    "new_ones": _new,
    "new_full": _new,
    "new_tensor": _new_tensor,
    **dict.fromkeys(("view_as", "reshape_as", "expand_as"), _as_other),
    "backward": _autograd.backward,
    "grad": _autograd.grad,
    "register_hook": _autograd.register_hook,
    "register_post_accumulate_grad_hook": _autograd.register_post_accumulate_grad_hook,
    "retain_grad": _autograd.retain_grad,
}


def special_handler(func: Any, name: OpName) -> Handler | None:
    module = getattr(func, "__module__", None) or ""
    if module.startswith("torch.distributed") or name.base.startswith(_COLLECTIVES):
        return _refuse("torch.distributed functions take this rank's part: use to_local()")
    if type(func).__name__ in ("ScriptFunction", "ScriptMethod"):
        return _refuse(
            "compiled functions hold plain tensors and are not distributed; call the function itself"
        )
    if name.base in REFUSED:
        return _refuse(
            "its random numbers would differ from rank to rank; compute it of full_tensor() and distribute the result, "
            "which takes that of the first rank"
        )
    if name.base.startswith("_nested_") or name.base.endswith("to_padded_tensor"):
        return _refuse("nested tensors are not distributed; make one of to_local() or full_tensor()")
    of_lists = _foreach.list_handler(name.base)
    if of_lists is not None:
        return of_lists
    if name.in_place and name.base in _IN_PLACE:
        return _IN_PLACE[name.base]
    if func in FUNCTIONAL:
        return FUNCTIONAL[func]
    if name.base in COMPOSITE:
        return (
            COMPOSITE[name.base]
            if func in DIRECT_PYTHON or not isinstance(func, types.FunctionType)
            else None
        )
    return TABLE.get(name.base) or _random_for(func, name)


def _random_for(func: Any, name: OpName) -> Handler | None:
    """Random functions; those of torch.nn.functional that are written in Python call the ones that are not."""
    return None if isinstance(func, types.FunctionType) else random_handler(func, name.base)
