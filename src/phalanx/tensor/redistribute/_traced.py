"""Collectives on tensors that a compiler traces: operators that stand in its graph and run when the graph does.

Owns ``is_traced`` and the operators ``torch.ops.phalanx.*``. Which collective an operator runs is a number in a table
of this process: a step of a plan, or a group. Nothing is sent while a graph is traced.

Invariants: results are new contiguous tensors, on every rank as the layout says. The operators have an effect in the
eyes of the compiler: it neither drops nor reorders them, so that ranks whose graphs differ still agree on the order.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from phalanx._torch_private import FakeTensor, FunctionalTensor
from phalanx._without_modes import without_user_modes
from phalanx.comm import Group
from phalanx.tensor.redistribute._plan import Plan
from phalanx.tensor.redistribute._search import LOCAL_KINDS
from phalanx.tensor.redistribute._steps import actions_of

TRACED = frozenset({FakeTensor, FunctionalTensor})  # types of the local tensors that a compiler traces
LIBRARY = "phalanx"


class NumberTable:
    """What operators are told by number: graphs hold nothing but tensors and numbers."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._number_of: dict[Any, int] = {}
        self._lock = threading.Lock()

    def number_of(self, value: Any, key: Any) -> int:
        """Return the number of ``value``, one for each ``key``."""
        with self._lock:
            known = self._number_of.get(key)
            if known is None:
                known = self._number_of[key] = len(self._values)
                self._values.append(value)
            return known

    def __getitem__(self, number: int) -> Any:
        return self._values[number]


_steps, _groups = NumberTable(), NumberTable()


def is_traced(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is what a compiler traces with: it has a shape and no data."""
    return type(tensor) in TRACED


def run_traced_plan(local: Tensor, plan: Plan) -> Tensor:
    """``run_plan`` in a trace: a step that communicates is one operator, the others are traced."""
    with without_user_modes():
        actions = actions_of(plan)
    for place, step in enumerate(plan.steps):
        if step.kind in LOCAL_KINDS:
            begin, _ = actions[place]
            _, local = begin(local, False)
        else:
            number = _steps.number_of((plan, place), (id(plan), place))
            local = torch.ops.phalanx.run_step(local, number)
    return local


def traced_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Return the reduction of the ranks' ``tensor`` over ``group``, in a trace."""
    result: Tensor = torch.ops.phalanx.all_reduce(tensor, op, _groups.number_of(group, id(group)))
    return result


def _run_step(local: Tensor, number: int) -> Tensor:
    plan, place = _steps[number]
    begin, finish = actions_of(plan)[place]
    _, filled = begin(local, False)
    result: Tensor = filled if finish is None else finish(filled)
    return result.contiguous()


def _run_step_shape(local: Tensor, number: int) -> Tensor:
    plan, place = _steps[number]
    return local.new_empty(plan.steps[place].target.local_shape)


def _all_reduce(tensor: Tensor, op: str, number: int) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    _groups[number].all_reduce(total, op)
    return total


def _all_reduce_shape(tensor: Tensor, op: str, number: int) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


_OPERATORS = (
    ("run_step(Tensor local, int number) -> Tensor", _run_step, _run_step_shape),
    ("all_reduce(Tensor tensor, str op, int number) -> Tensor", _all_reduce, _all_reduce_shape),
)
_library: list[Any] = []


def library() -> Any:
    """Return the library of our operators, made once."""
    if not _library:
        made = torch.library.Library(LIBRARY, "FRAGMENT")
        _library.append(made)
        for schema, run, shape in _OPERATORS:
            define(schema, run, shape)
    return _library[0]


def define(schema: str, run: Any, shape: Any) -> str:
    """Define one operator by what runs it and what makes a result without data; returns its name."""
    made = library()
    name = schema.partition("(")[0]
    made.define(schema)
    made.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{LIBRARY}::{name}", shape, lib=made)
    return f"{LIBRARY}::{name}"


def ordered_names() -> list[str]:
    """Names of the operators that communicate."""
    return [f"{LIBRARY}::{schema.partition('(')[0]}" for schema, _, _ in _OPERATORS]
