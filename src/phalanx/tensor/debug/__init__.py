"""Seeing what distributed tensors do: who communicates, and who holds what."""

from __future__ import annotations

from phalanx.tensor.debug._comm_mode import CommDebugMode

__all__ = ["CommDebugMode"]
