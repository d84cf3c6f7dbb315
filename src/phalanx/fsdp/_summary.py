"""``unit_summary``: the units of a sharded model and what each rank holds of them, in words."""

from __future__ import annotations

from torch import nn

from phalanx.fsdp.schedule._module_state import ModuleState, state_of
from phalanx.fsdp.unit._section import Section
from phalanx.tensor.debug._trace import readable


def unit_summary(module: nn.Module) -> str:
    """Say for every unit of ``module`` which parameters it has and how many elements and bytes each rank holds.

    >>> print(unit_summary(model))                                 # doctest: +SKIP
    unit 'layers.0' of 2 ranks: 6 parameters, 1,236 elements float32; by rank 618, 618 (2.47 kB, 2.47 kB)
    """
    seen: dict[ModuleState, str] = {}
    for path, part in module.named_modules():
        state = state_of(part)
        if state is not None:
            seen.setdefault(state, path or "root")
    lines = []
    total: list[int] = []
    for state, path in seen.items():
        for section in () if state.unit is None else state.unit.sections:
            lines.append(_line(path, section))
            held = [count * section.dtype.itemsize for count in section.layout.num_held]
            total = [a + b for a, b in zip(total or [0] * len(held), held, strict=True)]
    if not lines:
        return f"{type(module).__name__}: no unit; call fully_shard on it"
    return "\n".join([*lines, f"all units, by rank: {', '.join(map(readable, total))}"])


def _line(path: str, section: Section) -> str:
    held = section.layout.num_held
    elements = sum(p.numel for p in section.parameters)
    dtype = str(section.dtype).removeprefix("torch.")
    size = section.dtype.itemsize
    return (
        f"unit {path!r} of {len(held)} ranks: {len(section.parameters)} parameters, {elements:,} elements {dtype}; "
        f"by rank {', '.join(f'{n:,}' for n in held)} ({', '.join(readable(n * size) for n in held)})"
    )
