"""What can only be seen on a machine with CUDA: ``make gpu``. README.md says what each test will show.

None of this has been run: there was no such machine. Without one every test is skipped, with the reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from devices.programs import InGeneration, batch_on, digest, elastic, everything, model_on, use
from phalanx._devices import accelerator, describe, of
from processes import Worker, run_processes

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that this torch can use"),
]
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: nccl wants one per rank")


def near(one: Any, other: Any) -> bool:
    return torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-3, atol=1e-4)


# -- one device is enough -------------------------------------------------------------------------------------------


def test_the_device_is_described() -> None:
    found = accelerator()
    assert found is not None
    assert found.kind == "cuda"
    assert describe()["total"] >= describe()["free"] > 0
    torch.empty(1 << 20, device="cuda")
    assert found.memory().peak >= 4 << 20


def test_memory_for_the_device_is_pinned_and_marks_are_reached() -> None:
    cuda = of("cuda")
    buffer = cuda.host_buffer((1 << 20,), torch.float32)
    assert buffer.is_pinned()
    matrix = torch.randn(2048, 2048, device="cuda")
    for _ in range(20):
        matrix = matrix @ matrix / 2048
    mark = cuda.mark()
    mark.wait()
    assert mark.is_reached()


def through_the_host(worker: Worker) -> list[list[float]]:
    """Both ranks on one device, whose tensors go through pinned memory and the host's shared memory."""
    from phalanx.comm.transports._staged import StagedTransport

    torch.cuda.set_device(0)
    group = worker.group(backend="auto")
    staged = group._transport._other = StagedTransport(group._transport._cpu, of("cuda"))
    assert staged.name == "shm"
    out = []
    for number in range(50):
        heavy = torch.full((512, 512), 1.0, device="cuda")
        for _ in range(10):
            heavy = heavy @ heavy / 512  # stays 1, and takes the device a while
        tensor = heavy[0, :4] * (worker.rank + 1) * number
        group.all_reduce(tensor)
        out.append((tensor + 0).tolist())
    return out


def test_collectives_through_the_host_wait_for_the_device() -> None:
    for outcome in run_processes(2, through_the_host):
        assert outcome.value == [[3.0 * number] * 4 for number in range(50)]


def alone(worker: Worker, folder: str) -> dict[str, Any]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return elastic(worker, "cuda", folder)


def test_an_elastic_job_has_the_same_bits_every_time() -> None:
    found = []
    for _ in range(3):
        with TemporaryDirectory() as folder:
            found += [outcome.value for outcome in run_processes(1, alone, folder)]
    assert found[0] == found[1] == found[2]


# -- several devices ------------------------------------------------------------------------------------------------


@several
@pytest.mark.parametrize("name", ["collectives", "ddp", "dtensor"])
def test_programs_give_what_the_processors_give(name: str) -> None:
    with TemporaryDirectory() as folder:
        outcomes = run_processes(2, everything, ["cpu", "cuda"], [name], folder)
    for outcome in outcomes:
        on_cpu, on_cuda = outcome.value["cpu"][name], outcome.value["cuda"][name]
        assert on_cuda["device"] == "cuda"
        if name == "collectives":  # whole numbers: exact
            assert on_cuda == {**on_cpu, "device": "cuda"}
        elif name == "ddp":
            assert near(on_cuda["losses"], on_cpu["losses"])
    assert len({outcome.value["cuda"][name].get("weights") for outcome in outcomes}) == 1, "ranks differ"


def on_two(worker: Worker, folder: str) -> dict[str, Any]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return elastic(worker, "cuda", folder)


@several
def test_an_elastic_job_has_the_same_bits_on_one_and_on_two_devices() -> None:
    with TemporaryDirectory() as one, TemporaryDirectory() as two:
        (single,) = run_processes(1, alone, one)
        for outcome in run_processes(2, on_two, two):
            assert outcome.value == single.value


def sharded(worker: Worker) -> dict[str, Any]:
    from phalanx.comm import DeviceMesh
    from phalanx.fsdp import fully_shard

    device = use("cuda", worker)
    group = worker.group(backend="auto")
    whole, model = model_on(device), model_on(device)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cuda"))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (whole, model)]
    losses: list[list[float]] = [[], []]
    for step in range(4):
        for number, (each, optimizer) in enumerate(zip((whole, model), optimizers, strict=True)):
            optimizer.zero_grad()
            inputs, targets = batch_on(device, step)  # the same on all ranks, so that means are equal
            loss = F.cross_entropy(each(inputs), targets)
            loss.backward()
            optimizer.step()
            losses[number].append(loss.item())
    weights = digest([p.full_tensor() for p in model.parameters()])
    return {"whole": losses[0], "sharded": losses[1], "weights": weights, "memory": of("cuda").memory().peak}


@several
def test_a_sharded_model_trains_as_a_whole_one() -> None:
    outcomes = run_processes(2, sharded)
    for outcome in outcomes:
        assert near(outcome.value["sharded"], outcome.value["whole"])
    assert len({outcome.value["weights"] for outcome in outcomes}) == 1


def loses_a_peer(worker: Worker) -> tuple[str, float]:
    use("cuda", worker)
    group = worker.group(backend="auto", timeout=20.0)
    tensor = torch.ones(1 << 20, device="cuda")
    group.all_reduce(tensor)
    torch.cuda.synchronize()
    if worker.rank == 1:
        os._exit(9)
    began = time.monotonic()
    try:
        for _ in range(1000):
            group.all_reduce(tensor)
            torch.cuda.synchronize()
    except Exception as error:
        return type(error).__name__, time.monotonic() - began
    return "nothing", time.monotonic() - began


@several
def test_a_lost_peer_raises_in_the_survivor() -> None:
    survivor = run_processes(2, loses_a_peer, check=False)[0]
    assert survivor.value is not None, survivor.error
    print(f"\na lost peer: {survivor.value[0]} after {survivor.value[1]:.1f} s")
    assert survivor.value[0] == "PeerLost"


@several
def test_the_launcher_gives_each_worker_its_device(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import phalanx, torch\n"
        "group = phalanx.init()\n"
        "phalanx.init_device_mesh('cuda', (group.size,))\n"
        "print('rank', group.rank, 'device', torch.cuda.current_device())\n"
    )
    command = [sys.executable, "-m", "phalanx", "run", "--standalone", "--nproc-per-node", "gpu", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(torch.cuda.device_count()):
        assert f"rank {rank} device {rank}" in done.stdout


@several
def test_nccl_is_what_carries_cuda_tensors() -> None:
    assert dist.is_nccl_available()
    for outcome in run_processes(2, names_its_transport):
        assert outcome.value == ("shm", "nccl")


def names_its_transport(worker: Worker) -> tuple[str, str]:
    use("cuda", worker)
    group = InGeneration(worker, 0).group(backend="auto")
    tensor = torch.ones(1, device="cuda")
    group.all_reduce(tensor)
    return group.backend, group._transport._for(tensor).name
