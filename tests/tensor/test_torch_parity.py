"""The same program on phalanx.tensor and on torch.distributed.tensor, in the same gloo processes: the same values.

A program gets a namespace (ours or torch's) and a mesh, and returns tensors and values. All programs of one mesh run in
one set of processes; each is one test.
"""

from __future__ import annotations

import functools
import math
import traceback
from types import SimpleNamespace
from typing import Any

import parity_programs
import pytest
import torch
from torch import Tensor

from processes import Worker, _context, run_processes

pytestmark = pytest.mark.timeout(300)

# torch's DTensor takes seconds to import: do it once, in the server that the processes are forked from.
_PRELOADED = [
    "torch",
    "torch.distributed",
    "phalanx.comm",
    "phalanx.tensor.parallel",
    "phalanx.tensor.experimental",
]
_context.set_forkserver_preload(
    [*_PRELOADED, "torch.distributed.tensor.parallel", "torch.distributed.tensor.experimental"]
)

MESHES = {"2": (2,), "4": (4,), "2x2": (2, 2)}
TIMEOUT = 240.0


def both() -> tuple[SimpleNamespace, SimpleNamespace]:
    """Our names and torch's, by the same words."""
    import torch.distributed.tensor as theirs
    import torch.distributed.tensor.debug as their_debug
    import torch.distributed.tensor.experimental as their_experiments
    import torch.distributed.tensor.parallel as their_styles
    from torch.distributed.device_mesh import init_device_mesh as their_mesh

    import phalanx.tensor as ours
    import phalanx.tensor.debug as our_debug
    import phalanx.tensor.experimental as our_experiments
    import phalanx.tensor.parallel as our_styles
    from phalanx.comm import init_device_mesh as our_mesh

    names = ["DTensor", "Shard", "Replicate", "Partial", "distribute_tensor", "distribute_module"]
    names += ["zeros", "ones", "full", "empty"]

    def space(tensors: Any, styles: Any, experiments: Any, debug: Any, mesh: Any) -> SimpleNamespace:
        own = {name: getattr(tensors, name) for name in names}
        return SimpleNamespace(**own, styles=styles, experimental=experiments, debug=debug, mesh=mesh)

    return (
        space(ours, our_styles, our_experiments, our_debug, our_mesh),
        space(theirs, their_styles, their_experiments, their_debug, their_mesh),
    )


def flat(value: Any) -> Any:
    """Plain values all the way down; both kinds of DTensor become their whole, their local part and their layout."""
    if isinstance(value, Tensor) and hasattr(value, "placements"):
        detached = value.detach()
        kinds = [(type(p).__name__.strip("_"), getattr(p, "dim", None)) for p in value.placements]
        return {"whole": flat(detached.full_tensor()), "local": flat(detached.to_local()), "layout": kinds}
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: flat(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [flat(item) for item in value]
    return value


def compare(worker: Worker, shape: tuple[int, ...]) -> dict[str, str]:
    """Run every program both ways; program -> what differs ("" if nothing does)."""
    from phalanx.comm import use_group

    group = worker.group(timeout=120.0)
    group.make_default()
    found = {}
    with use_group(group):
        spaces = both()
        meshes = [space.mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :]) for space in spaces]
        for name, program in parity_programs.PROGRAMS.items():
            results = []
            try:
                for space, mesh in zip(spaces, meshes, strict=True):
                    torch.manual_seed(0)
                    results.append(flat(program(space, mesh)))
                assert same(*results, path=name) > 0, "nothing was compared"
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
    return found


def same(ours: Any, theirs: Any, path: str) -> int:
    """How many tensors are equal; raises at the first that is not."""
    if isinstance(theirs, Tensor):
        assert ours.dtype == theirs.dtype, f"{path}: {ours.dtype} {theirs.dtype}"
        torch.testing.assert_close(ours, theirs, msg=lambda text: f"{path}: {text}")
        return 1
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), path
        return sum(same(ours[name], theirs[name], f"{path}.{name}") for name in theirs)
    if isinstance(theirs, list):
        assert len(ours) == len(theirs), path
        return sum(same(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(ours, theirs, strict=True)))
    assert ours == theirs, f"{path}: {ours!r} {theirs!r}"
    return 0


@functools.cache
def outcomes(mesh: str) -> list[dict[str, str]]:
    shape = MESHES[mesh]
    try:
        return [o.value for o in run_processes(math.prod(shape), compare, shape, timeout=TIMEOUT)]
    except AssertionError as error:  # told by every test, but not run again for each
        return [dict.fromkeys(parity_programs.PROGRAMS, str(error))]


@pytest.mark.parametrize("program", list(parity_programs.PROGRAMS))
@pytest.mark.parametrize("mesh", ["2", "2x2", pytest.param("4", marks=pytest.mark.soak)])
def test_same_as_torch(mesh: str, program: str) -> None:
    for rank, found in enumerate(outcomes(mesh)):
        assert not found[program], f"rank {rank}: {found[program]}"
