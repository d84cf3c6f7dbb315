"""Finds built-in hooks by enum value, as PyTorch's trainers name them."""

from __future__ import annotations

from typing import Any

from phalanx.ddp.hooks.default import Hook, allreduce_hook, fp16_compress_hook

BUILTIN: dict[str, Hook] = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}


def builtin_hook(comm_hook_type: Any) -> Hook:
    """The hook for an enum member (or its name)."""
    name = getattr(comm_hook_type, "name", str(comm_hook_type)).rpartition(".")[2]
    if name not in BUILTIN:
        raise ValueError(
            f"unknown built-in communication hook {comm_hook_type!r}; expected one of {sorted(BUILTIN)}"
        )
    return BUILTIN[name]
