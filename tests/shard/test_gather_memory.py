"""That a gather under a cap needs no more memory than it says: on processes whose heap may not grow."""

from __future__ import annotations

import resource
import sys
import threading

import pytest
import torch

from processes import run_processes

ROWS, COLUMNS = 16384, 1024  # 64 MB
ROOM = 12 << 20
CAP = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux only")


def held() -> int:
    """Bytes of private writable memory: what RLIMIT_DATA counts."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))


def gather_in_little_room(worker, backend, path):
    from phalanx import shard
    from phalanx.comm import use_group

    threading.stack_size(256 << 10)  # a thread's stack counts as well; the default is 8 MB
    with use_group(worker.group(backend=backend, timeout=120.0)) as group:
        spec = shard.ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(worker.size)])
        tensor = shard.full(spec, (ROWS, COLUMNS), 1.0 + worker.rank)
        out = torch.empty(ROWS, COLUMNS) if worker.rank == 0 else None
        tensor.gather(0, None if out is None else path, max_bytes=CAP)  # threads and code are there now
        group.barrier()
        resource.setrlimit(resource.RLIMIT_DATA, (held() + ROOM, resource.RLIM_INFINITY))
        with pytest.raises((RuntimeError, MemoryError)):
            torch.empty(ROOM + CAP, dtype=torch.uint8)  # the limit is one
        tensor.gather(0, out, max_bytes=CAP)
        tensor.gather(0, None if out is None else path, max_bytes=CAP)
        if out is None:
            return None
        return [float(out[0, 0]), float(out[-1, -1]), bool((out[: ROWS // 2] == 1).all())]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["gloo", "auto"])
def test_gathers_to_the_host_and_to_a_file_stay_under_the_cap(backend, tmp_path) -> None:
    from safetensors.torch import load_file

    path = str(tmp_path / "whole.safetensors")
    outcomes = run_processes(2, gather_in_little_room, backend, path, timeout=200.0)
    assert outcomes[0].value == [1.0, 2.0, True]
    whole = load_file(path)["tensor"]
    assert whole.shape == (ROWS, COLUMNS)
    assert torch.equal(whole[:, 0], torch.tensor([1.0, 2.0]).repeat_interleave(ROWS // 2))
