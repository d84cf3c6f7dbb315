"""What torch's DTensor and ours send for the same operator, sample and layout.

``python tests/tensor/coverage.py --against-torch`` takes torch's operator samples and lays their tensors out on two
ranks in many ways. torch's side runs on its fake process group, once as each rank: no byte moves, but collectives are
counted, and where there are none the ranks' results together show whether torch is right. Ours runs on simulated ranks.
A cell is one operator, sample and layout that torch's DTensor takes. Each cell in which we send more than torch (more
bytes, in no fewer collectives) needs a reason in ``traffic_reasons.py``, or that torch, which sends nothing, is wrong.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from coverage import RANDOM, SEED, UNINITIALISED, contribution, distributed, in_order, layouts_of, samples_of
from torch import Tensor
from torch.distributed import tensor as reference
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from traffic_reasons import reason_for, refusal_for, unused

from phalanx import comm
from phalanx.comm import Group, init_device_mesh
from phalanx.errors import PhalanxError
from phalanx.tensor import Shard, manual_seed
from phalanx.tensor.debug import CommDebugMode

RANKS = 2
PARTIAL = ("sum", "avg", "max", "min")
_NAMESPACES = ("_c10d_functional", "_dtensor", "c10d")
_LOCAL = ("wait_tensor", "_wrap_tensor_autograd")  # no collectives

Layout = list[tuple[Any, ...]]


@dataclass
class Sent:
    """What one side sent for one cell: collectives by name, bytes that a rank sends; or why it refused."""

    counts: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    refused: str = ""
    failed: str = ""  # ours: a rank failed alone, or the ranks wait for each other
    results: list[Any] = field(default_factory=list)  # torch's: (placements, local) of each tensor, this rank's

    def __str__(self) -> str:
        return ", ".join(f"{n} {name}" for name, n in sorted(self.counts.items())) + f" ({self.nbytes} B)"


@dataclass(frozen=True)
class Case:
    """One operator, sample and layout."""

    op: OpInfo
    number: int
    sample: Any
    layout: Layout
    expected: list[Any]

    @property
    def name(self) -> str:
        return self.op.name + (f".{self.op.variant_test_name}" if self.op.variant_test_name else "")

    @property
    def layout_text(self) -> str:
        return " ".join(str(placements[0]) for placements in self.layout)

    def __str__(self) -> str:
        shapes = [tuple(t.shape) for t in _tensors(self.sample)]
        return f"{self.name} sample {self.number} {self.layout_text} of {shapes}"


def _tensors(sample: Any) -> list[Tensor]:
    flat, _ = tree_flatten((sample.input, sample.args, sample.kwargs))
    return [t for t in flat if isinstance(t, Tensor)]


def cases_of(op: OpInfo, limit: int, num_layouts: int) -> list[Case]:
    found = []
    for number, sample in enumerate(samples_of(op, limit)):
        tensors = _tensors(sample)
        if not tensors or any(t.layout != torch.strided for t in tensors):
            continue
        try:
            torch.manual_seed(SEED)
            plain = tree_map(
                lambda v: v.detach().clone() if isinstance(v, Tensor) else v, (sample.input, sample.args, sample.kwargs)
            )
            expected, _ = tree_flatten(op(plain[0], *plain[1], **plain[2]))
        except Exception:  # the sample does not even work on plain tensors
            continue
        seed = zlib.crc32(f"{op.name}{number}".encode())
        for layout in layouts_of(tensors, num_layouts, seed, 1, PARTIAL):
            found.append(Case(op, number, sample, layout, expected))
    return found


def on_the_wire(collective: str, nbytes: int) -> int:
    """Say what a rank of a ring sends of a collective in which ``nbytes`` go in or come out, whichever is more: an
    all-reduce goes around twice, a gather, a scattered reduction and an exchange once.
    """
    rounds = 2 if "all_reduce" in collective else 1
    return nbytes * rounds * (RANKS - 1) // RANKS


# ---- torch's DTensor


class _Counting(TorchDispatchMode):
    def __init__(self, sent: Sent) -> None:
        super().__init__()
        self.sent = sent

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, reference.DTensor) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if space in _NAMESPACES and name not in _LOCAL:
            self.sent.counts[name] += 1
            sides = [[t for t in tree_flatten(side)[0] if isinstance(t, Tensor)] for side in ((args, kwargs), result)]
            largest = max(sum(t.numel() * t.element_size() for t in side) for side in sides)
            self.sent.nbytes += on_the_wire(name, largest)
        return result


def _theirs(placement: Any) -> Any:
    if isinstance(placement, Shard):
        return reference.Shard(placement.dim)
    return reference.Partial(placement.reduce_op) if placement.is_partial() else reference.Replicate()


def _part(tensor: Tensor, placement: Any, rank: int) -> Tensor:
    """What ``rank`` holds: contributions to a sum are as in ``coverage.distributed``."""
    whole = in_order(tensor.detach(), "rows")
    if isinstance(placement, Shard):
        size = -(-whole.shape[placement.dim] // RANKS)
        start = min(whole.shape[placement.dim], rank * size)
        return whole.narrow(placement.dim, start, min(size, whole.shape[placement.dim] - start)).clone()
    return contribution(whole, placement.reduce_op, rank, RANKS) if placement.is_partial() else whole


def torch_sends(cases: Sequence[Case], rank: int) -> list[Sent]:
    """Run every case on torch's DTensor as ``rank`` of a fake group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
        return [_torch_sends(case, mesh, rank) for case in cases]
    finally:
        dist.destroy_process_group()


def _torch_sends(case: Case, mesh: Any, rank: int) -> Sent:
    placements = iter(case.layout)

    def lift(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        (placement,) = next(placements)
        return reference.DTensor.from_local(
            _part(value, placement, rank),
            mesh,
            [_theirs(placement)],
            run_check=False,
            shape=value.shape,
            stride=torch.empty(value.shape, device="meta").stride(),
        )

    sent = Sent()
    sample = case.sample
    try:
        first, args, kwargs = tree_map(lift, (sample.input, sample.args, sample.kwargs))
        torch.manual_seed(SEED)
        with torch.no_grad(), _Counting(sent):
            result = case.op(first, *args, **kwargs)
    except Exception as error:
        sent.refused = f"{type(error).__name__}: {str(error)[:200]}"
        return sent
    for one in tree_flatten(result)[0]:
        is_ours = isinstance(one, reference.DTensor)
        sent.results.append((one.placements[0], one.to_local(), one.shape) if is_ours else (None, one, None))
    return sent


def torch_is_wrong(case: Case, by_rank: Sequence[Sent]) -> str:
    """Say how the ranks' results together differ from one device's; empty if they do not, or cannot be joined."""
    expected = case.expected
    if (
        case.op.name in UNINITIALISED
        or case.op.name in RANDOM
        or any(len(sent.results) != len(expected) for sent in by_rank)
    ):
        return ""
    for number, wanted in enumerate(expected):
        if not isinstance(wanted, Tensor):
            if any(sent.results[number][1] != wanted for sent in by_rank):
                return f"result {number} is {[sent.results[number][1] for sent in by_rank]}, expected {wanted}"
            continue
        if wanted.layout != torch.strided:
            continue
        placement, _, shape = by_rank[0].results[number]
        if placement is None or type(placement) not in (reference.Shard, reference.Replicate, reference.Partial):
            continue
        if tuple(shape) != tuple(wanted.shape):
            return f"result {number} has shape {tuple(shape)}, expected {tuple(wanted.shape)}"
        try:
            joined = _joined(placement, [sent.results[number][1].detach() for sent in by_rank])
        except (RuntimeError, IndexError) as error:
            return f"result {number} cannot be joined: {error}"
        if joined.shape != wanted.shape:
            return f"result {number} has parts for shape {tuple(joined.shape)}, expected {tuple(wanted.shape)}"
        if not torch.allclose(joined.to(wanted.dtype), wanted, rtol=1e-3, atol=1e-4, equal_nan=True):
            return f"result {number} differs"
    return ""


def _joined(placement: Any, parts: Sequence[Tensor]) -> Tensor:
    if isinstance(placement, reference.Shard):
        return torch.cat([part for part in parts if part.numel()] or list(parts), placement.dim)
    if isinstance(placement, reference.Replicate):
        if not torch.allclose(parts[0], parts[1], equal_nan=True):
            raise RuntimeError("replicas differ")
        return parts[0]
    stacked = torch.stack(list(parts))
    if placement.reduce_op == "avg":
        return stacked.mean(0)
    by: dict[str, Callable[..., Tensor]] = {
        "sum": torch.sum, "product": torch.prod, "max": torch.amax, "min": torch.amin,
    }  # fmt: skip
    return by[placement.reduce_op](stacked, 0)


# ---- ours


def we_send(cases: Sequence[Case]) -> list[Sent]:
    """Run every case on our DTensor, on simulated ranks; what the first rank sent."""

    def rank_main(group: Group) -> list[Sent]:
        mesh = init_device_mesh("cpu", (RANKS,))
        return [_we_send(case, mesh) for case in cases]

    try:
        return comm.simulate(RANKS).run(rank_main)[0]
    except PhalanxError as error:  # the ranks part ways, wait for each other, or do not end
        return [Sent(failed=f"{type(error).__name__}: {str(error)[:400]} / {error.__cause__!r}")] * len(cases)


def _we_send(case: Case, mesh: Any) -> Sent:
    sample, placements = case.sample, iter(case.layout)

    def lift(value: Any) -> Any:
        return distributed(value.detach(), mesh, next(placements)) if isinstance(value, Tensor) else value

    first, args, kwargs = tree_map(lift, (sample.input, sample.args, sample.kwargs))
    sent = Sent()
    try:
        manual_seed(SEED, mesh)  # spares the ranks their agreement on one
        with torch.no_grad(), CommDebugMode() as seen:
            case.op(first, *args, **kwargs)
    except Exception as error:
        sent.refused = f"{type(error).__name__}: {str(error)[:200]}"
    sent.counts.update(seen.get_comm_counts())
    sent.nbytes = sum(on_the_wire(name, nbytes) for name, nbytes in seen.get_comm_bytes().items())
    return sent


# ---- both

KINDS = (
    "equal",  # both send nothing, or as many bytes
    "we_send_less",
    "fewer_collectives",  # more bytes in fewer collectives; one counts as 4 KiB, and the samples are small
    "torch_sends_alone",
    "torch_is_wrong",  # we send alone; torch's result is not that of one device
    "explained",  # we send more, and ``traffic_reasons.py`` says why
    "unexplained",  # we send more
    "torch_refuses",  # no cell: nothing to compare with
    "refused_with_reason",  # torch's takes it, and ``traffic_reasons.py`` says why ours does not
    "we_refuse",  # nobody says why
    "failed",  # ours did not end, or not on every rank
)
FAILURES = ("unexplained", "we_refuse", "failed")


def kind_of(case: Case, theirs: Sequence[Sent], ours: Sent) -> tuple[str, str]:
    """One of ``KINDS``, and what there is to say."""
    if any(sent.refused for sent in theirs):
        return "torch_refuses", theirs[0].refused
    if ours.failed:
        return "failed", ours.failed
    if ours.refused:
        why = refusal_for(case.name)
        return ("refused_with_reason", why) if why else ("we_refuse", ours.refused)
    they, we = sum(theirs[0].counts.values()), sum(ours.counts.values())
    both = f"torch {theirs[0]}, ours {ours}"
    if not we:
        return "torch_sends_alone" if they else "equal", both
    if they and ours.nbytes <= theirs[0].nbytes:
        return "equal" if ours.nbytes == theirs[0].nbytes else "we_send_less", both
    if we < they:
        return "fewer_collectives", both
    wrong = "" if they else torch_is_wrong(case, theirs)
    return ("torch_is_wrong", wrong) if wrong else _explained(case, both)


def _explained(case: Case, sent: str) -> tuple[str, str]:
    why = reason_for(case.name, str(case))
    return ("explained", f"{sent}: {why}") if why else ("unexplained", sent)


def compare(ops: Sequence[OpInfo], samples: int, layouts: int) -> Iterator[tuple[Case, str, str]]:
    """(case, kind, words) of every cell of these operators, each in a simulation of its own."""
    for op in ops:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cases = cases_of(op, samples, layouts)
            theirs = [torch_sends(cases, rank) for rank in range(RANKS)]
            ours = we_send(cases)
        for i, case in enumerate(cases):
            yield (case, *kind_of(case, [t[i] for t in theirs], ours[i]))


def report_traffic(ops: Sequence[OpInfo], samples: int, layouts: int, out: str) -> int:
    """Compare, print what is unexplained and the counts, write all of it to ``out``; 1 if something has no reason."""
    rows: dict[str, list[tuple[str, str, str]]] = {}
    total: Counter[str] = Counter()
    for case, kind, words in compare(ops, samples, layouts):
        total[kind] += 1
        rows.setdefault(case.name, []).append((kind, str(case), words))
        if kind in FAILURES:
            print(f"{case}: {kind}: {words}", flush=True)
    cells = sum(total.values()) - total["torch_refuses"]
    alone = sum(any(kind == "unexplained" for kind, *_ in row) for row in rows.values())
    print(
        f"{len(rows)} operators, {cells} cells; {total['unexplained']} of them, in {alone} operators, are unexplained"
    )
    print({kind: total[kind] for kind in KINDS})
    needed = [(name, text) for name, row in rows.items() for kind, text, _ in row if kind == "explained"]
    print("reasons that nothing needed:", unused(needed))
    if out:
        with open(out, "w") as file:
            json.dump({"total": total, "operators": rows}, file, indent=1)
    return int(any(total[kind] for kind in FAILURES))
