"""Seeding, saving and restoring random numbers: torch's own functions include DTensors; meshes do not repeat."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx import comm
from phalanx.comm import init_device_mesh
from phalanx.tensor import (
    Replicate,
    Shard,
    distribute_tensor,
    get_rng_state,
    manual_seed,
    ones,
    rand,
    randn,
    set_rng_state,
)
from phalanx.tensor.parallel import ColwiseParallel, parallelize_module

pytestmark = pytest.mark.fast


def values(mesh: Any) -> list[float]:
    """The next draw on ``mesh``."""
    found: list[float] = rand(6, device_mesh=mesh, placements=[Shard(0)] * mesh.ndim).full_tensor().tolist()
    return found


def test_the_stream_goes_on_after_a_block_that_was_seeded() -> None:
    def body(mesh: Any) -> None:
        x = ones(32, device_mesh=mesh, placements=[Shard(0)])
        torch.manual_seed(0)
        undisturbed = [F.dropout(x).full_tensor().tolist() for _ in range(3)]
        torch.manual_seed(0)
        masks, seeded = [], []
        for _ in range(3):
            masks.append(F.dropout(x).full_tensor().tolist())
            with torch.random.fork_rng():
                torch.manual_seed(123)
                seeded.append(F.dropout(x).full_tensor().tolist())
        assert masks == undisturbed
        assert masks[0] != masks[1] != masks[2]
        assert seeded[0] == seeded[1] == seeded[2]

    on_mesh(body, 2)


def test_restoring_undoes_a_seeding_and_seeding_undoes_restoring() -> None:
    def body(mesh: Any) -> None:
        torch.manual_seed(0)
        first = values(mesh)
        saved = torch.get_rng_state()
        second = values(mesh)
        torch.manual_seed(5)
        of_five = values(mesh)
        torch.set_rng_state(saved)
        assert values(mesh) == second
        torch.manual_seed(5)
        assert values(mesh) == of_five
        torch.set_rng_state(saved)
        torch.manual_seed(0)
        assert values(mesh) == first
        torch.seed()
        assert values(mesh) not in (first, second)

    on_mesh(body, 2)


def test_copies_and_files_of_the_state_restore_dtensors_too() -> None:
    def save(mesh: Any) -> tuple[bytes, list[list[float]]]:
        torch.manual_seed(3)
        values(mesh)
        states = [torch.get_rng_state().clone()]
        drawn = [values(mesh)]
        states.append(torch.get_rng_state().clone())  # of torch's generator nothing has changed
        drawn.append(values(mesh))
        for state, expected in zip(states, drawn, strict=True):
            torch.set_rng_state(state)
            assert values(mesh) == expected
        stored = io.BytesIO()
        torch.save(states, stored)
        return stored.getvalue(), drawn

    def load(mesh: Any) -> None:
        values(mesh)
        for state, expected in zip(torch.load(io.BytesIO(stored)), drawn, strict=True):
            torch.set_rng_state(state)
            assert values(mesh) == expected

    stored, drawn = on_mesh(save, 2)[0]
    on_mesh(load, 2)


def test_a_state_saved_before_the_first_draw_restores_that() -> None:
    def body(mesh: Any) -> None:
        torch.manual_seed(1)
        saved = torch.get_rng_state()
        first = values(mesh), values(mesh)
        torch.set_rng_state(saved)
        assert (values(mesh), values(mesh)) == first

    on_mesh(body, 2)


def test_torch_reads_back_only_the_halves_that_are_its_own() -> None:
    saved = torch.get_rng_state()
    drawn = torch.rand(5), torch.randn(5)
    cells = saved.numpy()[24 : 24 + 8 * 624].view(np.uint32)
    cells[1::2] = np.arange(7, 631)
    generator = torch.Generator()
    generator.set_state(saved)
    assert torch.equal(torch.rand(5, generator=generator), drawn[0])
    assert torch.equal(torch.randn(5, generator=generator), drawn[1])


def test_a_state_of_another_generator_leaves_dtensors_alone() -> None:
    def body(mesh: Any) -> None:
        torch.manual_seed(0)
        drawn = [values(mesh) for _ in range(3)]
        torch.manual_seed(0)
        found = []
        for _ in range(3):
            found.append(values(mesh))
            torch.set_rng_state(torch.Generator().manual_seed(9).get_state())
        assert found == drawn

    on_mesh(body, 2)


def test_a_checkpointed_layer_repeats_its_dropout() -> None:
    def body(mesh: Any) -> None:
        for reentrant in (False, True):
            torch.manual_seed(0)  # the first draw is inside
            x = ones(16, device_mesh=mesh, placements=[Shard(0)]).requires_grad_()
            y = checkpoint(lambda t: F.dropout(t * 2), x, use_reentrant=reentrant)
            with torch.random.fork_rng():
                torch.manual_seed(8)
                y.sum().backward()
            assert x.grad is not None
            assert torch.equal(x.grad.full_tensor(), y.detach().full_tensor())
            following = values(mesh)
            torch.manual_seed(0)
            F.dropout(x)
            assert values(mesh) == following

    on_mesh(body, 2)


def test_copies_of_a_submesh_draw_what_a_single_device_does() -> None:
    def alone(mesh: Any) -> Any:
        torch.manual_seed(4)
        return randn(4, 4, device_mesh=mesh).full_tensor()

    def body(mesh: Any) -> Any:
        torch.manual_seed(4)
        layer = nn.Linear(4, 4)
        parallelize_module(layer, mesh["tp"], ColwiseParallel())
        torch.manual_seed(4)
        return nn.init.normal_(layer.weight).full_tensor().detach()

    (expected,) = on_mesh(alone, 1)
    for found in on_mesh(body, 2, 2):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_two_meshes_do_not_draw_the_same_numbers() -> None:
    def body(mesh: Any) -> Any:
        torch.manual_seed(0)
        drawn = [values(m) for m in (mesh, mesh["tp"], mesh["dp"], mesh["dp", "tp"])]
        assert len({tuple(v) for v in drawn[:3]}) == 3
        assert drawn[3] not in drawn[:3]  # the same mesh again: its second draw
        torch.manual_seed(0)
        other_order = [values(m) for m in (mesh["tp"], mesh)]
        assert other_order == drawn[:2]
        again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))  # equal to ``mesh``
        assert values(again) not in drawn[:2]
        return drawn

    first, *others = on_mesh(body, 2, 2)
    assert all(other == first for other in others)


def test_a_mesh_is_new_to_all_its_ranks_though_some_have_used_others() -> None:
    def rank_main(group: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        last_two, every = comm.DeviceMesh("cpu", [2, 3]), init_device_mesh("cpu", (4,))
        early = values(last_two) if group.rank > 1 else None
        return early, values(every)

    results = comm.simulate(4).run(rank_main)
    assert len({tuple(late) for _, late in results}) == 1
    assert results[2][0] == results[3][0] != results[2][1]


def test_an_explicit_seed_is_taken_as_it_is_and_torch_does_not_repeat_it() -> None:
    def body(mesh: Any) -> None:
        torch.manual_seed(7)
        of_torch = values(mesh)
        torch.manual_seed(7)
        manual_seed(7, mesh["tp"])
        assert values(mesh["tp"]) == of_torch
        assert values(mesh) != of_torch
        manual_seed(7, mesh)
        assert values(mesh) == of_torch
        for seed in (1 << 64, -(1 << 63) - 1):
            with pytest.raises(ValueError, match="seed"):
                manual_seed(seed, mesh)

    on_mesh(body, 2, 2)


def test_the_state_of_a_mesh_goes_to_a_mesh_of_another_size() -> None:
    def save(mesh: Any) -> tuple[list[int], list[float]]:
        torch.manual_seed(4)
        values(mesh["dp"])
        values(mesh["tp"])
        state = get_rng_state(mesh["tp"])
        return state.tolist(), values(mesh["tp"])

    def load(mesh: Any) -> None:
        torch.manual_seed(99)
        set_rng_state(torch.tensor(state), mesh)
        assert values(mesh) == expected

    state, expected = on_mesh(save, 2, 2)[0]
    for shape in ((1,), (3,), (2, 2)):
        on_mesh(load, *shape)


def test_what_is_no_state_of_a_mesh_is_refused() -> None:
    def body(mesh: Any) -> None:
        before = get_rng_state(mesh)
        wrong: list[Any] = [
            torch.get_rng_state(),
            torch.tensor([1, 2]),
            torch.tensor([1.0, 2.0, 3.0]),
            torch.tensor([1, 2, -3]),
            torch.tensor([1 << 40, 2, 3]),
            [1, 2, 3],
            distribute_tensor(torch.tensor([1, 2, 3]), mesh, [Replicate()]),
        ]
        for state in wrong:
            with pytest.raises(ValueError, match="get_rng_state"):
                set_rng_state(state, mesh)
        assert torch.equal(get_rng_state(mesh), before)

    on_mesh(body, 2)


def test_more_meshes_than_a_saved_state_holds_are_named() -> None:
    def rank_main(group: Any) -> None:
        torch.manual_seed(0)
        for n in range(78):
            values(init_device_mesh("cpu", (1,), mesh_dim_names=(f"axis{n}",)))
        with pytest.raises(RuntimeError, match="78 meshes"):
            torch.get_rng_state()
        torch.manual_seed(0)
        torch.get_rng_state()

    comm.simulate(1).run(rank_main)
