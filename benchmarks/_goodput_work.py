"""The jobs of ``benchmarks.goodput``: the same work under phalanx, under torchrun with torch's DDP, and under torchft.

A script of its own, so that no contender imports what another needs. A step is ``SLOTS`` micro-batches, each a tiny
pass and a sleep: workers that wait for a device do not fight for the cores of this machine.

    python benchmarks/_goodput_work.py {phalanx,torchrun,torchft} DIRECTORY SLOT_SECONDS SAVE_EVERY
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZE = 4
SLOTS = 32
BATCH = 4


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def started(pid: int) -> str:
    """When a living process was started; empty if there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


class Marks:
    """What a worker leaves for the one who measures: that it lives, and how far the job is after each commit."""

    def __init__(self, directory: Path) -> None:
        (directory / f"pid-{os.getpid()}").write_text(started(os.getpid()))
        self._file = os.open(directory / f"marks-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, num_slots: int, size: int) -> None:
        """Say that the job has so many slots of work behind it that count, and how many workers it has."""
        os.write(self._file, f"{time.time():.6f} {num_slots} {size}\n".encode())


def one_slot(model: nn.Module, seconds: float, inputs: Tensor, targets: Tensor) -> Tensor:
    time.sleep(seconds)
    return F.cross_entropy(model(inputs), targets)


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4096, 64, generator=generator), torch.randint(0, 10, (4096,), generator=generator)


def run_phalanx(directory: Path, seconds: float, save_every: int) -> None:
    from phalanx.elastic import Job, RunOptions, Saves

    marks, model = Marks(directory), make()
    job = Job(
        model,
        torch.optim.AdamW(model.parameters()),
        torch.utils.data.TensorDataset(*samples()),
        num_slots=SLOTS,
        slot_batch_size=BATCH,
        saves=Saves(directory / "saves", every=save_every),
        run=RunOptions(progress=False, threads=1),
    )
    for step in job.steps(max_steps=10**9):
        for micro in step:
            micro.backward(one_slot(model, seconds, micro.inputs, micro.targets))
        if step.commit():
            marks.add(job.step * SLOTS, job.world_size)


def run_torchrun(directory: Path, seconds: float, save_every: int) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    marks = Marks(directory)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    plain = make()
    optimizer, done = torch.optim.AdamW(plain.parameters()), 0
    save = directory / "save.pt"
    if save.exists():
        state = torch.load(save, weights_only=True)
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    model = DistributedDataParallel(plain)
    while True:
        parts = SLOTS // size
        for part in range(parts):
            model.require_backward_grad_sync = part == parts - 1
            rows = [torch.randn(BATCH, 64), torch.randint(0, 10, (BATCH,))]
            (one_slot(model, seconds, *rows) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        marks.add(done * SLOTS, size)
        if rank == 0 and done % save_every == 0:
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            torch.save(state, save.with_suffix(".part"))
            save.with_suffix(".part").replace(save)


def run_torchft(directory: Path, seconds: float, save_every: int) -> None:
    """Each worker is a replica group of its own; it has no saves, since a newcomer takes the state of the others.

    Gradients are averaged by the manager's all-reduce, one for all of them: in torchft 0.2.0 with torch 2.13.0 the hook
    of its DDP ends the survivors with an AssertionError when a collective fails.
    """
    from datetime import timedelta

    import torch.distributed as dist
    from torchft import Manager, Optimizer, ProcessGroupGloo

    del save_every
    marks, plain = Marks(directory), make()
    torch.set_num_threads(1)
    inner = torch.optim.AdamW(plain.parameters())

    def load(state: dict[str, dict[str, Tensor]]) -> None:
        plain.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=2)),  # after which it gives a dead peer up
        load_state_dict=load,
        state_dict=lambda: {"model": plain.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
        replica_id=f"worker{os.environ['REPLICA_GROUP_ID']}",
        hostname="127.0.0.1",
    )
    optimizer, parts = Optimizer(manager, inner), SLOTS // SIZE
    while True:
        optimizer.zero_grad()
        for _ in range(parts):
            rows = [torch.randn(BATCH, 64), torch.randint(0, 10, (BATCH,))]
            (one_slot(plain, seconds, *rows) / parts).backward()
        grads = [param.grad for param in plain.parameters() if param.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        manager.allreduce(flat).wait()
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
        optimizer.step()
        marks.add(manager.batches_committed() * parts, manager.num_participants())


RUNS = {"phalanx": run_phalanx, "torchrun": run_torchrun, "torchft": run_torchft}

if __name__ == "__main__":
    RUNS[sys.argv[1]](Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
