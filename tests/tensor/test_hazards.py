"""Ways in which a distributed tensor could be silently wrong: each is right, or refused with a clear error."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from phalanx import comm
from phalanx.comm import init_device_mesh
from phalanx.tensor import (
    DTensor,
    ImplicitCommunicationError,
    NoShardingRule,
    Partial,
    Replicate,
    Shard,
    communication_mode,
    distribute_tensor,
    fallback_counts,
    fallback_policy,
    implicit_replication,
)


def on_mesh(body: Callable[..., Any], *shape: int, names: Any = None) -> list[Any]:
    shape = shape or (2,)
    size = 1
    for n in shape:
        size *= n
    return comm.simulate(size).run(lambda group: body(init_device_mesh("cpu", shape, mesh_dim_names=names)))


def test_plain_tensors_beside_dtensors_are_an_error_that_names_them() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        with pytest.raises(
            RuntimeError,
            match=r"add got a plain tensor of shape \(4, 4\) \(tensor argument 1\).*test_hazards",
        ):
            x + torch.ones(4, 4)
        with pytest.raises(RuntimeError, match="implicit_replication"):
            torch.cat([x, torch.ones(4, 4)])
        with implicit_replication():
            assert (x + torch.ones(4, 4)).full_tensor().tolist() == [[2.0] * 4] * 4
        assert (x + 1).full_tensor().tolist() == [[2.0] * 4] * 4
        assert (x * torch.tensor(3.0)).full_tensor()[0, 0] == 3

    on_mesh(body)


def test_numpy_cannot_swallow_a_dtensor() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with pytest.raises((TypeError, RuntimeError)):
            np.ones(4) + x
        with pytest.raises((TypeError, RuntimeError)):
            x + np.ones(4)

    on_mesh(body)


def test_sub_mesh_meets_root() -> None:
    def body(mesh: Any) -> None:
        a = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0), Replicate()])
        w = distribute_tensor(torch.arange(6.0).view(2, 3), mesh["tp"], [Shard(1)]).requires_grad_()
        out = a @ w
        assert out.placements == (Shard(0), Shard(1))
        out.sum().backward()
        assert w.grad is not None
        assert w.grad.full_tensor().tolist() == [[12.0] * 3, [16.0] * 3]
        other = init_device_mesh("cpu", (4,))
        with pytest.raises(ValueError, match="not parts of one another"):
            a + distribute_tensor(torch.ones(4, 2), other, [Shard(0)])

    on_mesh(body, 2, 2, names=("dp", "tp"))


def test_explicit_mode_names_op_layout_bytes_and_line() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        y = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
        w = distribute_tensor(torch.ones(4, 4), mesh).requires_grad_()
        with communication_mode("explicit"):
            assert (x * 2 + x).placements == (Shard(0),)
            with pytest.raises(ImplicitCommunicationError, match=r"add needs .*S\(.*\).* 32 B.*test_hazards\.py"):
                x + y
            with pytest.raises(ImplicitCommunicationError, match="backward of matmul sums the gradient"):
                x @ w
        with communication_mode("warn"), pytest.warns(UserWarning, match="add needs"):
            x + y
        assert (x + y).full_tensor()[0, 0] == 2

    on_mesh(body)


def test_fallbacks_are_named_and_counted() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.eye(4) * 2, mesh, [Shard(0)])
        before = fallback_counts().get("trace", 0)
        assert torch.trace(x).item() == 8
        assert fallback_counts()["trace"] == before + 1
        with fallback_policy("error"), pytest.raises(NoShardingRule, match=r"trace on .*S\(0\)"):
            torch.trace(x)
        with fallback_policy("warn"), pytest.warns(UserWarning, match="computed replicated"):
            torch.trace(x)

    on_mesh(body)


def test_hidden_mutation_is_written_back() -> None:
    def body(mesh: Any) -> None:
        torch.manual_seed(0)
        plain = nn.BatchNorm1d(4)
        data = torch.randn(6, 4)
        plain(data)
        mine = nn.BatchNorm1d(4)
        for name in ("running_mean", "running_var"):
            setattr(mine, name, distribute_tensor(getattr(mine, name), mesh, [Shard(0)]))
        mine.weight = nn.Parameter(distribute_tensor(mine.weight, mesh))
        mine.bias = nn.Parameter(distribute_tensor(mine.bias, mesh))
        mine.num_batches_tracked = distribute_tensor(mine.num_batches_tracked, mesh)
        mine(distribute_tensor(data, mesh, [Shard(0)]))
        assert mine.running_mean.placements == (Shard(0),)
        torch.testing.assert_close(mine.running_mean.full_tensor(), plain.running_mean)
        torch.testing.assert_close(mine.running_var.full_tensor(), plain.running_var)
        x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
        x.index_fill_(0, distribute_tensor(torch.tensor([1, 4]), mesh), 9.0)
        assert x.full_tensor().tolist() == [0.0, 9.0, 2.0, 3.0, 9.0, 5.0]

    on_mesh(body)


def test_indexing_get_and_set() -> None:
    def body(mesh: Any) -> None:
        plain = torch.arange(24.0).view(4, 6)
        x = distribute_tensor(plain, mesh, [Shard(0)])
        index = torch.tensor([3, 0])
        lifted = distribute_tensor(index, mesh)
        torch.testing.assert_close(x[lifted].full_tensor(), plain[index])
        torch.testing.assert_close(x[:, lifted].full_tensor(), plain[:, index])
        torch.testing.assert_close(x[1:3, ::2].full_tensor(), plain[1:3, ::2])
        torch.testing.assert_close(x[..., None, 0].full_tensor(), plain[..., None, 0])
        torch.testing.assert_close(x[x > 5].full_tensor(), plain[plain > 5])
        x[1] = 0
        x[:, 2] = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        x[lifted, 3] = -1.0
        x[x > 20] = 20
        plain[1] = 0
        plain[:, 2] = torch.ones(4)
        plain[index, 3] = -1.0
        plain[plain > 20] = 20
        torch.testing.assert_close(x.full_tensor(), plain)

    on_mesh(body)


def test_out_arguments() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        out = distribute_tensor(torch.zeros(4), mesh)
        assert torch.add(x, x, out=out) is out
        assert out.placements == (Replicate(),)
        assert out.to_local().tolist() == [0.0, 2.0, 4.0, 6.0]
        with pytest.raises(RuntimeError, match="not resized"):
            torch.add(x, x, out=distribute_tensor(torch.zeros(3), mesh))
        values, indices = torch.sort(
            x,
            descending=True,
            out=(
                distribute_tensor(torch.zeros(4), mesh),
                distribute_tensor(torch.zeros(4, dtype=torch.int64), mesh),
            ),
        )
        assert values.to_local().tolist() == [3.0, 2.0, 1.0, 0.0]
        assert indices.to_local().tolist() == [3, 2, 1, 0]

    on_mesh(body)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripts_and_forward_mode_are_refused() -> None:
    """On one rank: forward mode is a state of the process, not of a simulated rank."""
    script = torch.jit.script(nn.Linear(4, 2))

    def rank_main(group: Any) -> None:
        x = distribute_tensor(torch.ones(3, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(NotImplementedError, match="hold plain tensors"):
            script(x)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            forward_ad.make_dual(x, x)
        with pytest.raises(IndexError, match="expected a dim from -2 to 1"):
            x.redistribute(placements=[Shard(2)])

    comm.simulate(1).run(rank_main)


def test_data_keeps_dtype_and_shape_true() -> None:
    def body(mesh: Any) -> None:
        p = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
        p.data = distribute_tensor(torch.zeros(6, 2, dtype=torch.float64), mesh, [Shard(0)])
        assert p.shape == (6, 2)
        assert p.dtype == torch.float64
        assert (p + 1).full_tensor().sum() == 12
        with pytest.raises(TypeError, match="plain"):
            p.data = torch.ones(4, 2)

    on_mesh(body)


def test_from_local_never_guesses() -> None:
    def body(mesh: Any) -> None:
        rank = mesh.get_rank()
        uneven = DTensor.from_local(torch.ones([3, 3, 1][rank], 2), mesh, [Shard(0)])
        assert uneven.shape == (7, 2)
        with pytest.raises(ValueError, match="cut as torch"):
            DTensor.from_local(torch.ones([1, 3, 3][rank], 2), mesh, [Shard(0)])
        with pytest.raises(ValueError, match="gives this rank"):
            DTensor.from_local(torch.ones(2), mesh, [Shard(0)], shape=(9,))
        with pytest.raises(ValueError, match="replicas have one shape"):
            DTensor.from_local(torch.ones(2 + rank, 2), mesh, [Shard(1)], run_check=True)
        checked = DTensor.from_local(torch.full((2,), float(rank)), mesh, [Replicate()], run_check=True)
        assert checked.to_local().tolist() == [0.0, 0.0]
        with pytest.raises(TypeError, match="plain"):
            DTensor.from_local(uneven, mesh, [Replicate()])

    on_mesh(body, 3)


def test_from_local_refuses_a_stride_that_the_tensor_will_not_have() -> None:
    def body(mesh: Any) -> None:
        rows = torch.ones(2, 3)
        for stride in ((3, 1), [3, 1], torch.Size((3, 1))):
            x = DTensor.from_local(rows, mesh, [Shard(0)], shape=(4, 3), stride=stride)
            assert x.stride() == (3, 1)
        turned = DTensor.from_local(torch.ones(3, 2).t(), mesh, [Shard(0)], stride=(1, 4))
        assert turned.stride() == (1, 4)
        DTensor.from_local(torch.ones(2, 1), mesh, [Shard(0)], stride=(1, 7))
        for stride in ((1, 4), (6, 1), (1,)):
            with pytest.raises(ValueError, match=r"got stride=.* expected \(3, 1\)"):
                DTensor.from_local(rows, mesh, [Shard(0)], shape=(4, 3), stride=stride)

    on_mesh(body, 2)


def test_to_local_and_full_tensor_gradients() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(4), mesh).requires_grad_()
        x.to_local(grad_placements=[Partial()]).sum().backward()
        assert x.grad is not None
        assert x.grad.to_local().tolist() == [2.0] * 4, "each rank contributed one"
        y = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        (y.full_tensor() * torch.arange(4.0)).sum().backward()
        assert y.grad is not None
        assert y.grad.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]
        local = torch.ones(2, requires_grad=True)
        DTensor.from_local(local, mesh, [Partial()]).sum().backward()
        assert local.grad is not None
        assert local.grad.tolist() == [1.0, 1.0]

    on_mesh(body)


def test_the_gradient_of_a_full_tensor_is_laid_out_as_it_was_said() -> None:
    def body(mesh: Any) -> None:
        def gradient(given: Any) -> list[float]:
            x = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
            own = torch.arange(4.0) * (mesh.get_rank() + 1)
            (x.full_tensor(grad_placements=[given]) * own).sum().backward()
            assert x.grad is not None
            assert x.grad.placements == (Shard(0),)
            return list(x.grad.full_tensor().tolist())

        assert gradient(Partial()) == [0.0, 3.0, 6.0, 9.0], "both ranks' gradients, summed"
        assert gradient(Partial("avg")) == [0.0, 1.5, 3.0, 4.5]
        assert gradient(Replicate()) == [0.0, 1.0, 4.0, 6.0], "each rank's own part of what it has"

    on_mesh(body, 2)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_data_is_that_of_rank_0_where_ranks_hold_different_data(shape: tuple[int, ...]) -> None:
    def body(mesh: Any) -> None:
        truth = torch.arange(15.0).view(5, 3)
        own = truth + 100 * mesh.get_rank()
        for placements in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=mesh.ndim):
            x = distribute_tensor(own, mesh, placements)
            expected = distribute_tensor(truth, mesh, placements, src_data_rank=None)
            assert torch.equal(x.to_local(), expected.to_local()), placements
            assert torch.equal(x.full_tensor(), truth), placements

    on_mesh(body, *shape)


def test_what_was_gathered_for_a_fallback_is_not_kept() -> None:
    def body(mesh: Any) -> None:
        plain = torch.eye(4) * 2
        x = distribute_tensor(plain, mesh, [Shard(0)]).requires_grad_()
        before = sum(fallback_counts().values())
        assert torch.trace(x).item() == 8
        assert sum(fallback_counts().values()) > before, "trace has no rule"
        with torch.no_grad():
            x.mul_(0.5)
        assert torch.trace(x).item() == 4
        x.data.mul_(3)
        assert torch.trace(x).item() == 12

    on_mesh(body, 2)


def test_the_gradient_of_a_local_tensor_is_laid_out_on_request() -> None:
    def body(mesh: Any) -> None:
        def gradient(placement: Any, wanted: Any) -> list[float]:
            local = torch.ones(2, requires_grad=True)
            x = DTensor.from_local(local, mesh, [placement], grad_placements=[wanted])
            (x * x).sum().backward()
            assert local.grad is not None
            return list(local.grad.tolist())

        rank = mesh.get_rank()
        assert gradient(Replicate(), Replicate()) == [2.0, 2.0]
        assert gradient(Replicate(), Partial()) == ([2.0, 2.0] if rank == 0 else [0.0, 0.0]), "shares of the whole"
        assert gradient(Shard(0), Shard(0)) == [2.0, 2.0]
        with pytest.raises(ValueError, match="gradient of shape"):
            DTensor.from_local(torch.ones(2), mesh, [Replicate()], grad_placements=[Shard(0)])

    on_mesh(body, 2)


def test_placements_are_checked() -> None:
    def body(mesh: Any) -> None:
        with pytest.raises(ValueError, match="needs 1 placements"):
            distribute_tensor(torch.ones(4), mesh, [Shard(0), Shard(0)])
        with pytest.raises(IndexError, match="out of range"):
            distribute_tensor(torch.ones(4), mesh, [Shard(1)])
        x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(-1)])
        assert x.placements == (Shard(1),)
        with pytest.raises(ValueError, match="distributed already"):
            distribute_tensor(x, mesh, [Replicate()])
        assert "S(1)" in repr(x)
        assert str(x.shape) == "torch.Size([4, 2])"

    on_mesh(body)


def test_two_simulated_ranks_never_share_a_decision() -> None:
    def body(mesh: Any) -> float:
        x = distribute_tensor(torch.arange(3.0), mesh, [Shard(0)])
        return float((x * 2).sum())

    assert on_mesh(body, 2) == [6.0, 6.0]
    assert on_mesh(body, 3) == [6.0, 6.0, 6.0]


@pytest.mark.parametrize("number", [0.0, -0.0, 0, math.inf, -math.inf, math.nan, 2.0])
def test_sums_meet_numbers_that_are_not_finite_as_on_one_device(number: float) -> None:
    calls: list[Callable[[Any], Any]] = [
        lambda x: x / number,
        lambda x: x * number,
        lambda x: number * x,
        lambda x: torch.div(x, number),
        lambda x: x.clone().mul_(number),
        lambda x: x.clone().div_(number),
        lambda x: torch.add(x, x, alpha=number),
        lambda x: torch._foreach_mul([x], number)[0],
        lambda x: torch._foreach_div([x], [number])[0],
        lambda x: (x + 2) / number,
    ]

    def body(mesh: Any) -> None:
        local = torch.tensor([3.0, -3.0, 1.0]) if mesh.get_rank() else torch.tensor([-1.0, 1.0, 1.0])
        x = DTensor.from_local(local, mesh, [Partial()])
        numpy_ones: list[Callable[[Any], Any]] = [
            lambda x: x / np.float64(number),
            lambda x: x * np.float32(number),
            lambda x: torch.mul(x, complex(number, 0)).real,
        ]
        for index, call in enumerate([*calls, *numpy_ones]):
            ours, expected = call(x).full_tensor(), call(torch.tensor([2.0, -2.0, 2.0]))
            assert torch.allclose(ours, expected, equal_nan=True), (index, ours, expected)
        assert (x * 2.5).placements == (Partial(),)  # finite ones are not waited for

    on_mesh(body)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
@pytest.mark.parametrize("indices", [torch.tensor([1, 3]), torch.tensor([[1, 3, 1]])])
def test_an_embedding_is_differentiated_twice_where_ranks_have_nothing_of_it(
    indices: torch.Tensor, placement: Any
) -> None:
    weight = torch.arange(10.0).view(5, 2)

    def twice(i: Any, w: Any) -> Any:
        (grad,) = torch.autograd.grad((torch.nn.functional.embedding(i, w) ** 2).sum(), w, create_graph=True)
        (grad**2).sum().backward()
        return w.grad

    expected = twice(indices, weight.clone().requires_grad_())

    def body(mesh: Any) -> None:
        for cut in (Replicate(), Shard(0)):
            w = distribute_tensor(weight, mesh, [placement]).requires_grad_()
            found = twice(distribute_tensor(indices, mesh, [cut]), w)
            assert torch.allclose(found.full_tensor(), expected)

    for size in (2, 3):
        on_mesh(body, size)
