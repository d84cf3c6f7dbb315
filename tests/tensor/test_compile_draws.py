"""Random numbers of compiled DTensor programs: the masks of eager, and the seed agreed on where eager agrees on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh, whole
from test_compile_limits import own
from test_compile_programs import fresh, run, spread, values  # noqa: F401  # a fixture
from torch.utils.checkpoint import checkpoint

from phalanx import comm
from phalanx.tensor import Replicate, Shard, manual_seed
from phalanx.tensor.random._state import seed_alike

pytestmark = [
    pytest.mark.timeout(580),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo looks at it
]


def test_dropout_draws_the_masks_of_eager() -> None:
    def body(mesh: Any) -> None:
        x = spread(mesh, torch.ones(40), Shard(0))

        def dropped(x: Any) -> Any:
            return F.dropout(F.dropout(x, 0.5) * 2, 0.3)

        compiled = torch.compile(dropped, backend="aot_eager", fullgraph=True)
        for seed in (5, 6):
            masks = []
            for function in (dropped, compiled):
                manual_seed(seed, mesh)
                masks.append([whole(function(x)) for _ in range(3)])
                masks[-1].append(whole(dropped(x)))  # the next draw is the next one
            for eager, graph in zip(*masks, strict=True):
                assert torch.equal(eager, graph)
            assert not torch.equal(masks[1][0], masks[1][1])
        kept = torch.compile(lambda x: checkpoint(dropped, x, use_reentrant=False), backend="aot_eager")
        manual_seed(7, mesh)
        given = spread(mesh, torch.ones(40), Shard(0))
        result = kept(given)
        result.sum().full_tensor().backward()
        assert torch.equal(whole(given.grad), whole(result)), "backward has the mask of forward"

    on_mesh(body, 2, timeout=500.0)


def summed_and_dropped(x: Any) -> Any:
    return F.dropout(F.dropout(x.sum(0).redistribute(placements=[Replicate()]), 0.5) * x, 0.3)


def unseeded_calls(mesh: Any, function: Callable[..., Any], count: int = 3) -> tuple[list[Any], list[Any]]:
    """Results and what was sent in calls that follow a new seed of torch's, on which the ranks have not agreed."""
    torch.manual_seed(11)
    x = spread(mesh, values(6, 4), Shard(0))
    results, sent = [], []
    for _ in range(count):
        found, events = run(function, [x], [])
        results += found
        sent.append(events)
    return results, sent


@pytest.mark.parametrize("in_graph", [(0, 1), (0,), (1,)], ids=["all ranks", "rank 0", "rank 1"])
def test_the_seed_is_agreed_on_where_eager_does(in_graph: tuple[int, ...]) -> None:
    """Also beside a rank that runs the program as it is, as one does that has compiled too often."""

    def body(mesh: Any) -> None:
        expected, sent = unseeded_calls(mesh, summed_and_dropped)
        assert len(sent[0]) > len(sent[1]) == len(sent[2]), "the ranks ask each other once"
        function = own(summed_and_dropped)
        if mesh.get_rank() in in_graph:
            function = torch.compile(function, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            found, also_sent = unseeded_calls(mesh, function)
            assert also_sent == sent
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)

    on_mesh(body, 2, timeout=500.0)


def test_a_seed_that_all_ranks_were_given_is_not_asked_for() -> None:
    def body(mesh: Any) -> None:
        x, sent = spread(mesh, torch.ones(40), Shard(0)), []
        compiled = torch.compile(own(lambda x: F.dropout(x, 0.5) * 2), backend="aot_eager", fullgraph=True)
        masks = []
        for seed in (3, 4, 3):
            seed_alike(seed)
            state = torch.get_rng_state()
            with comm.observe(lambda event: sent.append(event.name)):
                masks.append(compiled(x))
            torch.set_rng_state(state)
            with comm.observe(lambda event: sent.append(event.name)):
                again = F.dropout(x, 0.5) * 2
            assert torch.equal(again.to_local(), masks[-1].to_local()), "a saved state has it too"
        assert not sent
        assert torch.equal(whole(masks[0]), whole(masks[2]))
        assert not torch.equal(whole(masks[0]), whole(masks[1]))

    on_mesh(body, 2, timeout=500.0)
