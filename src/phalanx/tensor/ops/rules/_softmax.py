"""Functions of rows: any dim but the row's own may be sharded.

Owns the rules for softmax and its relatives, and for sorting. A tensor sharded along the row is resharded along another
dim (one exchange) rather than gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.tensor.layout._placement import Shard
from phalanx.tensor.ops._rule import Call, Choice, Sharding, all_replicated
from phalanx.tensor.ops.rules._shape import along


def rows(
    position: int, name: str, default: Any = -1, num_outputs: int = 1
) -> Callable[[Call], Sharding | None]:
    """The argument at ``position`` names the row dim; results have the shape of the input in every other dim."""

    def rule(call: Call) -> Sharding | None:
        if len(call.inputs) != 1 or not call.inputs[0].ndim:
            return None
        one = call.inputs[0]
        given = call.arg(position, name, default)
        if given is None or not isinstance(given, int) or isinstance(given, bool):
            return None
        row = along(call, position, name, default)
        choices = [
            Choice((Shard(d),), (Shard(d),) * num_outputs)
            for d in sorted(range(one.ndim), key=lambda d: Shard(d) not in one.spec.placements)
            if d not in row
        ]
        return Sharding([*choices, all_replicated(call, num_outputs)])

    return rule
