"""Nothing grows: after warming up, any number of steps leaves tensors, mappings, files and memory as they were."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp.ranks import on_ranks
from phalanx.comm import init_device_mesh, use_group
from phalanx.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from processes import run_processes

POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}
WARM_UP = 20


class Steps:
    """A model with units that are called once, twice and only sometimes, and its training."""

    def __init__(self, mesh: Any, width: int, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)))
        for block in self.model:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(self.model, mesh=mesh, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.x = torch.randn(4, width)

    def run(self, count: int) -> None:
        for step in range(count):
            y = self.model(self.x)
            if step % 3 == 0:
                y = self.model(y)
            if step % 5 == 0:
                with torch.no_grad():
                    self.model(self.x)
            y.float().pow(2).mean().backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hundred_steps_leave_no_tensor(policy):
    """One simulated rank, whose tensors are all that there are; gathering and reducing go the way of several."""

    def body(mesh):
        steps = Steps(mesh, 8, POLICIES[policy])
        steps.run(WARM_UP)
        before = live_tensors()
        steps.run(100)
        return live_tensors() - before

    assert on_ranks(body, 1) == [0]


def settled_tensors() -> int:
    """Those that stay: gloo's thread lets go of a collective's tensors a moment after it was waited for."""
    count, before = live_tensors(), -1
    while count != before:
        time.sleep(0.1)
        count, before = live_tensors(), count
    return count


def _state() -> dict[str, int]:
    """What a process has: tensors, mappings, open files, and kilobytes in memory."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "tensors": settled_tensors(),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
        "files": len(os.listdir("/proc/self/fd")),
        "kB": int(status["VmRSS"].split()[0]),
    }


def _run_long(worker: Any, backend: str, count: int, policies: list[str]) -> dict[str, dict[str, int]]:
    torch.set_num_threads(1)
    group = worker.group(backend=backend, timeout=120)
    with use_group(group):
        mesh, found = init_device_mesh("cpu", (worker.size,)), {}
        for name in policies:
            steps = Steps(mesh, 512, POLICIES[name])
            steps.run(WARM_UP)
            before = _state()
            steps.run(count)
            found[name] = {key: value - before[key] for key, value in _state().items()}
    return found


def assert_nothing_grew(backend: str, count: int, policies: list[str]) -> None:
    """Memory may move by what an allocator does, whatever the number of steps; a unit has 1 MB."""
    for outcome in run_processes(2, _run_long, backend, count, policies, timeout=1500.0):
        for name, grown in outcome.value.items():
            assert grown["tensors"] == 0, (name, grown)
            assert grown["files"] <= 0, (name, grown)
            assert grown["mappings"] <= 8, (name, grown)  # of the allocator; a window of a unit each step would be more
            assert grown["kB"] < 16 * 1024, (name, grown)


def test_a_hundred_steps_of_processes_leave_nothing():
    assert_nothing_grew("auto", 100, ["default"])


@pytest.mark.soak
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_a_thousand_steps_of_processes_leave_nothing(backend):
    assert_nothing_grew(backend, 1000, list(POLICIES))
