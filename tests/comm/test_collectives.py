"""One conformance suite for collectives; it runs on simulated ranks and on real gloo processes."""

from __future__ import annotations

import warnings

import pytest
import torch

from phalanx.comm import Group, ReduceOp, simulate
from phalanx.comm.transports._tree_reduce import tree_reduce
from phalanx.errors import RankFailed
from processes import run_processes

WORLD = 3

MOVED = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
SUMMED = [dtype for dtype in MOVED if dtype is not torch.bool]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small integers that differ from rank to rank, exact in every dtype."""
    count = 1
    for size in shape:
        count *= size
    return ((torch.arange(count) * 3 + rank * 5) % 7).reshape(shape).to(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.dtype == expected.dtype, what
    assert torch.equal(actual, expected), f"{what}: got {actual}, expected {expected}"


# -- cases: each runs on every rank and asserts there --------------------------------------------------------------


def all_reduce_sums_every_dtype_and_shape(group: Group) -> None:
    for dtype in SUMMED:
        for shape in [(), (0,), (1,), (5,), (2, 3)]:
            tensor = values(group.rank, shape, dtype)
            group.all_reduce(tensor)
            expected = sum((values(r, shape, dtype) for r in range(1, group.size)), values(0, shape, dtype))
            same(tensor, expected, f"{dtype} {shape}")


def all_reduce_has_every_operation(group: Group) -> None:
    stack = torch.stack([values(r, (6,), torch.int32) for r in range(group.size)])
    folded = {"band": stack[0].clone(), "bor": stack[0].clone(), "bxor": stack[0].clone()}
    for row in stack[1:]:
        folded = {"band": folded["band"] & row, "bor": folded["bor"] | row, "bxor": folded["bxor"] ^ row}
    expected = {
        "sum": stack.sum(0),
        "min": stack.amin(0),
        "max": stack.amax(0),
        "product": stack.prod(0),
        **folded,
    }
    for op, result in expected.items():
        tensor = values(group.rank, (6,), torch.int32)
        group.all_reduce(tensor, op)
        same(tensor, result.to(torch.int32), op)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        tensor = values(group.rank, (6,), dtype)
        group.all_reduce(tensor, "avg")
        assert torch.allclose(tensor.to(torch.complex64).real, stack.float().mean(0), atol=2e-2), dtype


def all_reduce_of_bools_is_or_and_and(group: Group) -> None:
    for op, expected in [("sum", True), ("max", True), ("bor", True), ("product", False), ("min", False)]:
        tensor = torch.tensor([group.rank == 0])
        group.all_reduce(tensor, op)
        assert tensor.item() is expected, op


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls this layout a beta, once
    _COMPRESSED = torch.ones(1, 2).to_sparse_csr()


def meaningless_reductions_are_refused(group: Group) -> None:
    for dtype, op in [
        (torch.int64, "avg"),
        (torch.float32, "bor"),
        (torch.complex64, "max"),
        (torch.bool, "avg"),
    ]:
        with pytest.raises(TypeError, match="all_reduce"):
            group.all_reduce(torch.ones(2, dtype=dtype), op)
    with pytest.raises(ValueError, match="unknown reduction 'summ'"):
        group.all_reduce(torch.ones(2), "summ")
    with pytest.raises(TypeError, match="dense"):
        group.all_reduce(torch.ones(2, 2).to_sparse())
    whole, part = torch.ones(group.size, 2), torch.ones(1, 2)
    with pytest.raises(TypeError, match="dense"):
        group.reduce_scatter_tensor(_COMPRESSED, whole)
    for convert in (torch.Tensor.to_sparse, torch.Tensor.to_mkldnn):
        for sparse in (convert(part), convert(whole)):
            with pytest.raises(TypeError, match="dense"):
                group.all_reduce(sparse)
            with pytest.raises(TypeError, match="dense"):
                group.broadcast(sparse, 0)
        for big, small in ((convert(whole), part), (whole, convert(part))):
            with pytest.raises(TypeError, match="dense"):
                group.all_gather_into_tensor(big, small)
            with pytest.raises(TypeError, match="dense"):
                group.reduce_scatter_tensor(small, big)
    for call in (
        lambda: group.all_reduce([1.0]),  # type: ignore[arg-type]
        lambda: group.broadcast([1.0], 0),  # type: ignore[arg-type]
        lambda: group.all_gather_into_tensor([1.0], part),  # type: ignore[arg-type]
        lambda: group.reduce_scatter_tensor(part, [1.0]),  # type: ignore[arg-type]
        lambda: group.reduce_scatter_tensor([1.0], whole),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=r"expected a torch.Tensor"):
            call()


def non_contiguous_tensors_work_in_place(group: Group) -> None:
    base = torch.zeros(4, 3)
    view = base.t()[1:]
    view.copy_(values(group.rank, (2, 4), torch.float32))
    group.all_reduce(view)
    same(view, sum(values(r, (2, 4), torch.float32) for r in range(group.size)), "view")
    assert base[:, 0].eq(0).all(), "what is outside of the view stays"
    column = torch.full((3, 2), float(group.rank))[:, 0]
    group.broadcast(column, src=1)
    assert column.eq(1).all()
    grid = torch.zeros(group.size, 2).t()
    group.all_gather_into_tensor(grid.t(), torch.full((2,), float(group.rank)), async_op=True).wait()
    assert torch.equal(grid[0], torch.arange(float(group.size)))


def conjugations_and_signs_that_torch_put_off_are_carried_out(group: Group) -> None:
    size, conjugated = group.size, torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert conjugated.is_conj()
    expected = torch.tensor([1 - 2j, 3 + 4j])
    target = torch.tensor([1 + 2j, 3 - 4j]).conj() if group.rank == 0 else torch.zeros(2, dtype=torch.complex64)
    group.broadcast(target, src=0)
    same(target, expected, "broadcast")
    for make in (torch.Tensor.clone, torch.conj):  # where results go may be a conjugated view too
        outputs = [make(torch.zeros(2, dtype=torch.complex64)) for _ in range(size)]
        group.all_gather(outputs, conjugated)
        for output in outputs:
            same(output, expected, "all_gather")
    whole = torch.zeros(2 * size, dtype=torch.complex64)
    group.all_gather_into_tensor(whole, conjugated)
    same(whole, expected.repeat(size), "all_gather_into_tensor")
    swapped = torch.zeros(2 * size, dtype=torch.complex64)
    group.all_to_all_single(swapped, whole.conj())
    same(swapped, expected.conj().resolve_conj().repeat(size), "all_to_all_single")
    part = torch.zeros(2, dtype=torch.complex64).conj()
    group.reduce_scatter_tensor(part, whole.conj())
    same(part, size * expected.conj(), "reduce_scatter_tensor")
    total = torch.tensor([1 + 2j, 3 - 4j]).conj()
    group.all_reduce(total, async_op=True).wait()
    same(total, size * expected, "all_reduce")
    negated = torch.tensor([1 + 2j]).conj().imag
    assert negated.is_neg()
    assert negated.is_contiguous()
    group.all_reduce(negated)
    same(negated, torch.tensor([-2.0 * size]), "all_reduce of a negated view")
    received = torch.zeros(2, dtype=torch.complex64)
    sending = group.send(conjugated, (group.rank + 1) % size, async_op=True)
    group.recv(received, (group.rank - 1) % size)
    sending.wait()
    same(received, expected, "send")


def reduce_leaves_the_others_alone(group: Group) -> None:
    for dst in range(group.size):
        for dtype in (torch.float32, torch.int16):
            tensor = values(group.rank, (5,), dtype)
            group.reduce(tensor, dst)
            total = sum((values(r, (5,), dtype) for r in range(1, group.size)), values(0, (5,), dtype))
            same(tensor, total if group.rank == dst else values(group.rank, (5,), dtype), f"dst {dst}")


def broadcast_moves_every_dtype(group: Group) -> None:
    for dtype in MOVED:
        for shape in [(), (0, 2), (3,)]:
            tensor = values(group.rank, shape, dtype)
            group.broadcast(tensor, src=group.size - 1)
            same(tensor, values(group.size - 1, shape, dtype), f"{dtype} {shape}")


def all_gather_takes_even_and_uneven(group: Group) -> None:
    for dtype in MOVED:
        for shapes in [
            [(2, 2)] * group.size,
            [(r,) for r in range(group.size)],
            [(0,)] * group.size,
            [()] * group.size,
        ]:
            outputs = [torch.empty(shape, dtype=dtype) for shape in shapes]
            group.all_gather(outputs, values(group.rank, shapes[group.rank], dtype))
            for r, output in enumerate(outputs):
                same(output, values(r, shapes[r], dtype), f"{dtype} {shapes}")
    flat = torch.empty(group.size, 2, dtype=torch.int16)
    group.all_gather_into_tensor(flat, values(group.rank, (2,), torch.int16))
    same(flat, torch.stack([values(r, (2,), torch.int16) for r in range(group.size)]), "flat")


def empty_flat_tensors_work(group: Group) -> None:
    for dtype in (torch.float32, torch.int16, torch.bool):
        for shape in ((0,), (0, 3)):
            nothing, more = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
            group.all_gather_into_tensor(nothing, more)
            group.reduce_scatter_tensor(nothing, more)
            group.all_reduce(nothing)
            group.broadcast(nothing, 0)
    group.barrier()


def reduce_scatter_takes_even_and_uneven(group: Group) -> None:
    for dtype in SUMMED:
        for shapes in [[(2, 2)] * group.size, [(r,) for r in range(group.size)], [(0,)] * group.size]:
            inputs = [values(group.rank + r, shape, dtype) for r, shape in enumerate(shapes)]
            output = torch.empty(shapes[group.rank], dtype=dtype)
            group.reduce_scatter(output, inputs)
            own = shapes[group.rank]
            expected = sum(
                (values(r + group.rank, own, dtype) for r in range(1, group.size)),
                values(group.rank, own, dtype),
            )
            same(output, expected, f"{dtype} {shapes}")
            assert torch.equal(inputs[0], values(group.rank, shapes[0], dtype)), "inputs stay as they were"
    whole = values(group.rank, (group.size, 2), torch.float32)
    kept = whole.clone()
    part = torch.empty(2)
    group.reduce_scatter_tensor(part, whole, "max")
    expected = torch.stack([values(r, (group.size, 2), torch.float32) for r in range(group.size)]).amax(0)
    same(part, expected[group.rank], "flat")
    assert torch.equal(whole, kept), "the input stays as it was"
    for dtype in SUMMED:
        whole, part = values(group.rank, (group.size * 3,), dtype), torch.empty(3, dtype=dtype)
        work = group.reduce_scatter_tensor(part, whole, async_op=True)
        work.wait()
        expected = sum((values(r, (group.size * 3,), dtype) for r in range(1, group.size)), values(0, (9,), dtype))
        same(part, expected.view(group.size, 3)[group.rank], f"{dtype} of equal parts")


def reduce_scatter_adds_along_one_tree(group: Group) -> None:
    """The same bits on every transport, which an order of additions that depends on the rank would not give."""
    for dtype in (torch.float32, torch.bfloat16):
        for count in (5, 100_000):
            every = [
                torch.randn(group.size, count, generator=torch.Generator().manual_seed(r)).to(dtype)
                for r in range(group.size)
            ]
            for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT):
                part = torch.empty(count, dtype=dtype)
                work = group.reduce_scatter_tensor(part, every[group.rank].view(-1), op.value, async_op=True)
                work.wait()
                same(part, tree_reduce([each[group.rank] for each in every], op), f"{dtype} {op} {count}")
            uneven = [each.view(-1)[: group.size * 4 + 1] for each in every]
            mine = list(uneven[group.rank].tensor_split(group.size))
            part = torch.empty_like(mine[group.rank])
            group.reduce_scatter(part, mine)
            parts = [each.tensor_split(group.size)[group.rank] for each in uneven]
            same(part, tree_reduce(parts, ReduceOp.SUM), f"{dtype} uneven")


def large_results_are_gathered(group: Group) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
        rows = -(-(3 << 20) // (1000 * group.size * dtype.itemsize))
        parts = [values(r, (rows, 1000), dtype) for r in range(group.size)]
        expected = torch.cat(parts)
        outputs = [torch.empty_like(expected) for _ in range(2)]
        works = [group.all_gather_into_tensor(output, parts[group.rank], async_op=True) for output in outputs]
        for output, work in zip(outputs, works, strict=True):
            work.wait()
            same(output, expected, f"{dtype}")
        own = outputs[0].zero_()[group.rank * rows : (group.rank + 1) * rows]
        own.copy_(parts[group.rank])
        group.all_gather_into_tensor(outputs[0], own)
        same(outputs[0], expected, f"{dtype}, from its own place")


def all_to_all_takes_even_and_uneven(group: Group) -> None:
    for dtype in MOVED:
        inputs = [values(group.rank * 10 + r, (r + group.rank,), dtype) for r in range(group.size)]
        outputs = [torch.empty(r + group.rank, dtype=dtype) for r in range(group.size)]
        group.all_to_all(outputs, inputs)
        for r, output in enumerate(outputs):
            same(output, values(r * 10 + group.rank, (r + group.rank,), dtype), f"{dtype}")
        flat = torch.empty(group.size, 3, dtype=dtype)
        group.all_to_all_single(
            flat, torch.stack([values(group.rank * 10 + r, (3,), dtype) for r in range(group.size)])
        )
        for r in range(group.size):
            same(flat[r], values(r * 10 + group.rank, (3,), dtype), f"flat {dtype}")
    sent = torch.arange(group.size * 2.0).reshape(group.size, 2) + 100 * group.rank
    received = torch.empty(group.size, 2)
    group.all_to_all_single(received, sent)
    assert received[:, 0].tolist() == [100.0 * r + 2 * group.rank for r in range(group.size)]
    counts = [r + 1 for r in range(group.size)]
    received = torch.empty((group.rank + 1) * group.size, dtype=torch.int64)
    group.all_to_all_single(received, torch.full((sum(counts),), group.rank), [group.rank + 1] * group.size, counts)
    assert received.tolist() == [r for r in range(group.size) for _ in range(group.rank + 1)]


def min_and_max_keep_nan_on_whichever_rank_it_is(group: Group) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for op, infinity in (("max", -torch.inf), ("min", torch.inf)):
            rows = torch.tensor([[-1.5, 2.0, -0.0, infinity], [3.0, -4.0, 0.5, infinity], [0.0, 1.0, 2.0, infinity]])
            rows = torch.cat([rows, torch.eye(3)], 1).to(dtype)
            rows[:, 4:][torch.eye(3, dtype=torch.bool)] = torch.nan
            expected = torch.amax(rows, 0) if op == "max" else torch.amin(rows, 0)
            mine = rows[group.rank].clone()
            group.all_reduce(mine, op)
            torch.testing.assert_close(mine, expected, equal_nan=True, rtol=0, atol=0)
            at_root = rows[group.rank].clone()
            group.reduce(at_root, 1, op)
            torch.testing.assert_close(
                at_root, expected if group.rank == 1 else rows[group.rank], equal_nan=True, rtol=0, atol=0
            )
            part = torch.empty(2, dtype=dtype)
            group.reduce_scatter_tensor(part, rows[group.rank, 1:].contiguous(), op)
            own = expected[1 + 2 * group.rank : 3 + 2 * group.rank]
            torch.testing.assert_close(part, own, equal_nan=True, rtol=0, atol=0)


def gather_and_scatter_take_uneven_parts(group: Group) -> None:
    for root in range(group.size):
        for dtype in (torch.float32, torch.bool, torch.int16):
            at_root = group.rank == root
            outputs = [torch.empty(r + 1, dtype=dtype) for r in range(group.size)] if at_root else None
            group.gather(values(group.rank, (group.rank + 1,), dtype), outputs, root)
            for r, output in enumerate(outputs or ()):
                same(output, values(r, (r + 1,), dtype), f"gather {root}")
            inputs = [values(r, (r + 1,), dtype) for r in range(group.size)] if at_root else None
            output = torch.empty(group.rank + 1, dtype=dtype)
            group.scatter(output, inputs, root)
            same(output, values(group.rank, (group.rank + 1,), dtype), f"scatter {root}")


def send_and_recv_match_by_tag(group: Group) -> None:
    if group.rank == 0:
        group.send(torch.tensor([1.0]), dst=1, tag=7, async_op=True)
        group.send(torch.tensor([2.0]), dst=1, tag=8)
    if group.rank == 1:
        first, second = torch.empty(1), torch.empty(1)
        group.recv(second, src=0, tag=8)
        group.recv(first, src=0, tag=7)
        assert (first.item(), second.item()) == (1.0, 2.0)


def receives_of_other_tags_do_not_wait_for_one_another(group: Group) -> None:
    """The answer to the second makes the peer send the first; and long ones, of many tags, in any order."""
    if group.rank == 0:
        first, second = torch.zeros(1), torch.zeros(1)
        work = group.recv(first, src=1, tag=1, async_op=True)
        group.recv(second, src=1, tag=2)
        group.send(second + 1, dst=1)
        work.wait()
        same(torch.cat([first, second]), torch.tensor([4.0, 2.0]), "tags 1 and 2")
    elif group.rank == 1:
        group.send(torch.tensor([2.0]), dst=0, tag=2)
        told = torch.zeros(1)
        group.recv(told, src=0)
        group.send(told + 1, dst=0, tag=1)
    order = [(tag, turn) for turn in range(3) for tag in range(5)]
    if group.rank == 0:
        received = {key: torch.zeros(70_000) for key in order}
        works = {key: group.recv(received[key], src=1, tag=key[0], async_op=True) for key in order}
        for key in sorted(order, reverse=True):
            works[key].wait()
            same(received[key], torch.full((70_000,), 10.0 * key[0] + key[1]), f"tag and turn {key}")
    elif group.rank == 1:
        for tag, turn in sorted(order, key=lambda key: (key[1], -key[0])):
            group.send(torch.full((70_000,), 10.0 * tag + turn), dst=0, tag=tag)


def recv_any_takes_each_message_once_and_says_whose_it_is(group: Group) -> None:
    """Long ones fill what a rank may send ahead; those with another tag wait, in order, for who asks for them."""
    size, sources = group.size, []
    for count in (1, 50_000):
        if group.rank == 0:
            others = []
            for _ in range(size - 1):
                tensor = torch.empty(count)
                group.recv_any(tensor, tag=3, arrived=sources.append)
                same(tensor, torch.full((count,), float(sources[-1])), "recv_any")
                others.append(torch.empty(count))
                group.recv(others[-1], sources[-1], tag=4)
                same(others[-1], torch.full((count,), 4.0), "recv beside it")
        else:
            ahead = group.send(torch.full((count,), 4.0), 0, tag=4, async_op=True)
            group.send(torch.full((count,), float(group.rank)), 0, tag=3)
            ahead.wait()
        group.barrier()
    if group.rank == 0:
        assert sorted(sources) == sorted([*range(1, size)] * 2)
        column = torch.zeros(2, 2)
        group.recv_any(column[:, 0], tag=5)
        same(column, torch.tensor([[1.0, 0.0], [1.0, 0.0]]), "recv_any into a column")
    elif group.rank == 1:
        group.send(torch.ones(2), 0, tag=5)
    group.barrier()


def recv_any_goes_on_while_this_rank_sends(group: Group) -> None:
    if group.rank < 2:
        received, source = torch.empty(200_000), []
        work = group.recv_any(received, arrived=source.append, async_op=True)
        sent = group.send(torch.full((200_000,), float(group.rank)), 1 - group.rank, async_op=True)
        sent.wait()
        work.wait()
        assert source == [1 - group.rank]
        assert received.eq(1 - group.rank).all()
    group.barrier()
    message = torch.zeros(1)  # and while another recv waits for what comes only after it
    if group.rank == 0:
        later = torch.zeros(1)
        work = group.recv(later, 1, tag=9, async_op=True)
        group.recv_any(message, tag=8)
        group.send(message, 1)
        work.wait()
        assert [message.item(), later.item()] == [8.0, 9.0]
    elif group.rank == 1:
        group.send(torch.tensor([8.0]), 0, tag=8)
        group.recv(message, 0)
        group.send(torch.tensor([9.0]), 0, tag=9)
    group.barrier()


def monitored_barrier_lets_all_pass(group: Group) -> None:
    for _ in range(2):
        group.monitored_barrier(timeout=60.0)
    with pytest.raises(ValueError, match=f"rank {group.rank}: monitored_barrier with timeout 0"):
        group.monitored_barrier(timeout=0)


def async_work_completes_in_any_order_of_waiting(group: Group) -> None:
    tensors = [torch.full((4,), float(group.rank + i)) for i in range(5)]
    works = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
        assert work.is_done()
        work.wait()  # waiting again is harmless
    base = sum(range(group.size))
    assert [tensor[0].item() for tensor in tensors] == [base + i * group.size for i in range(5)]
    parts = [torch.empty(count) for count in (100_000, 5)]
    works = [
        group.reduce_scatter_tensor(part, torch.full((group.size * len(part),), float(group.rank)), async_op=True)
        for part in parts
    ]
    for part, work in reversed(list(zip(parts, works, strict=True))):
        work.wait()
        same(part, torch.full_like(part, float(base)), f"{len(part)}")


def values_travel_as_json(group: Group) -> None:
    everyone = group.all_gather_values({"rank": group.rank, "name": "é" * group.rank})
    assert everyone == [{"rank": r, "name": "é" * r} for r in range(group.size)]
    assert group.broadcast_value([1, None, "x"] if group.rank == 1 else None, src=1) == [1, None, "x"]
    with pytest.raises(TypeError, match="cannot be sent as JSON"):
        group.all_gather_values({1, 2})


def subgroups_talk_among_themselves(group: Group) -> None:
    pair = group.subgroup([2, 0])
    assert (pair is None) == (group.rank == 1)
    if pair is not None:
        assert pair.ranks == (2, 0)
        assert pair.rank == (0 if group.rank == 2 else 1)
        tensor = torch.tensor([float(group.rank)])
        pair.broadcast(tensor, src=0)
        assert tensor.item() == 2.0
        alone = pair.subgroup([pair.rank])
        assert alone is not None
        assert alone.ranks == (group.rank,)
        alone.all_reduce(tensor)
    again = group.subgroup([2, 0])
    if again is not None:
        again.barrier()


def wrong_arguments_name_rank_and_value(group: Group) -> None:
    with pytest.raises(ValueError, match=rf"rank {group.rank}: broadcast with src=9; expected a rank in \[0, 3\)"):
        group.broadcast(torch.ones(1), src=9)
    with pytest.raises(ValueError, match="got 2 tensors as outputs; expected one per rank"):
        group.all_gather([torch.ones(1)] * 2, torch.ones(1))
    with pytest.raises(ValueError, match="expected the larger to be 3"):
        group.all_gather_into_tensor(torch.ones(4), torch.ones(2))
    with pytest.raises(TypeError, match="expected one dtype"):
        group.reduce_scatter_tensor(torch.ones(1), torch.ones(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="is this rank itself"):
        group.send(torch.ones(1), dst=group.rank)
    with pytest.raises(ValueError, match="do not divide"):
        group.all_to_all_single(torch.ones(4), torch.ones(4))
    with pytest.raises(ValueError, match="sum to 3"):
        group.all_to_all_single(torch.ones(4), torch.ones(4), [1, 1, 1], [1, 1, 2])
    with pytest.raises(ValueError, match="distinct ranks"):
        group.subgroup([0, 0])


def closed_groups_refuse_calls(group: Group) -> None:
    from phalanx.errors import GroupAborted

    child = group.subgroup(range(group.size))
    assert child is not None
    child.barrier()
    child.close()
    with pytest.raises(GroupAborted, match="closed"):
        child.all_reduce(torch.ones(1))
    group.barrier()


CASES = [
    all_reduce_sums_every_dtype_and_shape,
    all_reduce_has_every_operation,
    all_reduce_of_bools_is_or_and_and,
    meaningless_reductions_are_refused,
    non_contiguous_tensors_work_in_place,
    conjugations_and_signs_that_torch_put_off_are_carried_out,
    reduce_leaves_the_others_alone,
    broadcast_moves_every_dtype,
    all_gather_takes_even_and_uneven,
    empty_flat_tensors_work,
    reduce_scatter_takes_even_and_uneven,
    large_results_are_gathered,
    all_to_all_takes_even_and_uneven,
    min_and_max_keep_nan_on_whichever_rank_it_is,
    gather_and_scatter_take_uneven_parts,
    send_and_recv_match_by_tag,
    receives_of_other_tags_do_not_wait_for_one_another,
    recv_any_takes_each_message_once_and_says_whose_it_is,
    recv_any_goes_on_while_this_rank_sends,
    monitored_barrier_lets_all_pass,
    async_work_completes_in_any_order_of_waiting,
    values_travel_as_json,
    subgroups_talk_among_themselves,
    wrong_arguments_name_rank_and_value,
    closed_groups_refuse_calls,
]
ONE_LEVEL_CASES = [reduce_scatter_adds_along_one_tree, *CASES]
"""Of groups in two levels, hosts decide the order of additions."""


@pytest.mark.fast
@pytest.mark.parametrize("case", ONE_LEVEL_CASES, ids=lambda case: case.__name__)
def test_on_simulated_ranks(case) -> None:
    try:
        simulate(WORLD).run(case)
    except RankFailed as error:
        raise error.__cause__ from error


def run_all_cases(worker, backend: str) -> None:
    group = worker.group(backend=backend)
    for case in ONE_LEVEL_CASES:
        try:
            case(group)
        except BaseException as error:
            error.add_note(f"in case {case.__name__}") if hasattr(error, "add_note") else None
            raise
        group.barrier()


def test_on_gloo_processes() -> None:
    outcomes = run_processes(WORLD, run_all_cases, "gloo")
    assert [outcome.exit_code for outcome in outcomes] == [0] * WORLD
