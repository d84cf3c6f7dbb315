"""Digests by cells, and saves by ranges: without a gather, the same on any ranks, straight from a unit's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp.models import batch, build
from fsdp.ranks import on_ranks, shard
from fsdp.test_layouts import LAYOUTS, held_by
from phalanx import shard as shards
from phalanx.fsdp import model_digest
from phalanx.fsdp.layout import _cell_sums
from phalanx.fsdp.layout._cell_sums import CELL, cell_sums, digest_of_cells
from phalanx.fsdp.layout._unit_layout import UnitLayout, cells, joined
from phalanx.shard.checkpoint import _save
from phalanx.tensor.debug import CommDebugMode


def cell_sums_of_one(vector: torch.Tensor) -> torch.Tensor:
    """The digests of all cells of a vector that one rank has as a whole: what the sum over ranks gives."""
    everything = joined([(0, vector.numel())])
    return cell_sums(UnitLayout(vector.numel(), (everything,), (everything,)), 0, vector)


@pytest.mark.fast
@pytest.mark.parametrize(("name", "layout", "extents"), LAYOUTS, ids=[name for name, *_ in LAYOUTS])
def test_the_sum_over_ranks_is_the_digest_of_the_vector(name, layout, extents, monkeypatch):
    monkeypatch.setattr(_cell_sums, "CELL", 50)  # so that ranges begin and end inside cells
    vector = torch.zeros(layout.length)
    for begin, end in extents:
        vector[begin:end] = torch.randn(end - begin)
    total = sum(cell_sums(layout, rank, held_by(layout, rank, vector)) for rank in range(layout.num_ranks))
    owned = torch.zeros(layout.length)  # padding between parameters belongs to nobody, and counts as zeros
    for begin, end in (piece for ranges in layout.owned for piece in ranges):
        owned[begin:end] = vector[begin:end]
    assert torch.equal(total, cell_sums_of_one(owned))


@pytest.mark.fast
def test_every_bit_and_every_place_counts():
    vector = torch.randn(CELL + 100)
    before = cell_sums_of_one(vector)
    for index in (0, 1, CELL - 1, CELL, CELL + 99):
        changed = vector.clone()
        changed.view(torch.int32)[index] ^= 1
        differ = (cell_sums_of_one(changed) != before).all(1)
        assert differ.tolist() == [index < CELL, index >= CELL]
    swapped = vector.clone()
    swapped[3], swapped[7] = vector[7], vector[3]
    assert (cell_sums_of_one(swapped) != before).any()
    assert digest_of_cells(before, "a") != digest_of_cells(before, "b")
    signed = torch.tensor([0.0, -0.0])
    assert not torch.equal(cell_sums_of_one(signed), cell_sums_of_one(signed.flip(0)))
    for dtype in (torch.bfloat16, torch.float64, torch.complex128, torch.bool, torch.int16):
        value = torch.ones(70, dtype=dtype)
        other = value.clone()
        other[69] = 0
        assert not torch.equal(cell_sums_of_one(value), cell_sums_of_one(other)), dtype
    copies = cells(256, [[0, 1], [1, 0], [0, 1], [1, 0]])
    vector = torch.randn(256)
    both = sum(cell_sums(copies, rank, held_by(copies, rank, vector)) for rank in range(2))
    assert torch.equal(both, cell_sums_of_one(vector)), "copies count once"


def test_a_model_has_one_digest_on_any_number_of_ranks():
    def body(mesh):
        model = shard(build("tied"), mesh)
        with CommDebugMode() as seen:
            found = model_digest(model)
        counts = {str(name): count for name, count in seen.get_comm_counts().items()}
        assert counts == ({"all_reduce": 1} if mesh.size() > 1 else counts)
        model(batch(0)).pow(2).mean().backward()  # gathered or not does not matter, gradients neither
        assert model_digest(model) == found
        with torch.no_grad():
            model.layers[1].up.bias[5] += 1e-6
        differences = model_digest(model).differences(found)
        assert differences == ["layers.1 float32: elements from 0"]
        return found

    found = {size: on_ranks(body, *size) for size in ((1,), (2,), (3,), (5,), (2, 2))}
    assert len({digest.root for digests in found.values() for digest in digests}) == 1
    with pytest.raises(ValueError, match="call fully_shard on it first"):
        model_digest(build("mlp"))


def test_saving_reads_the_units_memory_and_gathers_nothing(tmp_path: Path, monkeypatch):
    written: list[int] = []
    original = _save._bytes

    def bytes_of(tensor):
        data = original(tensor)
        assert tensor.data_ptr() == torch.frombuffer(data, dtype=torch.uint8).data_ptr(), "copied"
        written.append(tensor.data_ptr())
        return data

    monkeypatch.setattr(_save, "_bytes", bytes_of)

    def body(mesh):
        model = shard(build("tied"), mesh)
        with CommDebugMode() as seen:
            shards.save(model.state_dict(), tmp_path / "saved")
        with CommDebugMode() as seen_small:
            shards.save({"w": next(model.parameters())}, tmp_path / "small")
        assert seen.get_comm_counts() == seen_small.get_comm_counts(), "the index alone, whatever is saved"
        memory = [
            (section.storage.address(0), section.storage.address(section.storage.count))
            for module in model.modules()
            if (state := getattr(module, "_get_fsdp_state", lambda: None)()) is not None
            for section in state.unit.sections
        ]
        other = shard(build("tied"), mesh)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        shards.load(tmp_path / "saved", other.state_dict())
        return memory, model_digest(model) == model_digest(other)

    results = on_ranks(body, 3)
    assert all(same for _, same in results)
    memory = [place for places, _ in results for place in places]
    assert len(written) > 3
    assert all(any(begin <= address <= end for begin, end in memory) for address in written)
