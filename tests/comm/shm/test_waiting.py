"""What waiting costs and what it needs: processor time of idle ranks, results while they sleep, a tiny /dev/shm."""

from __future__ import annotations

import ctypes
import os
import resource
import time

import pytest
import torch

from processes import run_processes

MB = 1024 * 1024


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def wait_for_a_late_rank(worker, how: str) -> float:
    """The share of a core that this rank used while it waited two seconds for rank 0."""
    group, store = worker.group(backend="auto", timeout=60.0), worker.store()
    assert group.backend == "shm"
    tensor = torch.ones(1000)
    group.all_reduce(tensor, async_op=True).wait()  # the background thread exists from here on
    group.barrier()
    used, began = processor_seconds(), time.monotonic()
    store.set(f"began/{worker.rank}", b"")
    if worker.rank == 0:
        store.wait([f"began/{rank}" for rank in range(group.size)], 60.0)  # all of them wait for all of it
        time.sleep(2.0)  # being late is what is tested, nothing is synchronised by it
    if how == "async":
        group.all_reduce(tensor, async_op=True).wait()
    elif how == "recv" and worker.rank:
        group.recv(tensor, src=0)
    elif how == "recv":
        for peer in range(1, group.size):
            group.send(tensor, dst=peer)
    elif how == "all_reduce":
        group.all_reduce(tensor)
    share = (processor_seconds() - used) / (time.monotonic() - began)
    group.barrier()
    return share


@pytest.mark.parametrize("how", ["all_reduce", "async", "recv"])
def test_a_waiting_rank_leaves_its_core_to_others(how: str) -> None:
    shares = [outcome.value for outcome in run_processes(3, wait_for_a_late_rank, how)]
    assert max(shares[1:]) < 0.2, f"shares of a core used while waiting: {shares}; a spinning rank uses 1.0"


def have_a_tiny_dev_shm(worker) -> tuple[str, float]:
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private = 0x00020000, 1 << 18 | 1 << 14
    for code in (
        libc.unshare(new_mounts),
        libc.mount(b"none", b"/", None, private, None),
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k"),
    ):
        assert code == 0, os.strerror(ctypes.get_errno())
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 * 1024
    group = worker.group(backend="auto", timeout=60.0)
    tensor = torch.ones(16 * MB // 4)
    group.all_reduce(tensor)
    shared = group.shared_empty((16 * MB // 4,), torch.float32).fill_(1.0)
    group.all_reduce(shared)
    group.barrier()
    assert torch.equal(tensor, shared)
    return group.backend, tensor.sum().item()


def test_large_tensors_pass_where_dev_shm_is_tiny() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small /dev/shm to try")
    for outcome in run_processes(2, have_a_tiny_dev_shm):
        assert outcome.value == ("shm", 2.0 * 4 * MB)
