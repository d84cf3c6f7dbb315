"""Whatever reads raw memory gets the truth or a clear error: the shape of a distributed tensor is global."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from phalanx import comm, shard
from phalanx.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

pytestmark = pytest.mark.fast
VALUES = torch.arange(8.0).reshape(4, 2)

# What would hand out addresses or bytes of one part under the shape of the whole.
RAW: dict[str, Callable[[Any], Any]] = {
    "data_ptr": lambda t: t.data_ptr(),
    "const_data_ptr": lambda t: t.const_data_ptr(),
    "untyped_storage": lambda t: t.untyped_storage(),
    "storage": lambda t: t.storage(),
    "_typed_storage": lambda t: t._typed_storage(),
    "storage of a view": lambda t: t.detach().untyped_storage(),
    "safetensors.save": lambda t: safetensors.torch.save({"w": t}),
    "pickle of a storage": lambda t: pickle.dumps(t.untyped_storage()),
    "torch.save of storages": lambda t: torch.save([t.untyped_storage()], io.BytesIO()),
    "set_ to a storage": lambda t: torch.empty(0).set_(t.untyped_storage()),
    "by address": lambda t: (ctypes.c_float * 8).from_address(t.data_ptr()),
}
# What gives the values themselves.
TRUE: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda t: t.numpy(),
    "asarray": np.asarray,
    "array of float64": lambda t: np.array(t, dtype=np.float64),
    "tolist": lambda t: t.tolist(),
    "from_dlpack": torch.from_dlpack,
    "numpy.from_dlpack": np.from_dlpack,
    "to_dlpack": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
}
# No bytes at all, rather than wrong ones.
NONE: dict[str, Callable[[Any], Any]] = {
    "memoryview": memoryview,
    "frombuffer": lambda t: torch.frombuffer(t, dtype=torch.float32),
    "set_ to it": lambda t: torch.empty(0).set_(t),
    "Tensor": torch.Tensor,
    "ufunc": lambda t: np.add(t, 1),
}
LAYOUTS = {"cut": [Shard(0)], "cut by columns": [Shard(1)], "partial": [Partial()]}


def on_two(body: Callable[[Any], Any]) -> list[Any]:
    def run(group: Any) -> Any:
        return body(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))

    return comm.simulate(2, timeout=60.0).run(run)


@pytest.mark.filterwarnings("ignore:TypedStorage", "ignore:__array__")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_is_not_handed_out_as_the_whole(layout: str) -> None:
    def body(mesh: Any) -> None:
        tensor = distribute_tensor(VALUES, mesh, [Replicate()]).redistribute(placements=LAYOUTS[layout])
        for name, probe in RAW.items():
            with pytest.raises(NotImplementedError, match=r"float32\[4, 2\] \[tp:.*full_tensor\(\)") as error:
                probe(tensor)
            assert "to_local()" in str(error.value), name
            assert f"rank {mesh.get_rank()} holds" in str(error.value), name
            assert "phalanx.shard.save()" in str(error.value), name
        for name, probe in TRUE.items():
            assert np.array_equal(np.asarray(probe(tensor)), VALUES.numpy()), name
        for probe in NONE.values():
            with pytest.raises((TypeError, RuntimeError, ValueError)):
                probe(tensor)
        assert tensor.nbytes == 32

    on_two(body)


@pytest.mark.filterwarnings("ignore:TypedStorage", "ignore:__array__")
def test_what_every_rank_has_whole_answers() -> None:
    def body(mesh: Any) -> None:
        tensor = distribute_tensor(VALUES, mesh, [Replicate()])
        for name, probe in RAW.items():
            probe(tensor)
            assert name
        assert tensor.data_ptr() == tensor.to_local().data_ptr()
        assert tensor.untyped_storage().nbytes() == 32
        loaded = safetensors.torch.load(safetensors.torch.save({"w": tensor}))
        assert torch.equal(loaded["w"], VALUES)
        alone = init_device_mesh("cpu", (2, 1))  # an axis of one rank cuts nothing
        assert distribute_tensor(VALUES, alone, [Replicate(), Shard(0)]).untyped_storage().nbytes() == 32

    on_two(body)


def test_a_model_that_is_cut_is_not_written_as_garbage(tmp_path: Path) -> None:
    def body(mesh: Any) -> None:
        layer = nn.Linear(2, 4)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        path = tmp_path / f"{mesh.get_rank()}.safetensors"
        for write in (
            lambda: safetensors.torch.save_file(layer.state_dict(), path),
            lambda: safetensors.torch.save_model(layer, str(path)),
        ):
            with pytest.raises(NotImplementedError, match=r"full_tensor\(\)"):
                write()
        assert not path.exists()
        whole = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in layer.state_dict().items()
        }
        safetensors.torch.save_file(whole, path)
        assert torch.equal(safetensors.torch.load_file(path)["weight"], layer.weight.full_tensor())

    on_two(body)


def test_copies_pickles_and_training_need_no_raw_memory() -> None:
    def body(mesh: Any) -> None:
        layer = nn.Linear(2, 4)
        for name, value in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(value.detach(), mesh, [Shard(0)])))
        optimizer = torch.optim.AdamW(layer.parameters(), foreach=True)
        layer(distribute_tensor(VALUES, mesh, [Replicate()])).sum().backward()
        optimizer.step()
        layer.share_memory()
        assert layer.weight.is_shared()
        twin = copy.deepcopy(layer)
        assert torch.equal(twin.weight.full_tensor(), layer.weight.full_tensor())
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        for back in (
            pickle.loads(pickle.dumps(layer.weight)),
            torch.load(file)["weight"],
            pickle.loads(ForkingPickler.dumps(layer.weight.detach())),  # as queues between processes do
        ):
            assert back.placements == layer.weight.placements
            assert torch.equal(back.full_tensor(), layer.weight.full_tensor())

    on_two(body)


@pytest.mark.filterwarnings("ignore:TypedStorage", "ignore:__array__")
def test_a_sharded_tensor_has_no_memory_of_its_shape() -> None:
    def body(group: Any) -> None:
        spec = shard.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        tensor = shard.zeros(spec, 4, 2)
        tensor.local_tensor().copy_(VALUES.chunk(2)[group.rank])
        for name, probe in RAW.items():
            with pytest.raises(NotImplementedError, match=r"holds 4 of 8 elements.*gather\(\)"):
                probe(tensor)
            assert name
        for name, probe in TRUE.items():
            assert np.array_equal(np.asarray(probe(tensor)), VALUES.numpy()), name
        for probe in NONE.values():
            with pytest.raises((TypeError, RuntimeError, ValueError)):
                probe(tensor)

    comm.simulate(2, timeout=60.0).run(body)
