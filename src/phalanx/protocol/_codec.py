"""Turns records into versioned JSON and back: the one form in which agents and workers write to the job's store.

Owns the version, the error for what is no record, and the three forms that a key can hold: a ``StoreRecord`` (an object
with named fields and a version), one plain word (a count as decimal text, the id of a worker) and ``PRESENT`` (the key
says it all). A record is read field by field, by name and type (``phalanx._fields``); fields that a later release added
are ignored. With a job secret all three lie in one signed envelope (``phalanx.comm.stores``), without one as they are.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, field
from typing import Any, ClassVar, TypeVar

from phalanx._fields import Fields, load_json, read_dataclass

VERSION = 1

PRESENT = b"1"
"""What a key holds that only has to be there."""

R = TypeVar("R", bound="StoreRecord")


class RecordError(ValueError):
    """A control record does not parse or has a version that this release does not know."""


class StoreRecord:
    """The base of the dataclasses that lie in a store.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Greeting(StoreRecord):
    ...     what: ClassVar[str] = "greeting"
    ...     text: str
    >>> Greeting(text="hello").to_json()
    b'{"v":1,"text":"hello"}'
    >>> Greeting.from_json(b'{"v":1}')
    Traceback (most recent call last):
      ...
    phalanx.protocol._codec.RecordError: greeting has no field 'text'
    """

    what: ClassVar[str] = "record"
    """What an error calls it."""

    def to_json(self) -> bytes:
        return dump_record(asdict(self))  # type: ignore[call-overload]  # every subclass is a dataclass

    @classmethod
    def from_json(cls: type[R], data: bytes) -> R:
        """``RecordError`` when it is none."""
        return cls.from_fields(parse_record(data, cls.what))

    @classmethod
    def from_fields(cls: type[R], record: Fields) -> R:
        """Override it for a record that holds other records."""
        return read_dataclass(cls, record)


def at_least(low: int, default: Any = MISSING) -> Any:
    """Return a field that holds a whole number of this size; a record with a smaller one is refused."""
    return field(default=default, metadata={"low": low})


def required(default: Any) -> Any:
    """Return a field with a default that a record has to have all the same."""
    return field(default=default, metadata={"required": True})


def dump_record(values: dict[str, Any]) -> bytes:
    return json.dumps({"v": VERSION, **values}, separators=(",", ":")).encode()


def parse_record(data: bytes, what: str) -> Fields:
    """Return the fields of a versioned record; ``RecordError`` when it is none of this release."""
    record = Fields(load_json(data, what, RecordError), what, RecordError)
    if record.get("v") != VERSION:
        raise RecordError(f"{what} has an unknown version; expected {VERSION}: {data[:80]!r}")
    return record


def dump_count(count: int) -> bytes:
    return b"%d" % count


def parse_count(data: bytes, what: str) -> int:
    """Return a number that is at least 0; ``RecordError`` when it is none.

    >>> parse_count(b"12", "the number of nodes")
    12
    """
    if not data.isdigit() or len(data) > 18:
        raise RecordError(f"{what} is {data[:80]!r}; expected a number")
    return int(data)
