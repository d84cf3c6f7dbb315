"""Every public name of the torch that is installed has a row in docs/parity.md, in the section of its part.

``LISTED`` says which modules and classes of torch each section answers for; a part adds its line there. ``ROOTS`` are
the packages that it has to cover: a public module below them that shows a name and is not listed fails. A row's second
cell is the answer: a name of ours (``phalanx...``), or ``yes``, ``differs`` or ``no`` (``-``) with how or why.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.fast

PARITY = Path(__file__).parent.parent / "docs" / "parity.md"
ANSWER = re.compile(r"`phalanx\.|(yes|differs|no)[:,] [\w`]|- *\w")


class Listed(NamedTuple):
    """A module or class of torch, and the section that has a row for each of its public names."""

    torch: str
    section: str
    prefix: str = ""
    """What rows write before the name, such as ``DeviceMesh.``."""
    beyond: str = "builtins.object"
    """A base class whose own names are no news."""


GROUPS = "Device mesh and groups"
DDP = "Distributed data parallel"
HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
LAUNCHER = "Launcher"
DTENSOR = "DTensor"
SHARDING = "Sharding API"
SAMPLER = "Elastic sampler"
FULLY_SHARDED = "Fully sharded"
ROOTS = [
    "torch.distributed._shard",
    "torch.distributed.algorithms",
    "torch.distributed.device_mesh",
    "torch.distributed.distributed_c10d",
    "torch.distributed.elastic",
    "torch.distributed.fsdp",
    "torch.distributed.launch",
    "torch.distributed.launcher",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.utils.data.distributed",
]
# A module, or all below it: why its names need no rows of their own.
LEFT_OUT = {
    "torch.distributed._shard.checkpoint": "a second name of torch.distributed.checkpoint, in a row of its own",
    "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook": "its two functions have a row; importing it warns",
}
LISTED = [
    Listed("torch.utils.data.distributed", SAMPLER),
    Listed("torch.utils.data.distributed.DistributedSampler", SAMPLER, beyond="torch.utils.data.Sampler"),
    Listed("torch.distributed.elastic.utils.data.cycling_iterator", SAMPLER),
    Listed("torch.distributed.elastic.utils.data.elastic_distributed_sampler", SAMPLER),
    *(
        Listed(f"torch.distributed.fsdp{module}", FULLY_SHARDED)
        for module in ("", ".api", ".fully_sharded_data_parallel", ".sharded_grad_scaler", ".wrap")
    ),
    Listed("torch.distributed.fsdp.FSDPModule", FULLY_SHARDED, prefix="FSDPModule."),
    *(
        Listed(f"torch.nn.parallel.{module}", DDP, prefix="parallel.")
        for module in ("comm", "data_parallel", "parallel_apply", "replicate", "scatter_gather")
    ),
    Listed("torch.nn.parallel.distributed", DDP),
    Listed("torch.nn.parallel.DistributedDataParallel", DDP, beyond="torch.nn.Module"),
    Listed("torch.distributed.algorithms.join", DDP),
    Listed("torch.distributed.algorithms.join.Join", DDP, prefix="Join."),
    Listed("torch.distributed.algorithms.join.Joinable", DDP, prefix="Joinable."),
    Listed("torch.distributed.algorithms.join.JoinHook", DDP, prefix="JoinHook."),
    Listed("torch.distributed.GradBucket", DDP, prefix="GradBucket."),
    Listed(HOOKS, DDP),
    # Not ddp_zero_hook, whose import warns: its two functions have a row all the same.
    Listed(f"{HOOKS}.debugging_hooks", DDP),
    Listed(f"{HOOKS}.default_hooks", DDP),
    Listed(f"{HOOKS}.post_localSGD_hook", DDP),
    Listed(f"{HOOKS}.powerSGD_hook", DDP),
    Listed(f"{HOOKS}.quantization_hooks", DDP),
    Listed("torch.distributed.algorithms.model_averaging.averagers", DDP),
    Listed("torch.distributed.algorithms.model_averaging.hierarchical_model_averager", DDP),
    Listed("torch.distributed.algorithms.model_averaging.utils", DDP),
    Listed("torch.distributed.device_mesh", GROUPS),
    Listed("torch.distributed.device_mesh.DeviceMesh", GROUPS, prefix="DeviceMesh."),
    Listed("torch.distributed.distributed_c10d", GROUPS),
    Listed("torch.distributed.distributed_c10d.ProcessGroup", GROUPS, prefix="ProcessGroup."),
    Listed("torch.distributed.elastic.agent.server.api", LAUNCHER),
    Listed("torch.distributed.elastic.agent.server.local_elastic_agent", LAUNCHER),
    Listed("torch.distributed.elastic.agent.server.health_check_server", LAUNCHER),
    Listed("torch.distributed.elastic.multiprocessing", LAUNCHER),
    Listed("torch.distributed.elastic.multiprocessing.api", LAUNCHER),
    Listed("torch.distributed.elastic.multiprocessing.errors", LAUNCHER),
    Listed("torch.distributed.elastic.multiprocessing.errors.error_handler", LAUNCHER),
    Listed("torch.distributed.elastic.multiprocessing.errors.handlers", LAUNCHER),
    Listed("torch.distributed.elastic.multiprocessing.redirects", LAUNCHER),
    Listed("torch.distributed.elastic.multiprocessing.tail_log", LAUNCHER),
    *(
        Listed(f"torch.distributed.elastic.multiprocessing.subprocess_handler{module}", LAUNCHER)
        for module in ("", ".handlers", ".subprocess_handler")
    ),
    Listed("torch.distributed.elastic.rendezvous", LAUNCHER),
    Listed("torch.distributed.elastic.rendezvous.api", LAUNCHER),
    Listed("torch.distributed.elastic.rendezvous.registry", LAUNCHER),
    Listed("torch.distributed.elastic.rendezvous.dynamic_rendezvous", LAUNCHER),
    Listed("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", LAUNCHER),
    Listed("torch.distributed.elastic.rendezvous.etcd_rendezvous", LAUNCHER),
    Listed("torch.distributed.elastic.rendezvous.etcd_rendezvous_backend", LAUNCHER),
    Listed("torch.distributed.elastic.rendezvous.etcd_server", LAUNCHER),
    Listed("torch.distributed.elastic.rendezvous.etcd_store", LAUNCHER),
    Listed("torch.distributed.elastic.rendezvous.static_tcp_rendezvous", LAUNCHER),
    Listed("torch.distributed.elastic.rendezvous.utils", LAUNCHER),
    Listed("torch.distributed.elastic.timer.api", LAUNCHER, prefix="timer."),
    Listed("torch.distributed.elastic.timer.local_timer", LAUNCHER, prefix="timer."),
    Listed("torch.distributed.elastic.timer.file_based_local_timer", LAUNCHER, prefix="timer."),
    Listed("torch.distributed.elastic.timer.debug_info_logging", LAUNCHER, prefix="timer."),
    Listed("torch.distributed.elastic.events", LAUNCHER, prefix="events."),
    Listed("torch.distributed.elastic.events.api", LAUNCHER, prefix="events."),
    Listed("torch.distributed.elastic.events.handlers", LAUNCHER, prefix="events."),
    Listed("torch.distributed.elastic.metrics", LAUNCHER, prefix="metrics."),
    Listed("torch.distributed.elastic.metrics.api", LAUNCHER, prefix="metrics."),
    Listed("torch.distributed.elastic.control_plane", LAUNCHER, prefix="control_plane."),
    *(
        Listed(f"torch.distributed.elastic.utils.{module}", LAUNCHER, prefix="utils.")
        for module in ("api", "distributed", "log_level", "logging", "process_state", "store")
    ),
    Listed("torch.distributed.launcher.api", LAUNCHER),
    Listed("torch.distributed.run", LAUNCHER, prefix="run."),
    Listed("torch.distributed.launch", LAUNCHER, prefix="launch."),
    Listed("torch.distributed.tensor", DTENSOR),
    Listed("torch.distributed.tensor.placement_types", DTENSOR),
    Listed("torch.distributed.tensor.device_mesh", DTENSOR),
    Listed("torch.distributed.tensor.debug", DTENSOR, prefix="debug."),
    Listed("torch.distributed.tensor.debug.CommDebugMode", DTENSOR, prefix="debug.CommDebugMode."),
    Listed("torch.distributed.tensor.experimental", DTENSOR, prefix="experimental."),
    Listed("torch.distributed.tensor.parallel", DTENSOR, prefix="parallel."),
    Listed("torch.distributed.tensor.parallel.api", DTENSOR, prefix="parallel."),
    Listed("torch.distributed.tensor.parallel.style", DTENSOR, prefix="parallel."),
    Listed("torch.distributed.tensor.parallel.loss", DTENSOR, prefix="parallel."),
    Listed("torch.distributed.tensor.parallel.input_reshard", DTENSOR, prefix="parallel.input_reshard."),
    Listed("torch.distributed.tensor.parallel.fsdp", DTENSOR, prefix="parallel.fsdp."),
    Listed("torch.distributed.tensor.DTensor", DTENSOR, prefix="DTensor.", beyond="torch.Tensor"),
    *(
        Listed(f"torch.distributed.tensor.{name}", DTENSOR, prefix=f"{name}.")
        for name in ("Placement", "Shard", "Replicate", "Partial")
    ),
    *(
        Listed(f"torch.distributed._shard{module}", SHARDING)
        for module in (
            "", ".api", ".metadata", ".sharded_optim", ".sharded_optim.api", ".sharded_tensor", ".sharded_tensor.api",
            ".sharded_tensor.metadata", ".sharded_tensor.reshard", ".sharded_tensor.shard",
            ".sharded_tensor.utils", ".sharder", ".sharding_plan", ".sharding_plan.api",
            ".sharding_spec", ".sharding_spec.api", ".sharding_spec.chunk_sharding_spec",
            ".sharding_spec.chunk_sharding_spec_ops.embedding", ".sharding_spec.chunk_sharding_spec_ops.embedding_bag",
        )
    ),
    *(
        Listed(f"torch.distributed._shard.{path}", SHARDING, prefix=f"{path.rpartition('.')[2]}.", beyond=beyond)
        for path, beyond in (
            ("sharded_tensor.ShardedTensor", "torch.Tensor"),
            ("sharded_tensor.Shard", "builtins.object"),
            ("sharded_tensor.ShardedTensorMetadata", "builtins.object"),
            ("sharded_tensor.TensorProperties", "builtins.object"),
            ("metadata.ShardMetadata", "builtins.object"),
            ("sharding_spec.ShardingSpec", "builtins.object"),
            ("sharding_spec.ChunkShardingSpec", "builtins.object"),
            ("sharding_spec.EnumerableShardingSpec", "builtins.object"),
            ("sharding_spec.DevicePlacementSpec", "builtins.object"),
            ("sharding_plan.ShardingPlan", "builtins.object"),
            ("sharding_plan.ShardingPlanner", "builtins.object"),
            ("sharder.Sharder", "builtins.object"),
            ("sharded_optim.ShardedOptimizer", "torch.optim.Optimizer"),
        )
    ),
]  # fmt: skip


def find(dotted: str) -> Any:
    """The module, or the attribute of one, of that name."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        module, _, name = dotted.rpartition(".")
        return getattr(find(module), name)


def public_names(listed: Listed) -> set[str]:
    """What torch shows: a module's ``__all__`` (or what it defines itself), a class's members, own and inherited."""
    found, base = find(listed.torch), find(listed.beyond)
    if isinstance(found, ModuleType):
        names = getattr(found, "__all__", None)
        if names is None:
            names = [
                name for name, value in vars(found).items() if getattr(value, "__module__", None) == found.__name__
            ]
        return {name for name in names if not name.startswith("_")}
    assert inspect.isclass(found), f"{listed.torch} is neither a module nor a class"
    members = {*dir(found)} - {*dir(base)} | {*vars(found)}
    return {name for name in members if not name.startswith("_")}


def sections(text: str) -> dict[str, list[tuple[str, str, str]]]:
    """The rows below each heading."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            rows = found.setdefault(line[3:].strip(), [])
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3 and cells[1] != "ours":
            rows.append((cells[0], cells[1], cells[2]))
    return found


def named(cell: str) -> set[str]:
    """The names that a row's first cell is about.

    >>> sorted(named("`DeviceMesh.size`, `shape` (of the mesh)"))
    ['DeviceMesh.size', 'shape']
    """
    return set(re.findall(r"`([\w.]+)`", cell))


def public_modules(root: str) -> Iterator[str]:
    """``root`` and the public modules below it that are not left out."""
    package = find(root)
    inside = getattr(package, "__path__", ())
    for name in [root, *(found.name for found in pkgutil.walk_packages(inside, f"{root}."))]:
        below = name.removeprefix(root)
        if "._" not in below and not any(f"{name}.".startswith(f"{left}.") for left in LEFT_OUT):
            yield name


@pytest.mark.parametrize("root", ROOTS)
def test_no_public_module_of_torch_is_left_out(root: str) -> None:
    listed = {one.torch: one for one in LISTED}
    with warnings.catch_warnings(record=True):  # what torch says of modules that are old, filtered or not
        warnings.simplefilter("always")
        known = set().union(*(own_names(one) for name, one in listed.items() if name.startswith(f"{root}.")), set())
        unlisted = {name: public_names(Listed(name, "")) for name in public_modules(root) if name not in listed}
    missing = {name: sorted(names - known) for name, names in unlisted.items() if names - known}
    assert not missing, (
        f"public names in modules that LISTED does not name; list them, or say in LEFT_OUT why: {missing}"
    )


def own_names(listed: Listed) -> set[str]:
    """The public names of a listed module; a class has none that a module could show."""
    return public_names(listed) if isinstance(find(listed.torch), ModuleType) else set()


def test_what_is_left_out_exists() -> None:
    gone = [name for name in LEFT_OUT if importlib.util.find_spec(name) is None]
    assert not gone, f"the installed torch has no {gone}"


@pytest.mark.parametrize("listed", LISTED, ids=lambda listed: listed.torch)
def test_each_public_name_of_torch_has_a_row(listed: Listed) -> None:
    rows = sections(PARITY.read_text()).get(listed.section)
    assert rows, f"docs/parity.md has no section {listed.section!r} with rows"
    known = {name for row in rows for name in named(row[0])}
    missing = sorted(name for name in public_names(listed) if listed.prefix + name not in known)
    assert not missing, f"no row under {listed.section!r} for {listed.torch}: {missing}"


@pytest.mark.parametrize("section", sorted({listed.section for listed in LISTED}))
def test_each_row_answers_yes_differs_or_no(section: str) -> None:
    rows = sections(PARITY.read_text())[section]
    wrong = [row for row in rows if not (ANSWER.match(row[1]) or (row[1] == "-" and len(row[2]) > 8))]
    assert not wrong, f"expected a name of ours, or yes / differs / no and how or why: {wrong}"


def test_a_name_without_a_row_is_found() -> None:
    rows = sections("## A\n| PyTorch's name | ours | test |\n|---|---|---|\n| `DeviceMesh.size` | `phalanx.x` | |\n")
    assert {name for row in rows["A"] for name in named(row[0])} == {"DeviceMesh.size"}
    assert "get_group" in public_names(Listed("torch.distributed.device_mesh.DeviceMesh", "A"))
    assert "all_reduce" in public_names(Listed("torch.distributed.distributed_c10d", "A"))
    own = public_names(Listed("torch.nn.Linear", "A", beyond="torch.nn.Module"))
    assert own == {"forward", "extra_repr", "reset_parameters"}
