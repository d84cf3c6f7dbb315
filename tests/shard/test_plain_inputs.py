"""Plain tensors beside sharded ones: compared across ranks, or each rank's own, never silently wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from phalanx import shard
from phalanx.comm import Group, observe, simulate, use_group
from phalanx.comm.stores import FileStore
from processes import run_processes
from shard.layouts import chunk, gathered, grid

LAYOUTS = {
    "rows": chunk(4),
    "columns": chunk(4, 1),
    "turned": chunk(4, 0, [3, 1, 0, 2]),
    "one rank": chunk(4, 0, [2]),
    "several": chunk(4, 0, [0, 1, 1, 3, 0]),
    "grid": grid((8, 6)),
}
OPERATIONS = {
    "linear": lambda w, x, b: functional.linear(x, w, b),
    "matmul": lambda w, x, b: torch.einsum("bi,oi->bo", x, w),
    "pointwise": lambda w, x, b: w * x[:1],
    "cross entropy": lambda w, x, b: functional.cross_entropy(functional.linear(x, w), torch.arange(len(x))),
    "keyword": lambda w, x, b: functional.linear(input=x, weight=w, bias=b),
}


def batch(rank):
    """Another number of rows on every rank."""
    return torch.randn(rank + 1, 6, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def bias():
    return torch.randn(8, generator=torch.Generator().manual_seed(99)).requires_grad_()


def table():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100))


def check_per_rank(group, layout):
    """Every operation on this rank's own batch: its result, its batch's and bias' gradients, the sum at the owners."""
    results = {}
    for name, operation in OPERATIONS.items():
        weight = shard._shard_tensor(table().requires_grad_(), layout, verify=False)
        x, b = batch(group.rank), bias()
        with shard.plain_inputs("per_rank"):
            out = operation(weight, x, b)
        assert type(out) is torch.Tensor
        out.pow(2).sum().backward()
        grads = [part.tensor.grad for part in weight.local_shards()]
        results[name] = (out.detach(), x.grad, b.grad, gathered(weight._with_tensors(grads, torch.empty(0))))
    return results


def wanted_per_rank(num_ranks):
    """The reference: a whole table, all ranks' losses summed."""
    results = [{} for _ in range(num_ranks)]
    for name, operation in OPERATIONS.items():
        weight, parts = table().requires_grad_(), []
        for rank in range(num_ranks):
            x, b = batch(rank), bias()
            out = operation(weight, x, b)
            out.pow(2).sum().backward()
            parts.append((out.detach(), x.grad, b.grad))
        for rank, part in enumerate(parts):
            results[rank][name] = (*part, weight.grad if rank == 0 else None)
    return results


def compare(found, wanted):
    for name, parts in wanted.items():
        for what, one, other in zip(("result", "x", "bias", "weight"), found[name], parts, strict=True):
            torch.testing.assert_close(one, other, msg=lambda m, n=name, w=what: f"{n}, {w}: {m}")


@pytest.mark.fast
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_gets_the_result_of_its_own_batch(layout) -> None:
    for found, wanted in zip(simulate(4).run(check_per_rank, LAYOUTS[layout]), wanted_per_rank(4), strict=True):
        compare(found, wanted)


@pytest.mark.fast
@pytest.mark.parametrize("name", OPERATIONS)
def test_different_batches_are_refused_by_default(name) -> None:
    def main(group):
        weight = shard._shard_tensor(table(), chunk(2), verify=False)
        x = torch.full((3, 6), float(group.rank))
        with pytest.raises(ValueError, match="not the same on all ranks") as caught:
            OPERATIONS[name](weight, x, bias())
        return str(caught.value)

    first, second = simulate(2).run(main)
    assert "of a ShardedTensor" in first
    assert "rank 0 has torch.float32" in first
    assert ", rank 1 has torch.float32" in first
    assert "rank 1 has torch.float32" in second
    assert 'plain_inputs("per_rank")' in first


@pytest.mark.fast
def test_the_message_names_operation_argument_and_ranks() -> None:
    def main(group, case):
        weight = shard._shard_tensor(table(), chunk(3), verify=False)
        x = torch.arange(18.0).reshape(3, 6)
        odd = group.rank == 2
        if odd and case == "permuted":
            x = x.flip(0)
        if odd and case == "shape":
            x = x[:2]
        if odd and case == "dtype":
            x = x.int()
        changed = torch.zeros(8) + (odd and case == "bias")
        with pytest.raises(ValueError) as caught:
            functional.linear(x, weight, bias=changed)
        return str(caught.value)

    for case, wanted in (
        ("permuted", "linear of a ShardedTensor: argument 0, a plain tensor, is not"),
        ("shape", r"rank 2 has torch.float32 (2, 6)"),
        ("dtype", r"rank 2 has torch.int32 (3, 6)"),
        ("bias", "linear of a ShardedTensor: bias, a plain tensor, is not"),
    ):
        assert wanted in simulate(3).run(main, case)[0]


@pytest.mark.fast
def test_in_place_writes_of_different_values_are_refused() -> None:
    def main(group):
        weight = shard.ones(chunk(2), 4, 6)
        mine = torch.full((4, 6), float(group.rank))
        for write in (lambda: weight.copy_(mine), lambda: weight.mul_(mine), lambda: weight.add_(mine[0, 0])):
            with pytest.raises(ValueError, match="not the same on all ranks"):
                write()
        with shard.plain_inputs("per_rank"):
            with pytest.raises(NotImplementedError, match="in place"):
                weight.mul_(mine)
            with pytest.raises(ValueError, match="not the same on all ranks"):
                weight.copy_(mine)
        assert weight.local_tensor().eq(1).all()
        return gathered(weight.copy_(torch.full((4, 6), 5.0)))

    assert simulate(2).run(main)[0].eq(5).all()


@pytest.mark.fast
def test_the_check_is_one_small_collective_and_can_be_left_out() -> None:
    def main(group):
        weight, x = shard._shard_tensor(table(), chunk(2), verify=False), torch.ones(3, 6)
        counts = {}
        for policy in ("verify", "equal"):
            events = []
            with observe(events.append), shard.plain_inputs(policy):
                functional.linear(x, weight)
            counts[policy] = [(event.name, event.nbytes) for event in events]
        return counts

    for counts in simulate(2).run(main):
        assert counts["verify"] == [("all_gather_into_tensor", 16), *counts["equal"]]
        assert counts["equal"] == []


@pytest.mark.fast
def test_policies_nest_and_wrong_ones_are_refused() -> None:
    with (
        pytest.raises(ValueError, match="expected one of verify, equal, per_rank"),
        shard.plain_inputs("maybe"),
    ):
        pass

    def main(group):
        weight, x = shard.ones(chunk(2), 4, 3), torch.full((1, 3), float(group.rank))
        with shard.plain_inputs("per_rank"):
            assert float((x @ weight.t()).sum()) == 12 * group.rank
            with shard.plain_inputs("verify"), pytest.raises(ValueError, match="not the same"):
                x @ weight.t()
            assert float((x @ weight.t()).sum()) == 12 * group.rank

    simulate(2).run(main)


@pytest.mark.fast
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_plain_operands_get_their_whole_gradient(layout) -> None:
    shapes = {"whole": (8, 6), "row": (6,), "column": (8, 1), "number": ()}

    def loss(weight, shape):
        plain = torch.randn(shape, generator=torch.Generator().manual_seed(7)).requires_grad_()
        (weight * plain).pow(2).sum().backward()
        return plain.grad

    def main(group):
        weight = shard._shard_tensor(table().requires_grad_(), LAYOUTS[layout], verify=False)
        return {name: loss(weight, shape) for name, shape in shapes.items()}

    for found in simulate(4).run(main):
        for name, shape in shapes.items():
            torch.testing.assert_close(found[name], loss(table(), shape))


@pytest.mark.fast
def test_a_sharded_linear_trains_data_parallel() -> None:
    """Batches of different sizes; weights as if one process had seen all of them."""

    def data(rank, step):
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(rank + 2, 6, generator=generator)

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def main(group):
        model = make()
        shard.shard_module(model, shard.ShardingPlan({"0.weight": chunk(2), "2.weight": chunk(2, 1)}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            with shard.plain_inputs("per_rank"):
                model(data(group.rank, step)).pow(2).sum().backward()
            for parameter in model.parameters():
                if not isinstance(parameter, shard.ShardedTensor):
                    group.all_reduce(parameter.grad)
            optimizer.step()
        return shard.gather_state_dict(model.state_dict())

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        sum(model(data(rank, step)).pow(2).sum() for rank in range(2)).backward()
        optimizer.step()
    found = simulate(2).run(main)[0]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor)


def on_gloo(worker, file):
    group = Group.create(FileStore(file), worker.rank, worker.size, backend="gloo", timeout=120)
    with group, use_group(group):
        compare(check_per_rank(group, chunk(2, 0, [1, 0])), wanted_per_rank(worker.size)[worker.rank])
        weight = shard._shard_tensor(table(), chunk(2))
        with pytest.raises(ValueError, match="argument 0, a plain tensor, is not the same on all ranks"):
            functional.linear(batch(worker.rank), weight)
        same = functional.linear(batch(0), weight)
        torch.testing.assert_close(gathered(same), functional.linear(batch(0), table()) if worker.rank == 0 else None)
        return True


@pytest.mark.timeout(240)
def test_both_ways_on_gloo(tmp_path) -> None:
    outcomes = run_processes(2, on_gloo, str(tmp_path / "store"), timeout=200)
    assert [outcome.value for outcome in outcomes] == [True, True]
