"""Reads the structure of a pickle without running anything of it: calls and objects become inert records.

The opcodes come from ``pickletools``, a disassembler; this module keeps the stack. A pickle that would call a function
yields a ``Called`` with the function's name and arguments, one that would make an object likewise with the object's
state, and nothing is imported. An opcode that plain data has no use for is a ``ValueError``.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_MARK = object()
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE", "BINBYTES", "BINBYTES8", "SHORT_BINBYTES"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_PUTS = frozenset(("PUT", "BINPUT", "LONG_BINPUT"))
_GETS = frozenset(("GET", "BINGET", "LONG_BINGET"))


@dataclass(frozen=True)
class Named:
    """A class, function or constant that a pickle refers to, by its dotted name."""

    name: str


@dataclass(eq=False)
class Called:
    """What a pickle would have made by calling ``name``; ``state`` is what it would have been given afterwards."""

    name: str
    args: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def above_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("a list without a beginning")
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def run(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        if opcode in _LITERALS:
            stack.append(argument)
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _PUTS:
            self.memo[int(argument)] = stack[-1]
        elif opcode == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif opcode in _GETS:
            stack.append(self.memo[int(argument)])
        elif opcode in ("PROTO", "FRAME", "STOP"):
            pass
        elif opcode in _ACTIONS:
            _ACTIONS[opcode](self, argument)
        else:
            raise ValueError(f"the opcode {opcode}")


def _call(machine: _Machine, _: Any) -> None:
    args, function = machine.stack.pop(), machine.stack.pop()
    if not isinstance(function, Named) or not isinstance(args, tuple):
        raise ValueError("a call of something that is no function")
    machine.stack.append(Called(function.name, args))


def _call_with_names(machine: _Machine, _: Any) -> None:
    machine.stack.pop()  # arguments by name: records have no use for them
    _call(machine, None)


def _named(machine: _Machine, argument: Any) -> None:
    module, name = argument.split(" ", 1)
    machine.stack.append(Named(f"{module}.{name}"))


def _stack_named(machine: _Machine, _: Any) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(Named(f"{module}.{name}"))


def _build(machine: _Machine, _: Any) -> None:
    state = machine.stack.pop()
    if not isinstance(machine.stack[-1], Called):
        raise ValueError("a state for something that is no object")
    machine.stack[-1].state = state


def _set_items(machine: _Machine, _: Any) -> None:
    _put_items(machine, machine.above_mark())


def _set_item(machine: _Machine, _: Any) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _put_items(machine, [key, value])


def _put_items(machine: _Machine, values: list[Any]) -> None:
    target = machine.stack[-1]
    into = target.items if isinstance(target, Called) else target
    if not isinstance(into, dict):
        raise ValueError("items for something that is no dict")
    into.update(zip(values[::2], values[1::2], strict=True))


def _append(machine: _Machine, values: list[Any]) -> None:
    if not isinstance(machine.stack[-1], list):
        raise ValueError("an element for something that is no list")
    machine.stack[-1].extend(values)


def _tuple_of(count: int) -> Callable[[_Machine, Any], None]:
    def make(machine: _Machine, _: Any) -> None:
        values = tuple(machine.stack[len(machine.stack) - count :])
        del machine.stack[len(machine.stack) - count :]
        machine.stack.append(values)

    return make


_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": lambda machine, _: machine.stack.append(_MARK),
    "POP": lambda machine, _: machine.stack.pop() and None,
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.above_mark())),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "APPEND": lambda machine, _: _append(machine, [machine.stack.pop()]),
    "APPENDS": lambda machine, _: _append(machine, machine.above_mark()),
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "GLOBAL": _named,
    "STACK_GLOBAL": _stack_named,
    "REDUCE": _call,
    "NEWOBJ": _call,
    "NEWOBJ_EX": _call_with_names,
    "BUILD": _build,
}


def read_inert(data: bytes) -> Any:
    """Return what a pickle describes; ``ValueError`` for one that is torn or more than data.

    >>> import pickle
    >>> read_inert(pickle.dumps({"sizes": (2, 3), "ready": True}))
    {'sizes': (2, 3), 'ready': True}
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
            machine.run(opcode.name, argument)
        (value,) = machine.stack
    except ValueError:
        raise
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no pickle of data ({type(error).__name__}: {error})") from error
    return value
