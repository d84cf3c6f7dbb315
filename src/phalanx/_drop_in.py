"""Gives a script that imports torch's names ours instead, where ``phalanx run --drop-in`` says so.

Owns the table of names and the redirection: torch's module gets a class that answers for these names, with ours to
everybody but torch itself, whose own modules keep what they were written for. So names are ours however the script and
whatever it imports ask for them, by ``from torch.nn.parallel import ...`` or with dots. Ours are imported when they are
first asked for, which is said once. Imports nothing of torch by itself: modules that are not there yet are redirected
when they are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from phalanx._after_import import after_import

VARIABLE = "PHALANX_DROP_IN"
"""The parts to replace, separated by commas; set for the workers by the launcher."""

_DTENSOR = [
    *("DTensor", "DeviceMesh", "Partial", "Placement", "Replicate", "Shard", "distribute_module", "distribute_tensor"),
    *("empty", "full", "init_device_mesh", "ones", "rand", "randn", "zeros"),
]
_DTENSOR_API = [name for name in _DTENSOR if name.islower() and name != "init_device_mesh"] + ["DTensor"]
_PLACEMENTS = ["Partial", "Placement", "Replicate", "Shard", "_MaskPartial", "_StridedShard"]
_STYLES = [
    *("ColwiseParallel", "ParallelStyle", "PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput"),
    *("RowwiseParallel", "SequenceParallel"),
]
_MESH = ["DeviceMesh", "init_device_mesh"]
_FSDP = [
    *("CPUOffloadPolicy", "DataParallelMeshDims", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy"),
    *("UnshardHandle", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"),
]
PARTS: dict[str, dict[str, tuple[str, Sequence[str]]]] = {
    "ddp": {
        "torch.nn.parallel": ("phalanx.ddp", ["DistributedDataParallel"]),
        "torch.nn.parallel.distributed": ("phalanx.ddp", ["DistributedDataParallel"]),
    },
    "sampler": {
        "torch.utils.data": ("phalanx.data.torch_names", ["DistributedSampler"]),
        "torch.utils.data.distributed": ("phalanx.data.torch_names", ["DistributedSampler"]),
    },
    "tensor": {
        "torch.distributed": ("phalanx.comm", _MESH),
        "torch.distributed.device_mesh": ("phalanx.comm", _MESH),
        "torch.distributed.tensor": ("phalanx.tensor", _DTENSOR),
        "torch.distributed.tensor.debug": ("phalanx.tensor.debug", ["CommDebugMode", "visualize_sharding"]),
        "torch.distributed.tensor.device_mesh": ("phalanx.tensor.device_mesh", _MESH),
        "torch.distributed.tensor.experimental": (
            "phalanx.tensor.experimental",
            ["implicit_replication", "local_map", "register_sharding"],
        ),
        "torch.distributed.tensor.parallel": (
            "phalanx.tensor.parallel",
            [*_STYLES, "loss_parallel", "parallelize_module"],
        ),
        "torch.distributed.tensor.parallel.api": ("phalanx.tensor.parallel.api", ["parallelize_module"]),
        "torch.distributed.tensor.parallel.loss": ("phalanx.tensor.parallel.loss", ["loss_parallel"]),
        "torch.distributed.tensor.parallel.style": ("phalanx.tensor.parallel.style", _STYLES),
        "torch.distributed.tensor.placement_types": ("phalanx.tensor.placement_types", _PLACEMENTS),
        "torch.distributed._tensor": ("phalanx.tensor", _DTENSOR),  # where it was before torch 2.5
        "torch.distributed._tensor.api": ("phalanx.tensor", _DTENSOR_API),
        "torch.distributed._tensor.placement_types": ("phalanx.tensor.placement_types", _PLACEMENTS[:4]),
    },
    "fsdp": {
        "torch.distributed.fsdp": ("phalanx.fsdp", _FSDP),
        "torch.distributed._composable.fsdp": (
            "phalanx.fsdp",
            [name for name in _FSDP if name not in ("DataParallelMeshDims", "UnshardHandle", "share_comm_ctx")],
        ),
        "torch.distributed._composable.fsdp.fully_shard": (
            "phalanx.fsdp",
            ["FSDPModule", "UnshardHandle", "fully_shard", "register_fsdp_forward_method"],
        ),
    },
}
"""By part: in which module of torch's which names are answered by which module of ours."""


def parse_parts(text: str) -> tuple[str, ...]:
    """Read the parts to replace; ``ValueError`` names one that there is not.

    >>> parse_parts("ddp,sampler"), parse_parts("all")
    (('ddp', 'sampler'), ('ddp', 'sampler', 'tensor', 'fsdp'))
    """
    if text == "all":
        return tuple(PARTS)
    found = tuple(part for part in text.split(",") if part)
    unknown = [part for part in found if part not in PARTS]
    if unknown or not found:
        raise ValueError(f"--drop-in {text}; expected some of {', '.join(PARTS)}, separated by commas")
    return found


def modules_of(parts: Sequence[str]) -> tuple[str, ...]:
    """Return which of our modules answer for these parts, each once: what a process that is forked later wants to have.

    >>> modules_of(["ddp", "sampler"])
    ('phalanx.ddp', 'phalanx.data.torch_names')
    """
    return tuple(dict.fromkeys(ours for part in parts for ours, _ in PARTS[part].values()))


def install(parts: Sequence[str], tell: Callable[[str], None]) -> None:
    """Answer for the names of these parts from now on; ``tell`` hears of each name once, when it is first used."""
    said: set[str] = set()

    def tell_once(line: str) -> None:
        if line not in said:
            said.add(line)
            tell(line)

    for part in parts:
        for name, (ours, names) in PARTS[part].items():
            action = _redirection(ours, tuple(names), tell_once)
            if name in sys.modules:
                action(sys.modules[name])
            else:
                after_import(name, action)


def install_from(environ: Any) -> None:
    """Do what the launcher's variable says, if it is set; the worker with rank 0 tells."""
    text = environ.get(VARIABLE)
    if text:
        tell = _print if environ.get("RANK", "0") == "0" else lambda line: None
        tell(
            f"--drop-in {text}: a failure restarts all workers, and the script resumes from its own checkpoint; only a "
            f"phalanx.Job goes on in place"
        )
        install(parse_parts(text), tell)


def _print(line: str) -> None:
    print(f"phalanx: {line}", file=sys.stderr, flush=True)


def _asked_by() -> str:
    """Return the module whose code asked a redirected module for a name; the import system looks on its behalf."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def _redirection(ours: str, names: tuple[str, ...], tell: Callable[[str], None]) -> Callable[[Any], None]:
    def redirect(module: Any) -> None:
        class Redirected(type(module)):  # type: ignore[misc]  # whatever class torch gave its module
            """A module of torch's that answers for some of its names with ours."""

            def __getattribute__(self, name: str) -> Any:
                value = super().__getattribute__(name)
                if name not in names or _asked_by().partition(".")[0] in ("torch", "phalanx"):
                    return value
                tell(f"--drop-in: {module.__name__}.{name} is {ours}.{name}")
                return getattr(import_module(ours), name)

        module.__class__ = Redirected

    return redirect
