"""Communication modes: what ``explicit`` lets pass sends nothing, neither forward nor backward."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coverage import OpInfo, distributed, layouts_of, op_db, samples_of
from meshes import on_mesh
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from phalanx import comm
from phalanx.comm import DeviceMesh, init_device_mesh
from phalanx.tensor import (
    DTensor,
    ImplicitCommunicationError,
    Partial,
    Replicate,
    Shard,
    communication_mode,
    distribute_tensor,
    manual_seed,
)


class Inputs:
    """Leaves that need gradients: ``cut`` (S(0)), ``whole``, ``partial``; and others that do not."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        values = torch.arange(15.0).view(5, 3) + 1
        self.cut = self.leaf(values, Shard(0))
        self.whole = self.leaf(values)
        self.row = self.leaf(torch.ones(3))
        self.square = self.leaf(torch.ones(3, 3))
        self.partial = self.whole.detach().redistribute(placements=[Partial()]).requires_grad_()
        self.fixed = distribute_tensor(values, mesh)
        self.mask = self.cut.detach() > 3
        self.labels = distribute_tensor(torch.tensor([0, 1, 2, 0, 1]), mesh, [Shard(0)])
        self.heads = self.leaf(torch.ones(4, 2, 3, 2), Shard(0))
        self.whole_heads = self.leaf(torch.ones(4, 2, 3, 2))

    def leaf(self, values: Tensor, placement: Any = None) -> DTensor:
        return distribute_tensor(values, self.mesh, [placement or Replicate()]).requires_grad_()


def unscale(x: Inputs) -> Any:
    unscale_: Any = torch._amp_foreach_non_finite_check_and_unscale_
    return unscale_([x.cut.detach().clone()], torch.zeros(1), torch.ones(1))


def clip(x: Inputs) -> Any:
    parameter = nn.Parameter(x.cut.detach())
    parameter.grad = x.cut.detach().clone()
    return nn.utils.clip_grad_norm_([parameter], 1.0)


def assigned(x: Inputs) -> Any:
    result = x.cut * 1
    result[:] = x.whole
    return result


def assign_grad(x: Inputs) -> Any:
    parameter = nn.Parameter(x.fixed)
    parameter.grad = x.cut.detach()


class Misplaced(torch.autograd.Function):
    """Its backward returns a gradient in another layout than its input has."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].redistribute(placements=[Shard(0)])  # sends nothing


# Each communicates, forward or backward.
REFUSED: dict[str, Callable[[Inputs], Any]] = {
    "mul": lambda x: x.cut * x.whole,
    "add": lambda x: x.cut.detach() + x.whole,
    "add_": lambda x: (x.cut * 1).add_(x.whole),
    "a bias": lambda x: x.cut + x.row,
    "matmul": lambda x: x.cut @ x.square,
    "partial * whole": lambda x: x.partial * x.whole,
    "relu of partial": lambda x: x.partial.relu(),
    "where": lambda x: torch.where(x.mask, x.whole, 0.0),
    "cat": lambda x: torch.cat([x.cut, x.whole], 1),
    "mse_loss": lambda x: F.mse_loss(x.cut, x.whole),
    "attention": lambda x: F.scaled_dot_product_attention(x.heads, x.whole_heads, x.whole_heads),
    "copy_": lambda x: (x.cut * 1).copy_(x.whole),
    "setitem": assigned,
    "masked_fill": lambda x: x.whole.masked_fill(x.mask, 0.0),
    "gather": lambda x: x.whole.gather(1, x.labels.unsqueeze(1)),
    "norm": lambda x: x.cut.norm(),
    "norm of partial": lambda x: torch.linalg.vector_norm(x.partial),
    "_foreach_norm": lambda x: torch._foreach_norm([x.cut])[0],
    "_foreach_add": lambda x: torch._foreach_add([x.fixed], [x.cut.detach()])[0],
    "clip_grad_norm_": clip,
    "batch_norm": lambda x: F.batch_norm(x.cut, None, None, training=True),
    "unscale": unscale,
    ".grad =": assign_grad,
    "a gradient given to backward": lambda x: (x.whole * 2).backward(x.cut.detach()),
    "backward of a Function": lambda x: Misplaced.apply(x.whole).sum().backward(),
    "a hook's gradient": lambda x: (
        x.whole.register_hook(lambda g: g.redistribute(placements=[Shard(0)])),
        (x.whole * 2).sum().backward(),
    ),
    "argmax": lambda x: x.cut.argmax(),
    "topk": lambda x: x.cut.topk(1, 0).values,
    "max": lambda x: x.cut.max(0).values,
    "std": lambda x: x.cut.std(),
    "cumsum": lambda x: x.cut.cumsum(0),
    "nll_loss": lambda x: F.nll_loss(x.cut, x.labels),
    "item": lambda x: x.cut.sum().item(),
    "tolist": lambda x: x.cut.tolist(),
    "bernoulli": lambda x: torch.bernoulli(x.partial / 100),
    "multinomial": lambda x: torch.multinomial(x.cut.detach(), 1),
    "no rule": lambda x: torch.linalg.svd(x.cut)[0],
    "a partial number": lambda x: torch.zeros(3).mul_(x.cut.detach().sum()),
}

# None of these does.
ACCEPTED: dict[str, Callable[[Inputs], Any]] = {
    "mul": lambda x: x.cut * x.cut,
    "by a number": lambda x: (x.cut * 2.0).sum(),
    "by what needs no gradient": lambda x: x.cut + x.fixed,
    "mean": lambda x: x.cut.mean(),
    "linear in partial": lambda x: x.partial * 2.0 + x.partial,
    "mse_loss": lambda x: F.mse_loss(x.cut, x.cut.detach() + 1),
    "softmax": lambda x: x.cut.softmax(1),
    "embedding of cut rows": lambda x: F.embedding(positions(x), x.cut),
    "dropout": lambda x: F.dropout(x.cut),
    "_foreach_mul": lambda x: torch._foreach_mul([x.cut.detach()], 2.0)[0],
}


def positions(x: Inputs) -> DTensor:
    return DTensor.from_local(torch.tensor([0, 4]), x.mesh, [Replicate()])


def sent_by(call: Callable[[], Any]) -> tuple[bool, list[str]]:
    """Whether ``call`` was refused in explicit mode; and what it sent until then, and in a backward after it."""
    events: list[str] = []
    with comm.observe(lambda event: events.append(f"{event.name} {event.nbytes} B")):
        try:
            with communication_mode("explicit"):
                result = call()
        except ImplicitCommunicationError:
            return True, events
        outputs = [t for t in tree_flatten(result)[0] if isinstance(t, DTensor) and t.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    return False, events


@pytest.mark.fast
@pytest.mark.parametrize("shape", [(2,), (3,)])
def test_what_is_refused_and_what_is_accepted_sends_nothing(shape: tuple[int, ...]) -> None:
    def body(mesh: DeviceMesh) -> None:
        manual_seed(0, mesh)
        for table, refused in ((REFUSED, True), (ACCEPTED, False)):
            for name, call in table.items():
                x = Inputs(mesh)
                assert (name, *sent_by(lambda call=call, x=x: call(x))) == (name, refused, [])

    on_mesh(body, *shape)


@pytest.mark.fast
@pytest.mark.parametrize("name", REFUSED)
def test_warnings_come_where_explicit_raises(name: str) -> None:
    def body(mesh: DeviceMesh) -> None:
        manual_seed(0, mesh)
        x = Inputs(mesh)
        with communication_mode("warn"):
            REFUSED[name](x)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        on_mesh(body, 2)
    told = [str(w.message) for w in seen if "Redistribute by hand" in str(w.message)]
    assert told
    assert all(re.search(r"\d+ B\)?; called at .*test_communication_modes\.py:\d+", t) for t in told), told


@pytest.mark.fast
def test_what_the_user_asks_for_by_name_is_never_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        with communication_mode("explicit"):
            x = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)]).requires_grad_()
            assert x.full_tensor().sum() == 15
            y = x.redistribute(placements=[Replicate()])
            y.redistribute(placements=[Shard(1)]).sum().backward()
            assert x.grad is not None
            DTensor.from_local(torch.ones(2), mesh, [Shard(0)]).redistribute(placements=[Replicate()])

    on_mesh(body, 2)


@pytest.mark.fast
def test_the_way_back_names_operation_layout_bytes_and_line() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = Inputs(mesh)
        expected = r"backward of mul brings .*\[5, 3\] \[tp:R\]: all_gather.* 60 B.*test_communication_modes\.py:\d+"
        with communication_mode("explicit"):
            with pytest.raises(ImplicitCommunicationError, match=expected):
                x.cut * x.whole
            with torch.no_grad():
                x.cut * x.whole

    on_mesh(body, 2)


def is_agreement_on_a_seed(events: list[str]) -> bool:
    """The samples of random functions set torch's seed, after which ranks tell each other theirs, once."""
    names, sizes = [e.split()[0] for e in events], [int(e.split()[1]) for e in events]
    return names == ["all_gather_into_tensor", "all_gather"] and max(sizes) <= 32


def quiet_or_refused(group: Any, op: OpInfo, shape: tuple[int, ...]) -> list[str]:
    mesh = init_device_mesh("cpu", shape)
    problems = []
    for number, sample in enumerate(samples_of(op, 3)):
        given = (sample.input, sample.args, sample.kwargs)
        tensors = [t for t in tree_flatten(given)[0] if isinstance(t, Tensor)]
        if not tensors or any(t.layout != torch.strided for t in tensors):
            continue
        for placements in layouts_of(tensors, 4, number, mesh.ndim):
            rest = iter(placements)
            first, args, kwargs = tree_map(
                lambda v, rest=rest: distributed(v, mesh, next(rest)) if isinstance(v, Tensor) else v, given
            )
            try:
                _, events = sent_by(lambda: op(first, *args, **kwargs))  # noqa: B023  # called at once
            except Exception:  # refused for another reason: test_coverage.py's matter
                continue
            if events and not is_agreement_on_a_seed(events):
                problems.append(f"{op.name} sample {number} {placements}: {events}")
    return problems


def assert_quiet(ops: list[OpInfo]) -> None:
    problems = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in ops:
            problems += comm.simulate(2).run(quiet_or_refused, op, (2,))[0]
    assert not problems, "\n".join(problems)


def test_some_of_torchs_operators_are_refused_or_send_nothing() -> None:
    assert_quiet(op_db[::25])


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(12))
def test_torchs_operators_are_refused_or_send_nothing(part: int) -> None:
    assert_quiet(op_db[part::12])
