"""Lets ranks agree between two passes: on the order of arrival, bucket sizes, and a changed set of parameters.

All functions here are collective, and are called by all ranks or by none: the decision to call them rests on values
that all ranks share (the number of passes, the totals of the step's metadata).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from phalanx._devices import is_host, of
from phalanx.ddp.buckets._assignment import Caps, CommCost, ParamInfo, choose_caps, complete_order
from phalanx.ddp.buckets._parameters import NamedParameter
from phalanx.ddp.reducer._bucket_plan import BucketPlan, allocator

if TYPE_CHECKING:
    from phalanx.comm import Group

PROBE_BYTES = (4 * 1024, 4 * 1024 * 1024)


# Synchronised passes after which buckets are cut anew: first by the observed order, then by measured times too.
REBUILD_AFTER, TUNE_AFTER = 1, 3


@dataclass(frozen=True)
class Agreement:
    """How the next pass differs from this one; equal on all ranks except for the parameters' identity."""

    members: Sequence[NamedParameter]
    caps: Caps
    order: Sequence[int] | None
    late_grads: Sequence[tuple[nn.Parameter, Tensor]] = ()


def agree_on_order(
    group: Group, plan: BucketPlan, observed: Sequence[int], repeated: set[int], ready: Sequence[float] | None
) -> Agreement:
    """Rank 0's order of arrival for all, and with ``ready`` times bucket sizes that suit them.

    Parameters with several gradients per pass can only be sent at the end, so they come last.
    """
    arrived = complete_order(observed, len(plan.members))
    proposal = [*(i for i in arrived if i not in repeated), *(i for i in arrived if i in repeated)]
    order = [int(index) for index in group.broadcast_value(proposal, src=0)]
    tune = ready is not None and len(order) > 1
    caps = _agree_on_caps(group, plan.infos, order, ready or ()) if tune else plan.caps
    return Agreement(plan.members, caps, order)


def _agree_on_caps(group: Group, infos: Sequence[ParamInfo], order: Sequence[int], ready: Sequence[float]) -> Caps:
    """Caps from rank 0's ready times and the measured cost of a collective."""
    cost = measure_cost(group, infos[0].device)
    dense = [index for index in order if not infos[index].sparse]
    times = list(ready[: len(dense)]) or [0.0]
    times += [times[-1]] * (len(dense) - len(times))  # what never arrived is ready when backward ends
    sizes = [infos[index].nbytes for index in dense]
    spare = has_spare_cores(group, infos[0].device)
    caps = choose_caps([t - times[0] for t in times], sizes, cost, spare_cores=spare)
    return Caps(tuple(group.broadcast_value(list(caps.sizes), src=0)), False)


def has_spare_cores(group: Group, device: torch.device) -> bool:
    """Return whether this host has cores that its ranks' backward passes leave free. Collective."""
    hosts = group.all_gather_values(socket.gethostname())
    if not is_host(device):
        return True
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > hosts.count(socket.gethostname()) * torch.get_num_threads()


def measure_cost(group: Group, where: torch.device, rounds: int = 3) -> CommCost:
    """Latency and bandwidth of this group's all-reduce of tensors on a device, from the best of a few."""
    best, device, allocate = [], of(where), allocator(group)
    for nbytes in PROBE_BYTES:
        probe = allocate(nbytes // 4, torch.float32, where).zero_()
        seconds = []
        for _ in range(rounds):
            device.synchronize()
            start = time.perf_counter()
            group.all_reduce(probe)
            device.synchronize()  # where calls return before their work is done
            seconds.append(time.perf_counter() - start)
        best.append(max(min(seconds), 1e-7))
    small, large = best
    return CommCost(small, (PROBE_BYTES[1] - PROBE_BYTES[0]) / max(large - small, 1e-6))


def agree_on_change(
    group: Group,
    plan: BucketPlan,
    members: Sequence[NamedParameter],
    caps: Caps,
    factor: float,
    weight: float | None,
) -> Agreement:
    """Return all ranks must have made the same change to the parameters; those that joined are reduced in this pass
    still.

    The error names the first parameter that differs, and where.
    """
    problem = first_difference(group.all_gather_values([member.describe() for member in members]))
    if problem is not None:
        raise RuntimeError(
            f"rank {group.rank}: the trainable parameters changed differently on the ranks: {problem}; freeze, "
            "unfreeze, add or remove parameters on all ranks in the same step"
        )
    known = plan.index_by_identity()
    late = [member for member in members if id(member.part) not in known]
    return Agreement(members, caps, None, _reduce_late(group, late, factor, weight))


def first_difference(described: Sequence[Sequence[Sequence[object]]]) -> str | None:
    """Compare what ranks say about their parameters; name the parameter and the ranks that differ from rank 0."""
    reference = described[0]
    for rank, other in enumerate(described[1:], start=1):
        names, other_names = [str(row[0]) for row in reference], [str(row[0]) for row in other]
        for missing in sorted(set(names) - set(other_names)):
            return f"rank 0 has parameter {missing!r} (of {len(names)}), rank {rank} has not (of {len(other_names)})"
        for extra in sorted(set(other_names) - set(names)):
            return f"rank {rank} has parameter {extra!r} (of {len(other_names)}), rank 0 has not (of {len(names)})"
        for row, other_row in zip(reference, other, strict=True):
            if row[0] != other_row[0]:
                return f"where rank 0 has parameter {row[0]!r}, rank {rank} has {other_row[0]!r} (order differs)"
            for label, value, other_value in zip(
                ("shape", "dtype", "strides", "sparse gradient", "part"), row[1:], other_row[1:], strict=True
            ):
                if value != other_value:
                    return f"parameter {row[0]!r} has {label} {value} on rank 0 but {other_value} on rank {rank}"
    return None


def _reduce_late(
    group: Group, members: Sequence[NamedParameter], factor: float, weight: float | None
) -> list[tuple[nn.Parameter, Tensor]]:
    """Gradients of parameters that joined in this very pass, one by one: it happens once per change.

    ``weight`` multiplies this rank's gradient, ``factor`` the sum. A flag per parameter tells whether any rank has a
    gradient for it; those without are left out.
    """
    reduced: list[tuple[nn.Parameter, Tensor]] = []
    for member in members:
        param = member.part
        grad: Tensor = torch.zeros_like(param) if param.grad is None else param.grad
        total = (grad.to_dense() if grad.is_sparse else grad).contiguous() * (1.0 if weight is None else weight)
        flag = torch.tensor([float(param.grad is not None)], device=param.device)
        group.all_reduce(total)
        group.all_reduce(flag)
        if flag.item() > 0:
            reduced.append((param, total * factor))
    return reduced
