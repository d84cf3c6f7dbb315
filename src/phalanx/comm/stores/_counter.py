"""How a counter is kept as bytes: plain decimal digits, so that it can be read and set like any other
value.
"""

from __future__ import annotations


def counter_value(key: str, value: bytes | None, address: str) -> int:
    """The number a counter holds; an absent key counts as 0."""
    if value is None:
        return 0
    if not value.removeprefix(b"-").isdigit():
        raise ValueError(f"cannot add to {key!r} in {address}: it holds {value[:40]!r}, not a number")
    return int(value)
