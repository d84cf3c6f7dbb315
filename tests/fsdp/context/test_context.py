"""The block itself: buffers cut and restored, positions, training, and wrong use that raises on all ranks."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp.context import models
from phalanx.comm import Group, init_device_mesh, observe, simulate
from phalanx.ddp import DistributedDataParallel
from phalanx.errors import RankFailed
from phalanx.fsdp.context import context_parallel, context_parallel_unshard, set_rotate_method
from phalanx.tensor import DTensor, Replicate, Shard, distribute_tensor
from phalanx.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LENGTH = 12


def cp_mesh(group: Group):
    return init_device_mesh("cpu", (group.size,), mesh_dim_names=("cp",))


def test_buffers_are_cut_in_place_and_whole_again_at_the_end() -> None:
    def main(group: Group) -> None:
        mesh, (ids, labels) = cp_mesh(group), models.batch(LENGTH)
        table, kept = models.rotary_table(LENGTH), torch.arange(LENGTH)
        module = nn.Module()
        module.register_buffer("table", table)
        buffers = [ids, labels, table, kept]
        before = [b.clone() for b in buffers]
        whole_memory = [b.data_ptr() for b in buffers]
        positions = [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]][group.rank]
        for fail in (False, True):
            try:
                with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, -2, 0], no_restore_buffers={kept}):
                    for tensor, whole, dim in zip(buffers, before, (1, 1, -2, 0), strict=True):
                        assert torch.equal(tensor, whole.index_select(dim, torch.tensor(positions)))
                    assert module.table is table
                    if fail:
                        raise KeyError("in the block")
            except KeyError:
                assert fail
            assert all(torch.equal(b, w) for b, w in zip(buffers[:3], before[:3], strict=True))
            assert [b.data_ptr() for b in buffers[:3]] == whole_memory[:3], "restoring copies nothing"
            assert kept.tolist() == positions
            kept = buffers[3] = torch.arange(LENGTH)

    simulate(2).run(main)


def test_a_buffer_used_after_the_block_for_backward_raises() -> None:
    """What autograd kept of it are other positions now: never computed with them."""

    def main(group: Group) -> None:
        x, weight = torch.randn(8, 3), torch.randn(3, requires_grad=True)
        with context_parallel(cp_mesh(group), buffers=[x], buffer_seq_dims=[0]):
            out = x @ weight
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    simulate(2).run(main)


def test_positions_of_a_rotary_table_are_those_of_the_tokens() -> None:
    """Head and tail: each rank's rows of the table are those of the tokens that it holds."""

    def main(group: Group) -> None:
        mesh, ids, table = cp_mesh(group), torch.arange(LENGTH)[None], models.rotary_table(2 * LENGTH)
        whole = table.clone()
        x = torch.randn(1, LENGTH, 4, generator=torch.Generator().manual_seed(0))
        expected = models.rotate(x, whole[:, :LENGTH])
        with context_parallel(mesh, buffers=[ids, table, x], buffer_seq_dims=[1, 1, 1], length=LENGTH):
            assert torch.equal(table, whole[:, ids[0]]), "a longer table: the rows of the first positions"
            (found,) = context_parallel_unshard(mesh, [models.rotate(x, table)], [1])
        assert torch.equal(found, expected)
        assert torch.equal(table, whole)

    simulate(3).run(main)


@pytest.mark.parametrize(("size", "length"), [(2, 12), (3, 12), (4, 13), (3, 5)])
def test_training_a_decoder_equals_one_device(size: int, length: int) -> None:
    logits, grads = models.on_one_device(length)

    def main(group: Group) -> None:
        mesh, model, (ids, labels) = cp_mesh(group), models.Decoder(length), models.batch(length)
        num_tokens = labels.numel()
        with context_parallel(mesh, buffers=[ids, labels, model.table], buffer_seq_dims=[1, 1, 1]):
            out = model(ids)
            models.loss_of(out, labels, num_tokens).backward()
            (whole,) = context_parallel_unshard(mesh, [out], [1])
        torch.testing.assert_close(whole, logits)
        for name, parameter in model.named_parameters():
            group.all_reduce(parameter.grad)
            torch.testing.assert_close(parameter.grad, grads[name], msg=lambda text, name=name: f"{name}: {text}")

    for method in ("alltoall", "allgather"):
        set_rotate_method(method)
        simulate(size).run(main)


def test_training_a_decoder_with_tensor_parallel_heads() -> None:
    """(cp, tp): projections by columns and rows, each rank with its heads and its positions."""
    logits, grads = models.on_one_device(LENGTH)
    plan = {
        **dict.fromkeys(["query", "key", "value"], ColwiseParallel()),
        "out": RowwiseParallel(),
    }

    def main(group: Group) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        model, (ids, labels) = models.Decoder(LENGTH), models.batch(LENGTH)
        for layer in model.layers:
            parallelize_module(layer.attention, mesh["tp"], plan)
        with context_parallel(mesh["cp"], buffers=[ids, labels, model.table], buffer_seq_dims=[1, 1, 1]):
            out = model(ids)
            models.loss_of(out, labels, 2 * LENGTH).backward()
            (whole,) = context_parallel_unshard(mesh["cp"], [out], [1])
        torch.testing.assert_close(whole, logits)
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            mesh["cp"].get_group().all_reduce(local)
            full = grad.full_tensor() if isinstance(grad, DTensor) else grad
            torch.testing.assert_close(full, grads[name], msg=lambda text, name=name: f"{name}: {text}")

    simulate(4).run(main)


def test_training_with_ddp_over_data_and_context_ranks() -> None:
    """(dp, cp): each pair of context ranks has a batch of its own; DDP averages over all four."""
    model = models.Decoder(LENGTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        for seed in range(2):
            ids, labels = models.batch(LENGTH, seed=10 * step + seed)
            models.loss_of(model(ids), labels, 2 * labels.numel()).backward()
        optimizer.step()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def main(group: Group) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        model = models.Decoder(LENGTH)
        wrapped = DistributedDataParallel(model, forward_sync_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            optimizer.zero_grad()
            ids, labels = models.batch(LENGTH, seed=10 * step + mesh.get_local_rank("dp"))
            num_tokens = labels.numel()
            with context_parallel(mesh["cp"], buffers=[ids, labels, model.table], buffer_seq_dims=[1, 1, 1]):
                # a mean over four ranks of what is to be summed over the two of a context
                (2 * models.loss_of(wrapped(ids), labels, num_tokens)).backward()
            optimizer.step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, expected[name], msg=lambda text, name=name: f"{name}: {text}")

    simulate(4).run(main)


def test_buffers_written_inside_the_block_are_told() -> None:
    """Above all those of DDP, which gives the first rank's part of a rotary table to all."""

    def main(group: Group) -> None:
        model, (ids, labels) = models.Decoder(LENGTH), models.batch(LENGTH)
        table, wrapped, mesh = model.table.clone(), DistributedDataParallel(model), cp_mesh(group)
        message = rf"rank {group.rank}: .* buffers \[2\] were written inside the block.*forward_sync_buffers=False"
        raising = pytest.raises(RuntimeError, match=message) if group.rank else nullcontext()
        with (
            raising,
            context_parallel(mesh, buffers=[ids, labels, model.table], buffer_seq_dims=[1, 1, 1]),
        ):
            models.loss_of(wrapped(ids), labels, 2 * LENGTH).backward()
        assert torch.equal(model.table, table)
        kept = torch.arange(8)
        with context_parallel(mesh, buffers=[kept], buffer_seq_dims=[0], no_restore_buffers={kept}):
            kept += 1

    simulate(2).run(main)


def test_evaluation_in_inference_mode() -> None:
    logits, _ = models.on_one_device(LENGTH)

    def main(group: Group) -> None:
        mesh, model = cp_mesh(group), models.Decoder(LENGTH).eval()
        with torch.inference_mode():
            ids = models.batch(LENGTH)[0].clone()  # an inference tensor; the table is not
            with context_parallel(mesh, buffers=[ids, model.table], buffer_seq_dims=[1, 1]):
                (whole,) = context_parallel_unshard(mesh, [model(ids)], [1])
            assert (ids.shape[1], model.table.shape[1]) == (LENGTH, LENGTH)
        torch.testing.assert_close(whole, logits)

    simulate(2).run(main)


def test_a_sequence_that_is_not_balanced_is_put_together_as_it_was_cut() -> None:
    def main(group: Group) -> None:
        mesh, x = cp_mesh(group), torch.arange(7)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[0], load_balance=False):
            assert x.tolist() == [[0, 1, 2], [3, 4], [5, 6]][group.rank]
            assert context_parallel_unshard(mesh, [x], [0])[0].tolist() == list(range(7)), "it knows its block"
            part = x.clone()
        assert context_parallel_unshard(mesh, [part], [0], load_balance=False)[0].tolist() == list(range(7))
        with pytest.raises(ValueError, match=r"rank \d: .* got \[1, 2, 3\] positions .* held as \[2, 2, 2\]"):
            context_parallel_unshard(mesh, [torch.ones(group.rank + 1)], [0])

    simulate(3).run(main)


# ---- wrong use


def refused_by(**kwargs) -> str:
    """What all ranks of two say, which is the same but for their number."""

    def main(group: Group) -> str:
        with pytest.raises((ValueError, TypeError)) as raised, context_parallel(cp_mesh(group), **kwargs):
            pytest.fail("entered")
        group.barrier()
        return str(raised.value).replace(f"rank {group.rank}", "rank N")

    first, second = simulate(2).run(main)
    assert first == second
    return first


def test_buffers_that_cannot_be_cut_are_refused_on_all_ranks() -> None:
    x, y = torch.ones(2, 8), torch.ones(2, 8)
    assert "1 buffers and 2 buffer_seq_dims" in refused_by(buffers=[x], buffer_seq_dims=[0, 1])
    assert "buffer_seq_dims[0] is 2; buffers[0] has shape (2, 8)" in refused_by(buffers=[x], buffer_seq_dims=[2])
    assert "a tensor that is not among buffers" in refused_by(
        buffers=[x], buffer_seq_dims=[1], no_restore_buffers={torch.ones(1)}
    )
    assert "buffers holds one tensor twice" in refused_by(buffers=[x, x], buffer_seq_dims=[1, 1])
    assert "neither buffers nor length" in refused_by()
    parameter = nn.Parameter(torch.ones(8))
    assert "buffers[0] of shape (8,) requires a gradient" in refused_by(buffers=[parameter], buffer_seq_dims=[0])
    assert "buffers[1] has 2 positions in dim 0; expected 8, as in buffers[0]" in refused_by(
        buffers=[x, y], buffer_seq_dims=[1, 0]
    )
    assert "buffers[0] has 8 positions in dim 1; expected 9, the length" in refused_by(
        buffers=[x], buffer_seq_dims=[1], length=9
    )
    assert "a sequence of 1 positions on 2 ranks" in refused_by(buffers=[torch.ones(1)], buffer_seq_dims=[0])


def test_a_rank_that_cannot_enter_is_named_by_the_others() -> None:
    def main(group: Group) -> str:
        x = torch.ones(8, requires_grad=group.rank == 1)
        with pytest.raises(ValueError) as raised, context_parallel(cp_mesh(group), buffers=[x], buffer_seq_dims=[0]):
            pytest.fail("entered")
        group.barrier()
        return str(raised.value)

    said = simulate(3).run(main)
    assert said[1].startswith("rank 1: context_parallel: buffers[0] of shape (8,) requires a gradient")
    for rank in (0, 2):
        assert said[rank].startswith(f"rank {rank}: context_parallel was not entered, because rank 1 cannot: rank 1: ")


@pytest.mark.parametrize("what", ["content", "shape", "dim", "balance"])
def test_ranks_with_other_buffers_or_settings_raise_and_show_them(what: str) -> None:
    def main(group: Group) -> str:
        odd = group.rank == 1
        x = torch.zeros(4, 6 if odd and what == "shape" else 4)
        if odd and what == "content":
            x[3, 3] = 1e-30
        dim, balance = int(not (odd and what == "dim")), not (odd and what == "balance")
        with (
            pytest.raises(ValueError) as raised,
            context_parallel(cp_mesh(group), buffers=[x], buffer_seq_dims=[dim], load_balance=balance),
        ):
            pytest.fail("entered")
        group.barrier()
        return str(raised.value)

    for said in simulate(2).run(main):
        assert "got other buffers or settings than the other ranks of its mesh:\n  rank 0: " in said
        assert "expected the same buffers, whole, on all of them" in said


def test_entering_costs_one_small_collective() -> None:
    def main(group: Group) -> list[tuple[str, int]]:
        mesh, x, seen = cp_mesh(group), torch.ones(1000), []
        mesh.get_group()
        with observe(seen.append), context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]):
            pass
        return [(event.name, event.nbytes) for event in seen]

    assert simulate(4).run(main) == [[("all_gather_into_tensor", 4 * 24)]] * 4


def test_meshes_that_do_not_fit() -> None:
    def main(group: Group) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        with (
            pytest.raises(ValueError, match=r"rank \d: context_parallel got .* of 2 axes; expected one"),
            context_parallel(mesh, length=8),
        ):
            pytest.fail("entered")
        with (
            pytest.raises(TypeError, match="got a str; expected a"),
            context_parallel("cp", length=8),
        ):
            pytest.fail("entered")
        with (
            context_parallel(mesh["cp"], length=8),
            pytest.raises(RuntimeError, match="context_parallel inside context_parallel"),
            context_parallel(mesh["cp"], length=8),
        ):
            pytest.fail("entered")

    simulate(4).run(main)
    with pytest.raises(NotImplementedError, match="set_rotate_method\\('ring'\\): expected one of allgather, alltoall"):
        set_rotate_method("ring")


def test_attention_that_would_be_wrong_is_refused() -> None:
    x = torch.ones(1, 4, 4, 6)
    sdpa = F.scaled_dot_product_attention
    wrong = {
        "attn_mask of shape (4, 8); only is_causal=True or no mask": lambda: sdpa(x, x, x, attn_mask=torch.ones(4, 8)),
        "dropout_p=0.1; expected 0": lambda: sdpa(x, x, x, dropout_p=0.1),
        "3 positions in key; expected 4, this rank's part of a sequence of 8": lambda: sdpa(
            x, x[:, :, 1:], x[:, :, 1:]
        ),
        "8 positions in query; expected 4": lambda: sdpa(torch.cat([x, x], 2), x, x),
        "4 heads of queries and 2 of keys with enable_gqa=False": lambda: sdpa(x, x[:, :2], x[:, :2]),
        "4 heads of queries and 3 of keys with enable_gqa=True": lambda: sdpa(x, x[:, :3], x[:, :3], enable_gqa=True),
        "query, key, value of torch.float32, torch.float32, torch.float64": lambda: sdpa(x, x, x.double()),
        "query (1, 4, 4, 6), key (1, 4, 4, 5)": lambda: sdpa(x, x[..., 1:], x),
        "query (1, 4, 4, 6), key (2, 4, 4, 6)": lambda: sdpa(x, x.expand(2, -1, -1, -1), x.expand(2, -1, -1, -1)),
        "_flash_attention_for_cpu inside context_parallel would see the positions of this rank only": (
            lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)
        ),
    }

    def main(group: Group) -> None:
        with context_parallel(cp_mesh(group), length=8):
            for message, call in wrong.items():
                with pytest.raises((ValueError, TypeError, NotImplementedError)) as raised:
                    call()
                assert message in str(raised.value)
                assert str(raised.value).startswith(f"rank {group.rank}: ")

    simulate(2).run(main)


def test_dtensors_of_other_layouts_are_refused() -> None:
    def main(group: Group) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        x = torch.ones(1, 4, 8, 6)
        right, gathered, width, other = (
            distribute_tensor(x, mesh, placements)
            for placements in (
                [Shard(2), Shard(1)],
                [Replicate(), Shard(1)],
                [Shard(2), Shard(3)],
                [Shard(2), Replicate()],
            )
        )
        with context_parallel(mesh["cp"], length=8):
            for tensors, error, message in (
                ((gathered,) * 3, ValueError, r"R on axis 0; expected Shard\(2\), the positions"),
                ((width,) * 3, ValueError, r"S\(3\) on axis 1; expected Shard on batch or heads, or Replicate"),
                ((right, other, other), ValueError, "expected one layout for all three"),
                ((right, right.to_local(), right), TypeError, "expected DTensors or plain tensors for all three"),
            ):
                with pytest.raises(error, match=message):
                    F.scaled_dot_product_attention(*tensors)

    simulate(4).run(main)


def test_a_rank_that_raises_inside_leaves_no_rank_waiting() -> None:
    def main(group: Group) -> None:
        x = torch.ones(1, 1, 8, 4)
        with context_parallel(cp_mesh(group), buffers=[x], buffer_seq_dims=[2]):
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 * (group.rank == 1))

    with pytest.raises(RankFailed, match=r"rank 1 of 2 raised NotImplementedError: rank 1: .* dropout_p=0.5"):
        simulate(2).run(main)
