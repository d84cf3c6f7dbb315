"""Seeing what distributed tensors do: who communicates, and who holds what."""

from __future__ import annotations

from phalanx.tensor.debug._comm_mode import CommDebugMode
from phalanx.tensor.debug._picture import sharding_png, sharding_svg
from phalanx.tensor.debug._visualize import layout_summary, visualize_sharding

__all__ = ["CommDebugMode", "layout_summary", "sharding_png", "sharding_svg", "visualize_sharding"]
