"""Seeing what distributed tensors do: who communicates, and who holds what."""

from __future__ import annotations

from phalanx.tensor.debug._comm_mode import CommDebugMode
from phalanx.tensor.debug._visualize import sharding_svg, visualize_sharding

__all__ = ["CommDebugMode", "sharding_svg", "visualize_sharding"]
