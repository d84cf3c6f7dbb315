"""Operations on sharded tensors against the same on whole tensors, with gradients, in several layouts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from phalanx import shard
from phalanx.comm import init_device_mesh, observe, simulate
from phalanx.errors import RankFailed
from phalanx.tensor import DTensor, Partial, Replicate, Shard
from shard.layouts import chunk, gathered, grid

pytestmark = pytest.mark.fast
LAYOUTS = {
    "rows": chunk(4),
    "columns": chunk(4, 1),
    "turned": chunk(4, 0, [3, 1, 0, 2]),
    "grid": grid((8, 6)),
}
OPERATIONS = {
    "linear": lambda w, x: functional.linear(x, w),
    "matmul": lambda w, x: x @ w.t(),
    "pointwise": lambda w, x: torch.tanh(w * 2 + w.sigmoid()) - w.abs(),
    "plain operand": lambda w, x: w * x[:1, :6],
    "sum": lambda w, x: w.sum(),
    "mean of a dim": lambda w, x: w.mean(0),
    "softmax": lambda w, x: functional.softmax(w, -1),
    "log_softmax": lambda w, x: functional.log_softmax(x @ w.t(), -1),
    "norm": lambda w, x: torch.linalg.vector_norm(w),
    "cross entropy": lambda w, x: functional.cross_entropy(x @ w.t(), torch.tensor([1, 2, 3, 4, 5])),
    "reshape": lambda w, x: w.reshape(6, 8),
    "slice": lambda w, x: w[2:5],
}


def whole_of(result):
    """On rank 0: the result as a plain tensor, whatever it came back as."""
    return gathered(result) if isinstance(result, shard.ShardedTensor) else result


def loss_of(result):
    return (result * result).sum() if result.dim() else result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operations_equal_those_on_whole_tensors(layout) -> None:
    def main(group):
        torch.manual_seed(0)
        plain, x = torch.randn(8, 6), torch.randn(5, 6)
        results = {}
        for name, operation in OPERATIONS.items():
            weight = shard._shard_tensor(plain.clone().requires_grad_(), LAYOUTS[layout], verify=False)
            result = operation(weight, x)
            loss_of(result).backward()
            results[name] = (whole_of(result), gathered(weight.grad))
        return results

    found = simulate(4).run(main)[0]
    torch.manual_seed(0)
    plain, x = torch.randn(8, 6), torch.randn(5, 6)
    for name, operation in OPERATIONS.items():
        weight = plain.clone().requires_grad_()
        wanted = operation(weight, x)
        loss_of(wanted).backward()
        torch.testing.assert_close(found[name][0], wanted, msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(found[name][1], weight.grad, msg=lambda m, name=name: f"grad of {name}: {m}")


def test_pointwise_on_equal_layouts_needs_no_collective() -> None:
    def main(group):
        a, b = shard.ones(chunk(2), 4, 3), shard.full(chunk(2), (4, 3), 2.0)
        events = []
        with observe(events.append):
            c = (a + b) * 3 - a / b
            c.add_(1).mul_(b)
            c += a
            d = torch.where(c > 3, c, a)
            assert (c > 3).dtype is torch.bool
            assert torch.zeros_like(a).local_tensor().eq(0).all()
        assert events == []
        return d.local_tensor()[0, 0].item()

    assert simulate(2).run(main) == [20.0, 20.0]


def test_mixed_layouts_and_broadcasts_are_right() -> None:
    def main(group):
        torch.manual_seed(0)
        x, y = torch.randn(4, 6), torch.randn(4, 6)
        a, b = shard._shard_tensor(x, chunk(2)), shard._shard_tensor(y, chunk(2, 1))
        row = shard._shard_tensor(y[0].contiguous(), chunk(2))
        for found, wanted in ((a + b, x + y), (a * row, x * y[0]), (y + a, y + x)):
            whole = whole_of(found)
            assert group.rank or torch.allclose(whole, wanted)
        with pytest.raises(NotImplementedError, match="in place"):
            a.add_(row)
        with pytest.raises(TypeError, match="plain tensor"):
            y.add_(a)
        with pytest.raises(NotImplementedError, match="out="):
            torch.add(a, a, out=a)

    simulate(2).run(main)


def test_conversion_shares_memory_where_the_layout_allows() -> None:
    def main(group):
        weight = shard.ones(chunk(2), 4, 3, requires_grad=True)
        events = []
        with observe(events.append):
            distributed = shard.to_dtensor(weight)
            back = shard.from_dtensor(distributed)
        assert events == []
        assert distributed.placements == (Shard(0),)
        assert back.sharding_spec() == chunk(2)
        assert back.local_tensor().data_ptr() == weight.local_tensor().data_ptr()
        mesh = init_device_mesh("cpu", (2,))
        replicated = shard.from_dtensor(DTensor.from_local(torch.ones(4), mesh, [Replicate()]))
        assert [len(replicated.local_shards()), len(replicated.metadata().shards_metadata)] == [
            group.rank == 0,
            1,
        ]
        with pytest.raises(ValueError, match="redistribute"):
            shard.from_dtensor(DTensor.from_local(torch.ones(4), mesh, [Partial()]))

    simulate(2).run(main)


def test_a_dtensor_on_a_grid_becomes_a_grid_of_shards() -> None:
    from phalanx.tensor import distribute_tensor

    plain = torch.arange(30.0).reshape(5, 6)

    def main(group):
        mesh = init_device_mesh("cpu", (2, 2))
        made = shard.from_dtensor(distribute_tensor(plain, mesh, [Shard(1), Shard(0)]))
        return gathered(made)

    assert torch.equal(simulate(4).run(main)[0], plain)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("wrapped", [False, True])
def test_optimizers_update_shards_as_they_would_the_whole(kind, wrapped) -> None:
    def train(model, optimizer, x):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            optimizer.step()

    def main(group):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4, bias=False)), torch.randn(3, 6)
        if group is not None:
            shard.shard_module(model, shard.ShardingPlan({"0.weight": chunk(2), "2.weight": chunk(2, 1)}))
        if wrapped and group is not None:
            named = dict(shard.named_params_with_sharded_tensor(model))
            optimizer = shard.ShardedOptimizer(named, kind, lr=0.05)
        else:
            optimizer = kind(model.parameters(), lr=0.05)
        train(model, optimizer, x)
        if group is None:
            return model.state_dict()
        return shard.gather_state_dict(model.state_dict())

    found, wanted = simulate(2).run(main)[0], main(None)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor)


def test_optimizer_state_is_named_and_moves_to_another_layout() -> None:
    def main(group):
        torch.manual_seed(0)

        def make(spec):
            weight = nn.Parameter(shard._shard_tensor(torch.ones(4, 6), spec))
            bias = nn.Parameter(torch.ones(3))
            named = {"weight": weight, "bias": bias}
            return named, shard.ShardedOptimizer(named, torch.optim.Adam, lr=0.1)

        def step(named, optimizer):
            named["bias"].grad = torch.ones(3)
            whole = torch.arange(24.0).reshape(4, 6)
            named["weight"].grad = shard._shard_tensor(whole, named["weight"].sharding_spec())
            optimizer.step()

        first, optimizer = make(chunk(2))
        step(first, optimizer)
        state = optimizer.state_dict()
        assert state["param_groups"][0]["params"] == ["weight", "bias"]
        assert isinstance(state["state"]["weight"]["exp_avg"], shard.ShardedTensor)
        second, other = make(chunk(2, 1))
        second["weight"].detach().copy_(first["weight"].detach())
        other.load_state_dict(state)
        for named, each in ((first, optimizer), (second, other)):
            step(named, each)
        with pytest.raises(KeyError, match="no state for"):
            other.load_state_dict({"state": {}, "param_groups": []})
        with pytest.raises(ValueError, match="already"):
            other.add_param_group({"params": {"bias": torch.ones(1)}})
        other.add_param_group({"params": {"more": nn.Parameter(torch.ones(1))}, "lr": 1.0})
        return torch.allclose(first["weight"].detach(), second["weight"].detach(), rtol=0, atol=0)

    assert simulate(2).run(main) == [True, True]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_looks_up_its_own_batch(layout) -> None:
    """Against a whole table and the sum of the ranks' gradients."""
    variants = {
        "embedding": lambda w, i: functional.embedding(i, w),
        "padding": lambda w, i: functional.embedding(i, w, padding_idx=-3),
        "frequency": lambda w, i: functional.embedding(i, w, scale_grad_by_freq=True),
        "mean": lambda w, i: functional.embedding_bag(i, w),
        "max with padding": lambda w, i: functional.embedding_bag(i, w, mode="max", padding_idx=5),
        "weighted sum": lambda w, i: functional.embedding_bag(i, w, mode="sum", per_sample_weights=i.float() / 3),
        "offsets": lambda w, i: functional.embedding_bag(i.flatten(), w, torch.tensor([0, 0, 1]), mode="sum"),
        "max norm": lambda w, i: functional.embedding(i, w, max_norm=1.5, norm_type=2.0),
    }

    def batch(rank):
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(0, 8, (rank + 1, 2), generator=generator)

    def main(group):
        torch.manual_seed(0)
        plain, results = torch.randn(8, 6), {}
        for name, look_up in variants.items():
            table = shard._shard_tensor(plain.clone().requires_grad_(), LAYOUTS[layout], verify=False)
            with torch.no_grad() if name == "max norm" else torch.enable_grad():
                out = look_up(table, batch(group.rank))
            if out.requires_grad:
                out.pow(2).sum().backward()
            results[name] = (out.detach(), gathered(table.grad if table.grad is not None else table.detach()))
        return results

    found = simulate(4).run(main)
    torch.manual_seed(0)
    plain = torch.randn(8, 6)
    for name, look_up in variants.items():
        table = plain.clone().requires_grad_(name != "max norm")
        outputs = [look_up(table, batch(rank)) for rank in range(4)]
        if table.requires_grad:
            torch.stack([out.pow(2).sum() for out in outputs]).sum().backward()
        for rank, out in enumerate(outputs):
            torch.testing.assert_close(found[rank][name][0], out, msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(found[0][name][1], table.grad if table.requires_grad else table)


def test_only_distinct_rows_travel() -> None:
    def main(group):
        table, events = shard.ones(chunk(2), 100, 16), []
        with observe(events.append):
            functional.embedding(torch.tensor([3, 3, 60, 60, 60]), table)
        return [event.nbytes for event in events if event.name in ("all_to_all", "gather", "scatter")]

    assert simulate(2).run(main) == [[64], [64]]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda t, r: functional.embedding(torch.tensor([8 * r]), t), IndexError, "rank 1 asks for row 8"),
        (lambda t, r: functional.embedding(torch.tensor([0]), t, sparse=True), NotImplementedError, "sparse"),
        (lambda t, r: functional.embedding(t, t), TypeError, "plain tensor"),
    ],
)
def test_wrong_lookups_are_refused(call, kind, message) -> None:
    with pytest.raises(RankFailed) as failed:
        simulate(2).run(lambda group: call(shard.ones(chunk(2), 8, 2), group.rank))
    assert isinstance(failed.value.__cause__, kind)
    assert message in str(failed.value.__cause__)
