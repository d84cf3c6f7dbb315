"""A sample of the comparison with torch's DTensor: where it sends nothing we do not either, or say why.

``make coverage`` runs all operators (``coverage.py --against-torch``).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coverage import op_db
from meshes import on_mesh, whole
from traffic import FAILURES, Case, Sent, compare, kind_of
from traffic_reasons import REASONS, REFUSED, reason_for

from phalanx.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from phalanx.tensor.debug import CommDebugMode
from phalanx.tensor.experimental import local_map

SAMPLED = {
    "nn.functional.prelu",
    "nn.functional.adaptive_max_pool2d",
    "nn.functional.grid_sample",
    "nn.functional.pixel_shuffle",
    "fft.fft2",
    "nn.functional.cosine_similarity",
    "rot90",
    "fliplr",
    "kthvalue",
    "mode",
    "select_scatter",
    "slice_scatter",
    "linalg.cholesky",
    "frexp",
    "aminmax",
    "vstack",
    "dstack",
    "trapezoid",
    "permute_copy",
    "view_as_real",
    "view_as_complex",
    "maximum",
    "neg",
}


def test_a_sample_of_operators_sends_nothing_unexplained() -> None:
    found = list(compare([op for op in op_db if op.name in SAMPLED], 1, 5))
    assert {case.op.name for case, *_ in found} == SAMPLED
    assert sum(kind == "equal" for _, kind, _ in found) > 60
    told = [f"{case}: {kind} {words}" for case, kind, words in found if kind in FAILURES]
    assert not told, "\n".join(told)


def test_the_comparison_can_fail() -> None:
    op = next(op for op in op_db if op.name == "neg")
    x = torch.ones(2)
    case = Case(op, 0, None, [(Shard(0),)], [x])
    nothing, some = Sent(results=[(None, x, None)]), Sent(nbytes=8)
    some.counts["all_gather"] += 1
    case.__dict__["sample"] = type("Sample", (), {"input": x, "args": (), "kwargs": {}})()
    assert kind_of(case, [nothing, nothing], some)[0] == "unexplained"
    assert kind_of(case, [nothing, nothing], nothing)[0] == "equal"
    assert kind_of(case, [some, some], nothing)[0] == "torch_sends_alone"
    refused = Sent(refused="RuntimeError: no")
    assert kind_of(case, [nothing, nothing], refused)[0] == "we_refuse"
    assert kind_of(case, [refused, refused], refused)[0] == "torch_refuses"
    assert {"unexplained", "we_refuse"} < {*FAILURES}


def test_a_refusal_has_a_reason() -> None:
    """With torch's samples of ``masked.std``, whose second one makes a plain tensor inside."""
    found = list(compare([op for op in op_db if op.name == "masked.std"], 2, 4))
    kinds = {kind for _, kind, _ in found}
    assert "refused_with_reason" in kinds
    assert not kinds & {*FAILURES}, found


def test_reasons_name_operators_that_exist() -> None:
    known = {op.name + (f".{op.variant_test_name}" if op.variant_test_name else "") for op in op_db}
    named = [reason.operators for reason in REASONS] + [*REFUSED]
    assert {name for operators in named for name in operators.split()} <= known
    assert reason_for("half", "half sample 0 P(sum) of [()]")
    assert not reason_for("half", "half sample 0 S(0) of [(4,)]")


@pytest.mark.fast
def test_an_average_takes_what_all_ranks_have() -> None:
    parts, other = torch.arange(24.0).reshape(2, 4, 3), torch.ones(4, 3)

    def body(mesh: Any) -> None:
        x = DTensor.from_local(parts[mesh.get_local_rank()], mesh, [Partial("avg")])
        y = distribute_tensor(other, mesh, src_data_rank=None)
        for func in (lambda a, b: a + b, lambda a, b: b - a, lambda a, b: torch.add(a, b, alpha=2)):
            with CommDebugMode() as seen:
                result = func(x, y)
            assert seen.get_total_counts() == 0
            assert result.placements == (Partial("avg"),)
            torch.testing.assert_close(whole(result), func(parts.mean(0), other))

    on_mesh(body, 2)


@pytest.mark.fast
@pytest.mark.parametrize("op", ["max", "min"])
def test_partial_extremes_pass_what_only_grows_or_falls(op: Any) -> None:
    torch.manual_seed(1)
    parts, other = torch.randn(2, 4, 3), torch.randn(4, 3)
    whole_one = parts.amax(0) if op == "max" else parts.amin(0)
    swapped = {"max": "min", "min": "max"}[op]

    def body(mesh: Any) -> None:
        x = DTensor.from_local(parts[mesh.get_local_rank()], mesh, [Partial(op)])
        y = distribute_tensor(other, mesh, src_data_rank=None)
        for func, kept in (
            (lambda a, b: a.exp(), op),
            (lambda a, b: -a, swapped),
            (lambda a, b: a + b, op),
            (lambda a, b: a + 2.5, op),
            (lambda a, b: b - a, swapped),
            (lambda a, b: 1 - a, swapped),
            (lambda a, b: torch.sub(b, a, alpha=1), None),
            (lambda a, b: torch.maximum(a, b), op),
            (lambda a, b: torch.minimum(b, a), op),
            (lambda a, b: a.clamp(-0.5, 0.5), op),
            (lambda a, b: a.half(), op),
            (lambda a, b: a.sin(), None),
            (lambda a, b: a * b, None),
        ):
            with CommDebugMode() as seen:
                result = func(x, y)
            torch.testing.assert_close(whole(result), func(whole_one, other))
            if kept is not None:
                assert seen.get_total_counts() == 0
                assert result.placements == (Partial(kept),)
        maximum = getattr(torch, f"{op}imum")
        assert maximum(x, x).placements == (Partial(op),)
        torch.testing.assert_close(whole(getattr(torch, f"a{op}")(x, 1)), getattr(torch, f"a{op}")(whole_one, 1))

    on_mesh(body, 2)


@pytest.mark.fast
@pytest.mark.parametrize("op", ["max", "min"])
def test_fmax_and_fmin_take_not_a_number_for_what_no_contribution_exceeds(op: Any) -> None:
    nan = float("nan")
    parts, other = torch.tensor([[1.0, nan, -3.0, nan], [nan, 5.0, 2.0, nan]]), torch.tensor([2.0, 2.0, nan, 2.0])
    together = torch.maximum(*parts) if op == "max" else torch.minimum(*parts)

    def body(mesh: Any) -> None:
        x = DTensor.from_local(parts[mesh.get_local_rank()], mesh, [Partial(op)])
        y = distribute_tensor(other, mesh, src_data_rank=None)
        for func, kept in ((torch.fmin, "max"), (torch.fmax, "min")):
            with CommDebugMode() as seen:
                results = func(x, y), func(y, x)
            assert (seen.get_total_counts() == 0) == (kept == op)
            for result in results:
                torch.testing.assert_close(whole(result), func(together, other), equal_nan=True)

    on_mesh(body, 2)


@pytest.mark.fast
def test_values_are_looked_up_among_boundaries_where_those_are() -> None:
    values, boundaries = torch.tensor([[0.5, 3.0, 9.0], [4.0, float("nan"), -1.0]]), torch.tensor([1.0, 3, 3, 7, 8])
    parts = torch.stack([values - 1, values])

    def body(mesh: Any) -> None:
        x, cut = (
            distribute_tensor(t, mesh, p, src_data_rank=None) for t, p in ((values, None), (boundaries, [Shard(0)]))
        )
        largest = DTensor.from_local(parts[min(mesh.get_local_rank(), 1)], mesh, [Partial("max")])
        for right in (False, True):
            expected = torch.bucketize(values, boundaries, right=right)
            for given, limits, kept in ((x, cut, "sum"), (largest, cut.redistribute(placements=[Replicate()]), "max")):
                with CommDebugMode() as seen:
                    result = torch.bucketize(given, limits, right=right)
                assert seen.get_total_counts() == 0
                assert result.placements == (Partial(kept),)
                torch.testing.assert_close(whole(result), expected)

    on_mesh(body, 4)  # one rank has no boundary


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim")
def test_the_dim_of_a_cross_product_is_that_of_the_whole_tensor() -> None:
    a, b = torch.randn(6, 3), torch.randn(6, 3)

    def body(mesh: Any) -> None:
        x, y = (distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in (a, b))
        torch.testing.assert_close(whole(torch.cross(x, y)), torch.cross(a, b))  # each rank has three rows

    on_mesh(body, 2)


@pytest.mark.fast
def test_sizes_by_factors_are_decided_apart() -> None:
    plain = torch.randn(2, 4, 6, 6)

    def body(mesh: Any) -> None:
        x = distribute_tensor(plain, mesh, [Shard(1)], src_data_rank=None)
        for mode in ("nearest", "bilinear", "bicubic"):
            for factor in (1.5, 0.5, 2.0):
                with CommDebugMode() as seen:
                    result = torch.nn.functional.interpolate(x, scale_factor=factor, mode=mode)
                assert seen.get_total_counts() == 0
                expected = torch.nn.functional.interpolate(plain, scale_factor=factor, mode=mode)
                torch.testing.assert_close(whole(result), expected)

    on_mesh(body, 2)


def _put(x: Any, y: Any) -> Any:
    keys = torch.tensor([4, 0, 2])
    if isinstance(x, DTensor):
        keys = distribute_tensor(keys, x.device_mesh, src_data_rank=None)
    return x.index_put((keys,), y[:3])


# name -> function, placements of both arguments of shape (7, 6), most bytes that forward may take on three ranks
_COMPOSED: dict[str, tuple[Any, tuple[Any, Any], int]] = {
    "rms_norm": (lambda x, y: F.rms_norm(x, (6,), y[0]), (Shard(1), Replicate()), 7 * 4),
    "rms_norm of two dims": (lambda x, y: F.rms_norm(x, (7, 6)), (Shard(0), Shard(0)), 4),
    "cosine_similarity": (lambda x, y: F.cosine_similarity(x, y), (Shard(1), Shard(1)), 2 * 3 * 7 * 4),
    "triplet": (
        lambda x, y: F.triplet_margin_loss(x, y, x * y, swap=True), (Shard(1), Shard(1)), 3 * 3 * 7 * 4,
    ),
    "tensordot": (lambda x, y: torch.tensordot(x, y, ([1], [1])), (Shard(0), Replicate()), 0),
    "tensordot of all": (lambda x, y: torch.tensordot(x, y, 2), (Shard(1), Shard(1)), 0),
    "kron": (lambda x, y: torch.kron(x, y[:1, :2]), (Partial(), Replicate()), 0),
    "inner": (torch.inner, (Shard(0), Replicate()), 0),
    "take_along_dim": (lambda x, y: torch.take_along_dim(x, y[:1].argsort(1), 1), (Shard(0), Replicate()), 0),
    "index_put": (_put, (Shard(1), Shard(1)), 0),
    "difference from a mean": (lambda x, y: x - x.mean(), (Shard(0), Replicate()), 4),
}  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("name", _COMPOSED)
def test_composed_functions_send_little_and_are_those_of_one_device(name: str) -> None:
    func, placements, most = _COMPOSED[name]
    torch.manual_seed(4)
    plain = [torch.randn(7, 6), torch.randn(7, 6)]
    references = [t.clone().requires_grad_() for t in plain]
    expected = func(*references)
    wanted = torch.autograd.grad(expected.square().sum(), references, allow_unused=True)

    def body(mesh: Any) -> None:
        # (on a second axis of the mesh both are whole)
        own = [_laid_out(t, mesh, p).requires_grad_() for t, p in zip(plain, placements, strict=True)]
        with CommDebugMode() as seen:
            result = func(*own)
        assert mesh.ndim > 1 or seen.get_total_bytes() <= most
        torch.testing.assert_close(whole(result), expected.detach())
        found = torch.autograd.grad(result.square().sum(), own, allow_unused=True)
        for ours, reference in zip(found, wanted, strict=True):
            assert (ours is None) == (reference is None)
            if ours is not None:
                torch.testing.assert_close(whole(ours), reference)

    on_mesh(body, 3)
    on_mesh(body, 2, 2)


def _laid_out(tensor: torch.Tensor, mesh: Any, placement: Any) -> Any:
    if not placement.is_partial():
        rest = [Replicate()] * (mesh.ndim - 1)
        return distribute_tensor(tensor, mesh, [placement, *rest], src_data_rank=None)
    part = tensor - 1.0 * (mesh.shape[0] - 1) if mesh.get_local_rank(0) == 0 else torch.ones_like(tensor)
    return DTensor.from_local(part, mesh, [placement, *[Replicate()] * (mesh.ndim - 1)])


def _rotated(x: Any, turns: Any) -> Any:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns.view(1, 6, 1, 4)).flatten(3)


@pytest.mark.fast
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rotary_embeddings_send_nothing(dim: int) -> None:
    torch.manual_seed(2)
    plain, turns = torch.randn(2, 6, 4, 8), torch.polar(torch.ones(6, 4), torch.randn(6, 4))
    reference = plain.clone().requires_grad_()
    expected = _rotated(reference, turns)
    expected.square().sum().backward()

    def body(mesh: Any) -> None:
        x = distribute_tensor(plain, mesh, [Shard(dim)], src_data_rank=None).requires_grad_()
        turned = distribute_tensor(turns, mesh, src_data_rank=None)
        with CommDebugMode() as seen:
            result = _rotated(x, turned)
            result.square().sum().to_local().backward()
        assert seen.get_total_counts() == 0
        assert result.placements == (Shard(dim),)
        torch.testing.assert_close(whole(result), expected.detach())
        torch.testing.assert_close(whole(x.grad), reference.grad)

    on_mesh(body, 2)


@pytest.mark.fast
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_of_sharded_complex_parameters(kind: Any, foreach: bool) -> None:
    torch.manual_seed(3)
    start = torch.randn(5, 4, dtype=torch.complex64)

    def trained(parameter: Any) -> Any:
        optimizer = kind([parameter], lr=0.1, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            (parameter * parameter.conj()).real.sum().backward()
            optimizer.step()
        return whole(parameter)

    expected = trained(torch.nn.Parameter(start.clone()))

    def body(mesh: Any) -> None:
        for dim in (0, 1):
            ours = torch.nn.Parameter(distribute_tensor(start, mesh, [Shard(dim)], src_data_rank=None))
            torch.testing.assert_close(trained(ours), expected)

    on_mesh(body, 2)


@pytest.mark.fast
def test_local_map_gathers_no_sizes_that_it_is_told() -> None:
    plain = torch.randn(5, 4)

    def body(mesh: Any) -> None:
        x = distribute_tensor(plain, mesh, [Shard(0)], src_data_rank=None)
        for told in ((5, 4), [torch.Size((5, 4))], lambda x: x.shape):
            doubled = local_map(lambda t: t * 2, out_placements=[Shard(0)], out_shapes=told)
            with CommDebugMode() as seen:
                result = doubled(x)
            assert seen.get_total_counts() == 0
            torch.testing.assert_close(whole(result), plain * 2)
        for wrong, error in (((9, 4), "got a local tensor of shape"), ([(5, 4), None], "1 results for 2 out_shapes")):
            with pytest.raises(ValueError, match=error):
                local_map(lambda t: t * 2, out_placements=[Shard(0)], out_shapes=wrong)(x)
        several = local_map(lambda t: (t, t.sum()), out_placements=([Shard(0)], [Partial()]), out_shapes=((5, 4), None))
        part, total = several(x)
        torch.testing.assert_close(whole(total), plain.sum())
        assert part.shape == (5, 4)
        assert Replicate() not in part.placements

    on_mesh(body, 3)
