"""Divides a summed gradient by its weight, and sees on the way whether it is finite: one pass where that is possible.

By a power of two, as the weight is with as many slots, a division is the multiplication with the inverse, to the bit:
both round the same real number. There is a kernel that multiplies and looks. Elsewhere looking is a second pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from phalanx._devices import is_host
from phalanx._torch_private import foreach_check_and_unscale_

MAX_WEIGHT = 2.0**64
"""Of weights above it the inverse may not be a normal number."""


def divide(flats: Iterable[Tensor], weight: float, *, looks: bool = True) -> bool | None:
    """Divide all in place; whether the results are finite, None if nobody has looked.

    >>> x = torch.tensor([4.0, 8.0]); divide([x], 4.0), x
    (True, tensor([1., 2.]))
    >>> divide([torch.tensor([4.0, float("inf")])], 4.0), divide([x], 3.0)
    (False, None)
    """
    flats = list(flats)
    if not looks or not can_look(flats, weight):
        for flat in flats:
            if weight != 1.0:
                flat.div_(weight)
        return None
    found, factor = torch.zeros(1), torch.full((1,), 1.0 / weight)
    for flat in flats:
        foreach_check_and_unscale_([flat], found, factor)
    return not float(found)


def can_look(flats: Iterable[Tensor], weight: float) -> bool:
    """Return whether the kernel makes of these what a division does; it is used on the host, where a pass costs more
    than a call. A weight below 1 may make a finite value infinite after it was looked at.

    >>> can_look([torch.zeros(2)], 8.0), can_look([torch.zeros(2)], 6.0), can_look([], 8.0)
    (True, False, False)
    """
    flats = list(flats)
    is_exact = 1.0 <= weight <= MAX_WEIGHT and math.frexp(weight)[0] == 0.5
    return is_exact and bool(flats) and all(is_host(flat) and flat.is_floating_point() for flat in flats)
