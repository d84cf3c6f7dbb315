"""A user's ``autograd.Function`` on DTensors: it sees DTensors, while autograd sees its local tensors.

Owns the lift and its installation. Left alone, ``Function.apply`` would hand the wrapper to the engine, which knows no
gradient for it: the gradient would silently be lost. ``install`` wraps ``torch.autograd.Function.apply``; calls without
DTensors pass straight on.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import Tensor
from torch.autograd import Function

from phalanx._torch_private import are_functorch_transforms_active
from phalanx.tensor.core._copied_views import checked_local
from phalanx.tensor.core._dtensor import DTensor, local_gradient, wrap
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.redistribute._execute import entered_gradient, exposed_gradient

_pending = threading.local()  # the call that ``_Lifted.forward`` is about to serve, on this thread
_lifted: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class _Context:
    """What the user's functions get as ``ctx``: the real one, with DTensors in and out."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self._saved: list[Spec | None] = []

    def save_for_backward(self, *tensors: Any) -> None:
        self._saved = [t._spec if isinstance(t, DTensor) else None for t in tensors]
        self._ctx.save_for_backward(*(_local(t) for t in tensors))

    save_for_forward = save_for_backward

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(
            wrap(t, spec) if spec is not None else t
            for t, spec in zip(self._ctx.saved_tensors, self._saved, strict=True)
        )

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        return tuple(self._ctx.needs_input_grad)

    def mark_dirty(self, *tensors: Any) -> None:
        self._ctx.mark_dirty(*(_local(t) for t in tensors))

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self._ctx.mark_non_differentiable(*(_local(t) for t in tensors))

    def set_materialize_grads(self, value: bool) -> None:
        self._ctx.set_materialize_grads(value)


class _AppliedFunction:
    """One application: the layouts of inputs and outputs, and the user's context."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self.function = function
        self.inputs: list[Spec | None] = [a._spec if isinstance(a, DTensor) else None for a in args]
        self.outputs: list[Spec | None] = []
        self.originals = args
        self.single = False
        self.context: Any = None

    def node_of(self, node: Any) -> FunctionNode:
        """Wrap the ``grad_fn`` of a result, so that hooks on it see DTensors."""
        return FunctionNode(node, self)


class _Lifted(Function):
    """Runs another Function on DTensors made of its own local arguments."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        call: _AppliedFunction = _pending.call
        ctx.call = call
        context = call.context = _Context(ctx)
        given = [wrap(a, spec) if spec is not None else a for a, spec in zip(args, call.inputs, strict=True)]
        for original, one in zip(call.originals, given, strict=True):
            if type(original) is DTensor and original._copied_view is not None:
                one._copied_view = original._copied_view.read_only()
        function = call.function
        if function.setup_context is not Function.setup_context:
            result = function.forward(*given)
            function.setup_context(context, tuple(given), result)
        else:
            result = function.forward(context, *given)
        call.single = not isinstance(result, tuple)
        results = (result,) if call.single else result
        call.outputs = [r._spec if isinstance(r, DTensor) else None for r in results]
        locals_ = tuple(_local(r) for r in results)
        return locals_[0] if call.single else locals_

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: _AppliedFunction = ctx.call
        given = _wrapped(grads, call.outputs)
        function = call.function
        run = function.backward if function.backward is not Function.backward else function.vjp
        result = run(call.context, *given)
        results = result if isinstance(result, tuple) else (result,)
        return tuple(_gradient(r, spec) for r, spec in zip(results, call.inputs, strict=False))


def _local(value: Any) -> Any:
    return value._local if isinstance(value, DTensor) else value


def _gradient(value: Any, spec: Spec | None) -> Any:
    if spec is None or value is None:
        return value
    if not isinstance(value, DTensor):
        raise RuntimeError(
            f"backward of an autograd.Function returned a {type(value).__name__} for {spec!r}; expected a DTensor"
        )
    return entered_gradient(local_gradient("backward of an autograd.Function", value, spec), spec)


def _apply_lifted(function: Any, args: tuple[Any, ...]) -> Any:
    call = _pending.call = _AppliedFunction(function, args)
    result = _named(function).apply(*(checked_local(a) if isinstance(a, DTensor) else a for a in args))
    results = (result,) if call.single else result
    wrapped = []
    for value, spec in zip(results, call.outputs, strict=True):
        if spec is None or not isinstance(value, Tensor):
            wrapped.append(value)
            continue
        same = next((a for a in args if isinstance(a, DTensor) and a._local is value), None)
        wrapped.append(same if same is not None else wrap(value, spec))
        wrapped[-1]._lifted = call
    return wrapped[0] if call.single else tuple(wrapped)


def _named(function: Any) -> Any:
    """Return a class of the user's name, because torch looks for nodes by name (backward hooks of modules do)."""
    made = _lifted.get(function)
    if made is None:
        made = _lifted[function] = type(function.__name__, (_Lifted,), {})
    return made


class FunctionNode:
    """The ``grad_fn`` of a lifted Function's result: hooks on it see DTensors."""

    def __init__(self, node: Any, call: _AppliedFunction) -> None:
        self._node = node
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def register_hook(self, hook: Any) -> Any:
        inputs, outputs = self._call.inputs, self._call.outputs
        return self._node.register_hook(
            lambda gi, go: _unwrapped(hook(_wrapped(gi, inputs), _wrapped(go, outputs)), inputs)
        )

    def register_prehook(self, hook: Any) -> Any:
        outputs = self._call.outputs
        return self._node.register_prehook(lambda go: _unwrapped(hook(_wrapped(go, outputs)), outputs))


def _wrapped(grads: Any, specs: list[Spec | None]) -> tuple[Any, ...]:
    return tuple(
        g if spec is None or g is None else wrap(exposed_gradient(g, spec), spec.cotangent)
        for g, spec in zip(grads, specs, strict=True)
    )


def _unwrapped(grads: Any, specs: list[Spec | None]) -> Any:
    if grads is None:
        return None
    return tuple(_gradient(g, spec) for g, spec in zip(grads, specs, strict=True))


def function_apply(plain: Any) -> Any:
    """Lift a user's Function that is applied to DTensors."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if isinstance(arg, DTensor):  # also one whose data is still on its way
                if are_functorch_transforms_active():
                    raise RuntimeError(f"{cls.__name__} on a DTensor inside torch.func is not supported")
                return _apply_lifted(cls, args)
        return plain(cls, *args, **kwargs)

    return apply
