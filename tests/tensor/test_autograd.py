"""Gradients: hooks, grad, double backward, checkpointing, user functions, in-place, views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshes import Twice
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx import comm
from phalanx.comm import Group, init_device_mesh
from phalanx.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.redistribute._execute import apply_move, follow, route_of, turn_back
from phalanx.tensor.redistribute._plan import plan_redistribute

LAYOUTS = [(Replicate(), Replicate()), (Shard(0), Replicate()), (Shard(0), Shard(1)), (Shard(1), Shard(1))]


def on_mesh(body: Callable[..., Any], shape: tuple[int, ...] = (2, 2)) -> list[Any]:
    size = 1
    for n in shape:
        size *= n

    def rank_main(group: Group) -> Any:
        return body(init_device_mesh("cpu", shape))

    return comm.simulate(size).run(rank_main)


def pair(mesh: Any, placements: Any, *shape: int, seed: int = 0) -> tuple[DTensor, Tensor]:
    plain = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    return distribute_tensor(plain, mesh, placements, src_data_rank=None), plain


def same(ours: Any, reference: Tensor) -> None:
    torch.testing.assert_close(ours.full_tensor(), reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_gradients_have_the_layout_of_their_tensor(placements: Any) -> None:
    def body(mesh: Any) -> None:
        x, px = pair(mesh, placements, 6, 5)
        w, pw = pair(mesh, [Replicate(), Shard(0)], 5, 3, seed=1)
        ((x @ w).tanh() * 2).sum().backward()
        ((px @ pw).tanh() * 2).sum().backward()
        for ours, plain in ((x, px), (w, pw)):
            assert ours.grad is not None
            assert ours.grad.placements == ours.placements
            assert ours.grad is ours.grad, "the wrapper is kept"
            same(ours.grad, plain.grad)

    on_mesh(body)


def test_autograd_grad_and_double_backward() -> None:
    def body(mesh: Any) -> None:
        for placements in LAYOUTS:
            x, px = pair(mesh, placements, 4, 6)

            def twice(t: Any) -> Any:
                (first,) = torch.autograd.grad((t**3).sum(), t, create_graph=True)
                (second,) = torch.autograd.grad((first**2).sum(), t)
                return second

            same(twice(x), twice(px))

    on_mesh(body)


def test_double_backward_through_a_partial_sum() -> None:
    def body(mesh: Any) -> None:
        a, pa = pair(mesh, [Shard(1)], 3, 4)
        b, pb = pair(mesh, [Shard(0)], 4, 3, seed=1)

        def penalty(x: Any, y: Any) -> Any:
            out = (x @ y).relu().square().sum()
            grads = torch.autograd.grad(out, (x, y), create_graph=True)
            return sum((g.square().sum() for g in grads), torch.zeros(()))

        assert (a @ b).placements == (Partial("sum"),)
        ours, plain = penalty(a, b), penalty(pa, pb)
        same(ours, plain)
        ours.backward()
        plain.backward()
        same(a.grad, pa.grad)
        same(b.grad, pb.grad)

    on_mesh(body, (2,))


@pytest.mark.parametrize("placements", [(Partial(), Replicate()), (Shard(1), Partial())], ids=str)
def test_the_short_way_of_a_sum_has_the_bits_of_the_node(placements: Any) -> None:
    def body(mesh: Any) -> None:
        spec = Spec.of(mesh, placements, (4, 6), torch.float32)
        target = spec.with_placements([Replicate() if p.is_partial() else p for p in placements])
        route = turn_back(route_of(plan_redistribute(spec, target)))
        assert route.sums is not None
        found = []
        for way in (lambda local: apply_move(local, route), lambda local: follow(route, local)):
            generator = torch.Generator().manual_seed(mesh.get_rank())
            leaf = torch.randn(spec.local_shape[::-1], generator=generator).requires_grad_()
            total = way(leaf.t() ** 2)
            seed = torch.randn(1, spec.local_shape[1], generator=generator).expand(spec.local_shape)
            (first,) = torch.autograd.grad(total, leaf, seed, retain_graph=True)
            (used,) = torch.autograd.grad(total.sin(), leaf, seed, create_graph=True)
            (second,) = torch.autograd.grad(used.square().sum(), leaf)
            found.append((total.detach(), first, used.detach(), second))
        for node, short in zip(*found, strict=True):
            assert torch.equal(node, short)
            assert node.stride() == short.stride()

    on_mesh(body)


def test_hooks_on_one_sum_are_not_those_of_another() -> None:
    def body(mesh: Any) -> None:
        x, _ = pair(mesh, [Replicate()], 4)
        seen: list[str] = []
        totals = []
        for name in ("first", "second"):
            parts = DTensor.from_local(x.to_local(), mesh, [Partial()])
            total = parts.redistribute(placements=[Replicate()])
            total.register_hook(lambda grad, name=name: seen.append(name))
            total.retain_grad()
            totals.append(total)
        (totals[0] * 2).sum().backward()
        assert seen == ["first"]
        assert torch.equal(totals[0].grad.to_local(), torch.full((4,), 2.0))
        assert totals[1].grad is None
        with torch.no_grad():
            before = totals[1].to_local().clone()
        totals[1].mul_(3)  # a sum may be written to
        assert torch.equal(totals[1].to_local(), before * 3)
        totals[1].sum().backward()
        assert seen == ["first", "second"]
        assert torch.equal(x.grad.to_local(), torch.full((4,), 5.0))

    on_mesh(body, (2,))


@pytest.mark.parametrize("placement", [Partial("sum"), Partial("avg"), Shard(0), Replicate()], ids=str)
def test_an_undefined_gradient_passes_where_gradients_are_moved_or_summed(placement: Any) -> None:
    """Counting what is not zero has none, which torch says by None instead of zeros."""

    def body(mesh: Any) -> None:
        x = DTensor.from_local(torch.ones(2, 3), mesh, [placement]).detach().requires_grad_()
        torch.linalg.vector_norm(x, 0).backward()
        assert x.grad is None or not x.grad.full_tensor().any()
        rows = distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
        w = distribute_tensor(torch.ones(3), mesh, src_data_rank=None).requires_grad_()
        torch.linalg.vector_norm(rows * w, 0).backward()
        assert w.grad is None or not w.grad.full_tensor().any()

    on_mesh(body, (2,))


class Times(torch.autograd.Function):
    """``x`` times ``w``, whose backward is differentiated too."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] @ w.t(), x.t() @ grads[0]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("way", ["grad_outputs", "backward", "hook", "function"])
def test_what_meets_the_gradient_of_a_partial_sum_has_its_own_gradient(way: str) -> None:
    """Work that differs from rank to rank comes back to it: its gradient is the sum of all."""

    def second(a: Any, b: Any, w: Any, ones: Any) -> Any:
        y = Times.apply(a, b) if way == "function" else a @ b
        if way == "hook":
            y.register_hook(lambda g: g * w)
            (first,) = torch.autograd.grad(y, a, ones, create_graph=True)
        elif way == "function":
            (first,) = torch.autograd.grad(y * w, a, ones, create_graph=True)
        elif way == "grad_outputs":
            (first,) = torch.autograd.grad(y, a, w * w, create_graph=True)
        else:
            y.backward(w * w, inputs=[a], create_graph=True)
            first, a.grad = a.grad, None
        return torch.autograd.grad((first**2).sum(), (b, w))

    def body(mesh: Any) -> None:
        a, pa = pair(mesh, [Shard(1)], 3, 4)
        b, pb = pair(mesh, [Shard(0)], 4, 3, seed=1)
        w, pw = pair(mesh, [Replicate()], 3, 3, seed=2)
        assert (a @ b).placements == (Partial("sum"),)
        ones = torch.ones(3, 3)
        plain = second(pa, pb, pw, ones)
        ours = second(a, b, w, distribute_tensor(ones, mesh, src_data_rank=None))
        for mine, reference in zip(ours, plain, strict=True):
            same(mine, reference)

    on_mesh(body, (3,))


AVERAGES = [((2,), [Partial("avg")]), ((3,), [Partial("avg")]), ((2, 2), [Partial("avg"), Partial("sum")])]


@pytest.mark.parametrize(("shape", "placements"), AVERAGES, ids=str)
def test_the_gradient_of_an_average_is_that_of_the_whole_tensor(shape: Any, placements: Any) -> None:
    def body(mesh: Any) -> None:
        rank = mesh.get_rank()
        x = DTensor.from_local(torch.tensor([1.0 + rank, 2.0 * rank]), mesh, placements).detach()
        px = x.full_tensor().requires_grad_()
        x.requires_grad_()
        w, pw = pair(mesh, [Replicate()] * mesh.ndim, 2, 2)

        def cube(t: Any, factor: Any) -> Any:
            return (factor @ Twice.apply(t) ** 3).sum()

        def twice(t: Any, factor: Any) -> Any:
            (once,) = torch.autograd.grad(cube(t, factor), t, create_graph=True)
            return torch.autograd.grad((once**2).sum(), t)[0]

        same(twice(x, w), twice(px, pw))
        seen: list[Any] = []
        for t, factor in ((x, w), (px, pw)):
            handle = t.register_hook(lambda g: seen.append(g) or g * 3)
            cube(t, factor).backward()
            handle.remove()
            t.grad = t.grad / 2
            cube(t, factor).backward()
        same(seen[0], seen[1])
        assert x.grad is not None
        same(x.grad, px.grad)
        same(w.grad, pw.grad)
        assert x.grad.placements == (Replicate(),) * mesh.ndim
        kept = x.grad
        with pytest.raises(RuntimeError, match="zero would write to a grad of a DTensor that had to be copied"):
            kept.zero_()
        cube(x, w).backward()
        with pytest.raises(RuntimeError, match="out of date"):
            kept + 1

    on_mesh(body, shape)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_average_is_trained_as_the_whole_tensor(optimizer: Any) -> None:
    def body(mesh: Any) -> None:
        x = DTensor.from_local(torch.tensor([1.0 + mesh.get_rank()]), mesh, [Partial("avg")]).detach()
        px = x.full_tensor().requires_grad_()
        x.requires_grad_()
        for t in (x, px):
            steps = optimizer([t], lr=0.1)
            for _ in range(3):
                steps.zero_grad()
                (t**3).sum().backward()
                steps.step()
        same(x, px)

    on_mesh(body, (2,))


def test_hooks_retain_grad_and_accumulation() -> None:
    def body(mesh: Any) -> None:
        x, px = pair(mesh, [Shard(0), Replicate()], 4, 4)
        seen: list[Any] = []
        handle = x.register_hook(lambda g: seen.append(g.placements) or g * 2)
        px.register_hook(lambda g: g * 2)
        y, py = x * 3, px * 3
        y.retain_grad()
        py.retain_grad()
        (y * y).sum().backward()
        (py * py).sum().backward()
        assert seen == [x.placements]
        same(x.grad, px.grad)
        same(y.grad, py.grad)
        handle.remove()
        (x * 1.0).sum().backward()
        assert len(seen) == 1
        called: list[Any] = []
        z = x.detach().requires_grad_()
        z.register_post_accumulate_grad_hook(lambda t: called.append(t))
        z.sum().backward()
        assert called == [z] or called[0] is z

    on_mesh(body)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        assert isinstance(x, DTensor)
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x**3 * factor

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        assert isinstance(x, DTensor)
        assert ctx.needs_input_grad == (True, False)
        return grad * 3 * x**2 * ctx.factor, None


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(x: Any, y: Any) -> Any:
        return x * y, x + y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        return grads[0] * y + grads[1], grads[0] * x + grads[1]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


def test_user_functions_keep_their_gradient() -> None:
    def body(mesh: Any) -> None:
        for placements in LAYOUTS:
            x, px = pair(mesh, placements, 4, 6)
            y = Cube.apply(x, 2.0)
            (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
            same(first, 6 * px**2)
            same(second, 12 * px)
            w, pw = pair(mesh, [Replicate(), Replicate()], 4, 6, seed=2)
            product, total = Scale.apply(x, w)
            (product * total).sum().backward()
            ((px * pw) * (px + pw)).sum().backward()
            same(x.grad, px.grad)
            same(w.grad, pw.grad)
            z = x * 1
            out = Double.apply(z)
            assert out is z
            same(out, px * 2)

    on_mesh(body)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_the_same_dropout(reentrant: bool) -> None:
    def body(mesh: Any) -> None:
        torch.manual_seed(3)
        x, px = pair(mesh, [Shard(0), Replicate()], 8, 8)
        w, pw = pair(mesh, [Replicate(), Shard(1)], 8, 8, seed=1)

        def block(a: Any, b: Any) -> Any:
            return torch.nn.functional.dropout((a @ b).tanh(), 0.5)

        y = checkpoint(block, x, w, use_reentrant=reentrant)
        y.sum().backward()
        kept = (y.full_tensor() != 0).float() * 2
        (kept * (px @ pw).tanh()).sum().backward()
        same(x.grad, px.grad)
        same(w.grad, pw.grad)

    on_mesh(body)


def test_in_place_writes_reach_the_base_through_views() -> None:
    def body(mesh: Any) -> None:
        x, px = pair(mesh, [Shard(0), Replicate()], 4, 6)
        with torch.no_grad():
            for t in (x, px):
                t.mul_(2).add_(1)
                t[:, 2:4].zero_()
                t.T.mul_(3)
                t.view(4, 2, 3)[:, 1] += 5
        same(x, px.detach())

    on_mesh(body)


def test_in_place_on_non_leaf_is_differentiated() -> None:
    def body(mesh: Any) -> None:
        x, px = pair(mesh, [Shard(1), Replicate()], 4, 6)
        for t in (x, px):
            y = t * 2
            y.mul_(t).add_(1)
            y.relu_()
            y.sum().backward()
        same(x.grad, px.grad)

    on_mesh(body)


def test_grad_can_be_assigned_and_cleared() -> None:
    def body(mesh: Any) -> None:
        x, _ = pair(mesh, [Shard(0)], 4, 4)
        g = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()], src_data_rank=None)
        x.grad = g
        assert x.grad.placements == (Shard(0),)
        same(x.grad, torch.ones(4, 4))
        x.grad = None
        assert x.grad is None
        with pytest.raises(TypeError, match="DTensor"):
            x.grad = torch.ones(4, 4)

    on_mesh(body, (2,))


def test_no_grad_inference_and_detach() -> None:
    def body(mesh: Any) -> None:
        x, px = pair(mesh, [Shard(0)], 4, 4)
        with torch.no_grad():
            assert not (x * 2).requires_grad
        with torch.inference_mode():
            same(x * 2, px.detach() * 2)
        assert not x.detach().requires_grad
        assert (x * 2).requires_grad
        assert x.is_leaf
        assert not (x * 2).is_leaf

    on_mesh(body, (2,))


def test_module_backward_hooks_see_dtensors() -> None:
    def body(mesh: Any) -> None:
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0)]))
        layer.bias = nn.Parameter(distribute_tensor(layer.bias, mesh, [Shard(0)]))
        seen: list[Any] = []
        layer.register_full_backward_hook(lambda mod, gi, go: seen.append((gi[0], go[0])))
        x, _ = pair(mesh, [Replicate()], 2, 4)
        layer(x).sum().backward()
        assert len(seen) == 1
        assert all(isinstance(t, DTensor) for t in seen[0])

    on_mesh(body, (2,))
