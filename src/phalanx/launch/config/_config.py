"""Holds everything a launch depends on in one value, ``LaunchConfig``, which nothing here ever changes.

Owns the fields, their defaults, flags and checks. Where a default depends on another field, ``resolved`` returns a
filled-in copy: that one value is what every part of an agent is given, and each takes from it what it needs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from phalanx._drop_in import parse_parts
from phalanx.launch.config._flag import duration, flag, words
from phalanx.launch.system._signals import DEFAULT_SIGNALS, parse_signals
from phalanx.protocol import timeouts

if TYPE_CHECKING:
    from phalanx.launch.numa import NumaOptions
    from phalanx.launch.telemetry._logs import LogsSpecs
    from phalanx.preemption import NoticeSource, SignalNotices

DEFAULT_RDZV_TIMEOUT = int(timeouts.JOIN)
ENV_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@dataclass
class LaunchConfig:
    """Says how to launch a job.

    >>> LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=4).resolved().rdzv_endpoint
    'localhost:0'
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: LogsSpecs | None = None
    run_id: str = ""
    role: str = field(
        default="default_role",
        metadata=flag(default="default", help="the role of the workers, for logs and ROLE_NAME"),
    )
    rdzv_endpoint: str = field(default="", metadata=flag(help="host:port of the rendezvous, the same on all nodes"))
    rdzv_backend: str = field(
        default="c10d", metadata=flag(default="", help="static, c10d, etcd, file, or one that was registered")
    )
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = field(
        default=3,
        metadata=flag(kind=int, default=None, help="restarts of the whole job before it fails (0; with heal 100)"),
    )
    monitor_interval: float = field(
        default=0.1, metadata=flag(kind=float, help="seconds between looks at requests in the store")
    )
    start_method: str = field(
        default="spawn",
        metadata=flag(
            default="warm",
            choices=("warm", "exec", "spawn", "fork", "forkserver"),
            help="warm: fork from a process that has torch imported; exec: a fresh interpreter each",
        ),
    )
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = field(default=None, metadata=flag(help="address of this node; by default its FQDN"))
    event_log_handler: str = field(default="null", metadata=flag(help="where events go beside the log directory"))
    numa_options: NumaOptions | None = None
    signals_to_handle: str = field(
        default=DEFAULT_SIGNALS, metadata=flag(help="signals that end the job and are passed on")
    )
    duplicate_stdout_filters: list[str] | None = field(
        default=None, metadata=flag(kind=words, default=[], help="copy matching lines to filtered_stdout.log")
    )
    duplicate_stderr_filters: list[str] | None = field(
        default=None, metadata=flag(kind=words, default=[], help="copy matching lines to filtered_stderr.log")
    )
    virtual_local_rank: bool = field(
        default=False,
        metadata=flag(kind=None, help="LOCAL_RANK is 0 everywhere, each worker sees one device"),
    )
    shutdown_timeout: float | None = field(
        default=None, metadata=flag(kind=int, help="seconds between the signal and SIGKILL (30)")
    )
    on_failure: str = field(
        default="restart", metadata=flag(choices=("restart", "heal"), help="restart all, or replace the dead")
    )
    notice: tuple[str | NoticeSource | SignalNotices, ...] = field(
        default=(),
        metadata=flag(
            kind=lambda text: tuple(words(text)),
            help="who says that this node will be taken away, so that it leaves before: aws, gcp, azure, slurm, "
            "kubernetes, signal:NAME, file:PATH, call:MODULE:FUNCTION",
        ),
    )
    leave_signal: str = field(
        default="SIGTERM", metadata=flag(help="the signal by which a worker is asked to leave at a step boundary")
    )
    restart_window: float = field(
        default=0.0,
        metadata=flag(
            kind=duration,
            default=None,
            help="count restarts within this time only, such as 1h or 90s (0: over the whole job; with heal 1h, if no "
            "number is given)",
        ),
    )
    max_failures_without_progress: int = field(
        default=3,
        metadata=flag(kind=int, help="failures in a row without a new step, after the first, before the job stops"),
    )
    preload: tuple[str, ...] = field(
        default=(),
        metadata=flag(kind=lambda text: tuple(words(text)), help="modules to import once, before workers are forked"),
    )
    hang_timeout: float = field(
        default=0.0, metadata=flag(kind=float, help="seconds without progress before a worker is killed")
    )
    start_timeout: float = field(
        default=timeouts.WORKER_START,
        metadata=flag(kind=float, help="the same for a worker that has yet to make its first step (if longer)"),
    )
    dashboard: str = field(
        default="",
        metadata=flag(help="[HOST:]PORT: show the job there, as a page, an API and metrics (docs/watch.md)"),
    )
    otel: str = field(
        default="",
        metadata=flag(help="push metrics to this OpenTelemetry collector, such as http://127.0.0.1:4318 (extra otel)"),
    )
    console: str = field(
        default="auto",
        metadata=flag(
            choices=("auto", "plain", "merged"),
            help="merged: equal lines of several ranks as one, with their ranks; auto: that, with more than one "
            "worker; plain: as they are",
        ),
    )
    standby: int | None = field(
        default=None,
        metadata=flag(kind=int, help="processes kept ready to replace a dead worker (0; with heal, and warm, 1)"),
    )
    drop_in: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            kind=parse_parts,
            help="give the script ours in the place of torch's names; alone: all of ddp,sampler,tensor,fsdp",
        ),
    )
    exit_barrier_timeout: float = timeouts.EXIT_BARRIER
    """Seconds that a node which is done waits for the others."""
    uninterruptible_state_timeout: float | None = None
    """Seconds that the kernel may hold a worker (state D) before the job ends; None: as the environment says."""
    master_addr: str | None = None
    """Where the workers' store is, if not at the first node's own address; the static rendezvous says it itself."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(f"nodes are {self.min_nodes}:{self.max_nodes}; expected 1 <= min_nodes <= max_nodes")
        if self.nproc_per_node < 1:
            raise ValueError(f"nproc_per_node is {self.nproc_per_node}; expected at least 1")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts is {self.max_restarts}; expected 0 or more")
        if not 0 <= self.restart_window < float("inf"):
            raise ValueError(f"restart_window is {self.restart_window}; expected 0 (the whole job) or seconds")
        if self.max_failures_without_progress < 0:
            raise ValueError(
                f"max_failures_without_progress is {self.max_failures_without_progress}; expected 0 or more"
            )
        if self.monitor_interval <= 0:
            raise ValueError(f"monitor_interval is {self.monitor_interval}; expected a positive number of seconds")
        if self.on_failure not in ("restart", "heal"):
            raise ValueError(f"on_failure is {self.on_failure!r}; expected restart or heal")
        if self.shutdown_timeout is not None and self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout is {self.shutdown_timeout}; expected 0 or more seconds")
        if self.hang_timeout < 0:
            raise ValueError(f"hang_timeout is {self.hang_timeout}; expected 0 (off) or a number of seconds")
        if self.start_timeout < 0:
            raise ValueError(f"start_timeout is {self.start_timeout}; expected 0 or more seconds")
        if self.standby is not None and self.standby < 0:
            raise ValueError(f"standby is {self.standby}; expected 0 or more processes")
        parse_signals(self.signals_to_handle)
        if len(parse_signals(self.leave_signal)) != 1:
            raise ValueError(f"leave_signal is {self.leave_signal!r}; expected one name such as SIGTERM")
        if self.notice:
            self._check_notice()
        if self.otel:
            from phalanx.watch._otel import metrics_endpoint  # start-up: few agents ask

            metrics_endpoint(self.otel)

    def _check_notice(self) -> None:
        from phalanx.preemption import parse_source  # start-up: few agents ask

        if self.on_failure != "heal":
            raise ValueError(
                f"notice is {', '.join(map(str, self.notice))} and on_failure {self.on_failure!r}; expected 'heal': "
                "else no worker could leave without the others"
            )
        for source in self.notice:
            if isinstance(source, str) and not source.startswith("call:"):  # which imports what a user has written
                parse_source(source)

    @property
    def merges_lines(self) -> bool:
        """Whether lines are shown with their ranks, equal ones of several ranks as one. With more than one worker, on
        other nodes too: in the file of a scheduler the lines of all of them lie together."""
        are_several = self.nproc_per_node > 1 or self.max_nodes > 1
        return self.console == "merged" or (self.console == "auto" and are_several)

    @property
    def shows_line(self) -> bool:
        """Whether a person at a terminal is shown one live line: step, loss, throughput, workers, last event."""
        return self.console != "plain" and os.isatty(2)

    @property
    def request_interval(self) -> float:
        """Seconds between two looks at what the store asks of an agent."""
        return max(self.monitor_interval, timeouts.REQUEST_INTERVAL)

    def resolved(self, environ: Mapping[str, str] | None = None) -> LaunchConfig:
        """Return a copy with every default that depends on something else filled in."""
        import uuid  # start-up: the command line reads its flags from this module

        env = os.environ if environ is None else environ
        configs = dict(self.rdzv_configs)
        if self.rdzv_timeout != -1:
            configs["timeout"] = self.rdzv_timeout
        configs.setdefault("timeout", DEFAULT_RDZV_TIMEOUT)
        endpoint, backend = self.rdzv_endpoint, self.rdzv_backend
        if not endpoint and self.max_nodes == 1:
            endpoint, backend = "localhost:0", "c10d"
        elif not endpoint:
            raise ValueError(
                f"a job of up to {self.max_nodes} nodes has no rdzv_endpoint; expected host:port of the {backend} "
                "rendezvous, the same on every node"
            )
        patience = self.shutdown_timeout
        is_worth_a_fork = self.on_failure == "heal" and self.start_method == "warm"
        return replace(
            self,
            run_id=self.run_id or uuid.uuid4().hex,
            rdzv_endpoint=endpoint,
            rdzv_backend=backend,
            rdzv_configs=configs,
            logs_specs=_own_logs(self.logs_specs),
            master_addr=self.master_addr or (static_address(endpoint)[0] if backend == "static" else None),
            standby=int(is_worth_a_fork) if self.standby is None else self.standby,
            shutdown_timeout=int(env.get(ENV_SHUTDOWN_TIMEOUT) or timeouts.SHUTDOWN) if patience is None else patience,
        )


def _own_logs(specs: LogsSpecs | None) -> LogsSpecs:
    """Return the specs of one launch: ours remember the directory of their run, which is the launch's, not the
    config's."""
    from phalanx.launch.telemetry._logs import DefaultLogsSpecs  # start-up, as above

    if specs is None:
        return DefaultLogsSpecs()
    return copy(specs) if isinstance(specs, DefaultLogsSpecs) else specs


def static_address(endpoint: str) -> tuple[str, int]:
    """Read the master address that a static rendezvous was told.

    >>> static_address("node0:29500")
    ('node0', 29500)
    """
    endpoint = endpoint.strip()
    if not endpoint:
        raise ValueError("the static rendezvous has no endpoint; give --master-addr and --master-port")
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"the static endpoint {endpoint!r} has no port; give --master-port, or host:port")
    return host.strip("[]"), int(port)
