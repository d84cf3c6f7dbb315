"""Which accelerator a mesh selects: the launcher's local rank, as with torch's mesh; on an accelerator that is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh as their_mesh

from phalanx import comm
from phalanx.comm import init_device_mesh
from phalanx.comm.mesh._accelerator import choose_device, select_device

pytestmark = pytest.mark.fast


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``torch.pretend``: four devices that only remember which was chosen."""
    chosen: list[int] = []
    module = SimpleNamespace(
        chosen=chosen,
        is_initialized=lambda: module.initialized,
        initialized=False,
        device_count=lambda: 4,
        set_device=chosen.append,
        current_device=lambda: chosen[-1] if chosen else 0,
    )
    monkeypatch.setattr(torch, "pretend", module, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return module


def test_the_local_rank_decides_as_with_torchs_mesh(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        init_device_mesh("pretend", (1,))
        assert accelerator.chosen == [3]
        their_mesh("pretend", (1,))
        assert accelerator.chosen == [3, 3]
        accelerator.initialized = True  # the program has chosen
        init_device_mesh("pretend", (1,))
        their_mesh("pretend", (1,))
        assert accelerator.chosen == [3, 3]
        init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_without_a_launcher_ranks_take_devices_in_turn_and_say_so(accelerator: Any) -> None:
    with pytest.warns(UserWarning, match=r"rank 6: no pretend device was chosen .* taking device 2"):
        select_device("pretend", 6, 8, None)
    assert accelerator.chosen == [2]
    assert [choose_device(rank, 8, None, 4, "x") for rank in range(8)] == [0, 1, 2, 3] * 2
    assert [choose_device(rank, 2, None, 4, "x") for rank in range(2)] == [0, 1]


def test_what_cannot_be_is_refused_and_what_is_not_there_left_alone(accelerator: Any) -> None:
    with pytest.raises(RuntimeError, match=r"rank 5: LOCAL_RANK=4, but this process sees 4 pretend devices"):
        select_device("pretend", 5, 8, 4)
    with pytest.raises(RuntimeError, match="rank 1: 6 ranks on hosts of 4 pretend devices, and no LOCAL_RANK"):
        select_device("pretend", 1, 6, None)
    for absent in ("cpu", "meta", "nosuchthing"):
        select_device(absent, 0, 1, 0)
    if not torch.cuda.is_available():
        select_device("cuda", 0, 1, 0)
    comm.simulate(2).run(lambda group: init_device_mesh("pretend", (2,)).size())
    assert accelerator.chosen == []
