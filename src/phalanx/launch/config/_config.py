"""``LaunchConfig``: everything a launch depends on, as one value that nothing here ever changes.

Owns the fields, their defaults and their checks. Where a default depends on another field, ``resolved`` returns a
filled-in copy.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from phalanx.launch.system._signals import DEFAULT_SIGNALS, parse_signals
from phalanx.launch.telemetry._logs import DefaultLogsSpecs, LogsSpecs
from phalanx.protocol import timeouts

if TYPE_CHECKING:
    from phalanx.launch.numa import NumaOptions

DEFAULT_RDZV_TIMEOUT = int(timeouts.JOIN)
ENV_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@dataclass
class LaunchConfig:
    """How to launch a job.

    >>> LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=4).resolved().rdzv_endpoint
    'localhost:0'
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: LogsSpecs | None = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "c10d"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: NumaOptions | None = None
    signals_to_handle: str = DEFAULT_SIGNALS
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    on_failure: str = "restart"
    preload: tuple[str, ...] = ()
    hang_timeout: float = 0.0
    start_timeout: float = 600.0
    standby: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(
                f"nodes are {self.min_nodes}:{self.max_nodes}; expected 1 <= min_nodes <= max_nodes"
            )
        if self.nproc_per_node < 1:
            raise ValueError(f"nproc_per_node is {self.nproc_per_node}; expected at least 1")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts is {self.max_restarts}; expected 0 or more")
        if self.on_failure not in ("restart", "heal"):
            raise ValueError(f"on_failure is {self.on_failure!r}; expected restart or heal")
        if self.shutdown_timeout is not None and self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout is {self.shutdown_timeout}; expected 0 or more seconds")
        if self.hang_timeout < 0:
            raise ValueError(f"hang_timeout is {self.hang_timeout}; expected 0 (off) or a number of seconds")
        if self.start_timeout < 0:
            raise ValueError(f"start_timeout is {self.start_timeout}; expected 0 or more seconds")
        if self.standby < 0:
            raise ValueError(f"standby is {self.standby}; expected 0 or more processes")
        parse_signals(self.signals_to_handle)

    def resolved(self, environ: Mapping[str, str] | None = None) -> LaunchConfig:
        """A copy with every default that depends on something else filled in."""
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
        return replace(
            self,
            run_id=self.run_id or uuid.uuid4().hex,
            rdzv_endpoint=endpoint,
            rdzv_backend=backend,
            rdzv_configs=configs,
            logs_specs=_own_logs(self.logs_specs),
            shutdown_timeout=int(env.get(ENV_SHUTDOWN_TIMEOUT) or 30) if patience is None else patience,
        )


def _own_logs(specs: LogsSpecs | None) -> LogsSpecs:
    """The specs of one launch: ours remember the directory of their run, which is the launch's, not the config's."""
    if specs is None:
        return DefaultLogsSpecs()
    return copy(specs) if isinstance(specs, DefaultLogsSpecs) else specs
