"""Reads JSON that anybody may have written: every field is asked for by its name and type.

Owns the checks between ``json.loads`` and a value of ours: records in a store, lines of a log, an index on disk. What
is not as it should be raises the error that the caller documents, and no other: not ``KeyError``, ``TypeError`` or
``RecursionError``. Fields that nobody asks for are ignored: a later release may have added them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar, cast

MAX_INTEGER: Final = 2**63 - 1
"""What a tensor library and a file system can count; JSON itself has no limit."""

_ABSENT: Final = object()

D = TypeVar("D")


def load_json(data: bytes | bytearray | str, what: str, error: type[Exception] = ValueError) -> Any:
    """Return the value of a JSON text; ``error`` when it is none, also when it is nested too deeply to be one of
    ours."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise error(f"{what} is not JSON ({type(problem).__name__}): {data[:80]!r}") from problem


def short(value: Any, limit: int = 80) -> str:
    """Return a value for a message, cut where it gets long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists in lists in lists
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else text[:limit] + "..."


class Fields:
    """A JSON object whose fields are taken out one by one.

    >>> fields = Fields({"step": 3, "name": "a"}, "the record")
    >>> fields.integer("step"), fields.text("name"), fields.integer("rank", default=-1)
    (3, 'a', -1)
    >>> fields.text("step")
    Traceback (most recent call last):
      ...
    ValueError: the record: field 'step' is 3; expected text
    """

    def __init__(self, value: Any, what: str, error: type[Exception] = ValueError) -> None:
        self._what, self._error = what, error
        if not isinstance(value, dict):
            raise error(f"{what} is {short(value)}; expected an object with named fields")
        self._value: dict[str, Any] = value

    def integer(self, name: str, *, low: int = -MAX_INTEGER, default: Any = _ABSENT) -> int:
        value = self._get(name, default)
        if type(value) is not int or not low <= value <= MAX_INTEGER:
            self._refuse(name, value, f"an integer of at least {low}" if low > -MAX_INTEGER else "an integer")
        return int(value)

    def number(self, name: str, *, default: Any = _ABSENT, finite: bool = True) -> float:
        """Return a number; a finite one unless told otherwise."""
        value = self._get(name, default)
        if type(value) is int and not _is_finite(value):
            self._refuse(name, value, "a number")
        if type(value) not in (int, float) or (finite and not _is_finite(value)):
            self._refuse(name, value, "a finite number")
        return float(value)

    def text(self, name: str, *, default: Any = _ABSENT) -> str:
        value = self._get(name, default)
        if not isinstance(value, str) or not _is_unicode(value):
            self._refuse(name, value, "text")
        return str(value)

    def flag(self, name: str, *, default: Any = _ABSENT) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            self._refuse(name, value, "true or false")
        return bool(value)

    def items(self, name: str, *, default: Any = _ABSENT) -> list[Any]:
        value = self._get(name, default)
        if not isinstance(value, list):
            self._refuse(name, value, "a list")
        return list(value)

    def texts(self, name: str, *, default: Any = _ABSENT) -> tuple[str, ...]:
        values = self.items(name, default=default)
        try:
            "".join(values).encode()  # one call: there may be millions, of a stranger's making
        except (TypeError, UnicodeEncodeError):
            self._refuse(name, values, "a list of texts")
        return tuple(values)

    def integers(self, name: str, *, low: int = -MAX_INTEGER, default: Any = _ABSENT) -> list[int]:
        values = self.items(name, default=default)
        if not all(type(value) is int and low <= value <= MAX_INTEGER for value in values):
            self._refuse(name, values, f"a list of integers of at least {low}")
        return values

    def numbers(self, name: str, *, default: Any = _ABSENT) -> tuple[float, ...]:
        values = self.items(name, default=default)
        if not all(type(value) in (int, float) and _is_finite(value) for value in values):
            self._refuse(name, values, "a list of finite numbers")
        return tuple(map(float, values))

    def mapping(self, name: str, *, default: Any = _ABSENT) -> dict[str, Any]:
        value = self._get(name, default)
        if not isinstance(value, dict):
            self._refuse(name, value, "an object with named fields")
        return dict(value)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field as it is, for the caller to look at."""
        return self._value.get(name, default)

    def _get(self, name: str, default: Any) -> Any:
        value = self._value.get(name, default)
        if value is _ABSENT:
            raise self._error(f"{self._what} has no field {name!r}")
        return value

    def _refuse(self, name: str, value: Any, expected: str) -> None:
        raise self._error(f"{self._what}: field {name!r} is {short(value)}; expected {expected}")


_READERS: Final[dict[str, Callable[..., Any]]] = {
    "str": Fields.text,
    "int": Fields.integer,
    "float": Fields.number,
    "bool": Fields.flag,
    "tuple[str, ...]": Fields.texts,
    "tuple[int, ...]": lambda fields, name, **options: tuple(fields.integers(name, **options)),
    "tuple[float, ...]": Fields.numbers,
    "dict[str, Any]": Fields.mapping,
}


class _FieldPlan(NamedTuple):
    """How one field of a dataclass is read."""

    name: str
    reader: Callable[..., Any]
    options: dict[str, Any]
    may_be_absent: bool
    may_be_none: bool
    usual: type | None
    """The type of nearly every value, where no more than a look at it is needed."""


@cache
def _plan(kind: type) -> tuple[_FieldPlan, ...]:
    """Return how the fields of a dataclass are read: worked out once for each, there may be many records of it."""
    found = []
    for one in dataclasses.fields(kind):
        options = dict(one.metadata)
        has_default = one.default is not dataclasses.MISSING or one.default_factory is not dataclasses.MISSING
        may_be_absent = has_default and not options.pop("required", False)
        of, _, or_none = str(one.type).partition(" | ")
        usual = None if options else {"int": int, "float": float, "str": str}.get(of)
        found.append(_FieldPlan(one.name, _READERS[of], options, may_be_absent, bool(or_none), usual))
    return tuple(found)


def _is_usual(value: Any) -> bool:
    """Return whether an int, a float or a text needs no closer look."""
    kind = type(value)
    if kind is int:
        return bool(-MAX_INTEGER <= value <= MAX_INTEGER)
    return bool(value.isascii()) if kind is str else bool(value - value == 0.0)  # of no other float


def read_dataclass(kind: type[D], record: Fields) -> D:
    """Make a dataclass of a JSON object: each field is read as its type says, what is absent has its default.

    The annotations have to be text (``from __future__ import annotations``). A field's metadata are arguments for the
    method of ``Fields`` that reads it; ``required`` among them: the default is for callers, not for a record.
    """
    values = {}
    for name, reader, options, may_be_absent, may_be_none, usual in _plan(
        cast(Any, kind)
    ):  # a class can be hashed, whatever mypy says
        value = record.get(name, _ABSENT)
        if usual is type(value) and _is_usual(value):
            values[name] = value
        elif value is _ABSENT and may_be_absent:
            continue
        else:
            values[name] = None if may_be_none and value is None else reader(record, name, **options)
    return kind(**values)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is no float
        return False


def _is_unicode(text: str) -> bool:
    """JSON can spell half a character; such a text cannot be encoded, so not be printed, hashed or sent either."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
