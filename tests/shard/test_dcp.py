"""torch.distributed.checkpoint on our tensors: every layout into every other, at other world sizes, files shared with
torch's own DTensor and ShardedTensor, and torch's helpers for state dicts.
"""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from processes import run_processes

SHAPES = [(8, 6), (5, 3), (2,), (0, 4), ()]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def value_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = functools.reduce(lambda a, b: a * b, shape, 1)
    return (torch.arange(count).reshape(shape) * 7 + 1).remainder(97).to(dtype)


def layouts(mesh: Any, dims: int) -> list[list[Any]]:
    from phalanx.tensor import Replicate, Shard, StridedShard

    one = [Replicate(), *(Shard(d) for d in range(dims))]
    if mesh.ndim == 1:
        return [[p] for p in one] + ([[StridedShard(0, 2)]] if dims else [])
    both = [[p, q] for p in one for q in one]
    return both + ([[StridedShard(0, 2), Shard(0)], [Shard(0), StridedShard(0, 3)]] if dims else [])


def start(worker: Any, file: str) -> None:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=worker.rank, world_size=worker.size)


def many_layouts(mesh: Any) -> dict[str, Any]:
    """One DTensor for each layout and shape, and for each dtype."""
    from phalanx.tensor import distribute_tensor

    found = {}
    for shape in SHAPES:
        for number, placements in enumerate(layouts(mesh, len(shape))):
            found[f"{shape} {number}"] = distribute_tensor(value_of(shape), mesh, placements, src_data_rank=None)
    for dtype in DTYPES:
        found[str(dtype)] = distribute_tensor(value_of((5, 3), dtype), mesh, layouts(mesh, 2)[1], src_data_rank=None)
    return found


def rotated(mesh: Any, saved: dict[str, tuple[Any, torch.dtype]]) -> dict[str, Any]:
    """Zeros of the same shapes, each in another of the layouts."""
    from phalanx.tensor import zeros

    found = {}
    for number, (name, (shape, dtype)) in enumerate(saved.items()):
        choice = layouts(mesh, len(shape))
        placements = choice[(number * 5 + 3) % len(choice)]
        found[name] = zeros(*shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return found


def check(found: dict[str, Any], of: str = "") -> None:
    """Each rank's part against what the layout says it is."""
    from phalanx.tensor import distribute_tensor

    for name, tensor in found.items():
        value = value_of(tuple(tensor.shape), tensor.dtype)
        expected = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        assert torch.equal(tensor.to_local(), expected.to_local()), f"{of} {name} {tensor}"


def sharded(shape: tuple[int, ...], module: Any, world: int) -> list[Any]:
    """Sharded tensors of ours or of torch's: in chunks, in reverse order, and one shard on the last rank alone."""
    spec = module.ChunkShardingSpec
    devices = [f"rank:{r}/cpu" for r in range(world)]
    tensors = [module.zeros(spec(dim, order), *shape) for dim in (0, 1) for order in (devices, devices[::-1])]
    whole = module.ShardMetadata([0, 0], list(shape), devices[-1])
    return [*tensors, module.zeros(module.EnumerableShardingSpec([whole]), *shape)]


def fill_shards(tensor: Any) -> Any:
    for shard in tensor.local_shards():
        where = tuple(
            slice(o, o + s) for o, s in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        )
        shard.tensor.copy_(value_of(tuple(tensor.size()))[where])
    return tensor


def check_shards(tensor: Any) -> None:
    for shard in tensor.local_shards():
        where = tuple(
            slice(o, o + s) for o, s in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        )
        assert torch.equal(shard.tensor, value_of(tuple(tensor.size()))[where])


class TorchShards:
    """torch's names under ours."""

    def __init__(self) -> None:
        from torch.distributed._shard import sharded_tensor, sharding_spec

        self.zeros, self.ShardMetadata = sharded_tensor.zeros, sharding_spec.ShardMetadata
        self.ChunkShardingSpec = sharding_spec.ChunkShardingSpec
        self.EnumerableShardingSpec = sharding_spec.EnumerableShardingSpec


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.arange(7))

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x))) * self.scale


def four_ranks(worker: Any, file: str, folder: str) -> None:
    start(worker, file)
    from phalanx.tensor import DeviceMesh, init_device_mesh

    meshes = {"flat": init_device_mesh("cpu", (4,)), "square": init_device_mesh("cpu", (2, 2))}
    three = DeviceMesh("cpu", [0, 1, 2])
    every_layout(worker, meshes, three, folder)
    between_ours_and_torchs(worker, folder)
    sharded_tensors(worker, folder)
    refusals(meshes["flat"], folder)
    staged(meshes["square"], folder)


def every_layout(worker: Any, meshes: dict[str, Any], three: Any, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    for name, mesh in meshes.items():
        ours = many_layouts(mesh)
        dcp.save(ours, checkpoint_id=f"{folder}/{name}")
        check(ours, "after saving")
        saved = {key: (tuple(t.shape), t.dtype) for key, t in ours.items()}
        for other in meshes.values():
            loaded = rotated(other, saved)
            dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
            check(loaded, f"{name} into {other}")
        loaded = rotated(three, saved) if worker.rank < 3 else {}
        dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
        check(loaded, f"{name} into three ranks")
    # An element is in the files once: replicas are not written again.
    if worker.rank == 0:
        metadata = dcp.FileSystemReader(f"{folder}/square").read_metadata()
        for key, one in metadata.state_dict_metadata.items():
            written = sum(functools.reduce(lambda a, b: a * b, chunk.sizes, 1) for chunk in one.chunks)
            assert written == functools.reduce(lambda a, b: a * b, one.size, 1), key


def between_ours_and_torchs(worker: Any, folder: str) -> None:
    """Files of one are files of the other; the chunks are the same."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed import tensor as theirs

    import phalanx.tensor as ours
    from phalanx import shard

    pairs = [("S0", "S1"), ("R", "S0"), ("S1", "R"), ("R", "R"), ("S0", "S0")]
    tensors: dict[str, dict[str, Any]] = {"ours": {}, "theirs": {}}
    blank: dict[str, dict[str, Any]] = {"ours": {}, "theirs": {}}
    for side, module in (("ours", ours), ("theirs", theirs)):
        mesh = module.init_device_mesh("cpu", (2, 2))
        kinds = {"R": module.Replicate(), "S0": module.Shard(0), "S1": module.Shard(1)}
        for number, pair in enumerate(pairs):
            other = pairs[(number + 2) % len(pairs)]
            for shape in [(8, 6), (5, 3), (1, 2)]:
                key = f"{shape} {pair}"
                args = (mesh, [kinds[p] for p in pair])
                tensors[side][key] = module.distribute_tensor(value_of(shape), *args, src_data_rank=None)
                args = (mesh, [kinds[p] for p in other])
                blank[side][key] = module.distribute_tensor(torch.zeros(shape), *args, src_data_rank=None)
    chunks = {}
    for side, other in (("ours", "theirs"), ("theirs", "ours")):
        dcp.save(tensors[side], checkpoint_id=f"{folder}/of {side}")
        dcp.load(blank[other], checkpoint_id=f"{folder}/of {side}")
        for key, tensor in blank[other].items():
            assert torch.equal(tensor.full_tensor(), value_of(tuple(tensor.shape))), (side, key)
            tensor.zero_()
        shard.load(f"{folder}/of {side}", blank["ours"])  # our reader, which runs nothing of the metadata
        for key, tensor in blank["ours"].items():
            assert torch.equal(tensor.full_tensor(), value_of(tuple(tensor.shape))), (side, key)
            tensor.zero_()
        metadata = dcp.FileSystemReader(f"{folder}/of {side}").read_metadata().state_dict_metadata
        chunks[side] = {
            key: sorted((tuple(c.offsets), tuple(c.sizes)) for c in one.chunks if 0 not in c.sizes)
            for key, one in metadata.items()
        }
    assert chunks["ours"] == chunks["theirs"]


def sharded_tensors(worker: Any, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    from phalanx import shard
    from phalanx.tensor import Shard, init_device_mesh, zeros

    modules = {"ours": shard, "theirs": TorchShards()}
    for side, other in (("ours", "theirs"), ("theirs", "ours"), ("ours", "ours")):
        for shape in [(9, 4), (2, 3)]:
            if shape == (2, 3) and side == "theirs":
                continue  # torch cannot save its own where some rank has nothing
            saved = [fill_shards(tensor) for tensor in sharded(shape, modules[side], worker.size)]
            where = f"{folder}/shards {side} {other} {shape}"
            dcp.save({str(i): tensor for i, tensor in enumerate(saved)}, checkpoint_id=where)
            blank = sharded(shape, modules[other], worker.size)
            dcp.load({str((i + 2) % len(saved)): t for i, t in enumerate(blank)}, checkpoint_id=where)
            for tensor in blank:
                check_shards(tensor)
            as_dtensor = {"1": zeros(*shape, device_mesh=init_device_mesh("cpu", (4,)), placements=[Shard(1)])}
            dcp.load(as_dtensor, checkpoint_id=where)
            check(as_dtensor)


def refusals(mesh: Any, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    from phalanx.tensor import DTensor, MaskPartial, Partial

    for placement in (Partial(), MaskPartial()):
        tensor = {"(5, 3) 0": DTensor.from_local(torch.ones(5, 3), mesh, [placement])}
        with pytest.raises(dcp.CheckpointException, match=r"known only after a reduction. redistribute\(\)"):
            dcp.save(tensor, checkpoint_id=f"{folder}/partial")
        with pytest.raises(dcp.CheckpointException, match=r"known only after a reduction. redistribute\(\)"):
            dcp.load(tensor, checkpoint_id=f"{folder}/flat")


def staged(mesh: Any, folder: str) -> None:
    """async_save writes what was there when it was called, by any stager."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

    options = StagingOptions(use_pinned_memory=False, use_async_staging=False, use_non_blocking_copy=False)
    shared = StagingOptions(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
    )
    for number, stager in enumerate([BlockingAsyncStager(), DefaultStager(options), DefaultStager(shared)]):
        tensors = {"nested": {"list": list(many_layouts(mesh).values())[:12]}}
        where = f"{folder}/async {number}"
        response = dcp.async_save(tensors, checkpoint_id=where, async_stager=stager)
        for tensor in tensors["nested"]["list"]:
            tensor.zero_()
        getattr(response, "upload_completion", response).result()
        dcp.load(tensors, checkpoint_id=where)
        check(dict(enumerate(tensors["nested"]["list"])), str(stager))


def distributed(module: Any, mesh: Any, *, cut: int, device: str = "cpu") -> nn.Module:
    """The model with its weights cut along ``cut``, and the rest replicated."""
    torch.manual_seed(0)
    model = Model().to(device)

    def place(_: str, part: nn.Module, mesh: Any) -> None:
        for name, parameter in list(part.named_parameters(recurse=False)):
            placement = module.Shard(cut) if parameter.dim() > cut else module.Replicate()
            placed = module.distribute_tensor(parameter.detach(), mesh, [placement])
            part.register_parameter(name, nn.Parameter(placed))

    return module.distribute_module(model, mesh, place)


def train(model: nn.Module, optimizer: Any, module: Any, mesh: Any) -> None:
    x = module.distribute_tensor(torch.linspace(-1, 1, 24).reshape(4, 6), mesh, [module.Replicate()])
    model(x).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def plain_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain_values(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(entry) for entry in value]
    if isinstance(value, torch.Tensor):
        assert type(value) in (torch.Tensor, nn.Parameter), type(value)
        return ["tensor", str(value.dtype), value.tolist()]
    return value


def two_ranks(worker: Any, file: str, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed import tensor as theirs
    from torch.distributed.checkpoint import state_dict as helpers

    start(worker, file)
    import phalanx.tensor as ours

    mesh = ours.init_device_mesh("cpu", (2,))
    for name in ("flat", "square"):  # written by four ranks
        metadata = dcp.FileSystemReader(f"{folder}/{name}").read_metadata().state_dict_metadata
        found = rotated(mesh, {key: (tuple(o.size), o.properties.dtype) for key, o in metadata.items()})
        dcp.load(found, checkpoint_id=f"{folder}/{name}")
        check(found, f"{name} into two ranks")

    def trained(module: Any, cut: int) -> tuple[nn.Module, Any, Any]:
        mesh = module.init_device_mesh("cpu", (2,))
        model = distributed(module, mesh, cut=cut)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        train(model, optimizer, module, mesh)
        return model, optimizer, mesh

    model, optimizer, mesh = trained(ours, 0)
    their_model, their_optimizer, _ = trained(theirs, 0)
    whole: Any = None
    for options in (
        {"full_state_dict": True},
        {"full_state_dict": True, "cpu_offload": True},
        {"full_state_dict": True, "flatten_optimizer_state_dict": True},
    ):
        asked = helpers.StateDictOptions(**options)
        mine = helpers.get_state_dict(model, optimizer, options=asked)
        expected = helpers.get_state_dict(their_model, their_optimizer, options=asked)
        assert plain_values(mine) == plain_values(expected), options
        whole = whole or copy.deepcopy(mine)

    def same(model: nn.Module, optimizer: Any, of: str) -> None:
        asked = helpers.StateDictOptions(full_state_dict=True)
        found = helpers.get_state_dict(model, optimizer, options=asked)
        assert plain_values(found) == plain_values(whole), of

    # Back into models that are cut otherwise: from whole tensors on all ranks, or on the first alone.
    for options in ({"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}):
        other, steps, _ = trained(ours, 1)
        train(other, steps, ours, mesh)
        alone = worker.rank > 0 and "broadcast_from_rank0" in options
        given, states = copy.deepcopy(({}, {}) if alone else whole)
        asked = helpers.StateDictOptions(**options)
        helpers.set_model_state_dict(other, given, options=asked)
        helpers.set_optimizer_state_dict(other, steps, states, options=asked)
        same(other, steps, str(options))
    # A model that has no memory yet.
    empty = distributed(ours, mesh, cut=1, device="meta")
    asked = helpers.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    helpers.set_model_state_dict(empty, copy.deepcopy(whole[0]) if worker.rank == 0 else {}, options=asked)
    found = helpers.get_model_state_dict(empty, options=helpers.StateDictOptions(full_state_dict=True))
    assert plain_values(found) == plain_values(whole[0])
    # As users do it: sharded state dicts through files, into another layout.
    kept = dict(zip(("model", "optimizer"), helpers.get_state_dict(model, optimizer), strict=True))
    dcp.save(kept, checkpoint_id=f"{folder}/trained")
    other, steps, _ = trained(ours, 1)
    room = dict(zip(("model", "optimizer"), helpers.get_state_dict(other, steps), strict=True))
    dcp.load(room, checkpoint_id=f"{folder}/trained")
    helpers.set_state_dict(other, steps, model_state_dict=room["model"], optim_state_dict=room["optimizer"])
    same(other, steps, "through files")
    gathered_shards(worker)


def gathered_shards(worker: Any) -> None:
    """The helpers on sharded tensors, cut any way."""
    from torch.distributed import _state_dict_utils as helpers

    from phalanx import shard

    for tensor in sharded((5, 4), shard, worker.size):
        found = helpers._gather_state_dict({"a": [fill_shards(tensor)], "b": 1})
        assert torch.equal(found["a"][0], value_of((5, 4))), found
        found = helpers._gather_state_dict({"a": [tensor]}, ranks_only=(1,))
        assert found == {} if worker.rank == 0 else torch.equal(found["a"][0], value_of((5, 4)))
        for spread in (helpers._broadcast_state_dict, helpers._distribute_state_dict):
            local = {"a": shard.zeros(tensor.sharding_spec(), 5, 4)}
            spread({"a": value_of((5, 4))}, local, torch.device("cpu"))
            check_shards(local["a"])


def test_every_layout_is_saved_and_loaded(tmp_path: Any) -> None:
    """On four ranks, then on one: each element where it belongs, from files of ours and of torch's."""
    import torch.distributed.checkpoint as dcp

    run_processes(4, four_ranks, str(tmp_path / "store"), str(tmp_path), timeout=200.0)
    run_processes(2, two_ranks, str(tmp_path / "other store"), str(tmp_path), timeout=200.0)
    for name in ("flat", "square"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            metadata = dcp.FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata
            plain = {key: torch.zeros(one.size, dtype=one.properties.dtype) for key, one in metadata.items()}
            dcp.load(plain, checkpoint_id=tmp_path / name, no_dist=True)
        assert len(plain) > 20
        for key, tensor in plain.items():
            assert torch.equal(tensor, value_of(tuple(tensor.shape), tensor.dtype)), (name, key)
