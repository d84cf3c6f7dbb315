"""Functions of torch that take a DTensor without asking its class, and would see an empty tensor.

Owns the wrappers that ``install`` puts around them, which refuse or do right; calls without DTensors pass straight on.
A tracer records what happens to this rank's part, so inside ``torch.jit.trace`` every operation on a DTensor raises,
and every collective (which no trace can hold). Calls outside of a trace pay nothing for that: the remembered handlers
are dropped when a trace begins, and those found meanwhile look for it (``find_handler``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.utils.dlpack
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from phalanx import comm
from phalanx.comm.torch_interop._dcp import Spread
from phalanx.tensor.core._dtensor import DTensor, _handlers

_lock = threading.Lock()
_num_traces = 0  # of all threads: while there are some, handlers are not remembered


def while_tracing(handler: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any] | None:
    """What to call in place of ``handler`` while some thread is inside ``torch.jit.trace``; None if none is."""
    if not _num_traces:
        return None

    def check(func: Any, args: Any, kwargs: Any) -> Any:
        if torch._C._get_tracing_state() is not None:
            _refuse_trace(f"{getattr(func, '__name__', func)} on a DTensor")
        return handler(func, args, kwargs)

    return check


def _refuse_trace(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what} inside torch.jit: it would record this rank's part. "
        f"Trace or script the plain module before it is distributed, or give it full_tensor()"
    )


def _refuse_collective(event: comm.CommEvent) -> None:
    if torch._C._get_tracing_state() is not None:
        _refuse_trace(f"{event.name} of {event.nbytes} B")


@contextmanager
def _tracing() -> Iterator[None]:
    global _num_traces
    with _lock:
        _num_traces += 1
    _handlers.clear()
    try:
        with comm.observe(_refuse_collective):
            yield
    finally:
        with _lock:
            _num_traces -= 1


def _tracer(plain: Any) -> Any:
    @functools.wraps(plain)
    def trace(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            _refuse_trace("a DTensor as example input")
        with _tracing():
            return plain(*args, **kwargs)

    return trace


def _module_compiler(plain: Any) -> Any:
    """``torch.jit`` makes its own module of an ``nn.Module``, whether by tracing or by scripting."""

    @functools.wraps(plain)
    def create_script_module(nn_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for name, tensor in (*nn_module.named_parameters(), *nn_module.named_buffers()):
            if isinstance(tensor, DTensor):
                _refuse_trace(f"{name}, a DTensor, in {type(nn_module).__name__}")
        return plain(nn_module, *args, **kwargs)

    return create_script_module


def _faker(plain: Any) -> Any:
    @functools.wraps(plain)
    def from_tensor(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, DTensor):
            raise NotImplementedError(
                f"a FakeTensor of {tensor._spec!r}: make_fx, torch.export and FakeTensorMode do not work on a DTensor. "
                f"Export the plain module before it is distributed, or give it full_tensor()"
            )
        return plain(self, tensor, *args, **kwargs)

    return from_tensor


def _packer(plain: Any) -> Any:
    @functools.wraps(plain)
    def to_dlpack(tensor: Any) -> Any:
        return plain(tensor._whole() if isinstance(tensor, Spread) else tensor)

    return to_dlpack


def _edge_maker(plain: Any) -> Any:
    @functools.wraps(plain)
    def get_gradient_edge(tensor: Any) -> Any:
        if isinstance(tensor, DTensor):
            raise NotImplementedError(
                f"get_gradient_edge of {tensor._spec!r}: the gradient at an edge would be this rank's part of it. "
                f"Give torch.autograd.grad the DTensor itself"
            )
        return plain(tensor)

    return get_gradient_edge


# (module or class, name, what wraps it)
_DOORS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (torch.jit, "trace", _tracer),
    (torch.jit, "trace_module", _tracer),
    (torch.jit, "_get_trace_graph", _tracer),  # torch.onnx
    (torch.jit._recursive, "create_script_module", _module_compiler),
    (FakeTensorMode, "from_tensor", _faker),
    (torch.autograd.graph, "get_gradient_edge", _edge_maker),
    (torch, "to_dlpack", _packer),
    (torch.utils.dlpack, "to_dlpack", _packer),
)


def install() -> None:
    """Wrap them. Does it once."""
    for owner, name, wrapper in _DOORS:
        plain = getattr(owner, name)
        if not hasattr(plain, "_phalanx"):
            wrapped = wrapper(plain)
            wrapped._phalanx = True
            setattr(owner, name, wrapped)
