"""What was gathered for a module, and used there by ranks that do different work: gradients that go back scattered.

Owns ``Gathered``. A gathered tensor is a replica; where replicas meet different work, their gradients are summed. Both
together, a sum over the ranks and then this rank's shard of it, is a reduce-scatter, of half the bytes. So operations
that would sum use the gathered values behind a node of their own, which leads straight to what was gathered; others use
the tensor itself, and autograd adds up what comes back on both ways.

Only for tensors that nobody else holds: what comes back by the node of its own never passes the tensor. Whoever asks
for the tensor's gradient all the same is refused (``keep_gradient``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from phalanx.tensor.redistribute._execute import Route, apply_move, route_of, turn_back


class Gathered:
    """How ``local`` came about: from ``source``, by ``route``."""

    __slots__ = ("is_used", "local", "route", "source", "version")

    def __init__(self, source: Tensor, route: Route, local: Tensor) -> None:
        self.source, self.route, self.local = source, route, local
        self.version = local._version
        self.is_used = False

    def summed(self, axes: tuple[int, ...]) -> Tensor | None:
        """Return the gathered values where gradients come back summed over ``axes``; None: they were written to."""
        if self.local._version != self.version:
            return None
        self.is_used = True
        result: Tensor = apply_move(self.source, turn_back(route_of(self.route.plan, axes)), self)
        return result

    def run(self) -> Tensor:
        """Return what the node gives: the values, with the version that the tensor has."""
        return self.local.detach()


def gathered(source: Any, result: Any) -> Any:
    """Return ``result``, which ``source`` was redistributed to for one module, so that gradients go back scattered."""
    route = source._spec.variants.get(("move", result._spec, ()))
    before = source._local
    if route is None or route.back is None or source._spec.is_partial:
        return result
    if result._local.requires_grad and before.requires_grad:
        result._gathered = Gathered(before, route, result._local)
    return result


def keep_gradient(tensor: Any, what: str) -> None:
    """See that the gradient of ``tensor`` comes by it from here on."""
    origin = tensor._gathered
    tensor._gathered = None
    if origin is not None and origin.is_used:
        raise RuntimeError(
            f"rank {tensor._spec.mesh.get_rank()}: {what} on the input that a parallel style gathered for a module, "
            f"after the module has used it: its gradient goes straight back to the shards. Say it before the module "
            f"runs, or of the tensor that was given to the module"
        )
