"""Shows a job to people and to their tools: what its events say, as accounts, JSON, metrics and one page.

Reads the one stream of events and nothing else; changes nothing about a job by itself.
"""

from __future__ import annotations

from phalanx.watch._goodput import PARTS, Goodput, goodput

__all__ = ["PARTS", "Goodput", "goodput"]
