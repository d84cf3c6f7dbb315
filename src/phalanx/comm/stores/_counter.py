"""Keeps a counter as bytes: plain decimal digits, so that it can be read and set like any other value."""

from __future__ import annotations

LIMIT = 2**62
"""Beyond what any counter of a job reaches; a store's own arithmetic ends a little further on."""


def counter_value(key: str, value: bytes | None, address: str) -> int:
    """Return the number a counter holds; an absent key counts as 0."""
    if value is None:
        return 0
    number = parse_counter(value)
    if number is None:
        raise ValueError(f"cannot add to {key!r} in {address}: it holds {value[:40]!r}, not a number")
    return number


def parse_counter(value: bytes) -> int | None:
    """Return the number, or None when this is not what a counter can hold.

    >>> parse_counter(b"17"), parse_counter(b"-3"), parse_counter(b"1e9"), parse_counter(b"9" * 30)
    (17, -3, None, None)
    """
    if len(value) > 20 or not value.removeprefix(b"-").isdigit():
        return None
    number = int(value)
    return number if abs(number) < LIMIT else None
