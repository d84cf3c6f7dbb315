"""Fully sharded training: each rank holds a part of parameters, gradients and optimizer state, all only while used."""

from __future__ import annotations

from phalanx.fsdp import context

__all__ = ["context"]
