"""``layout_summary``: what each rank holds of a module's parameters, in words.

Nothing is communicated: a layout is known to every rank. Modules whose parameters are gathered together say so by a
class attribute ``_is_unit``, so that nothing here depends on who shards them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from torch import Tensor, nn

from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.debug._trace import describe, in_columns, readable

_SHOWN = 8
"""So many ranks are listed; of more, the least and the most that one holds."""


def layout_summary(module: nn.Module) -> str:
    """Return one line per parameter: its name, shape and layout, the bytes on each rank of its mesh, and its unit.

    >>> print(layout_summary(model))   # doctest: +SKIP
    up.weight   float32[10, 6] [tp:S(0)]  120 B, 120 B of 240 B
    up.bias     float32[10] [tp:S(0)]     20 B, 20 B of 40 B
    down.bias   float32[6]                24 B on each rank
    total                                 164 B, 164 B of 304 B

    Parameters that ``fully_shard`` has taken name the unit with which they are gathered.
    """
    units = [path for path, part in module.named_modules() if getattr(type(part), "_is_unit", False)]
    lines, everywhere, by_rank, everything = [], 0, dict[int, int](), 0
    for name, parameter in module.named_parameters():
        held, full = _held(parameter), parameter.numel() * parameter.element_size()
        everything += full
        if held is None:
            everywhere += full
        for rank, own in (held or {}).items():
            by_rank[rank] = by_rank.get(rank, 0) + own
        unit = f"unit {_innermost(units, name) or 'root'!r}" if units and held is not None else ""
        lines.append([name, describe(parameter), _shares(held, full), unit])
    total = {rank: own + everywhere for rank, own in by_rank.items()} or None
    return in_columns([*lines, ["total", "", _shares(total, everything), ""]])


def _held(parameter: Tensor) -> dict[int, int] | None:
    """Return the bytes by rank; None: of a plain tensor, which each rank has."""
    if not isinstance(parameter, DTensor):
        return None
    spec = parameter._spec
    found = {}
    for coordinate in itertools.product(*map(range, spec.mesh.shape)):
        count = 1
        for size in spec.shape_at(coordinate):
            count *= size
        found[int(spec.mesh.mesh[coordinate])] = count * parameter.element_size()
    return found


def _shares(held: Mapping[int, int] | None, full: int) -> str:
    if held is None:
        return f"{readable(full)} on each rank"
    counts = [held[rank] for rank in sorted(held)]
    if len(counts) <= _SHOWN:
        return f"{', '.join(map(readable, counts))} of {readable(full)}"
    return f"{readable(min(counts))} to {readable(max(counts))} on {len(counts)} ranks of {readable(full)}"


def _innermost(units: list[str], name: str) -> str:
    return max((path for path in units if not path or name.startswith(f"{path}.")), key=len, default="")
