"""Gradients are on their way while backward goes on: a rank waits for the others when the next unit is done."""

from __future__ import annotations

import torch
from torch import nn

from fsdp.ranks import on_ranks, shard
from phalanx.comm import CommEvent, observe

REDUCE, SUM = "reduce_scatter_tensor", "all_reduce"
Event = tuple[int, str]
"""A rank, and what it does."""


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)


def told(*shape: int) -> list[Event]:
    """What the ranks do in one backward pass, in the order in which they do it; units stay gathered, so that they have
    nothing to wait for but reductions. Reductions are numbered by the layers that they come from."""
    events: list[Event] = []

    def look(event: CommEvent) -> None:
        rank = event.group.ranks[event.group.rank]
        if event.name in (REDUCE, SUM):
            number = sum(other == rank and what.startswith(event.name) for other, what in events)
            events.append((rank, f"{event.name} {3 - number}"))

    def body(mesh):
        model = shard(Chain(), mesh, reshard_after_forward=False)
        rank = mesh.get_rank()
        for number, layer in enumerate(model.layers):
            layer[0].register_full_backward_pre_hook(lambda *_, n=number: events.append((rank, f"backward {n}")))
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()

    with observe(look):
        on_ranks(body, *shape)
    return events


def test_a_reduction_is_under_way_while_backward_goes_on():
    """Whoever comes first goes on to layer 1 before the other has sent its gradients of layer 3."""
    events = told(2)
    first = events[0][0]
    sent, goes_on = (events.index((first, what)) for what in (f"{REDUCE} 3", "backward 1"))
    assert sent < goes_on < events.index((1 - first, f"{REDUCE} 3"))


def test_replicas_add_up_while_backward_goes_on():
    """Their sum of layer 3 begins with the reduction of layer 2, and nobody waits for it until that of layer 1."""
    events = told(2, 1)
    first = events[0][0]
    sent, goes_on = (events.index((first, what)) for what in (f"{SUM} 3", "backward 0"))
    assert sent < goes_on < events.index((1 - first, f"{SUM} 3"))
    assert [what for rank, what in events if rank == first and SUM in what] == [f"{SUM} {n}" for n in (3, 2, 1, 0)]
