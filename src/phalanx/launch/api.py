"""Offers launching under the path that users of torch know: ``torch.distributed.launcher.api``."""

from __future__ import annotations

from phalanx.launch.agent._launch import elastic_launch, launch_agent
from phalanx.launch.config._config import LaunchConfig

__all__ = [
    "LaunchConfig",
    "elastic_launch",
    "launch_agent",
]
