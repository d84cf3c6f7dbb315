"""Collects the whole model of a sharded job, and digests of what lies in cells without collecting them.

``full_state_dict`` goes section by section, so no worker but the one that asks for it has more than one of them in
memory; names, shapes and dtypes are the model's own. Digests: each holder of a cell digests what it has, all tell each
other, and the job's digest is that of the list; holders of one cell must agree.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.elastic.checkpoint._state import digest
from phalanx.elastic.membership._sync import WorkersDiffer
from phalanx.elastic.sharded._cell_reports import describe_cell
from phalanx.elastic.sharded._cell_store import CellStore
from phalanx.fsdp.layout._unit_layout import UnitLayout

if TYPE_CHECKING:
    from phalanx.elastic.sharded._sharding import JobSharding


def full_state_dict(sharding: JobSharding, *, everywhere: bool) -> dict[str, Tensor]:
    """Return the model's state dict on rank 0, or on all workers; all of them call it. Others get an empty dict."""
    group, store, tensor_groups = sharding.live_group, sharding.store, sharding.tensor_groups
    everywhere_in_lane = everywhere and tensor_groups is None  # lanes are put together by the first of them
    wanted = everywhere_in_lane or group.rank == 0
    found: dict[str, Tensor] = {}
    for u, s, section in sharding.units.sections():
        flat = _collect(store, u, s, group, section.layout, everywhere=everywhere_in_lane)
        for parameter in sharding.units.parameters:
            if wanted and parameter.key[:2] == (u, s):
                begin, end = parameter.extent
                found[parameter.name] = flat[begin:end].view(parameter.shape).clone()
    if tensor_groups is not None:
        found = tensor_groups.whole_parameters(sharding, found)
        wanted = everywhere or sharding.everyone.rank == 0
    if not wanted:
        return {}
    buffers = {name: buffer.detach().clone() for name, buffer in sharding.job.model.named_buffers()}
    return sharding.with_all_names(found, buffers)


def _collect(store: CellStore, u: int, s: int, group: Group, layout: UnitLayout, *, everywhere: bool) -> Tensor:
    """Return the flat vector of a section; on other ranks than 0 an empty one, unless it is to be everywhere."""
    mine = [store.local_values(u, s, begin, end) for begin, end in layout.owned[group.rank]]
    dtype = store.sections[u, s].storage.dtype
    sent = torch.cat(mine) if mine else torch.empty(0, dtype=dtype)
    if not everywhere and group.rank:
        group.all_to_all([torch.empty(0, dtype=dtype)] * group.size, [sent, *[sent[:0]] * (group.size - 1)])
        return sent[:0]
    received = [torch.empty(count, dtype=dtype) for count in layout.num_owned]
    outgoing = [sent] * group.size if everywhere else [sent, *[sent[:0]] * (group.size - 1)]
    group.all_to_all(received, outgoing)
    flat = torch.zeros(layout.length, dtype=dtype)
    for ranges, part in zip(layout.owned, received, strict=True):
        at = 0
        for begin, end in ranges:
            flat[begin:end] = part[at : at + end - begin]
            at += end - begin
    return flat


def cell_digests(sharding: JobSharding, kinds: Collection[str]) -> dict[int, str]:
    """Return the digest of each cell that this worker holds: parameters and these kinds of state of them."""
    sharding.collect()
    found = {}
    for cell in sharding.store.held:
        parts = sharding.store.cell_fragments([cell])
        found[cell] = digest(
            [[list(f.key), f.begin, f.end, f.values, {k: v for k, v in f.states.items() if k in kinds}] for f in parts]
        )
    return found


def agreed_digests(sharding: JobSharding, kinds: Collection[str]) -> list[str]:
    """Return the digests of all cells in the table's order, with these kinds of state; all workers call it.

    Raises ``WorkersDiffer`` if two holders of a cell have different bits.
    """
    told = sharding.live_group.all_gather_values(
        {str(cell): one for cell, one in cell_digests(sharding, kinds).items()}
    )
    known: dict[int, tuple[str, str]] = {}
    for worker, each in zip(sharding.workers, told, strict=True):
        for name, value in each.items():
            other, first = known.setdefault(int(name), (worker, value))
            if first != value:
                what = describe_cell(sharding, int(name))
                raise WorkersDiffer(f"at step {sharding.job.step}, workers {other} and {worker} differ in {what}")
    return [known[cell][1] for cell in range(len(sharding.table))]
