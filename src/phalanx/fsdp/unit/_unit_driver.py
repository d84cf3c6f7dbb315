"""What somebody above ``fully_shard`` may decide about its units: an elastic job, whose ranks come and go.

Owns the two interfaces through which a unit asks: ``UnitDriver`` before its collectives and when one fails, and
``GradientReduction`` for where gradients go. Without a driver a unit raises what its collectives raise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from phalanx.comm import Group
from phalanx.errors import CommError

if TYPE_CHECKING:
    from phalanx.fsdp.unit._gradient_sum import Destination
    from phalanx.fsdp.unit._unit import Unit


class UnitDriver(Protocol):
    """Hears of what a unit is about to do; raises where that cannot be."""

    @property
    def version(self) -> int | None:
        """Counts the changes of the units' values, alike on all ranks; None: they may change at any time."""

    def gathers(self, unit: Unit) -> None: ...

    def reduces(self, unit: Unit) -> None: ...

    def survives(self, error: CommError) -> bool:
        """Return whether to go on with zeros after a failed gather: what is computed with them will not count."""

    def waits(self, is_waiting: bool) -> None:
        """Hear that this rank waits for others, or does no longer."""

    def describes(self, unit: Unit) -> None:
        """Raise if the parameters that are registered between uses cannot be written to a state dict, or loaded."""


class GradientReduction(Protocol):
    """Gradients of one unit and dtype on their way; ``GradientSum`` is one."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be sent."""

    def add(self, group: Group, index: int, grad: Tensor) -> None: ...

    def start(self, to: Destination, *, async_op: bool) -> None: ...

    def finish(self) -> list[Tensor | None] | None: ...

    def drop(self) -> None: ...
