"""Offers the registry under the path that users of torch know."""

from __future__ import annotations

from phalanx.launch.rendezvous._registry import get_rendezvous_handler

__all__ = ["get_rendezvous_handler"]
