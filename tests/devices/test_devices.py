"""What depends on the device: programs on the processors and on ``torch.late``, and each decision by itself.

``late`` is a fake accelerator that does its work when somebody waits for it (``late.py``): a wait that is missing is a
wrong number here, not a rare one on somebody's GPU. The same programs run on CUDA in ``tests/gpu``.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from devices.programs import PROGRAMS, everything, use
from phalanx import _devices
from phalanx._devices import HOST, AcceleratorDevice, accelerator, is_host, of
from processes import Worker, run_processes

pytestmark = pytest.mark.timeout(300)


@cache
def results() -> list[dict[str, Any]]:
    """What each rank got from every program on each kind; all run once, one after the other, in two processes."""
    with TemporaryDirectory() as folder:
        return [outcome.value for outcome in run_processes(2, everything, ["cpu", "late"], list(PROGRAMS), folder)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_accelerator_gives_what_the_processors_give(name: str) -> None:
    for rank in results():
        on_cpu, on_late = rank["cpu"][name], rank["late"][name]
        assert (on_cpu["device"], on_late["device"]) == ("cpu", "late")
        assert on_late == {**on_cpu, "device": "late"}


# -- the fake one can fail ------------------------------------------------------------------------------------------


def look_at_streams(worker: Worker) -> dict[str, Any]:
    device = use("late", worker)
    late: Any = torch.late  # type: ignore[attr-defined]
    side, out = late.Stream(), {}
    base = torch.ones(2, device=device)
    late.synchronize()
    with late.stream(side):
        there = base * 3
    out["unordered"] = (there + 0).cpu().tolist()
    with late.stream(side):
        again = base * 3
    late.current_stream().wait_stream(side)
    out["ordered"] = (again + 0).cpu().tolist()
    with late.stream(side):  # a collective waits for the stream it is called on
        group = worker.group(backend="auto")
        total = base * (worker.rank + 1)
        work = group.all_reduce(total, async_op=True)
    late.current_stream().wait_stream(side)
    work.wait()  # and its result is there for the stream on which it is awaited
    out["collective"] = (total + 0).cpu().tolist()
    mark = of(device).mark()
    out["before"] = mark.is_reached()
    base * 2  # something to do
    mark = of(device).mark()
    out["reached"] = mark.is_reached()
    mark.wait()
    out["waited"] = mark.is_reached()
    with pytest.raises(RuntimeError, match=r"expected all tensors on the same device, got cpu, late:0"):
        base + torch.ones(2)
    AcceleratorDevice.mark = lambda self: HOST.mark()  # type: ignore[method-assign]  # for the rest of this process
    forgotten = base * 2
    group.all_reduce(forgotten)
    out["forgotten"] = forgotten.cpu().tolist()
    return out


def test_work_is_seen_after_a_wait_only_and_a_missing_wait_is_wrong_numbers() -> None:
    for outcome in run_processes(2, look_at_streams):
        found = outcome.value
        assert found["unordered"] != [3.0, 3.0]
        assert found["ordered"] == [3.0, 3.0]
        assert found["collective"] == [3.0, 3.0]
        assert (found["before"], found["reached"], found["waited"]) == (True, False, True)
        assert found["forgotten"] != [4.0, 4.0], "without its wait the transport sends what was not computed yet"


# -- decisions ------------------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_the_host_decides_nothing_and_waits_for_nothing() -> None:
    assert of("cpu") is of(torch.ones(1)) is of(torch.device("cpu")) is HOST
    assert [is_host(each) for each in ("cpu", torch.ones(1), "cuda:1", torch.device("meta"))] == [
        True,
        True,
        False,
        False,
    ]
    assert (HOST.count(), HOST.is_in_use(), HOST.current(), HOST.engine) == (1, False, torch.device("cpu"), "")
    assert HOST.mark().is_reached()
    assert HOST.not_deterministic() == ""
    assert set(HOST.bits_depend_on()) == {"torch", "threads", "instructions"}
    assert HOST.host_buffer((2, 3), torch.int8).shape == (2, 3)
    for absent in ("meta", "nosuchthing"):
        assert (of(absent).count(), of(absent).is_host, of(absent).engine) == (0, False, "")
    assert of("cuda").engine == "nccl"


def decide(worker: Worker) -> dict[str, Any]:
    from devices import late
    from phalanx.comm.mesh._accelerator import select_device
    from phalanx.elastic._rng import seed_everything
    from phalanx.elastic.membership._sync import BitsWarning, fingerprint, warn_not_deterministic
    from phalanx.launch.workers._start import method_that_works
    from phalanx.shard.plan._auto_plan import _device

    late.install(num_devices=2)
    module: Any = torch.late  # type: ignore[attr-defined]
    device = accelerator()
    assert device is not None
    assert (device.kind, device.count(), device.is_host, device.is_in_use()) == ("late", 2, False, False)
    out: dict[str, Any] = {"used": _devices.used_before_fork(), "described": _devices.describe()}
    select_device("late", 5, 8, 1)
    out["selected"] = (str(device.current()), str(_devices.place_of("late")), module.calls[-1])
    select_device("late", 5, 8, 0)  # the program has chosen by now
    assert device.current().index == 1
    assert torch.empty(1, device="late").device == torch.device("late:1")
    assert [_device("late", position) for position in range(3)] == ["late:0", "late:1", "late:0"]
    assert [_devices.count_usable(kind) for kind in ("auto", "gpu", "xpu")] == [2, torch.cuda.device_count(), 0]
    assert [_devices.names_device(text) for text in ("late:1", "cpu", "mean")] == [True, True, False]
    assert _devices.device_of_engine("shm") == torch.device("cpu")
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec("def typed(): pass", main.__dict__)  # as in a notebook
    with pytest.raises(TypeError, match="this process has used LATE, which forks cannot"):
        method_that_works(main.typed, (), "spawn")
    device.select(0)
    seed_everything(3)
    first = torch.rand(2, device="late").tolist(), torch.rand(2).tolist()
    seed_everything(3)
    assert (torch.rand(2, device="late").tolist(), torch.rand(2).tolist()) == first
    indices, kind = device.generators()
    with torch.random.fork_rng(indices, device_type=kind):
        inside = torch.rand(2, device="late").tolist()
    assert torch.rand(2, device="late").tolist() == inside
    model = nn.Linear(2, 2).to("late")
    with pytest.warns(BitsWarning, match=r"is on late, .* call torch.use_deterministic_algorithms\(True\) first"):
        warn_not_deterministic(model)
    torch.use_deterministic_algorithms(True)
    assert device.not_deterministic() == ""
    out["bits"] = fingerprint(model)
    out["memory"] = device.memory()
    return out


def test_decisions_on_an_accelerator() -> None:
    (outcome,) = run_processes(1, decide)
    found = outcome.value
    assert found["used"] == ""
    assert found["described"] == {
        "kind": "late", "count": 2, "engine": "", "name": "Late 1", "free": 1 << 30, "total": 2 << 30,
    }  # fmt: skip
    assert found["selected"] == ("late:1", "late:1", "set_device(1)")
    assert found["bits"]["device"] == "Late 1"
    assert found["bits"]["deterministic algorithms"] is True
    assert (found["memory"].used, found["memory"].peak) == (3 << 20, 5 << 20)


@pytest.mark.fast
def test_what_cuda_needs_for_equal_bits_is_named_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, before = of("cuda"), torch.are_deterministic_algorithms_enabled()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        with torch.backends.cudnn.flags(benchmark=True):
            torch.use_deterministic_algorithms(False)
            assert "use_deterministic_algorithms(True)" in cuda.not_deterministic()
            torch.use_deterministic_algorithms(True)
            assert "cudnn.benchmark = False" in cuda.not_deterministic()
        with torch.backends.cudnn.flags(benchmark=False):
            assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in cuda.not_deterministic()
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            assert cuda.not_deterministic() == ""
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.fast
def test_pinned_memory_is_used_where_it_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    empty = torch.empty

    def record(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory and not can_pin:
            raise RuntimeError("no pinned memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", record)
    can_pin = True
    device = of("cuda")
    device.host_buffer((2,), torch.float32)
    assert asked == [True]
    can_pin = False
    with pytest.raises(RuntimeError, match="no pinned memory"):
        device.host_buffer((2,), torch.float32)  # it could before: memory is short, and plain memory is no answer
    other = of("cuda")
    other.host_buffer((2,), torch.float32)
    other.host_buffer((2,), torch.float32)
    assert asked == [True, True, True, False, False]


@pytest.mark.fast
def test_the_instructions_for_a_machine_with_cuda_name_what_is_there() -> None:
    folder = Path(__file__).parent.parent / "gpu"
    text = (folder / "README.md").read_text()
    for path in sorted(folder.glob("test_*.py")):
        for line in path.read_text().splitlines():
            if line.startswith("def test_"):
                name = line.partition("(")[0].removeprefix("def ")
                assert f"`{name}`" in text, f"{path.name}: {name} is not in tests/gpu/README.md"
    assert os.path.exists(folder.parent.parent / "Makefile")
