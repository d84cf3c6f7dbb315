"""What a compiled function asks of meshes and placements: the answers of eager, in the graph but for groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshes import on_mesh, whole
from test_compile_limits import own
from test_compile_programs import fresh, spread, values  # noqa: F401  # a fixture

from phalanx.comm import DeviceMesh
from phalanx.tensor import DTensor, Partial, Replicate, Shard

pytestmark = pytest.mark.timeout(580)
Asked = Callable[[DeviceMesh, Any], Any]
IN_GRAPH: dict[str, Asked] = {  # a number, of a mesh and of a DTensor on it
    "ndim": lambda mesh, x: mesh.ndim,
    "shape": lambda mesh, x: mesh.shape[0],
    "mesh": lambda mesh, x: mesh.mesh.numel(),
    "mesh_dim_names": lambda mesh, x: len(mesh.mesh_dim_names[0]),
    "device_type": lambda mesh, x: len(mesh.device_type),
    "size": lambda mesh, x: mesh.size(),
    "size of an axis": lambda mesh, x: mesh.size(0),
    "size of a named axis": lambda mesh, x: mesh.size("tp"),
    "get_rank": lambda mesh, x: mesh.get_rank() + 1,
    "get_local_rank": lambda mesh, x: mesh.get_local_rank() + 1,
    "get_local_rank of an axis": lambda mesh, x: mesh.get_local_rank("tp") + 1,
    "get_coordinate": lambda mesh, x: mesh.get_coordinate()[0] + 1,
    "a slice": lambda mesh, x: mesh["tp"].ndim + mesh["tp"].size(0) + mesh["tp"].get_local_rank(),
    "==": lambda mesh, x: 2 if x.device_mesh == mesh else 3,
    "of a DTensor": lambda mesh, x: x.device_mesh.ndim + x.device_mesh.size(0) + x.device_mesh.get_local_rank(),
    "to_local": lambda mesh, x: x.to_local().shape[0],
    "dim": lambda mesh, x: x.placements[0].dim + 2,
    "is_shard": lambda mesh, x: 2 if x.placements[0].is_shard(0) and not x.placements[0].is_partial() else 3,
    "isinstance": lambda mesh, x: 2 if isinstance(x.placements[0], (Replicate, Partial)) else 3,
    "placements": lambda mesh, x: 2 if x.placements == (Shard(0),) else 3,
    "str": lambda mesh, x: len(str(x.placements[0])),
}
OUTSIDE: dict[str, Asked] = {  # which break the graph
    "get_group": lambda mesh, x: mesh.get_group().size,
    "get_all_groups": lambda mesh, x: len(mesh.get_all_groups()),
}


def test_what_is_answered_in_the_graph() -> None:
    def body(mesh: Any) -> None:
        x = spread(mesh, values(6, 4), Shard(0))
        everything = lambda x: [x * asked(mesh, x) for asked in IN_GRAPH.values()]  # noqa: E731
        compiled = torch.compile(own(everything), backend="aot_eager", fullgraph=True)
        expected = everything(x)
        for _ in range(2):
            for name, one, other in zip(IN_GRAPH, compiled(x), expected, strict=True):
                assert torch.equal(whole(one), whole(other)), name

    on_mesh(body, 2, timeout=500.0)


@pytest.mark.parametrize("asked", OUTSIDE)
def test_what_is_answered_outside_of_the_graph(asked: str) -> None:
    def body(mesh: Any) -> None:
        x = spread(mesh, values(6, 4), Shard(0))
        function = lambda x: x * OUTSIDE[asked](mesh, x)  # noqa: E731
        compiled = torch.compile(own(function), backend="aot_eager")
        assert torch.equal(whole(compiled(x)), whole(function(x)))

    on_mesh(body, 2, timeout=500.0)


class Holder(torch.nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: Any) -> Any:
        return x * (self.mesh.get_local_rank() + 1) / self.mesh.size(0) + self.mesh.ndim


def test_a_mesh_of_a_module_and_one_that_takes_its_place() -> None:
    def body(mesh: Any) -> None:
        x, model = spread(mesh, values(6, 4), Shard(0)), Holder(mesh)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for other in (mesh, DeviceMesh("cpu", [1, 0]), mesh["tp"], DeviceMesh("cpu", [mesh.get_rank()])):
            model.mesh = other
            assert torch.equal(whole(compiled(x)), whole(model(x)))

    on_mesh(body, 2, timeout=500.0)


def test_slices_that_are_made_in_the_graph() -> None:
    def body(mesh: Any) -> None:
        mesh.get_all_groups()
        x = spread(mesh["tp"], values(6, 4), Shard(0))

        def asked(x: Any) -> Any:
            one, other = mesh["tp"], mesh["dp"]
            number = one.ndim + one.size(0) + one.get_local_rank() * 10 + other.get_local_rank() * 100 + mesh.size("dp")
            moved = DTensor.from_local(x.to_local() * number, one, [Shard(0)], shape=(6, 4))
            return moved if one == x.device_mesh else moved * 2

        compiled = torch.compile(own(asked), backend="aot_eager", fullgraph=True)
        assert torch.equal(whole(compiled(x)), whole(asked(x)))
        assert torch.equal(compiled(x).device_mesh.mesh, mesh["tp"].mesh), "it has data"
        ranks = own(lambda x: x * mesh["dp"].mesh.numel())
        with pytest.raises(Exception, match="Unexpected type in sourceless builder"):  # a limit, on the page
            torch.compile(ranks, backend="aot_eager")(x)

    on_mesh(body, 2, 2, timeout=500.0)
