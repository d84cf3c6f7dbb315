"""DeviceMesh on simulated ranks: slicing, groups, identity, errors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from phalanx import comm
from phalanx.comm import DeviceMesh, Group, init_device_mesh

pytestmark = pytest.mark.fast


def test_axis_groups_reduce_over_their_axis_only() -> None:
    def rank_main(group: Group) -> tuple[float, float, float]:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        sums = []
        for axis in ("dp", "tp"):
            value = torch.tensor(float(group.rank))
            mesh.get_group(axis).all_reduce(value)
            sums.append(value.item())
        value = torch.tensor(float(group.rank))
        mesh["dp", "tp"]._flatten("all").get_group().all_reduce(value)
        return sums[0], sums[1], value.item()

    results = comm.simulate(6).run(rank_main)
    assert results == [(2 * (r % 3) + 3, 3.0 * (r // 3 * 3) + 3, 15.0) for r in range(6)]


def test_groups_are_made_once_and_shared_by_submeshes() -> None:
    def rank_main(group: Group) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert mesh._root.groups == {}
        tp = mesh["tp"].get_group()
        assert mesh.get_group("tp") is tp
        assert mesh.get_group(1) is tp
        assert mesh["dp", "tp"].get_all_groups()[1] is tp
        assert tp.ranks == tuple(mesh["tp"].mesh.tolist())
        assert tp.rank == mesh.get_local_rank("tp")
        line = init_device_mesh("cpu", (4,))
        assert line.get_group() is group

    comm.simulate(4).run(rank_main)


def test_an_axis_group_of_a_smaller_mesh_needs_only_its_own_ranks() -> None:
    def rank_main(group: Group) -> float | None:
        mesh = DeviceMesh("cpu", [[1, 2], [4, 5]])
        if mesh.get_coordinate() is None:
            with pytest.raises(RuntimeError, match=f"rank {group.rank} is not part"):
                mesh.get_group(0)
            return None
        value = torch.tensor(float(group.rank))
        mesh.get_group(0).all_reduce(value)
        return value.item()

    assert comm.simulate(6).run(rank_main) == [None, 5.0, 7.0, None, 5.0, 7.0]


def test_only_one_pipeline_stage_asks_for_its_axis() -> None:
    def rank_main(group: Group) -> float:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        value = torch.tensor(float(group.rank))
        if mesh.get_local_rank("pp") == 1:
            mesh.get_group("tp").all_reduce(value)
        return value.item()

    assert comm.simulate(4).run(rank_main) == [0.0, 1.0, 5.0, 5.0]


def test_identity_copies_and_pickle() -> None:
    def rank_main(group: Group) -> DeviceMesh:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert mesh == again
        assert hash(mesh) == hash(again)
        assert mesh["tp"] == again["tp"]
        assert mesh["tp"] != mesh["dp"]
        assert mesh != init_device_mesh("cpu", (2, 2))
        assert mesh != init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
        assert mesh != "mesh"
        assert copy.deepcopy(mesh) is mesh
        mesh["dp", "tp"]._flatten("all")
        assert pickle.loads(pickle.dumps(mesh)) == mesh
        assert pickle.loads(pickle.dumps(mesh["tp"])) == mesh["tp"]
        assert pickle.loads(pickle.dumps(mesh))["all"] == mesh["all"]
        assert mesh["tp"]._get_root_mesh() == mesh
        assert mesh._get_root_mesh() is mesh
        return mesh

    first, second, *_ = comm.simulate(4).run(rank_main)
    assert first != second, "meshes of two simulated ranks name different groups"


def test_from_group() -> None:
    def rank_main(group: Group) -> None:
        whole = DeviceMesh.from_group(group, "cpu")
        assert whole.mesh.tolist() == [0, 1, 2, 3]
        assert whole == init_device_mesh("cpu", (4,))
        assert hash(whole) == hash(init_device_mesh("cpu", (4,)))
        assert pickle.loads(pickle.dumps(whole)) == whole
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        groups = mesh.get_all_groups()
        again = DeviceMesh.from_group(groups, "cpu", mesh.mesh, mesh_dim_names=("dp", "tp"))
        assert again.get_all_groups() == groups
        assert again.get_coordinate() == mesh.get_coordinate()
        assert again["tp"].get_group() is groups[1]
        assert again == DeviceMesh.from_group(groups, "cpu", mesh.mesh, mesh_dim_names=("dp", "tp"))
        assert again == mesh
        assert hash(again) == hash(mesh)
        assert again != init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), "that has made no groups yet"
        others = [group.subgroup(one.ranks) for one in groups]  # the same ranks, other groups
        assert again != DeviceMesh.from_group(others, "cpu", mesh.mesh, mesh_dim_names=("dp", "tp"))
        with pytest.raises(ValueError, match="needs mesh="):
            DeviceMesh.from_group(groups, "cpu")
        with pytest.raises(ValueError, match=r"axis 0 of the mesh holds ranks"):
            DeviceMesh.from_group(groups[::-1], "cpu", mesh.mesh)
        with pytest.raises(ValueError, match="2 groups for a mesh of 1 axes"):
            DeviceMesh.from_group(groups, "cpu", [0, 1])
        assert again._flatten("all").get_group() is group
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(again)

    comm.simulate(4).run(rank_main)


def test_with_mesh_nests() -> None:
    def rank_main(group: Group) -> None:
        from phalanx.comm.mesh._mesh import current_mesh

        outer, inner = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
        assert current_mesh() is None
        with outer, inner as entered:
            assert entered is inner
            assert current_mesh() is inner
        assert current_mesh() is None

    comm.simulate(2).run(rank_main)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda m: m["tp", "dp"], KeyError, "out of order"),
        (lambda m: m["xx"], KeyError, "no axis 'xx'"),
        (lambda m: m["dp", "dp"], RuntimeError, "twice"),
        (lambda m: m.get_group(), RuntimeError, "which axis"),
        (lambda m: m.get_group("xx"), KeyError, "no axis"),
        (lambda m: m.get_group(2), IndexError, "out of range"),
        (lambda m: m["dp"]._flatten("tp"), ValueError, "already"),
        (lambda m: m._unflatten("tp", (2, 2), ("a", "b")), ValueError, "product"),
        (lambda m: m._unflatten("tp", (2, 1), ("a",)), RuntimeError, "2 sizes but 1 names"),
        (lambda m: m._unflatten("tp", (2, 1), ("dp", "b")), RuntimeError, "unique"),
        (lambda m: init_device_mesh("cpu", (5,)), RuntimeError, "needs 5 ranks"),
        (lambda m: init_device_mesh("cuda:0", (2,)), RuntimeError, "plain type"),
        (
            lambda m: init_device_mesh("cpu", (2,), mesh_dim_names=("a", "b")),
            RuntimeError,
            "one name per axis",
        ),
        (lambda m: init_device_mesh("cpu", (2, 2))["a"], RuntimeError, "no axis names"),
        (lambda m: DeviceMesh("cpu", [0, 0]), ValueError, "unique"),
        (lambda m: DeviceMesh("cpu", []), ValueError, "non-empty"),
        (lambda m: DeviceMesh("cpu", [7]), ValueError, "rank 7"),
    ],
)
def test_mistakes_are_named(act: Any, error: type[Exception], message: str) -> None:
    def rank_main(group: Group) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(error, match=message):
            act(mesh)

    comm.simulate(4).run(rank_main)
