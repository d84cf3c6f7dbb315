"""Blocks travel while others are computed with: the order of sending, computing and waiting."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from phalanx.fsdp.context._block_exchange import EXCHANGES


class _Sent:
    """A collective under way."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait(self) -> None:
        self._log.append(f"wait for {self._name}")


class _LoggedGroup:
    """Rank 0 of three, of whose collectives only the order matters."""

    rank, size = 0, 3

    def __init__(self) -> None:
        self.log: list[str] = []

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, async_op: bool) -> _Sent:
        return self._start(f"block {len([e for e in self.log if e.startswith('send')]) + 1}", async_op)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, async_op: bool) -> _Sent:
        return self._start("all", async_op)

    def _start(self, name: str, async_op: bool) -> _Sent:
        assert async_op
        self.log.append(f"send {name}")
        return _Sent(self.log, name)


ORDERS = {
    "alltoall": [
        "send block 1",
        "compute with 0",
        "wait for block 1",
        "send block 2",
        "compute with 2",
        "wait for block 2",
        "compute with 1",
    ],
    "allgather": ["send all", "compute with 0", "wait for all", "compute with 2", "compute with 1"],
}


@pytest.mark.parametrize("method", EXCHANGES)
def test_the_next_block_travels_while_this_one_is_computed_with(method):
    group = _LoggedGroup()
    for source, _ in EXCHANGES[method](group, [4, 4, 4]).blocks(torch.zeros(4)):
        group.log.append(f"compute with {source}")
    assert group.log == ORDERS[method]
