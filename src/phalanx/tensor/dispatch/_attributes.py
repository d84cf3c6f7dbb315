"""Torch functions that compute nothing on elements: what tensors tell about themselves, memory, tensors like them.

Owns their handlers, which get (func, args, kwargs) as torch gave them.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx._without_modes import without_user_modes
from phalanx.tensor.core._copied_views import check_writable, checked_local
from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.core._strides import has_no_gaps, strides_of
from phalanx.tensor.dispatch._fallback import run_replicated, write_out
from phalanx.tensor.dispatch._run import run_rule
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.ops._registry import op_name
from phalanx.tensor.ops._rule import torch_keywords


def is_complex(func: Any, args: Any, kwargs: Any) -> bool:
    """Optimizers ask this of every parameter, at every step."""
    tensor: DTensor = args[0] if args else kwargs["input"]
    return tensor._spec.dtype.is_complex


def from_local(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0]._local, *args[1:], **(kwargs or {}))


def stride(func: Any, args: Any, kwargs: Any) -> Any:
    strides = strides_of(args[0])
    dims = (args[1:] or (None,))[0] if not kwargs else kwargs.get("dim")
    return strides if dims is None else strides[dims]


def is_contiguous(func: Any, args: Any, kwargs: Any) -> bool:
    shape, strides = args[0].shape, strides_of(args[0])
    if kwargs or len(args) > 1:  # another memory format
        with without_user_modes():
            whole = torch.empty_strided(shape, strides, dtype=args[0].dtype, device="meta")
            return bool(func(whole, *args[1:], **(kwargs or {})))
    return has_no_gaps(shape, strides)


def shape_answer(func: Any, args: Any, kwargs: Any) -> Any:
    return getattr(args[0], {"nelement": "numel", "ndimension": "dim"}.get(func.__name__, func.__name__))(
        *args[1:], **(kwargs or {})
    )


def nbytes(func: Any, args: Any, kwargs: Any) -> int:
    return int(args[0].numel() * args[0].dtype.itemsize)


def is_same_size(func: Any, args: Any, kwargs: Any) -> bool:
    return bool(args[0].shape == args[1].shape)


def set_data(func: Any, args: Any, kwargs: Any) -> None:
    args[0].data = args[1]


def set_(func: Any, args: Any, kwargs: Any) -> DTensor:
    """``x.set_(y)``, by which parametrizations replace what they are registered on."""
    if kwargs or len(args) != 2 or type(args[1]) is not DTensor:
        raise NotImplementedError("set_ on a DTensor takes another DTensor: its storage is this rank's part")
    tensor: DTensor = args[0]
    tensor.data = args[1]
    return tensor


def of_whole(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].full_tensor(), *args[1:], **(kwargs or {}))


def share_memory(func: Any, args: Any, kwargs: Any) -> DTensor:
    tensor: DTensor = args[0]
    tensor._local.share_memory_()
    return tensor


def new(func: Any, args: Any, kwargs: Any) -> DTensor:
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


def factory_out(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.eye(n, out=x)`` and others that take no tensor besides: the same values on every rank."""
    options = dict(kwargs or {})
    out = options.pop("out", None)
    made = None if out is None else func(*args, **options)
    if made is None or isinstance(made, DTensor):  # of tensors: linspace(start, end)
        return run_replicated(func, args, kwargs)
    return write_out(wrap(made, Spec.of(out._spec.mesh, out._spec.replicated.placements, made.shape, made.dtype)), out)


def as_other(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.view_as(y)`` is ``x.view(y.shape)``, and so on."""
    other = args[1] if len(args) > 1 else kwargs["other"]
    return getattr(args[0], func.__name__.removesuffix("_as"))(other.shape)


def new_tensor(func: Any, args: Any, kwargs: Any) -> DTensor:
    local = func(args[0]._local.detach(), *args[1:], **(kwargs or {}))
    mesh = args[0]._spec.mesh
    return wrap(local, Spec.of(mesh, args[0]._spec.replicated.placements, local.shape, local.dtype))


def reshape_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.t_()``, ``x.unsqueeze_(0)`` and the like: the view becomes the tensor itself."""
    name, options = op_name(func), torch_keywords(kwargs or {})
    tensor: DTensor = args[0]
    check_writable(tensor, name.base, anywhere=False)
    view = getattr(torch.Tensor, name.base)(*args, **options)
    if view._copied_view is not None:
        raise NotImplementedError(
            f"{name.base}_ on {tensor._spec!r} would have to move its data: use {name.base}() and the tensor it returns"
        )
    if name.base == "squeeze":  # by number: a local dim of size one may be a shard of a longer one
        gone = [d for d in range(-tensor.ndim, 0) if tensor.shape[d] == 1]
        dims = args[1] if len(args) > 1 else options.get("dim", gone)
        chosen = {d % max(1, tensor.ndim) - tensor.ndim for d in ([dims] if isinstance(dims, int) else dims)}
        tensor._local.squeeze_(tuple(d for d in gone if d in chosen))
    else:
        func(tensor._local, *args[1:], **options)
    tensor._spec = view._spec
    return tensor


def to(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.to(y)`` and ``x.type_as(y)`` take nothing of y but its dtype."""
    other = args[1] if len(args) > 1 else (kwargs or {}).get("other")
    if isinstance(other, torch.Tensor):
        options = {name: value for name, value in (kwargs or {}).items() if name != "other"}
        return run_rule(torch.Tensor.to, (args[0], other.dtype, *args[2:]), options)
    return run_rule(func, args, kwargs)


def type_(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.type()`` is a name, ``x.type(dtype)`` a cast."""
    return run_rule(func, args, kwargs) if kwargs or len(args) > 1 else func(args[0]._local)


def no_nested_tensors(func: Any, args: Any, kwargs: Any) -> bool:
    """Answer ``nn.TransformerEncoder``, which asks whether it may use nested tensors; masks do the same work."""
    return False


def raw_memory(func: Any, args: Any, kwargs: Any) -> Any:
    """Answer ``data_ptr``, ``untyped_storage`` and their like where every rank holds all of the tensor, else raise.

    A shape is global; this rank's memory behind it would be read past its end. The error is what torch raises
    for tensors that have no storage, which some callers know how to do without.
    """
    tensor: DTensor = args[0]
    spec = tensor._spec
    if all(p.is_replicate() or ranks == 1 for p, ranks in zip(spec.placements, spec.mesh.shape, strict=True)):
        return func(checked_local(tensor), *args[1:], **(kwargs or {}))
    raise NotImplementedError(
        f"{func.__name__}() of {spec!r}: rank {spec.mesh.get_rank()} holds {spec.local_bytes} of its "
        f"{spec.num_elements * spec.dtype.itemsize} bytes, and no memory of the global shape. Use full_tensor() for "
        f"the whole or to_local() for this rank's part; phalanx.shard.save() and torch.distributed.checkpoint write "
        f"parts to files"
    )
