"""Decides everything that depends on the kind of device: the only module that asks torch about accelerators.

Owns ``Device`` and its two implementations: the host's memory and processors (``HostDevice``), and whatever torch has a
device module for (``AcceleratorDevice``: ``torch.cuda``, ``torch.xpu``, a backend registered as PrivateUse1, ...). They
are asked which device is this process's, how to wait for its work, what memory the host should hand it, which c10d
engine is made for it, what its bits depend on, and how full it is.

Guarantees: the decisions of ``AcceleratorDevice`` use names that every device module of torch has, and ask before they
use one that some have not; nothing here touches a driver before it must. Not here: streams of our own. What is under
way on a device is awaited by the stream that is current where the result is wanted, as torch does it.

>>> of(torch.ones(1)).is_host, of("cuda").is_host, of("cpu").kind
(True, False, 'cpu')
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ENGINES = {"cuda": "nccl"}
"""The c10d backend that torch itself has for a kind of device and that we know how to make."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device: used by this process's tensors now and at most, and of all there is, free and in all."""

    used: int = 0
    peak: int = 0
    free: int = 0
    total: int = 0


class Mark(ABC):
    """A place in the work of a device: what was handed to it before."""

    @abstractmethod
    def wait(self) -> None:
        """Block this thread until the device has got there."""

    @abstractmethod
    def is_reached(self) -> bool:
        """Return whether ``wait`` would return at once."""


class Device(ABC):
    """What depends on one kind of device; ``of`` makes them."""

    kind: str
    is_host: bool
    """Whether its tensors are in the host's memory: readable by address, shared between processes, done when a call
    returns."""
    engine: str
    """The c10d backend that was made for it, if any; it may not be there."""

    @abstractmethod
    def count(self) -> int:
        """Return how many of them this process sees; 0 where they cannot be used."""

    @abstractmethod
    def is_in_use(self) -> bool:
        """Return whether this process has used one: then it has chosen, and may not fork."""

    @abstractmethod
    def current(self) -> torch.device:
        """Return the one that new tensors are made on, with its index."""

    @abstractmethod
    def select(self, index: int) -> None:
        """Make one of them the current one."""

    @abstractmethod
    def mark(self) -> Mark:
        """Return the end of what this thread's current stream has been given."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all work of the current device is done."""

    @abstractmethod
    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory of the host that the device reads and writes by itself, where it can."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed torch's generators of this kind of device."""

    @abstractmethod
    def generators(self) -> tuple[list[int], str]:
        """Say what ``torch.random.fork_rng`` is to keep beside the processor's generator: devices, and their kind."""

    @abstractmethod
    def bits_depend_on(self) -> dict[str, Any]:
        """Return what the bits of a computation depend on, besides its inputs: plain values, equal where it is."""

    @abstractmethod
    def not_deterministic(self) -> str:
        """Say which setting lets equal inputs give different bits, and how to change it; "" if none does."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Return how full the current one is; zeros where torch does not say."""


class _Reached(Mark):
    def wait(self) -> None:
        return

    def is_reached(self) -> bool:
        return True


class HostDevice(Device):
    """The processors and their memory."""

    kind, is_host, engine = "cpu", True, ""
    _reached = _Reached()

    def count(self) -> int:
        return 1

    def is_in_use(self) -> bool:
        return False  # it can be forked, and there is nothing to choose

    def current(self) -> torch.device:
        return torch.device("cpu")

    def select(self, index: int) -> None:
        return

    def mark(self) -> Mark:
        return self._reached

    def synchronize(self) -> None:
        return

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def generators(self) -> tuple[list[int], str]:
        return [], "cuda"  # any kind: none of its devices

    def bits_depend_on(self) -> dict[str, Any]:
        return {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }

    def not_deterministic(self) -> str:
        return ""

    def memory(self) -> DeviceMemory:
        return DeviceMemory()


class _EventMark(Mark):
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def is_reached(self) -> bool:
        return bool(self._event.query())


class AcceleratorDevice(Device):
    """A kind of device that torch has a module for, such as ``torch.cuda``."""

    is_host = False

    def __init__(self, kind: str, module: Any) -> None:
        self.kind = kind
        self.engine = _ENGINES.get(kind, "")
        self._module = module
        self._pins: bool | None = None

    def count(self) -> int:
        return int(self._module.device_count()) if self._has("device_count") and self._is_available() else 0

    def is_in_use(self) -> bool:
        return bool(self._module.is_initialized()) if self._has("is_initialized") else False

    def current(self) -> torch.device:
        return torch.device(self.kind, int(self._module.current_device()))

    def select(self, index: int) -> None:
        self._module.set_device(index)

    def mark(self) -> Mark:
        if not self._has("Event"):  # torch.mps, say: one stream, and no place in it
            self.synchronize()
            return _Reached()
        event = self._module.Event()
        event.record()
        return _EventMark(event)

    def synchronize(self) -> None:
        self._module.synchronize()

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pinned memory; torch keeps what is freed until no stream reads it any more. Plain memory, which is right as
        well, where this backend has none that is pinned."""
        if self._pins is not False:
            try:
                buffer = torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
            except RuntimeError:
                if self._pins:
                    raise  # it could before: there is no memory left
                self._pins = False
            else:
                self._pins = True
                return buffer
        return torch.empty(tuple(shape), dtype=dtype)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)  # of all devices, this kind's too, and the processor's

    def generators(self) -> tuple[list[int], str]:
        return [self.current().index], self.kind

    def bits_depend_on(self) -> dict[str, Any]:
        cudnn = torch.backends.cudnn
        return {
            "device": self._module.get_device_name() if self._has("get_device_name") else self.kind,
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "float32 matmul precision": torch.get_float32_matmul_precision(),
            "cudnn": [cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32] if self.kind == "cuda" else [],
        }

    def not_deterministic(self) -> str:
        if not torch.are_deterministic_algorithms_enabled():
            return "call torch.use_deterministic_algorithms(True) first"
        if self.kind == "cuda" and torch.backends.cudnn.benchmark:
            return "set torch.backends.cudnn.benchmark = False first"
        if self.kind == "cuda" and not os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
            return "set CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment of the workers"
        return ""

    def memory(self) -> DeviceMemory:
        free, total = self._ask("mem_get_info") or (0, 0)
        return DeviceMemory(
            used=int(self._ask("memory_allocated") or 0),
            peak=int(self._ask("max_memory_allocated") or 0),
            free=int(free),
            total=int(total),
        )

    def _has(self, name: str) -> bool:
        return hasattr(self._module, name)

    def _ask(self, name: str) -> Any:
        return getattr(self._module, name)() if self._has(name) else None

    def _is_available(self) -> bool:
        return bool(self._module.is_available()) if self._has("is_available") else True


class _NoDevice(HostDevice):
    """A type of tensors that have no device behind them (``meta``), or none that this torch can use."""

    is_host = False

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def count(self) -> int:
        return 0

    def current(self) -> torch.device:
        return torch.device(self.kind)


HOST = HostDevice()


def of(what: Tensor | torch.device | str) -> Device:
    """Return what decides for a tensor, a device, or a kind of device (``"cuda"``)."""
    if isinstance(what, str):
        kind = what.partition(":")[0]
    else:
        kind = (what.device if isinstance(what, Tensor) else what).type
    if kind == "cpu":
        return HOST
    module = None if kind == "meta" else getattr(torch, kind, None)
    return AcceleratorDevice(kind, module) if _is_device_module(module) else _NoDevice(kind)


def _is_device_module(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("device_count", "set_device", "current_device"))


def is_host(what: Tensor | torch.device | str) -> bool:
    """Return whether a tensor is, or the tensors of a device are, in the host's memory. Cheap."""
    if isinstance(what, Tensor):
        return what.is_cpu
    return (what if isinstance(what, str) else what.type).partition(":")[0] == "cpu"


def accelerator() -> Device | None:
    """Return this machine's accelerator, if it has one that can be used."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else of(found)


def names_device(text: str) -> bool:
    """Return whether a word among the arguments of a call names a device.

    >>> names_device("cuda:1"), names_device("mean")
    (True, False)
    """
    found = torch.accelerator.current_accelerator()
    return text.partition(":")[0] in ("cpu", "cuda", *(() if found is None else (found.type,)))


def place_of(kind: str) -> torch.device:
    """Return the device on which a process computes that was told a kind: with its index, where there are several."""
    device = of(kind)
    return device.current() if device.count() else torch.device(kind)


def device_of_engine(engine: str) -> torch.device:
    """Return the device whose tensors a c10d backend carries: the host's, unless it carries an accelerator's only."""
    for kind, name in _ENGINES.items():
        if name == engine:
            return of(kind).current()
    return HOST.current()


def seed_all(seed: int) -> None:
    """Seed torch's generators: those of the accelerator, if there is one, and the processor's."""
    _generators_of().seed(seed)


@functools.lru_cache(maxsize=1)
def _generators_of() -> Device:
    """Find out once: ``torch.manual_seed`` takes a fifth of a millisecond to find no device."""
    found = torch.accelerator.current_accelerator()
    return HOST if found is None else of(found)


def used_before_fork() -> str:
    """Return the kind of accelerator that this process has used, which a forked worker could not; "" if none.

    Asks no driver: to ask whether a device is there would be to use it.
    """
    found = torch.accelerator.current_accelerator()
    kinds = ("cuda", "xpu", *(() if found is None else (found.type,)))
    return next((kind for kind in kinds if of(kind).is_in_use()), "")


def count_usable(kind: str) -> int:
    """Return how many devices a user means who asked for one worker per ``gpu``, ``xpu`` or ``auto``: any."""
    if kind == "auto":
        found = accelerator()
        return found.count() if found else 0
    return of({"gpu": "cuda"}.get(kind, kind)).count()


def describe() -> dict[str, Any]:
    """Return what this process sees of accelerators, in plain values; for ``phalanx doctor``."""
    found = accelerator()
    if found is None:
        return {"kind": "", "count": 0, "engine": "", "name": "", "free": 0, "total": 0}
    memory = found.memory()
    name = str(found.bits_depend_on()["device"])
    return {
        "kind": found.kind,
        "count": found.count(),
        "engine": found.engine,
        "name": name,
        "free": memory.free,
        "total": memory.total,
    }
