"""How an agent treats its workers, as one checked value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """How an agent treats its workers."""

    on_failure: str = "restart"
    shutdown_timeout: float = 30.0
    exit_barrier_timeout: float = 300.0
    hang_timeout: float = 0.0
    """0: no detection."""
    start_timeout: float = 600.0
    """The same until a worker has made its first step."""

    def __post_init__(self) -> None:
        if self.on_failure not in ("restart", "heal"):
            raise ValueError(f"on_failure is {self.on_failure!r}; expected restart or heal")
        if self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout is {self.shutdown_timeout}; expected 0 or more seconds")
