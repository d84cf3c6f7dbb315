"""Every operator sample that torch ships, on DTensors under many placements, against plain tensors.

``python tests/tensor/coverage.py [--names add,mul] [--shape 2] [--order reversed] [--out report.json]`` runs all of
them and prints how many calls were right by rule, right by fallback, refused, and wrong (which must be none). Right is
a result with the values, the strides and the gradients that it has on one device. Refused are only calls of the
operators in ``REFUSED`` that a ``raise`` of phalanx.tensor ended with a message for the user (``is_refusal``); any
other error counts as wrong. The tests run a sample of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_map

import phalanx.tensor
from phalanx import comm
from phalanx.comm import Group, init_device_mesh
from phalanx.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, fallback_counts
from phalanx.tensor.layout._placement import REDUCE_OPS

SEED = 1234
SOURCE = Path(phalanx.tensor.__file__).parent

# Uninitialised memory: only shape and dtype can be compared.
UNINITIALISED = {"empty_like", "new_empty", "new_empty_strided", "empty", "empty_permuted", "empty_strided"}
# These look at the storage behind a tensor, which a distributed copy does not reproduce.
STORAGE = {"as_strided.partial_views", "to_sparse"}
# Refused as documented: random numbers drawn inside, resizing, and functions that make plain tensors inside.
REFUSED = {
    "svd_lowrank",
    "pca_lowrank",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d",
    "resize_",
    "resize_as_",
    "masked.std",
    "masked.var",
}
# Compared with the replicated DTensor from the same seed: torch's own generator gives other values.
RANDOM = [
    "bernoulli",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "normal",
    "nn.functional.alpha_dropout",
    "nn.functional.dropout",
    "nn.functional.dropout2d",
    "nn.functional.dropout3d",
    "nn.functional.feature_alpha_dropout",
    "nn.functional.rrelu",
    "rand_like",
    "randint_like",
    "randn_like",
    "uniform",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.multi_head_attention_forward",
    "bernoulli_",
    "normal_",
    "uniform_",
    "randint",
    "randn",
]


# Orders of the inputs' dims in memory: from outer to inner.
ORDERS: dict[str, Callable[[int], list[int]]] = {
    "rows": lambda ndim: list(range(ndim)),
    "reversed": lambda ndim: list(range(ndim))[::-1],
    "channels_last": lambda ndim: [0, *range(2, ndim), 1] if ndim > 2 else list(range(ndim))[::-1],
}


@dataclass
class Report:
    """What became of the calls of one operator."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def samples_of(op: OpInfo, limit: int) -> list[Any]:
    dtype = next(
        (d for d in (torch.float64, torch.float32, torch.complex64, torch.int64, torch.bool) if d in op.dtypes),
        None,
    )
    if dtype is None:
        return []
    torch.manual_seed(SEED)
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    before = random.getstate()
    random.seed(SEED)  # torch draws margins and choices from it: the same on all ranks, in all runs
    try:
        return list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), limit))
    finally:
        random.setstate(before)


def layouts_of(
    tensors: list[Tensor], limit: int, seed: int, num_axes: int, partial: Sequence[str] = ("sum",)
) -> list[list[tuple[Any, ...]]]:
    """Combinations of placements, one per tensor and axis: uniform ones first, then random ones."""

    def options(t: Tensor) -> list[Any]:
        found: list[Any] = [Replicate(), *(Shard(d) for d in range(t.dim()))]
        if t.dtype.is_floating_point or t.dtype.is_complex:
            found += [Partial(op) for op in partial if op in ("sum", "avg") or not t.dtype.is_complex]
        return found

    chosen: dict[Any, None] = {}
    for index in range(max((len(options(t)) for t in tensors), default=0)):
        chosen[tuple((options(t)[min(index, len(options(t)) - 1)],) * num_axes for t in tensors)] = None
    rng = random.Random(seed)
    for _ in range(limit * 3):
        chosen[tuple(tuple(rng.choice(options(t)) for _ in range(num_axes)) for t in tensors)] = None
    return [list(c) for c in list(chosen)[:limit]]


def in_order(tensor: Tensor, order: str) -> Tensor:
    """A leaf with the values of ``tensor``, its dims in memory in the order of that name."""
    dims = ORDERS[order](tensor.dim())
    copy = tensor.detach().permute(dims).clone(memory_format=torch.contiguous_format)
    return copy.permute(_inverse(dims)).requires_grad_(tensor.requires_grad)


def _inverse(dims: list[int]) -> list[int]:
    return sorted(range(len(dims)), key=dims.__getitem__)


def distributed(tensor: Tensor, mesh: Any, placements: tuple[Any, ...], order: str = "rows") -> DTensor:
    """``tensor`` laid out so, partial ones as unequal contributions; a leaf."""
    dims = ORDERS[order](tensor.dim())
    back = _inverse(dims)
    whole = tensor.detach().permute(dims).clone(memory_format=torch.contiguous_format)
    placements = tuple(Shard(back[p.dim]) if isinstance(p, Shard) else p for p in placements)
    made = distribute_tensor(
        whole, mesh, [Replicate() if p.is_partial() else p for p in placements], src_data_rank=None
    )
    local = made.to_local().detach().clone()
    for axis, p in enumerate(placements):
        if p.is_partial():
            local = contribution(local, p.reduce_op, mesh.get_local_rank(axis), mesh.shape[axis])
    result = DTensor.from_local(local, mesh, placements, shape=whole.shape).permute(back)
    return result.detach().requires_grad_(tensor.requires_grad)


def contribution(whole: Tensor, op: str, rank: int, ranks: int) -> Tensor:
    """What ``rank`` of ``ranks`` holds of ``whole`` where that is reduced by ``op``: something else on each side."""
    if op in ("max", "min"):  # each rank has the value of some elements
        place = torch.arange(whole.numel(), device=whole.device).reshape(whole.shape)
        behind = (1 + place % 3).to(whole.dtype)
        return torch.where(place % ranks == rank, whole, whole - behind if op == "max" else whole + behind)
    if op == "product":
        return whole / 2 ** (ranks - 1) if rank == 0 else torch.full_like(whole, 2)
    share = torch.full_like(whole, 0.25)
    total = whole * ranks if op == "avg" else whole
    return total - share * (ranks - 1) if rank == 0 else share


def same_order(ours: Any, reference: Any) -> bool:
    """Whether both have the same strides, where strides say anything."""
    if not isinstance(reference, Tensor) or reference.layout != torch.strided or not reference.numel():
        return True
    pairs = zip(ours.stride(), reference.stride(), reference.shape, strict=True)
    return all(a == b for a, b, size in pairs if size != 1)


def close(ours: Any, reference: Any, values: bool = True) -> bool:
    if isinstance(reference, Tensor):
        if not isinstance(ours, DTensor):
            return False
        whole = ours.full_tensor()
        if not values:
            return whole.shape == reference.shape and whole.dtype == reference.dtype
        if whole.shape != reference.shape or whole.dtype != reference.dtype:
            return False
        if reference.is_sparse or reference.layout != torch.strided:
            return bool(torch.allclose(whole.to_dense(), reference.to_dense(), equal_nan=True))
        return bool(torch.allclose(whole.detach(), reference.detach(), rtol=1e-3, atol=1e-4, equal_nan=True))
    if isinstance(reference, float):
        return abs(ours - reference) <= 1e-3 * max(1.0, abs(reference)) or (ours != ours and reference != reference)
    return bool(ours == reference)


def gradients(outputs: list[Any], inputs: list[Any], weights: list[Tensor], mesh: Any) -> list[Any]:
    seeds: list[Any] = []
    kept = []
    for out, weight in zip(outputs, weights, strict=True):
        if isinstance(out, Tensor) and out.requires_grad:
            kept.append(out)
            seeds.append(distribute_tensor(weight, mesh, src_data_rank=None) if mesh is not None else weight)
    if not kept:
        return []
    return list(torch.autograd.grad(kept, inputs, seeds, allow_unused=True))


def run_op(
    group: Group, op: OpInfo, limit: int, num_layouts: int, shape: tuple[int, ...], order: str, partial: str
) -> Report:
    report = Report()
    linear = partial in ("sum", "avg")  # gradients through the others are refused
    mesh = init_device_mesh("cpu", shape)
    if f"{op.name}.{op.variant_test_name}".rstrip(".") in STORAGE:
        return report
    for number, sample in enumerate(samples_of(op, limit)):
        if order != "rows":
            sample = reordered(sample, order)
        flat, _ = tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [t for t in flat if isinstance(t, Tensor)]
        if not tensors or any(t.layout != torch.strided for t in tensors):
            continue
        leaves = [t for t in tensors if t.requires_grad]
        wanted = []
        try:
            flat_expected, _ = tree_flatten(reference_of(op, sample, mesh))
            torch.manual_seed(SEED)
            weights = [
                (torch.randn_like(t) if t.is_floating_point() else t.detach()) if isinstance(t, Tensor) else t
                for t in flat_expected
            ]
            if leaves and linear and op.supports_autograd and op.name not in RANDOM:
                wanted = gradients(flat_expected, leaves, weights, None)
        except Exception:  # the sample does not even work on plain tensors
            continue
        seed = zlib.crc32(f"{op.name}{number}".encode())
        for placements in layouts_of(tensors, num_layouts, seed, mesh.ndim, (partial,)):
            with torch.set_grad_enabled(linear):
                kind, problem = one_call(op, sample, mesh, placements, order, flat_expected, weights, wanted)
            report.counts[kind] += 1
            if kind == "wrong" or (kind == "refused" and len(report.problems) < 3):
                report.problems.append(f"{kind} sample {number} {placements}: {problem}")
    return report


def reordered(sample: Any, order: str) -> Any:
    """The same with its tensors in that order."""

    def leaf(value: Any) -> Any:
        strided = isinstance(value, Tensor) and value.layout == torch.strided
        return in_order(value, order) if strided else value

    given = tree_map(leaf, (sample.input, sample.args, sample.kwargs))
    return SampleInput(given[0], args=given[1], kwargs=given[2])


def reference_of(op: OpInfo, sample: Any, mesh: Any) -> Any:
    """The result on plain tensors; of random functions, the result of a replicated DTensor."""
    if op.name not in RANDOM:
        return op(sample.input, *sample.args, **sample.kwargs)
    torch.manual_seed(SEED)
    plain = tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, (sample.input, sample.args, sample.kwargs))
    whole = (Replicate(),) * mesh.ndim
    first, args, kwargs = tree_map(lambda v: distributed(v, mesh, whole) if isinstance(v, Tensor) else v, plain)
    result = op(first, *args, **kwargs)
    return tree_map(lambda v: v.full_tensor() if isinstance(v, DTensor) else v, result)


def one_call(
    op: OpInfo,
    sample: Any,
    mesh: Any,
    placements: list[Any],
    order: str,
    expected: list[Any],
    weights: list[Any],
    wanted: list[Any],
) -> tuple[str, str]:
    """(rule | fallback | refused | wrong, explanation) of one call under one combination of layouts."""
    made: list[DTensor] = []

    def lift(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made.append(distributed(value, mesh, placements[len(made)], order))
        return made[-1]

    before = sum(fallback_counts().values())
    first, args, kwargs = tree_map(lift, (sample.input, sample.args, sample.kwargs))
    try:
        torch.manual_seed(SEED)
        result = op(first, *args, **kwargs)
        flat, _ = tree_flatten(result)
        if len(flat) != len(expected):
            return "wrong", f"{len(flat)} results, expected {len(expected)}"
        for ours, reference in zip(flat, expected, strict=True):
            if not close(ours, reference, op.name not in UNINITIALISED):
                return "wrong", f"forward differs: {describe(ours)} expected {describe(reference)}"
            if op.name not in UNINITIALISED and op.name not in RANDOM and not same_order(ours, reference):
                return (
                    "wrong",
                    f"strides are {ours.stride()}, expected {reference.stride()}: {describe(ours)}",
                )
        if wanted:
            leaves = [t for t in made if t.requires_grad]
            found = gradients(flat, leaves, weights, mesh)
            if not found:
                return "wrong", "no gradient"
            for ours, reference in zip(found, wanted, strict=True):
                if (ours is None) != (reference is None):
                    zero = reference if ours is None else ours.full_tensor()
                    if bool((zero != 0).any()):
                        return "wrong", f"gradient is {ours}, expected {reference}"
                elif ours is not None and not close(ours, reference):
                    return "wrong", f"gradient differs: {describe(ours)} expected {describe(reference)}"
    except Exception as error:
        told = f"{type(error).__name__}: {str(error)[:300]}"
        return ("refused" if op.name in REFUSED and is_refusal(error) else "wrong"), told
    return ("fallback" if sum(fallback_counts().values()) > before else "rule"), ""


def is_refusal(error: Exception) -> bool:
    """Whether a ``raise`` of ours was meant for the user. What torch says of a local call is a failure of ours: the
    same call worked on plain tensors.
    """
    if isinstance(error, AssertionError) or "DTensor" not in str(error):
        return False
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Path(frame.filename).is_relative_to(SOURCE) and (frame.line or "").startswith("raise ")


# Bad arguments that torch refuses and a DTensor takes: an ``out=`` that overlaps itself or an input, or has another
# dtype to which the result can be cast. Results are copied into it.
_HARMLESS = (
    "single memory location",
    "Expected out tensor to have dtype",
    "for argument 'out'",
    "tensor out, got",
)


def accepted_errors(op: OpInfo, shape: tuple[int, ...] = (2,)) -> list[str]:
    """Torch's samples of bad arguments for ``op`` that raise on plain tensors, and not on DTensors cut along dim 0."""

    def rank_main(group: Group) -> list[str]:
        mesh = init_device_mesh("cpu", shape)
        found = []
        torch.manual_seed(SEED)  # the same samples on all ranks
        for number, error in enumerate(list(op.error_inputs("cpu"))):
            given = (error.sample_input.input, error.sample_input.args, error.sample_input.kwargs)
            tensors = [t for t in tree_flatten(given)[0] if isinstance(t, Tensor)]
            if not tensors or any(t.layout != torch.strided or t.device.type != "cpu" for t in tensors):
                continue
            told = raised(op, given)
            if told is None or told.startswith("AssertionError") or any(text in told for text in _HARMLESS):
                continue
            mine = tree_map(lambda v: cut_along_0(v, mesh) if isinstance(v, Tensor) else v, given)
            told_of_mine = raised(op, mine)
            if told_of_mine is None or told_of_mine.startswith("AssertionError"):
                found.append(f"{op.name}: bad sample {number} gave {told_of_mine}, expected {told}")
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return comm.simulate(math.prod(shape)).run(rank_main)[0]


def raised(op: OpInfo, given: Any) -> str | None:
    first, args, kwargs = given
    try:
        op(first, *args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def cut_along_0(tensor: Tensor, mesh: Any) -> DTensor:
    placement = Shard(0) if tensor.dim() else Replicate()
    made = distribute_tensor(tensor.detach(), mesh, [placement] * mesh.ndim, src_data_rank=None)
    return made.requires_grad_(tensor.requires_grad)


def describe(value: Any) -> str:
    if isinstance(value, DTensor):
        return f"{value._spec!r} {str(value.full_tensor().detach())[:160]}"
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)} {str(value.detach())[:160]}"
    return repr(value)[:160]


def cover(
    op: OpInfo, limit: int, num_layouts: int, shape: tuple[int, ...], order: str = "rows", partial: str = "sum"
) -> Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            results = comm.simulate(math.prod(shape)).run(run_op, op, limit, num_layouts, shape, order, partial)
        except Exception as error:  # a rank that fails alone is a failure of ours
            report = Report()
            report.counts["wrong"] += 1
            report.problems.append(f"wrong: {type(error).__name__}: {str(error)[:400]} / {error.__cause__!r}"[:700])
            return report
    merged = results[0]
    for other in results[1:]:
        for problem in other.problems:
            if problem.startswith("wrong") and not merged.counts["wrong"]:
                merged.counts["wrong"] += 1
                merged.problems.append(problem)
    return merged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", default="", help="only these operators, comma-separated")
    parser.add_argument("--shape", default="2", help="mesh shape, e.g. 3 or 2x2")
    parser.add_argument("--order", default="rows", choices=ORDERS, help="of the inputs' dims in memory")
    parser.add_argument("--partial", default="sum", choices=REDUCE_OPS, help="reduction of partial inputs")
    parser.add_argument("--against-torch", action="store_true", help="compare what torch's DTensor and ours send")
    parser.add_argument("--compile", action="store_true", help="compare torch.compile with eager, both on DTensors")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--layouts", type=int, default=6)
    parser.add_argument("--part", default="0/1", help="i/n: the i-th of n parts of the operators")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = set(filter(None, options.names.split(",")))
    part, parts = map(int, options.part.split("/"))
    ops = [op for i, op in enumerate(op_db) if (not names or op.name in names) and i % parts == part]
    mesh_shape = tuple(map(int, options.shape.split("x")))
    if options.compile:
        from compiled_samples import report_compiled  # it needs this module

        return report_compiled(ops, options.samples, options.layouts, mesh_shape, options.out)
    if options.against_torch:
        from traffic import report_traffic  # it needs this module

        return report_traffic(ops, options.samples, options.layouts, options.out)
    total: Counter[str] = Counter()
    rows = {}
    for op in ops:
        report = cover(op, options.samples, options.layouts, mesh_shape, options.order, options.partial)
        total += report.counts
        label = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        rows[label] = {**report.counts, "problems": report.problems}
        if report.counts["wrong"] or report.counts["refused"]:
            print(label, dict(report.counts), *report.problems[:2], sep="\n    ", flush=True)
    print(dict(total))
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"total": total, "operators": rows}, file, indent=1)
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
