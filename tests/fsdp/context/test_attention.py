"""Attention over ranks equals attention on one device: every layout, both ways of travelling, and what they cost."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import checkpoint

from phalanx.comm import CommEvent, Group, init_device_mesh, observe, simulate
from phalanx.fsdp.context import context_parallel, context_parallel_unshard, set_rotate_method
from phalanx.fsdp.context._block_exchange import BlockRing
from phalanx.tensor import DTensor, Shard
from phalanx.tensor.debug import CommDebugMode

METHODS = ["alltoall", "allgather"]
# Absolute, for inputs of unit variance: what docs/context.md promises.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def inputs(length: int, *, dtype: torch.dtype = torch.float32, key_heads: int = 2) -> list[Tensor]:
    """Queries, keys, values, and the gradient of the output."""
    make = torch.Generator().manual_seed(length)
    heads = (4, key_heads, key_heads, 4)
    return [torch.randn(2, h, length, 8, generator=make, dtype=torch.float64).to(dtype) for h in heads]


def whole(tensors: list[Tensor], **kwargs) -> list[Tensor]:
    """Output and gradients on one device."""
    *qkv, grad = [tensor.detach().clone() for tensor in tensors]
    for tensor in qkv:
        tensor.requires_grad_()
    out = F.scaled_dot_product_attention(*qkv, **kwargs)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


def in_parts(mesh, tensors: list[Tensor], *, load_balance: bool = True, sdpa=F.scaled_dot_product_attention, **kwargs):
    """The same over the ranks of a mesh, put together again."""
    buffers = [tensor.clone() for tensor in tensors]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, load_balance=load_balance):
        *qkv, grad = [tensor.detach().clone() for tensor in buffers]
        for tensor in qkv:
            tensor.requires_grad_()
        out = sdpa(*qkv, **kwargs)
        grads = torch.autograd.grad(out, qkv, grad)
        return context_parallel_unshard(mesh, [out, *grads], [2] * 4)


def assert_exact(found: list[Tensor], expected: list[Tensor]) -> None:
    tolerance = TOLERANCE[expected[0].dtype]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_it_equals_attention_on_one_device(size: int, causal: bool, method: str) -> None:
    set_rotate_method(method)
    options = {"is_causal": causal, "enable_gqa": True, "scale": 0.3}

    def main(group: Group) -> None:
        mesh = init_device_mesh("cpu", (size,))
        for length, balanced in ((16, True), (13, True), (13, False), (5, True)):
            tensors = inputs(length)
            assert_exact(in_parts(mesh, tensors, load_balance=balanced, **options), whole(tensors, **options))

    simulate(size).run(main)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_documented_tolerance_holds_for_each_dtype(dtype: torch.dtype) -> None:
    """Against the same attention in float64, at a length at which every rank merges parts of many keys."""
    tensors = inputs(200, dtype=dtype, key_heads=4)
    exact = [t.to(dtype) for t in whole([t.double() for t in tensors], is_causal=True)]

    def main(group: Group) -> None:
        assert_exact(in_parts(init_device_mesh("cpu", (4,)), tensors, is_causal=True), exact)

    for method in METHODS:
        set_rotate_method(method)
        simulate(4).run(main)


def test_both_methods_give_the_same_bits_forward() -> None:
    def main(group: Group) -> Tensor:
        return in_parts(init_device_mesh("cpu", (3,)), inputs(17), is_causal=True, enable_gqa=True)[0]

    results = []
    for method in METHODS:
        set_rotate_method(method)
        results.append(simulate(3).run(main)[0])
    assert torch.equal(*results)


def test_a_call_is_seen_however_the_function_was_imported() -> None:
    tensors = inputs(8, key_heads=4)
    expected = whole(tensors, is_causal=True)

    def main(group: Group) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for function in (imported_by_name, torch.ops.aten.scaled_dot_product_attention, torch.nn.functional.__dict__[
            "scaled_dot_product_attention"]):  # fmt: skip
            assert_exact(in_parts(mesh, tensors, sdpa=function, is_causal=True), expected)

    simulate(2).run(main)


def test_queries_without_heads_or_with_more_batch_dims() -> None:
    make = torch.Generator().manual_seed(0)
    for shape in ((8, 4), (3, 8, 4), (2, 3, 2, 8, 4)):
        x = torch.randn(shape, generator=make)
        expected = F.scaled_dot_product_attention(x, x, x, is_causal=True)

        def main(group: Group, x=x, expected=expected) -> None:
            mesh, own, dim = init_device_mesh("cpu", (2,)), x.clone(), x.dim() - 2
            with context_parallel(mesh, buffers=[own], buffer_seq_dims=[dim]):
                out = F.scaled_dot_product_attention(own, own, own, is_causal=True)
                torch.testing.assert_close(context_parallel_unshard(mesh, [out], [dim])[0], expected)

        simulate(2).run(main)


def test_values_of_another_width_and_memory_in_another_order() -> None:
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 8, 3, width, generator=make).transpose(1, 2) for width in (4, 4, 6))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def main(group: Group) -> None:
        mesh, parts = init_device_mesh("cpu", (2,)), [q.clone(), k.clone(), v.clone()]
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 3):
            crossed = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in parts]
            for tensors in (parts, crossed):
                out = F.scaled_dot_product_attention(*tensors, is_causal=True)
                torch.testing.assert_close(context_parallel_unshard(mesh, [out], [2])[0], expected)

    simulate(2).run(main)


# ---- what it costs


def traffic(size: int, length: int, method: str, dtype: torch.dtype = torch.float32) -> list[list[tuple[str, int]]]:
    """(collective, bytes) of one call on rank 0: forward, backward."""
    set_rotate_method(method)

    def main(group: Group) -> list[list[tuple[str, int]]]:
        seen: list[CommEvent] = []
        tensors, counted = inputs(length, dtype=dtype), []
        with context_parallel(init_device_mesh("cpu", (size,)), buffers=tensors, buffer_seq_dims=[2] * 4):
            qkv = [tensor.detach().clone().requires_grad_() for tensor in tensors[:3]]
            with observe(seen.append):
                out = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
                counted.append([(event.name, event.nbytes) for event in seen])
                seen.clear()
                out.backward(tensors[3])
                counted.append([(event.name, event.nbytes) for event in seen])
        return counted

    return simulate(size).run(main)[0]


@pytest.mark.parametrize("size", [2, 4])
def test_a_ring_passes_each_block_on_once_less_than_there_are_ranks(size: int) -> None:
    block = 2 * (2 * 2 * 4 * 8)  # elements of keys and values of a rank: batch, key heads, 4 positions, width
    forward, backward = traffic(size, 4 * size, "alltoall")
    assert forward == [("all_to_all", 4 * block)] * (size - 1)
    assert backward == [("all_to_all", 4 * block)] * (2 * (size - 1))
    forward, backward = traffic(size, 4 * size, "alltoall", torch.bfloat16)
    assert forward == [("all_to_all", 2 * block)] * (size - 1)
    assert sorted(backward) == sorted([("all_to_all", 2 * block), ("all_to_all", 4 * block)] * (size - 1)), (
        "keys and values travel as they are, their gradients in float32"
    )


def test_gathering_is_one_collective_forward_and_two_backward() -> None:
    everything = 4 * 4 * 2 * (2 * 2 * 4 * 8)
    forward, backward = traffic(4, 16, "allgather")
    assert forward == [("all_gather", everything)]
    assert backward == [("all_gather", everything), ("reduce_scatter", everything)]


def test_one_rank_sends_nothing() -> None:
    for method in METHODS:
        assert traffic(1, 8, method) == [[], []]


def test_the_next_block_is_under_way_while_this_one_is_computed_with() -> None:
    def main(group: Group) -> list[int]:
        seen: list[CommEvent] = []
        with observe(seen.append):
            return [len(seen) for _ in BlockRing(group, [2, 2, 2]).blocks(torch.ones(2))]

    assert simulate(3).run(main) == [[1, 2, 2]] * 3


# ---- what a program does with it


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_attention_is_computed_again_inside_the_block_only(use_reentrant: bool) -> None:
    tensors = inputs(8, key_heads=4)
    expected = whole(tensors, is_causal=True)

    def sdpa(q: Tensor, k: Tensor, v: Tensor, **kwargs) -> Tensor:
        def run(*qkv: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*qkv, **kwargs).tanh().atanh()

        return checkpoint(run, q, k, v, use_reentrant=use_reentrant)

    def inside(group: Group) -> None:
        mesh, buffers = init_device_mesh("cpu", (2,)), [tensor.clone() for tensor in tensors]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
            qkv = [tensor.detach().clone().requires_grad_() for tensor in buffers[:3]]
            out = sdpa(*qkv, is_causal=True)
            out.backward(buffers[3])
            found = context_parallel_unshard(mesh, [out, *(t.grad for t in qkv)], [2] * 4)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)  # tanh and back costs digits

    def outside(group: Group) -> None:
        x = torch.randn(1, 1, 4, 4, requires_grad=True)
        with context_parallel(init_device_mesh("cpu", (2,)), length=8):
            out = sdpa(x, x, x)
        with pytest.raises(RuntimeError, match=r"rank \d: a checkpointed forward .* call backward inside the block"):
            out.sum().backward()

    simulate(2).run(inside)
    simulate(2).run(outside)


def test_backward_after_the_block_is_right_without_buffers() -> None:
    tensors = inputs(8, key_heads=4)
    expected = whole(tensors)

    def main(group: Group) -> None:
        mesh = init_device_mesh("cpu", (2,))
        with context_parallel(mesh, length=8, load_balance=False):
            part = slice(4 * group.rank, 4 * group.rank + 4)
            qkv = [tensor[:, :, part].clone().requires_grad_() for tensor in tensors[:3]]
            out = F.scaled_dot_product_attention(*qkv)
        out.backward(tensors[3][:, :, part])
        grads = [t.grad for t in qkv]
        assert_exact(context_parallel_unshard(mesh, [out, *grads], [2] * 4, load_balance=False), expected)

    simulate(2).run(main)


def test_a_second_derivative_is_refused() -> None:
    def main(group: Group) -> None:
        x = torch.randn(1, 1, 4, 4, requires_grad=True)
        with context_parallel(init_device_mesh("cpu", (2,)), length=8):
            out = F.scaled_dot_product_attention(x, x, x)
            with pytest.raises(NotImplementedError, match=r"rank \d: backward with create_graph=True of attention"):
                torch.autograd.grad(out.sum(), x, create_graph=True)

    simulate(2).run(main)


def test_traces_name_the_operation_whether_they_begin_outside_or_inside() -> None:
    tensors = inputs(8, key_heads=4)

    def main(group: Group) -> list[str]:
        mesh, told = init_device_mesh("cpu", (2,)), []
        for outside in (True, False):
            with ExitStack() as stack:
                outer = stack.enter_context(CommDebugMode()) if outside else None
                buffers = [tensor.clone() for tensor in tensors]
                stack.enter_context(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4))
                seen = outer or stack.enter_context(CommDebugMode())
                qkv = [tensor.detach().clone().requires_grad_() for tensor in buffers[:3]]
                F.scaled_dot_product_attention(*qkv, is_causal=True).backward(buffers[3])
            told += [text for text in seen.generate_comm_debug_tracing_table(1).splitlines() if "*" in text]
        return told

    said = simulate(2).run(main)[0]
    assert len(said) == 1 + 3 + 3
    assert all(Path(__file__).name in text for text in said), said
    assert all("scaled_dot_product_attention at " in text for text in said[1:]), said


def test_multi_head_attention_of_torch_attends_to_all_positions() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 8, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    for training in (True, False):  # in evaluation torch has a fused layer, which would see one rank's positions
        layer.train(training)
        expected = layer(x, src_mask=mask, is_causal=True).detach()

        def main(group: Group, expected=expected) -> None:
            mesh, own = init_device_mesh("cpu", (2,)), x.clone()
            with context_parallel(mesh, buffers=[own], buffer_seq_dims=[1]), torch.no_grad():
                out = layer(own, src_mask=mask, is_causal=True)
                torch.testing.assert_close(context_parallel_unshard(mesh, [out], [1])[0], expected)
                with pytest.raises(NotImplementedError, match="pass need_weights=False"):
                    layer.self_attn(own, own, own)

        simulate(2).run(main)


def test_autocast_computes_in_its_dtype() -> None:
    tensors = inputs(8, key_heads=4)

    def main(group: Group) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected, *grads = whole(tensors, is_causal=True)
            out, *found = in_parts(init_device_mesh("cpu", (2,)), tensors, is_causal=True)
        assert out.dtype == expected.dtype == torch.bfloat16
        assert [g.dtype for g in found] == [torch.float32] * 3
        torch.testing.assert_close([out, *found], [expected, *grads], atol=4e-2, rtol=4e-2)

    simulate(2).run(main)


def test_heads_sharded_over_another_axis_as_dtensors() -> None:
    """On a mesh (dp, cp, tp): the batch, the positions and the heads are each on an axis."""
    tensors = inputs(8, key_heads=4)
    expected = whole(tensors, is_causal=True)

    def main(group: Group) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        batch, heads = (slice(r, r + 1) for r in (mesh.get_local_rank("dp"), 0))
        heads = slice(2 * mesh.get_local_rank("tp"), 2 * mesh.get_local_rank("tp") + 2)
        buffers = [tensor[batch, heads].clone() for tensor in tensors]
        cp = mesh["cp"]
        with context_parallel(cp, buffers=buffers, buffer_seq_dims=[2] * 4):
            for where, placements in (
                (mesh, [Shard(0), Shard(2), Shard(1)]),
                (mesh["cp", "tp"], [Shard(2), Shard(1)]),
                (mesh["tp"], [Shard(1)]),
            ):
                *qkv, grad = [DTensor.from_local(b.clone(), where, placements, run_check=False) for b in buffers]
                for tensor in qkv:
                    tensor.requires_grad_()
                out = F.scaled_dot_product_attention(*qkv, is_causal=True)
                assert (out.placements, out.shape) == (tuple(placements), qkv[0].shape)
                out.backward(grad)
                local = [t.to_local() for t in (out, *(tensor.grad for tensor in qkv))]
                assert_exact(context_parallel_unshard(cp, local, [2] * 4), [t[batch, heads] for t in expected])

    simulate(8).run(main)


def test_an_axis_of_one_rank_may_have_any_placement() -> None:
    x = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0))

    def main(group: Group) -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("cp", "tp"))
        with context_parallel(mesh["cp"], length=8):
            heads = DTensor.from_local(x, mesh, [Shard(2), Shard(1)], run_check=False)
            out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        torch.testing.assert_close(out.to_local(), F.scaled_dot_product_attention(x, x, x, is_causal=True))

    simulate(2).run(main)
