"""Fully sharded training: each rank holds a part of parameters, gradients and optimizer state, all only while used."""

from __future__ import annotations

__all__: list[str] = []
