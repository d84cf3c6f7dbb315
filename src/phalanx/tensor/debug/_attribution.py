"""Whose communication is it? Modules and operations that run now, and those that made a node of the backward graph.

Owns ``Attribution``. Forward, the module is the innermost whose forward (with its hooks) runs, the operation the torch
function that runs. Backward, autograd says which node runs, and a node keeps the number it got when it was made;
numbers only grow, so the numbers that passed while an operation ran forward tell which operation of which module made
the node.
Nodes that were made before the mode began belong to nobody and count for the root.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from phalanx._torch_private import (
    autograd_sequence_number,
    current_autograd_node,
    current_graph_task_id,
    sequence_number_of,
)
from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.debug._trace import ROOT, Place, Record
from phalanx.tensor.ops._registry import op_name
from phalanx.tensor.patches import _operators

_OURS, _TORCHS = f"{Path(__file__).parents[2]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}"
_NOT_USERS = (_OURS, _TORCHS, contextlib.__file__)
# A program's call passes through these: the methods of ``DTensor``, and a mode inside of this one.
_PASSING_ON = (_TORCHS, "<", _operators.__file__, __file__)
KEPT_SPANS = 1_000_000  # so that a mode left on for a whole training run stays bounded


class _Acting(threading.local):
    module: nn.Module | None = None


_acting = _Acting()


@contextmanager
def acting_for(module: nn.Module) -> Iterator[None]:
    """Say that what this thread sends in the block is for ``module``, whatever runs now."""
    before, _acting.module = _acting.module, module
    try:
        yield
    finally:
        _acting.module = before


class Span(NamedTuple):
    """Graph nodes numbered from ``start`` to before ``end`` were made by this operation."""

    start: int
    end: int
    module: str
    op: str
    line: str


class Running(NamedTuple):
    name: str
    task: int  # the backward pass that runs it again (activation checkpointing), or -1
    start: int  # the number of the next graph node when it began


class Attribution(TorchFunctionMode):
    """Follows modules and torch functions of one thread while it is entered."""

    def __init__(self, record: Record, names: Mapping[nn.Module, str] | None = None) -> None:
        """Follow; ``names`` are of modules that go by them wherever they are called."""
        super().__init__()
        self._fixed = names or {}
        self._record = record
        self._thread = threading.get_ident()
        self._running: list[Running] = []
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._given: Counter[str] = Counter()  # how many modules were to have the name
        self._op = ""
        self._spans: list[Span] = []
        self._stack = ExitStack()

    def __enter__(self) -> Attribution:
        self._stack.callback(module_hooks.register_module_forward_pre_hook(self._begin).remove)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
        self._stack.close()

    # ---- modules

    def _begin(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        name = self._name_of(module)
        running = Running(name, current_graph_task_id(), _next_node())
        self._running.append(running)
        # The module's last hook, not a global one: those come before the module's own, which communicate too.
        handle: RemovableHandle = module.register_forward_hook(lambda *_: self._end(running, handle), always_call=True)
        if name not in self._record.modules:
            self._record.modules[name] = type(module).__name__
            own = dict(module.named_parameters(recurse=False))
            if own:
                self._record.parameters[name] = own

    def _end(self, running: Running, handle: RemovableHandle) -> None:
        if self._running and self._running[-1] is running:  # else an inner call of the same module ended
            self._running.pop()
            handle.remove()
            self._keep(Span(running.start, _next_node(), running.name, "", ""))

    def _known(self, module: nn.Module) -> str | None:
        return self._fixed.get(module, self._names.get(module))

    def _name_of(self, module: nn.Module) -> str:
        """Return the dotted path below the outermost running module, which goes by its class.

        Of several by one name the second is ``MLP#2``. Modules without parameters or buffers may be made anew at every
        call: they share the name.
        """
        known = self._known(module)
        if known is not None:
            return known
        kind = type(module).__name__
        wanted = f"{self._running[-1].name}.{kind}" if self._running else kind
        name = wanted
        if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
            self._given[wanted] += 1
            if self._given[wanted] > 1:
                name = f"{wanted}#{self._given[wanted]}"
        for path, part in module.named_modules():
            self._names[part] = f"{name}.{path}" if path else name
        return name

    # ---- operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op_name(func).base
        if name.endswith((".get", ".set", ".delete")):  # attributes
            return func(*args, **(kwargs or {}))
        if not _is_our_own():
            self._record.operations[(self._module(), name, _holds_dtensor((args, kwargs)))] += 1
        outer, self._op = self._op, name
        start = _next_node()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._op = outer
            end = _next_node()
            if end > start:
                self._keep(Span(start, end, self._module(), name, user_line()))

    def _module(self) -> str:
        return self._running[-1].name if self._running else ROOT

    # ---- the answer

    def place(self) -> Place:
        """On whose behalf this thread communicates now."""
        task = current_graph_task_id()
        known = None if _acting.module is None else self._known(_acting.module)
        if known is not None:
            return Place(known, "forward" if task == -1 else "backward", self._op, user_line())
        if task == -1:
            return Place(self._module(), "forward", self._op, user_line())
        if self._running and self._running[-1].task == task:  # a forward that backward runs again
            return Place(self._module(), "backward", self._op, user_line())
        span = self._find(current_autograd_node())
        if span is None:
            return Place(ROOT, "backward", "", user_line())
        return Place(span.module, "backward", span.op, span.line or user_line())

    def _keep(self, span: Span) -> None:
        if len(self._spans) >= KEPT_SPANS:
            del self._spans[: KEPT_SPANS // 2]
        self._spans.append(span)

    def _find(self, node: Any) -> Span | None:
        """Return the innermost span that holds ``node``: spans are kept in the order in which they ended."""
        if node is None:
            return None
        number = sequence_number_of(node)()
        index = bisect_right(self._spans, number, key=lambda span: span.end)
        # The first span that ends behind the number is the innermost one that can hold it.
        for span in self._spans[index:]:
            if span.start <= number:
                return span
        return None


def _holds_dtensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_dtensor, value))
    if isinstance(value, dict):
        return any(map(_holds_dtensor, value.values()))
    return isinstance(value, DTensor)


def _is_our_own() -> bool:
    """Return whether the operation that runs now is one of this package's, not one of the program's (or torch's for
    it)."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PASSING_ON):
            return bool(name.startswith(_OURS))
        frame = frame.f_back
    return False


def _next_node() -> int:
    return int(autograd_sequence_number())


def user_line() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor ours."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_USERS) and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
