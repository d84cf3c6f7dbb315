"""Keeps a counter as bytes: plain decimal digits, so that it can be read and set like any other value.

Adding is reading and writing if nobody else has meanwhile. Of many that do so at once one gets through at a time, and
without pauses each would try about as often as there are others.
"""

from __future__ import annotations

import random
import time

_CHANCE = random.SystemRandom()  # not the global generator: that one belongs to the training script

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


def longest_pause(num_tries: int) -> float:
    """Return how many seconds a client may pause that was forestalled in so many tries.

    >>> longest_pause(1), longest_pause(4), longest_pause(1000)
    (0.002, 0.016, 0.5)
    """
    return min(0.001 * float(2 ** min(num_tries, 20)), 0.5)


def make_way(num_tries: int) -> None:
    """Pause before the next try to add: as many clients add at once as it takes to be forestalled so often."""
    time.sleep(_CHANCE.uniform(0, longest_pause(num_tries)))
