"""Builds the configuration and the entrypoint that the flags of ``phalanx run`` describe.

Owns what flags mean together: which rendezvous they ask for, which defaults depend on others. ``ValueError`` in one
line when they contradict each other. Starts nothing.
"""

from __future__ import annotations

import argparse
import os
import uuid
from collections.abc import Mapping
from typing import Any

from phalanx.launch.cli._flags import UsageError
from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.config._flag import flags_of
from phalanx.launch.config._worker_spec import Entrypoint, Script
from phalanx.launch.rendezvous._allocation import AUTO, SCHEDULERS, NodeAllocation, find_allocation
from phalanx.launch.rendezvous._settings import check_settings
from phalanx.launch.system._listen_address import LOOPBACK
from phalanx.launch.telemetry._logs import DefaultLogsSpecs, LogsSpecs, Std
from phalanx.launch.workers._start import LOCAL_RANK_MACRO

HEAL_RESTARTS = 100
"""Default of --max-restarts under heal, where replacing one worker costs the others next to nothing."""

HEAL_WINDOW = 3600.0
"""Seconds in which those are counted if neither is told: a total would be gone some day, however rare failures are."""

OWN_ETCD = 3
"""On how many nodes a job has an etcd of its own when it was given none: it survives the loss of one of them."""

FLAG_OF_SETTING = {
    "backend": "--rdzv-backend",
    "endpoint": "--rdzv-endpoint",
    "run_id": "--rdzv-id",
    "min_nodes": "--nnodes",
    "max_nodes": "--nnodes",
    "local_addr": "--local-addr",
}
"""What looks like a setting of the rendezvous but has a flag of its own."""


def config_from_args(args: argparse.Namespace, local_size: int) -> LaunchConfig:
    """Build the configuration that the flags describe. ``ValueError`` in one line when they contradict each other."""
    allocation = _allocation(args)
    min_nodes, max_nodes = parse_nodes(args.nnodes)
    is_own = args.rdzv_backend == "etcd" and not args.rdzv_endpoint
    backend, endpoint = _rendezvous(args, max_nodes)
    configs = parse_settings(args.rdzv_conf)
    if is_own and not args.standalone:
        configs.setdefault("embedded", str(OWN_ETCD))
    if allocation is not None:
        configs.setdefault("is_host", str(allocation.serves).lower())
    try:
        check_settings(configs, backend)
    except ValueError as error:
        raise UsageError(f"--rdzv-conf {args.rdzv_conf}: {error}") from None
    if max_nodes > 1 and backend in ("c10d", "static", "file") and _asks_for_own_etcd(configs):
        raise UsageError(
            f"--rdzv-conf embedded={configs['embedded']} and --rdzv-backend {backend}: an etcd of the job's own is had "
            "with --rdzv-backend etcd, or with that of a scheduler"
        )
    if backend == "static":
        configs["rank"] = args.node_rank
    max_restarts, window = _budget(args)
    told = {flag.dest: getattr(args, flag.dest) for flag in flags_of(LaunchConfig)}
    together = {
        "min_nodes": min_nodes,
        "max_nodes": max_nodes,
        "nproc_per_node": local_size,
        "logs_specs": _logs_specs(args),
        "run_id": args.rdzv_id or (uuid.uuid4().hex if max_nodes == 1 else "none"),
        "rdzv_endpoint": endpoint,
        "rdzv_backend": backend,
        "rdzv_configs": configs,
        "max_restarts": max_restarts,
        "restart_window": window,
        "log_line_prefix_template": os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        "numa_options": _numa_options(args.numa_binding),
    }
    return LaunchConfig(**{**told, **together})


def _budget(args: argparse.Namespace) -> tuple[int, float]:
    """Return how many restarts there are, and within how many seconds (0: over the whole job)."""
    heals, told, window = args.on_failure == "heal", args.max_restarts, args.restart_window
    if window is None:
        window = HEAL_WINDOW if heals and told is None else 0.0
    if told is None:
        told = HEAL_RESTARTS if heals else 0
    return told, window


def _allocation(args: argparse.Namespace) -> NodeAllocation | None:
    """Have a scheduler say what the flags leave open: number of nodes, endpoint and id of the job. Returns what it said
    where its endpoint is the one that is used."""
    asked = args.rdzv_backend
    if asked not in (*SCHEDULERS, AUTO):
        return None
    if args.standalone:
        raise UsageError(f"--standalone and --rdzv-backend {asked} exclude each other")
    try:
        found = find_allocation(asked)
    except ValueError as error:
        raise UsageError(str(error)) from None
    args.rdzv_backend = ""
    if found is None:
        return None
    if args.nnodes == "1":
        args.nnodes = str(found.num_agents)
    if parse_nodes(args.nnodes)[0] > found.num_agents:
        raise UsageError(f"--nnodes {args.nnodes}: {found.scheduler} has started {found.num_agents} agents only")
    args.rdzv_id = args.rdzv_id or found.job
    if found.num_agents == 1 and not args.rdzv_endpoint:
        return None  # as without a scheduler: nobody else will come
    args.rdzv_backend = "etcd" if _asks_for_own_etcd(parse_settings(args.rdzv_conf)) else "c10d"
    if args.rdzv_endpoint:
        return None
    args.rdzv_endpoint = found.endpoint
    return found


def _asks_for_own_etcd(configs: Mapping[str, Any]) -> bool:
    return str(configs.get("embedded", "0")) != "0"


def _rendezvous(args: argparse.Namespace, max_nodes: int) -> tuple[str, str]:
    """Backend and endpoint. One node without an endpoint or a port is standalone, so that jobs never collide."""
    is_plain = not (args.rdzv_endpoint or args.rdzv_backend or args.master_port)
    if args.standalone or (max_nodes == 1 and is_plain):
        return "c10d", "localhost:0"
    backend = args.rdzv_backend or "static"
    endpoint = args.rdzv_endpoint
    if not endpoint and backend == "static":
        endpoint = f"{args.master_addr}:{args.master_port or 29500}"
    if not endpoint and max_nodes == 1 and backend in ("c10d", "etcd"):
        endpoint = "localhost:0"
    if not endpoint and backend == "etcd" and args.master_addr not in LOOPBACK:  # where the etcd of its own begins
        endpoint = f"{args.master_addr}:{args.master_port or 29400}"
    if not endpoint:
        raise UsageError(f"--rdzv-backend {backend} needs --rdzv-endpoint host:port, the same on every node")
    return backend, endpoint


def entrypoint_from_args(args: argparse.Namespace) -> tuple[Entrypoint, list[str]]:
    """Return what the workers run, and with which arguments."""
    words = list(args.training_script_args)
    if not args.use_env:
        words.insert(0, f"--local-rank={LOCAL_RANK_MACRO}")
    if args.no_python and not args.run_path:
        return args.training_script, words
    return Script(args.training_script, is_module=args.module), words


def parse_nodes(text: str) -> tuple[int, int]:
    """Read ``N`` or ``MIN:MAX``.

    >>> parse_nodes("2"), parse_nodes("1:4")
    ((2, 2), (1, 4))
    """
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isdigit() for part in parts):
        raise UsageError(f"--nnodes {text}; expected a number, or MIN:MAX such as 1:4")
    least, most = int(parts[0]), int(parts[-1])
    if not 1 <= least <= most:
        raise UsageError(f"--nnodes {text}; expected 1 <= MIN <= MAX")
    return least, most


def parse_settings(text: str) -> dict[str, Any]:
    """Read ``key=value,key=value``.

    >>> parse_settings("timeout=60,is_host=true")
    {'timeout': '60', 'is_host': 'true'}
    """
    settings: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--rdzv-conf has {pair!r}; expected key=value,key=value")
        if (flag := FLAG_OF_SETTING.get(key.strip())) is not None:
            raise UsageError(f"--rdzv-conf has {pair!r}; that is said with {flag}")
        settings[key.strip()] = value.strip()
    return settings


def _logs_specs(args: argparse.Namespace) -> LogsSpecs:
    ranks: set[int] | None = None
    if args.local_ranks_filter:
        try:
            ranks = {int(part) for part in args.local_ranks_filter.split(",")}
        except ValueError:
            raise UsageError(f"--local-ranks-filter {args.local_ranks_filter}; expected numbers such as 0,1") from None
    make: type[LogsSpecs] = DefaultLogsSpecs if args.logs_specs is None else _plugin(args.logs_specs)
    return make(
        log_dir=args.log_dir,
        redirects=Std.from_str(args.redirects),
        tee=Std.from_str(args.tee),
        local_ranks_filter=ranks,
    )


def _plugin(name: str) -> type[LogsSpecs]:
    from importlib.metadata import entry_points  # start-up speed: few ask for it

    for group in ("phalanx.logs_specs", "torchrun.logs_specs"):
        for point in entry_points(group=group, name=name):
            found: type[LogsSpecs] = point.load()
            return found
    raise UsageError(f"--logs-specs {name}: no installed package offers it (entry points phalanx.logs_specs)")


def _numa_options(name: str | None) -> Any:
    if name is None:
        return None
    from phalanx.launch.numa import AffinityMode, NumaOptions  # start-up speed: few ask for it

    return NumaOptions(affinity_mode=AffinityMode(name))
