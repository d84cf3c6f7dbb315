"""``phalanx run``: from flags to a launched job, from its end to an exit code.

Owns the order of things that makes the start fast: flags are read and files looked for before torch is imported; torch
is imported once; the zygote is forked before the first thread. Exit codes: 0 all workers succeeded, 1 the job failed,
2 the command line was wrong, 128+n ended by signal n.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shutil
import sys
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from phalanx.launch._config import LaunchConfig
from phalanx.launch._environment import resolver_defaults, thread_defaults
from phalanx.launch._flags import UsageError, parse
from phalanx.launch._logs import DefaultLogsSpecs, LogsSpecs, Std
from phalanx.launch._zygote import quiet_imports

if TYPE_CHECKING:
    from phalanx.launch._spec import Entrypoint

HEAL_RESTARTS = 100
"""Default of --max-restarts under heal, where replacing one worker costs the others next to nothing."""

FLAG_OF_SETTING = {
    "backend": "--rdzv-backend",
    "endpoint": "--rdzv-endpoint",
    "run_id": "--rdzv-id",
    "min_nodes": "--nnodes",
    "max_nodes": "--nnodes",
    "local_addr": "--local-addr",
}
"""What looks like a setting of the rendezvous but has a flag of its own."""


def main(argv: Sequence[str]) -> int:
    """Run ``phalanx run`` with these arguments; the exit code."""
    try:
        args = parse(argv, os.environ)
        _check_script(args)
        local_size = local_world_size(args.nproc_per_node)
        config = config_from_args(args, local_size)
    except (ValueError, NotADirectoryError) as error:
        print(f"phalanx run: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(format="phalanx: %(message)s", level=os.environ.get("PHALANX_LOGLEVEL", "WARNING"))
    # Before OpenMP is loaded and the first name resolved: they look only then.
    os.environ.update(thread_defaults(local_size, os.environ) | resolver_defaults(os.environ))
    return _launch(config, args)


def _launch(config: LaunchConfig, args: argparse.Namespace) -> int:
    with quiet_imports():
        from phalanx.launch._api import launch_agent
        from phalanx.launch._failures import ChildFailedError
        from phalanx.launch._local_agent import WARM_IMPORTS
        from phalanx.launch._orders import Plan
        from phalanx.launch._processes import ProcessStartError, Zygote
        from phalanx.launch._signals import SignalException
        from phalanx.launch.rendezvous import RendezvousError
    entrypoint, words = entrypoint_from_args(args)
    try:
        plan = Plan(entrypoint=entrypoint, args=tuple(words), method=config.start_method)
        zygote = Zygote.fork({}, (*WARM_IMPORTS, *config.preload) if plan.is_warm else ())
        launch_agent(config, entrypoint, words, zygote=zygote)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    except SignalException as error:
        print(f"phalanx run: {error}", file=sys.stderr)
        return 128 + error.sigval
    except (RendezvousError, ProcessStartError, ValueError) as error:
        print(f"phalanx run: {error}", file=sys.stderr)
        return 1
    return 0


def config_from_args(args: argparse.Namespace, local_size: int) -> LaunchConfig:
    """The configuration that the flags describe. ``ValueError`` in one line when they contradict each other."""
    min_nodes, max_nodes = parse_nodes(args.nnodes)
    backend, endpoint = _rendezvous(args, max_nodes)
    configs = parse_settings(args.rdzv_conf)
    if backend == "static":
        configs["rank"] = args.node_rank
    max_restarts = args.max_restarts
    if max_restarts is None:
        max_restarts = HEAL_RESTARTS if args.on_failure == "heal" else 0
    return LaunchConfig(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=local_size,
        logs_specs=_logs_specs(args),
        run_id=args.rdzv_id or (uuid.uuid4().hex if max_nodes == 1 else "none"),
        role=args.role,
        rdzv_endpoint=endpoint,
        rdzv_backend=backend,
        rdzv_configs=configs,
        max_restarts=max_restarts,
        monitor_interval=args.monitor_interval,
        start_method=args.start_method,
        log_line_prefix_template=os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        local_addr=args.local_addr,
        event_log_handler=args.event_log_handler,
        numa_options=_numa_options(args.numa_binding),
        signals_to_handle=args.signals_to_handle,
        duplicate_stdout_filters=args.duplicate_stdout_filters,
        duplicate_stderr_filters=args.duplicate_stderr_filters,
        virtual_local_rank=args.virtual_local_rank,
        shutdown_timeout=args.shutdown_timeout,
        on_failure=args.on_failure,
        preload=tuple(args.preload),
        hang_timeout=args.hang_timeout,
        standby=args.standby,
    )


def _rendezvous(args: argparse.Namespace, max_nodes: int) -> tuple[str, str]:
    """Backend and endpoint. One node without an endpoint or a port is standalone, so that jobs never collide."""
    is_plain = not (args.rdzv_endpoint or args.rdzv_backend or args.master_port)
    if args.standalone or (max_nodes == 1 and is_plain):
        return "c10d", "localhost:0"
    backend = args.rdzv_backend or "static"
    endpoint = args.rdzv_endpoint
    if not endpoint and backend == "static":
        endpoint = f"{args.master_addr}:{args.master_port or 29500}"
    if not endpoint and max_nodes == 1 and backend == "c10d":
        endpoint = "localhost:0"
    if not endpoint:
        raise UsageError(f"--rdzv-backend {backend} needs --rdzv-endpoint host:port, the same on every node")
    return backend, endpoint


def entrypoint_from_args(args: argparse.Namespace) -> tuple[Entrypoint, list[str]]:
    """What the workers run, and with which arguments."""
    from phalanx.launch._spec import Script

    words = list(args.training_script_args)
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


def local_world_size(text: str) -> int:
    """The number of workers of this node; ``auto``, ``cpu``, ``gpu`` and ``xpu`` look at the machine."""
    if text.isdigit():
        count = int(text)
        if count < 1:
            raise UsageError(f"--nproc-per-node {text}; expected at least 1")
        return count
    if text == "cpu":
        return _usable_cpus()
    if text not in ("auto", "gpu", "xpu"):
        raise UsageError(f"--nproc-per-node {text}; expected a number, auto, cpu, gpu or xpu")
    devices = _count_devices(text)
    if devices:
        return devices
    if text == "auto":
        return _usable_cpus()
    raise UsageError(f"--nproc-per-node {text}: this machine has no such device that torch can use")


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count_devices(kind: str) -> int:
    """Asked in another process: a process that has touched a device driver must not fork workers."""
    import subprocess

    module = {"gpu": "torch.cuda", "xpu": "torch.xpu", "auto": "torch.accelerator"}[kind]
    question = f"import torch; print({module}.device_count() if {module}.is_available() else 0)"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False)
    words = answer.stdout.split()
    return int(words[-1]) if words and words[-1].isdigit() else 0


def _logs_specs(args: argparse.Namespace) -> LogsSpecs:
    ranks: set[int] | None = None
    if args.local_ranks_filter:
        try:
            ranks = {int(part) for part in args.local_ranks_filter.split(",")}
        except ValueError:
            raise UsageError(
                f"--local-ranks-filter {args.local_ranks_filter}; expected numbers such as 0,1"
            ) from None
    make: type[LogsSpecs] = DefaultLogsSpecs if args.logs_specs is None else _plugin(args.logs_specs)
    return make(
        log_dir=args.log_dir,
        redirects=Std.from_str(args.redirects),
        tee=Std.from_str(args.tee),
        local_ranks_filter=ranks,
    )


def _plugin(name: str) -> type[LogsSpecs]:
    from importlib.metadata import entry_points

    for group in ("phalanx.logs_specs", "torchrun.logs_specs"):
        for point in entry_points(group=group, name=name):
            found: type[LogsSpecs] = point.load()
            return found
    raise UsageError(f"--logs-specs {name}: no installed package offers it (entry points phalanx.logs_specs)")


def _numa_options(name: str | None) -> Any:
    if name is None:
        return None
    from phalanx.launch.numa import AffinityMode, NumaOptions

    return NumaOptions(affinity_mode=AffinityMode(name))


def _check_script(args: argparse.Namespace) -> None:
    """Notice a script that is not there before anything is started for it."""
    script = args.training_script
    if args.module and args.no_python:
        raise UsageError("--module and --no-python exclude each other")
    if args.no_python and not args.run_path:
        if shutil.which(script) is None:
            raise UsageError(f"command {script!r} was not found or may not be executed")
    elif args.module:
        top = script.partition(".")[0]
        sys.path.insert(0, os.getcwd())
        try:
            if importlib.util.find_spec(top) is None:
                raise UsageError(f"module {script!r} was not found on the path")
        finally:
            sys.path.pop(0)
    elif not os.path.exists(script):
        raise UsageError(f"script {script!r} does not exist (working directory: {os.getcwd()})")
