"""Context parallel: each rank holds a part of every sequence, and attention sees the whole of it."""

from __future__ import annotations

from phalanx.fsdp.context._context_parallel import context_parallel, context_parallel_unshard, set_rotate_method

__all__ = ["context_parallel", "context_parallel_unshard", "set_rotate_method"]
