"""torch's operator samples on DTensors under torch.compile, against the same calls in eager.

``python tests/tensor/coverage.py --compile`` compiles each call with ``aot_eager``. ``one graph``: it was traced whole,
and results, layouts, strides and gradients have the bits of eager. ``broken``: it cannot be traced whole, and without
``fullgraph`` it gives the same. ``as torch compiles``: one graph that gives what torch.compile does on plain tensors,
where eager rounds otherwise (``interpolate``, the gradient of ``prod``), has the dims of a gradient in another order in
memory (``istft``), or raises for what no graph looks at (the gradient of ``linalg.eig``). ``refused``: eager raises,
and so does it compiled; or it is one of ``NOT_COMPILED``. Anything else is wrong, and so is a rank that stops alone.
"""

from __future__ import annotations

import json
import math
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from coverage import SEED, STORAGE, UNINITIALISED, Report, distributed, layouts_of, samples_of
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_flatten, tree_map

from phalanx import comm
from phalanx.comm import Group, init_device_mesh
from phalanx.tensor import DTensor, distribute_tensor

# Operators that eager takes and that raise compiled, also without fullgraph, with the words of their error.
NOT_COMPILED: dict[str, str] = {}


@dataclass
class Outcome:
    """Results and gradients of one call on this rank, or what it raised."""

    values: list[Any]
    gradients: list[Tensor | None]
    error: Exception | None = None


def called(function: Callable[..., Any], sample: Any, lift: Callable[[], Callable[[Any], Any]]) -> Outcome:
    """Call ``function`` on fresh inputs, and backward through whatever has a graph."""
    made: list[DTensor] = []
    lay_out = lift()

    def lifted(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made.append(lay_out(value))
        return made[-1]

    first, args, kwargs = tree_map(lifted, (sample.input, sample.args, sample.kwargs))
    try:
        torch.manual_seed(SEED)
        flat, _ = tree_flatten(function(first, *args, **kwargs))
        outputs = [value for value in flat if isinstance(value, Tensor) and value.requires_grad]
        leaves = [tensor for tensor in made if tensor.requires_grad]
        found: list[Tensor | None] = []
        if outputs and leaves:
            seeds = [torch.ones_like(value).detach() for value in outputs]
            found = list(torch.autograd.grad(outputs, leaves, seeds, allow_unused=True))
        return Outcome([value.detach() if isinstance(value, Tensor) else value for value in flat], found)
    except Exception as error:  # compared with what the other way raises
        return Outcome([], [], error)


def difference(eager: Outcome, compiled: Outcome, *, values: bool) -> str:
    """Say what differs on this rank; nothing if nothing does."""
    if len(eager.values) != len(compiled.values):
        return f"{len(compiled.values)} results, expected {len(eager.values)}"
    for place, (one, other) in enumerate(zip(eager.values, compiled.values, strict=True)):
        if not _same(one, other, values):
            return f"result {place} is {_text(other)}, expected {_text(one)}"
    for place, (want, got) in enumerate(zip(eager.gradients, compiled.gradients, strict=True)):
        if want is None and got is not None and not bool(_local(got).any()):
            continue  # as with plain tensors: zeros
        if not _same(want, got, values):
            return f"gradient {place} is {_text(got)}, expected {_text(want)}"
    return ""


def _local(value: Any) -> Any:
    return value._local if isinstance(value, DTensor) else value


def _same(one: Any, other: Any, values: bool) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and (one == other or one != one)
    if isinstance(one, DTensor) != isinstance(other, DTensor):
        return False
    if isinstance(one, DTensor) and isinstance(other, DTensor) and one._spec is not other._spec:
        return False
    left, right = _local(one), _local(other)
    if left.dtype != right.dtype or left.shape != right.shape or one.stride() != other.stride():
        return False
    return not values or torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


def _text(value: Any) -> str:
    where = f"{value._spec!r} {value.stride()} " if isinstance(value, DTensor) else ""
    return where + str(_local(value))[:120]


def as_torch_compiles(call: Callable[..., Any], sample: Any, compiled: Outcome, *, is_defined: bool = True) -> bool:
    """Whether all is as torch.compile has it on plain tensors, where it computes some operators unlike eager; gradients
    only where they are defined, which eager denies by raising."""
    traced = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False)
    plain = called(traced, sample, lambda: lambda t: t.detach().clone().requires_grad_(t.requires_grad))
    counts = [(len(outcome.values), len(outcome.gradients)) for outcome in (plain, compiled)]
    if plain.error is not None or counts[0] != counts[1]:
        return False
    values = [_cut_as(value, like) for value, like in zip(plain.values, compiled.values, strict=True)]
    gradients = [_cut_as(value, like) for value, like in zip(plain.gradients, compiled.gradients, strict=True)]
    expected = Outcome(values, gradients if is_defined else compiled.gradients)
    return not difference(expected, compiled, values=True)


def _cut_as(value: Any, like: Any) -> Any:
    if not isinstance(value, Tensor) or not isinstance(like, DTensor) or like._spec.is_partial:
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def one_call(op: OpInfo, sample: Any, mesh: Any, placements: list[Any]) -> tuple[str, str]:
    """(one graph | as torch compiles | broken | refused | wrong, explanation) of one call under some layouts."""
    function = op.op

    def lift() -> Callable[[Any], Any]:
        left = iter(placements)
        return lambda value: distributed(value, mesh, next(left))

    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        return function(first, *args, **kwargs)

    eager = called(call, sample, lift)
    whole = called(torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False), sample, lift)
    compares = op.name not in UNINITIALISED
    if eager.error is not None:
        if whole.error is None:
            kind = "as torch compiles" if as_torch_compiles(call, sample, whole, is_defined=False) else "wrong"
            return kind, f"eager raises {eager.error!r:.200}, compiled does not"
        return "refused", f"{eager.error!r:.200}"
    if whole.error is None:
        told = difference(eager, whole, values=compares)
        if told and as_torch_compiles(call, sample, whole):
            return "as torch compiles", told
        return ("wrong", told) if told else ("one graph", "")
    parts = called(torch.compile(call, backend="aot_eager", dynamic=False), sample, lift)
    if parts.error is not None:
        said = f"{type(parts.error).__name__}: {parts.error}"
        known = NOT_COMPILED.get(op.name)
        return ("refused" if known and known in said else "wrong"), said[:300]
    told = difference(eager, parts, values=compares)
    return ("wrong", f"in parts: {told}") if told else ("broken", f"{whole.error!s:.200}")


def run_op(group: Group, op: OpInfo, limit: int, num_layouts: int, shape: tuple[int, ...]) -> Report:
    report = Report()
    mesh = init_device_mesh("cpu", shape)
    mesh.get_all_groups()
    if f"{op.name}.{op.variant_test_name}".rstrip(".") in STORAGE:
        return report
    for number, sample in enumerate(samples_of(op, limit)):
        flat, _ = tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [t for t in flat if isinstance(t, Tensor)]
        if not tensors or any(t.layout != torch.strided for t in tensors):
            continue
        try:
            torch.manual_seed(SEED)
            op(sample.input, *sample.args, **sample.kwargs)
        except Exception:  # the sample does not even work on plain tensors
            continue
        seed = zlib.crc32(f"{op.name}{number}".encode())
        for placements in layouts_of(tensors, num_layouts, seed, mesh.ndim):
            with torch._dynamo.config.patch(recompile_limit=4096):  # of this rank's thread
                kind, problem = one_call(op, sample, mesh, placements)
            report.counts[kind] += 1
            if kind == "wrong" or (kind != "one graph" and len(report.problems) < 3):
                report.problems.append(f"{kind} sample {number} {placements}: {problem}")
    return report


def cover_compiled(op: OpInfo, limit: int, num_layouts: int, shape: tuple[int, ...] = (2,)) -> Report:
    """What became of the calls of ``op``; wrong on one rank is wrong."""
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results: list[Report] = comm.simulate(math.prod(shape)).run(run_op, op, limit, num_layouts, shape)
    except Exception as error:  # a rank that fails alone is a failure of ours
        failed = Report()
        failed.counts["wrong"] += 1
        failed.problems.append(f"wrong: {type(error).__name__}: {str(error)[:400]} / {error.__cause__!r}"[:700])
        return failed
    finally:
        torch._dynamo.reset()
    merged = results[0]
    for other in results[1:]:
        if other.counts["wrong"] and not merged.counts["wrong"]:
            merged.counts["wrong"] += 1
            merged.problems += [problem for problem in other.problems if problem.startswith("wrong")]
    return merged


def report_compiled(ops: list[OpInfo], limit: int, num_layouts: int, shape: tuple[int, ...], out: str) -> int:
    """Run all, print what is wrong, refused or broken, and the totals; 1 if anything is wrong."""
    rows, total = {}, Report().counts
    for op in ops:
        report = cover_compiled(op, limit, num_layouts, shape)
        total += report.counts
        label = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        rows[label] = {**report.counts, "problems": report.problems}
        if set(report.counts) - {"one graph"}:
            print(label, dict(report.counts), *report.problems[:2], sep="\n    ", flush=True)
    print(dict(total))
    if out:
        with open(out, "w") as file:
            json.dump({"total": total, "operators": rows}, file, indent=1)
    return 1 if total["wrong"] else 0
