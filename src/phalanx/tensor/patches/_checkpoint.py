"""Activation checkpoints: what is recomputed runs as it ran, on inputs that still know their gradient.

Owns the installation. torch keeps the inputs of a checkpointed function as it keeps tensors for backward, so that an
outer checkpoint recomputes them. The wrapper requires no gradient in autograd's eyes: recomputed, it would have none,
so of a DTensor torch keeps the local tensor. Recomputation happens in backward, where the user's contexts have ended:
the modes of forward hold there again, for checkpoints of either kind.
"""

from __future__ import annotations

from typing import Any

from torch.utils import checkpoint

from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.core._modes import under_these_modes


def install() -> None:
    """Wrap how torch's checkpoints keep their inputs and give them back. Does it once."""
    frame: Any = checkpoint._CheckpointFrame
    plain_save, plain_get = frame.save_inputs, frame.get_inputs
    if hasattr(plain_save, "_phalanx"):
        return

    def save_inputs(self: Any, *args: Any) -> None:
        kept = [type(a) is DTensor and a._stale is None for a in args]
        self.layouts = [a._spec if keep else None for a, keep in zip(args, kept, strict=True)]
        self.recompute_fn = under_these_modes(self.recompute_fn)
        plain_save(self, *(a._local if keep else a for a, keep in zip(args, kept, strict=True)))

    def get_inputs(self: Any) -> list[Any]:
        found = zip(plain_get(self), self.layouts, strict=True)
        return [value if spec is None else wrap(value, spec) for value, spec in found]

    save_inputs._phalanx = True  # type: ignore[attr-defined]  # a mark that this was done
    frame.save_inputs, frame.get_inputs = save_inputs, get_inputs
    reentrant: Any = checkpoint.CheckpointFunction
    plain_forward = reentrant.forward

    def forward(ctx: Any, run_function: Any, *args: Any) -> Any:
        return plain_forward(ctx, under_these_modes(run_function), *args)

    reentrant.forward = staticmethod(forward)
