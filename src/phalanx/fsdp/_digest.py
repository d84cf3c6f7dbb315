"""``model_digest``: one name for the values of a sharded model, without gathering them, the same on any ranks.

Owns the tree above the cells: cells of a unit's flat vector (``layout/_cell_sums.py``), units, model.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import nn

from phalanx.comm import Group
from phalanx.fsdp.layout._cell_sums import CELL, cell_sums, digest_of_cells
from phalanx.fsdp.schedule._module_state import ModuleState, state_of
from phalanx.fsdp.unit._section import Section
from phalanx.fsdp.unit._unit_memory import HEADER


@dataclass(frozen=True)
class ModelDigest:
    """A tree of digests: of the model, of its units by path and dtype, of their cells."""

    root: str
    units: dict[str, str]
    cells: dict[str, tuple[str, ...]]

    def differences(self, other: ModelDigest) -> list[str]:
        """Say where two models differ, by unit and ranges of its flat vector.

        >>> one = ModelDigest("a", {"layers.0 float32": "b"}, {"layers.0 float32": ("x", "y")})
        >>> one.differences(ModelDigest("c", {"layers.0 float32": "d"}, {"layers.0 float32": ("x", "z")}))
        ['layers.0 float32: elements from 65,536']
        """
        found = []
        for name in sorted(self.units.keys() | other.units.keys()):
            if self.units.get(name) == other.units.get(name):
                continue
            mine, theirs = self.cells.get(name), other.cells.get(name)
            if mine is None or theirs is None or len(mine) != len(theirs):
                found.append(f"{name}: not in both, or of another size")
            else:
                differ = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
                found.append(f"{name}: elements from {', '.join(f'{i * CELL:,}' for i in differ[:5])}")
        return found


def model_digest(module: nn.Module) -> ModelDigest:
    """Return the digest of all parameters that ``fully_shard`` has taken below ``module``.

    Collective over the ranks that shard the model: one all-reduce of 16 bytes for every 65,536 elements. It depends on
    the values, names of units, dtypes and shapes only, not on the number of ranks. Of a model that is tensor-parallel
    too, it is that of this rank's tensor-parallel shards.

    >>> model_digest(model).root == before.root                      # doctest: +SKIP
    True
    """
    sections = _sections(module)
    if not sections:
        raise ValueError(f"model_digest of a {type(module).__name__} without units: call fully_shard on it first")
    summed = _summed(sections)
    about = {name: str([(p.name, p.shape) for p in section.parameters]) for name, section in sections.items()}
    units = {name: digest_of_cells(sums, about[name]) for name, sums in summed.items()}
    cells = {name: tuple(digest_of_cells(row) for row in sums) for name, sums in summed.items()}
    return ModelDigest(blake2b(repr(sorted(units.items())).encode(), digest_size=16).hexdigest(), units, cells)


def _sections(module: nn.Module) -> dict[str, Section]:
    """Return the units' flat vectors by path and dtype, their shards in place."""
    found: dict[str, Section] = {}
    seen: set[ModuleState] = set()
    for path, part in module.named_modules():
        state = state_of(part)
        if state is None or state.unit is None or state in seen:
            continue
        seen.add(state)
        state.unit.bring_home()
        for section in state.unit.sections:
            found[f"{path or 'root'} {str(section.dtype).removeprefix('torch.')}"] = section
    return found


def _summed(sections: dict[str, Section]) -> dict[str, torch.Tensor]:
    """Return the cells' digests of each section; one all-reduce for all sections of a group."""
    found: dict[str, torch.Tensor] = {}
    by_group: dict[Group, list[str]] = {}
    for name, section in sections.items():
        by_group.setdefault(section.place.group, []).append(name)
    for group, names in by_group.items():
        own = []
        for name in names:
            section = sections[name]
            assert section.storage is not None, "its unit was brought home"
            own.append(cell_sums(section.layout, group.rank, section.storage.buffer[HEADER:]))
        total = torch.cat(own)
        group.all_reduce(total)
        found.update(zip(names, total.split([len(each) for each in own]), strict=True))
    return {name: found[name] for name in sections}
