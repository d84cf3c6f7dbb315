"""Autograd's own functions on DTensors: backward, grad, hooks. The graph is that of the local tensors.

Owns their handlers. A gradient has the layout of its tensor, replicated where the tensor is partial
(``Spec.cotangent``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from phalanx.tensor.core._dtensor import DTensor, local_gradient, wrap
from phalanx.tensor.layout._placement import Partial
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.redistribute._execute import (
    LINEAR_OPS,
    entered_gradient,
    exposed_gradient,
    num_averaged,
)
from phalanx.tensor.redistribute._gathered import keep_gradient


def _listed(value: Any) -> list[Any]:
    return [] if value is None else [value] if isinstance(value, Tensor) else list(value)


def _local(tensor: Any) -> Any:
    return tensor._local if isinstance(tensor, DTensor) else tensor


def _keep_gradient(tensor: Any, what: str) -> None:
    if isinstance(tensor, DTensor) and tensor._gathered is not None:
        keep_gradient(tensor, what)


def _seed(output: Any, given: Any) -> Any:
    """Return the gradient to start from, for the local of ``output``."""
    if not isinstance(output, DTensor):
        if given is None and output.numel() == 1:
            return torch.ones_like(output)
        return _local(given)
    spec = output._spec
    for p in spec.placements:
        if isinstance(p, Partial) and p.reduce_op not in LINEAR_OPS:
            raise RuntimeError(f"backward from {spec!r}: {p!r} has no gradient; redistribute first")
    scale = 1 / num_averaged(spec)
    if given is None:
        if spec.num_elements != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return torch.full_like(output._local, scale, requires_grad=False)
    if not isinstance(given, DTensor):
        if given.dim():
            raise RuntimeError(
                f"backward of {spec!r} got a plain gradient of shape {tuple(given.shape)}; distribute it"
            )
        return torch.ones_like(output._local) * given * scale
    if given.shape != output.shape:
        raise RuntimeError(f"backward of {spec!r} got a gradient of shape {tuple(given.shape)}")
    return entered_gradient(local_gradient("backward from a given gradient", given, spec), spec)


def backward(func: Any, args: Any, kwargs: Any) -> None:
    """``tensor.backward(...)`` and ``torch.autograd.backward(tensors, ...)``."""
    given = dict(kwargs or {})
    if func is torch.autograd.backward:
        names: tuple[str, ...] = (
            "tensors",
            "grad_tensors",
            "retain_graph",
            "create_graph",
            "grad_variables",
            "inputs",
        )
    else:
        names = ("tensors", "gradient", "retain_graph", "create_graph", "inputs")
    given.update(zip(names, args, strict=False))
    outputs = _listed(given["tensors"])
    for tensor in _listed(given.get("inputs")):
        _keep_gradient(tensor, "backward(inputs=...)")
    if any(isinstance(t, GradientEdge) for t in outputs):
        raise NotImplementedError(
            "torch.autograd.backward got a GradientEdge together with DTensors: give it the tensor itself"
        )
    grads = _listed(given.get("grad_tensors", given.get("gradient"))) or [None] * len(outputs)
    inputs = given.get("inputs")
    torch.autograd.backward(
        [_local(t) for t in outputs],
        [_seed(t, g) for t, g in zip(outputs, grads, strict=True)],
        retain_graph=given.get("retain_graph"),
        create_graph=given.get("create_graph") or False,
        inputs=None if inputs is None else [_local(t) for t in _listed(inputs)],
    )


def grad(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.autograd.grad(outputs, inputs, ...)``."""
    names = (
        "outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused",
        "is_grads_batched", "materialize_grads",
    )  # fmt: skip
    given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
    if given.get("is_grads_batched"):
        raise NotImplementedError("torch.autograd.grad(is_grads_batched=True) does not work on DTensors")
    outputs, inputs = _listed(given["outputs"]), _listed(given["inputs"])
    if any(isinstance(t, GradientEdge) for t in (*outputs, *inputs)):
        raise NotImplementedError(
            "torch.autograd.grad got a GradientEdge together with DTensors: an edge does not tell how the gradient is "
            "laid out. Give it the tensor itself"
        )
    for tensor in inputs:
        _keep_gradient(tensor, "autograd.grad")
    seeds = _listed(given.get("grad_outputs")) or [None] * len(outputs)
    found = torch.autograd.grad(
        [_local(t) for t in outputs],
        [_local(t) for t in inputs],
        [_seed(t, g) for t, g in zip(outputs, seeds, strict=True)],
        retain_graph=given.get("retain_graph"),
        create_graph=given.get("create_graph") or False,
        allow_unused=given.get("allow_unused"),
        materialize_grads=given.get("materialize_grads") or False,
    )
    return tuple(
        _wrapped(g, t._spec) if g is not None and isinstance(t, DTensor) else g
        for t, g in zip(inputs, found, strict=True)
    )


def _wrapped(local: Tensor, spec: Spec) -> DTensor:
    return wrap(exposed_gradient(local, spec), spec.cotangent)


def register_hook(func: Any, args: Any, kwargs: Any) -> Any:
    """Register a hook that sees the gradient as a DTensor, and may return another."""
    tensor, hook = args[0], args[1] if len(args) > 1 else kwargs["hook"]
    _keep_gradient(tensor, "register_hook")
    return tensor._local.register_hook(on_gradient(tensor, hook))


def on_gradient(tensor: DTensor, hook: Callable[[Any], Any]) -> Callable[[Tensor], Tensor | None]:
    own, spec = tensor._spec, tensor._spec.cotangent

    def local_hook(local: Tensor) -> Tensor | None:
        result = hook(wrap(exposed_gradient(local, own), spec))
        if result is None:
            return None
        if not isinstance(result, DTensor):
            raise RuntimeError(f"a gradient hook of a DTensor returned a {type(result).__name__}; expected a DTensor")
        return entered_gradient(local_gradient("a gradient hook", result, own), own)

    return local_hook


def register_post_accumulate_grad_hook(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, hook = args[0], args[1] if len(args) > 1 else kwargs["hook"]

    def local_hook(local: Tensor) -> None:
        hook(tensor)  # what it returns is dropped, as torch drops it

    return tensor._local.register_post_accumulate_grad_hook(local_hook)


def retain_grad(func: Any, args: Any, kwargs: Any) -> None:
    _keep_gradient(args[0], "retain_grad")
    args[0]._local.retain_grad()
