"""Functions on lists of tensors, as optimizers use them: ``_foreach_*``, ``_fused_*``, unscaling of gradients.

Owns their handlers. Functions of elements run once on the lists of locals, where the tensors at each place of the lists
have one layout; otherwise the others are brought to the layout of the first list's. Every other function runs on each
place by itself, as the function of single tensors that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from phalanx._torch_faults import check_fused_tensors
from phalanx.tensor.core._copied_views import check_writable, checked_local, written
from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.core._implicit_communication import check_collective, moved_for
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.ops._registry import OPERATORS

PREFIX = "_foreach_"


def list_handler(base: str) -> Callable[[Any, Any, Any], Any]:
    """Find the handler of ``_foreach_*``, by its name without the ``_`` of writing in place."""
    return foreach if OPERATORS[base.removeprefix(PREFIX)].foreach else _each


def foreach(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch._foreach_op(list, ...)`` of elements, in place or not."""
    if not kwargs:
        alike = _all_alike(args)
        if alike is not None:
            local_args, specs = alike
            result = func(*local_args)
            if result is None or func.__name__[-1] == "_":
                return list(args[0])
            return [wrap(local, spec) for local, spec in zip(result, specs, strict=True)]
    return _foreach_any(func, args, kwargs or {})


def _all_alike(args: Any) -> tuple[list[Any], list[Spec]] | None:
    """Return the locals of lists that are laid out alike, place by place, as an optimizer's are; else None."""
    first = args[0]
    if type(first) is not list and type(first) is not tuple:
        return None
    specs = [t._spec for t in first if type(t) is DTensor and t._copied_view is None]
    if len(specs) != len(first) or any(spec.is_partial for spec in set(specs)):
        return None
    local_args: list[Any] = [[t._local for t in first]]
    for arg in args[1:]:
        if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor):
            found = [
                t._local
                for t, spec in zip(arg, specs, strict=True)
                if type(t) is DTensor and t._spec is spec and t._copied_view is None
            ]
            if len(found) != len(specs):
                return None
            arg = found
        elif isinstance(arg, DTensor):
            return None
        local_args.append(arg)
    return local_args, specs


def _foreach_any(func: Any, args: Any, kwargs: Any) -> Any:
    name = func.__name__
    base = name[:-1] if name.endswith("_") else name
    if not args or not isinstance(args[0], (list, tuple)):  # a number to the power of tensors, or keywords only
        return _each(func, args, kwargs)
    first = list(args[0])
    if any(not isinstance(t, DTensor) for t in first):
        return _by_kind(func, args, kwargs)
    specs = [t._spec for t in first]
    odd = any(spec.is_partial for spec in specs) and OPERATORS[base.removeprefix(PREFIX)].foreach != "contributions"
    if odd or not all(_same_shapes(arg, first) for arg in args[1:]):
        return _each(func, args, kwargs)
    if name.endswith("_"):
        for tensor in first:
            check_writable(tensor, name)
    local_args = [_locals(name, arg, specs) for arg in args]
    local_kwargs = {key: _locals(name, value, specs) for key, value in kwargs.items()}
    result = func(*local_args, **local_kwargs)
    if name.endswith("_"):
        for tensor in first:
            written(tensor)
        return list(args[0])
    return [wrap(local, spec) for local, spec in zip(result, specs, strict=True)]


def _same_shapes(value: Any, first: list[Any]) -> bool:
    """Return whether the DTensors of a list are of the shapes, and on the meshes, of the first list's."""
    if not isinstance(value, (list, tuple)) or not value or not isinstance(value[0], Tensor):
        return True
    return all(
        not t.dim() or (t.shape == other.shape and (not isinstance(t, DTensor) or t._spec.mesh == other._spec.mesh))
        for t, other in zip(value, first, strict=True)
    )


def _locals(name: str, value: Any, specs: list[Spec | None]) -> Any:
    """Lists of tensors in the layouts ``specs``; a single tensor (a learning rate) replicated."""
    kind = type(value)
    if kind is list or kind is tuple:
        if value and isinstance(value[0], Tensor):
            assert len(value) == len(specs), f"lists of {len(value)} and {len(specs)} tensors"
            return [
                checked_local(t) if type(t) is DTensor and t._spec is spec else _brought(name, t, spec)
                for t, spec in zip(value, specs, strict=True)
            ]
        return value
    if isinstance(value, DTensor):
        return moved_for(name, checked_local(value), value._spec, value._spec.replicated)
    return value


def _brought(name: str, tensor: Any, spec: Spec | None) -> Any:
    assert spec is not None, "checked by the caller"
    if not isinstance(tensor, DTensor):
        if tensor.dim():
            raise RuntimeError(
                f"a list function got a plain tensor of shape {tuple(tensor.shape)} beside {spec!r}: distribute it"
            )
        return tensor
    own, local = tensor._spec, checked_local(tensor)
    if own is spec:
        return local
    if own.dtype is not spec.dtype and own.shape == spec.shape and own.placements == spec.placements:
        return local
    if not tensor.ndim:
        return moved_for(name, local, own, own.replicated)
    if own.shape != spec.shape:
        raise RuntimeError(f"a list function got {own!r} beside {spec!r}: shapes differ")
    return moved_for(name, local, own, spec.with_dtype(own.dtype))


def _by_kind(func: Any, args: Any, kwargs: Any) -> Any:
    """Plain tensors among DTensors in the first list: the places of either kind by themselves."""
    results: list[Any] = list(args[0])
    for plain in (True, False):
        places = [i for i, t in enumerate(args[0]) if isinstance(t, DTensor) is not plain]
        given = [_at(arg, places, plain, func.__name__) for arg in args]
        named = {key: _at(value, places, plain, func.__name__) for key, value in kwargs.items()}
        found = func(*given, **named) if places else None
        if found is not None and not func.__name__.endswith("_"):
            for place, result in zip(places, found, strict=True):
                results[place] = result
    return results


def _at(value: Any, places: list[int], plain: bool, name: str) -> Any:
    """``value`` at these places of the lists; for ``plain`` ones without a DTensor in it."""
    if isinstance(value, (list, tuple)):
        # optimizers leave unused lists empty
        return [_at(value[place], [], plain, name) for place in places] if value else []
    if not plain or not isinstance(value, DTensor):
        return value
    if value.ndim:
        raise RuntimeError(
            f"{name} got a DTensor, {value._spec!r}, beside a plain tensor: distribute that, or pass d.full_tensor()"
        )
    return moved_for(name, checked_local(value), value._spec, value._spec.replicated)


def _each(func: Any, args: Any, kwargs: Any) -> Any:
    """Return each place of the lists by itself: partial tensors, shapes that differ, functions of more than
    elements."""
    options = dict(kwargs or {})
    given = (options.pop("self"), *args) if "self" in options else tuple(args)
    name = func.__name__
    single = _single(name)
    if name.startswith("_foreach_addc") and len(given) == 4:
        options["value"] = given[3].tolist() if isinstance(given[3], Tensor) and given[3].dim() else given[3]
        given = given[:3]
    count = next(len(arg) for arg in given if isinstance(arg, (list, tuple)))
    results = [
        single(*_place(given, i), **dict(zip(options, _place(options.values(), i), strict=True))) for i in range(count)
    ]
    return list(given[0]) if name.endswith("_") else results


def _place(values: Iterable[Any], place: int) -> list[Any]:
    return [value[place] if isinstance(value, (list, tuple)) else value for value in values]


def _single(name: str) -> Any:
    """Return the function of one tensor that ``name`` applies to each of a list."""
    method = name.removeprefix(PREFIX)
    found: Any = getattr(_OfOne, method, None)
    if found is None:
        found = getattr(Tensor, method, None) if method.endswith("_") else getattr(torch, method, None)
    if found is None:
        raise NotImplementedError(
            f"{name} on DTensors: no function of single tensors is known for it; call one on each of them"
        )
    return found


class _OfOne:
    """Functions of one tensor, where ``torch`` has none of the name or one that takes other arguments."""

    @staticmethod
    def norm(tensor: Tensor, ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
        return torch.linalg.vector_norm(tensor, ord, dtype=dtype)

    @staticmethod
    def powsum(tensor: Tensor, ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
        return tensor.to(dtype or tensor.dtype).abs().pow(ord).sum()

    @staticmethod
    def maximum(tensor: Tensor, other: Any) -> Any:
        return (torch.maximum if isinstance(other, Tensor) else torch.clamp_min)(tensor, other)

    @staticmethod
    def minimum(tensor: Tensor, other: Any) -> Any:
        return (torch.minimum if isinstance(other, Tensor) else torch.clamp_max)(tensor, other)

    maximum_ = torch.Tensor.clamp_min_
    minimum_ = torch.Tensor.clamp_max_


def fused(func: Any, args: Any, kwargs: Any) -> None:
    """``torch._fused_adam_`` and the like: lists of one length, written in place."""
    first = list(args[0])
    if func.__name__.startswith("_fused_sgd"):
        check_fused_tensors([t._local if isinstance(t, DTensor) else t for t in first], "a DTensor's part")
    if any(not isinstance(t, DTensor) for t in first):
        _by_kind(func, args, kwargs or {})
        return
    specs = [t._spec for t in first]
    if any(spec.is_partial for spec in specs):
        raise RuntimeError(f"{func.__name__} on partial parameters: redistribute them first")
    for tensor in first:
        check_writable(tensor, func.__name__, anywhere=False)
    copies: list[tuple[DTensor, Tensor, Spec]] = []
    local_kwargs = {key: _fused_arg(func.__name__, value, specs, copies) for key, value in (kwargs or {}).items()}
    func(*[_fused_arg(func.__name__, value, specs, copies) for value in args], **local_kwargs)
    for tensor, local, spec in copies:
        tensor._local.copy_(moved_for(func.__name__, local, spec, tensor._spec))


def _fused_arg(name: str, value: Any, specs: list[Spec], copies: list[tuple[DTensor, Tensor, Spec]]) -> Any:
    """Locals in the layouts of the parameters; state of another layout is copied, and noted to be written back."""
    if not isinstance(value, (list, tuple)):
        return value._local if isinstance(value, DTensor) else value
    locals_ = list(value)
    for place, tensor in enumerate(locals_):
        if type(tensor) is DTensor and tensor._spec is specs[place] and tensor._copied_view is None:
            locals_[place] = tensor._local
        elif isinstance(tensor, Tensor):
            spec = specs[place]
            locals_[place] = local = _brought(name, tensor, spec)
            if isinstance(tensor, DTensor) and local is not tensor._local:
                copies.append((tensor, local, spec.with_dtype(tensor.dtype)))
    return locals_


def unscale(func: Any, args: Any, kwargs: Any) -> None:
    """``_amp_foreach_non_finite_check_and_unscale_(grads, found_inf, scale)``: found anywhere is found everywhere."""
    grads, found, scale = args
    local_found = found._local if isinstance(found, DTensor) else found
    local_scale = scale._local if isinstance(scale, DTensor) else scale
    for grad in grads:
        if isinstance(grad, DTensor):
            check_writable(grad, func.__name__, anywhere=False)
    meshes = {g._spec.mesh: None for g in grads if isinstance(g, DTensor)}
    shared = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim) if mesh.shape[axis] > 1]
    if shared:
        nbytes = len(shared) * local_found.nbytes
        check_collective(func.__name__, "asks every rank whether it found a gradient that is not finite", nbytes)
    func([g._local if isinstance(g, DTensor) else g for g in grads], local_found, local_scale)
    for group in shared:
        group.all_reduce(local_found, "max")
