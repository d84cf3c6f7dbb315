"""What was saved can be shown, read and written in the formats of others, both ways, and nothing of it is run."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import phalanx
from phalanx import checkpoint, shard
from phalanx.__main__ import main
from phalanx.fsdp import fully_shard
from phalanx.shard import CheckpointError
from phalanx.shard.checkpoint._dcp_folder import DcpFolder
from phalanx.shard.files._inert_pickle import Called, read_inert
from phalanx.tensor import Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.fast

STATE = {
    "encoder.weight": torch.arange(60, dtype=torch.float32).view(12, 5),
    "encoder.bias": torch.linspace(-1, 1, 5, dtype=torch.bfloat16),
    "count": torch.tensor(7),
}


def model_and_saves(folder: Path) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    data = [(torch.randn(4), torch.randn(3)) for _ in range(16)]
    job = phalanx.Job(
        model,
        torch.optim.AdamW(model.parameters()),
        data,
        num_slots=2,
        slot_batch_size=4,
        saves=phalanx.elastic.Saves(directory=folder, every=1),
        run=phalanx.elastic.RunOptions(progress=False),
    )
    for step in job.steps(max_steps=2):
        for micro in step:
            micro.backward(nn.functional.mse_loss(model(micro.inputs), micro.targets))
        step.commit()
    job.save()
    job.close()
    return model, folder


def dcp_save(state: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def write(kind: str, folder: Path) -> Path:
    """Have somebody else's tool write STATE."""
    path = folder / kind
    if kind == "safetensors":
        safetensors.torch.save_file(STATE, path)
    elif kind == "hf":
        path.mkdir()
        safetensors.torch.save_file({"encoder.weight": STATE["encoder.weight"]}, path / "a.safetensors")
        safetensors.torch.save_file({k: STATE[k] for k in ("encoder.bias", "count")}, path / "b.safetensors")
        files = {"encoder.weight": "a.safetensors", "encoder.bias": "b.safetensors", "count": "b.safetensors"}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    elif kind == "dcp":
        dcp_save(STATE, path)
    elif kind == "torch":
        torch.save(STATE, path)
    elif kind == "bin":
        path.mkdir()
        torch.save(STATE, path / "pytorch_model.bin")
    else:
        phalanx.simulate(1).run(lambda _: shard.save(STATE, path))
    return path


KINDS = ["safetensors", "hf", "dcp", "torch", "bin", "ours"]


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_others_are_shown_and_loaded(kind: str, tmp_path: Path) -> None:
    path = write(kind, tmp_path)
    contents = checkpoint.inspect(path)
    assert {row.name: (row.dtype, row.shape) for row in contents.tensors} == {
        "count": ("int64", ()),
        "encoder.bias": ("bfloat16", (5,)),
        "encoder.weight": ("float32", (12, 5)),
    }
    assert contents.num_bytes == 240 + 10 + 8
    state = {name: torch.zeros_like(value) for name, value in STATE.items()}
    checkpoint.load(path, state)
    assert all(torch.equal(state[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["hf", "dcp", "torch"])
def test_everything_becomes_everything(kind: str, format: str, tmp_path: Path) -> None:
    path, out = write(kind, tmp_path), tmp_path / "out"
    assert sorted(checkpoint.export(path, out, format=format)) == sorted(STATE)
    back = read_with_its_own_tool(format, out)
    assert back.keys() == STATE.keys()
    assert all(torch.equal(back[name], STATE[name]) and back[name].dtype == STATE[name].dtype for name in STATE)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([kind, "out"])


def test_safetensors_say_whose_tensors_they_hold(tmp_path: Path) -> None:
    checkpoint.export(write("torch", tmp_path), tmp_path / "out")
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    torch.save({"__metadata__": torch.ones(1)}, tmp_path / "odd")
    with pytest.raises(CheckpointError, match="called __metadata__, which safetensors files keep for themselves"):
        checkpoint.export(tmp_path / "odd", tmp_path / "other")


def read_with_its_own_tool(format: str, path: Path) -> dict[str, torch.Tensor]:
    if format == "hf":
        return safetensors.torch.load_file(path / "model.safetensors")
    if format == "torch":
        loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        return loaded
    state = {name: torch.zeros_like(value) for name, value in STATE.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_each_rank_fills_its_shards(kind: str, tmp_path: Path) -> None:
    path = write(kind, tmp_path)

    def run(_: object) -> None:
        mesh = phalanx.init_device_mesh("cpu", (3,))
        state = {
            "encoder.weight": distribute_tensor(torch.zeros(12, 5), mesh, [Shard(1)]),
            "encoder.bias": distribute_tensor(torch.zeros(5, dtype=torch.bfloat16), mesh, [Replicate()]),
        }
        shard.load(path, state)
        assert all(torch.equal(value.full_tensor(), STATE[name]) for name, value in state.items())

    phalanx.simulate(3).run(run)


def test_names_below_a_key_are_found(tmp_path: Path) -> None:
    dcp_save({"model": {"w": torch.arange(12.0).view(4, 3)}, "epoch": 3}, tmp_path / "saved")
    saved = DcpFolder(tmp_path / "saved")
    assert saved.names() == ["model.w"]
    assert saved.others == ["epoch"]
    state = {"w": torch.zeros(4, 3)}
    checkpoint.load(tmp_path / "saved", state)  # the key above is found by itself
    assert torch.equal(state["w"], torch.arange(12.0).view(4, 3))


def test_a_jobs_saves_are_exported_under_the_models_names(tmp_path: Path) -> None:
    model, saves = model_and_saves(tmp_path / "saves")
    contents = checkpoint.inspect(saves)
    assert contents.step == 2
    assert "optimizer.state.0.exp_avg" in {row.name for row in contents.tensors}
    names = checkpoint.export(saves, tmp_path / "hf", dtype=torch.bfloat16)
    assert sorted(names) == sorted(model.state_dict())
    back = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    for name, value in model.state_dict().items():
        wanted = value.to(torch.bfloat16) if value.is_floating_point() else value
        assert torch.equal(back[name], wanted), name
    assert checkpoint.export(saves, tmp_path / "opt", names="optimizer.*") == [
        row.name for row in contents.tensors if row.name.startswith("optimizer.")
    ]
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    checkpoint.load(saves, state)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_save_that_several_workers_wrote_is_shown_without_its_bytes_and_exported(tmp_path: Path) -> None:
    """Tied weights too: one tensor in the save, two names in the model."""

    def run(group: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        model[1].weight = model[0].weight
        fully_shard(model)
        saves = phalanx.elastic.Saves(directory=tmp_path / "saves", every=1)
        options = phalanx.elastic.RunOptions(progress=False, group=group)
        data = [(torch.ones(40), torch.zeros(40))] * 16
        optimizer = torch.optim.AdamW(model.parameters())
        job = phalanx.Job(model, optimizer, data, num_slots=4, slot_batch_size=2, saves=saves, run=options, copies=2)
        for step in job.steps(max_steps=1):
            for micro in step:
                micro.backward(nn.functional.mse_loss(model(micro.inputs), micro.targets))
            step.commit()
        job.save()
        return job.full_state_dict()

    expected = phalanx.simulate(3).run(run)[0]
    (saved,) = (tmp_path / "saves").glob("step-*")
    files = sorted(saved.glob("*.safetensors"))
    assert len(files) == 3
    assert sorted(checkpoint.export(saved, tmp_path / "hf")) == sorted(expected)
    back = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(back[name], value) for name, value in expected.items())
    data = bytearray(files[1].read_bytes())
    data[-1] ^= 1
    files[1].write_bytes(data)
    assert checkpoint.inspect(saved).step == 1, "what is inside can be seen without reading it"
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        checkpoint.export(saved, tmp_path / "damaged")
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        checkpoint.load(saved, expected)


def test_large_exports_are_split_into_files(tmp_path: Path) -> None:
    path = write("torch", tmp_path)
    checkpoint.export(path, tmp_path / "out", max_file_bytes=100)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    state = {name: torch.zeros_like(value) for name, value in STATE.items()}
    checkpoint.load(tmp_path / "out", state)
    assert all(torch.equal(state[name], STATE[name]) for name in STATE)


def test_the_commands_say_what_they_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write("dcp", tmp_path), tmp_path / "out"
    assert main(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert "torch distributed checkpoint, 3 tensors, 258 B" in said
    assert "encoder.weight  float32        240 B  12 x 5" in said
    assert main(["inspect", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["num_bytes"] == 258
    assert main(["export", str(path), str(out), "--format", "torch", "--names", "encoder.*"]) == 0
    assert "wrote 2 tensors, 250 B" in capsys.readouterr().out
    capsys.readouterr()
    assert main(["export", str(path), str(out) + "2", "--format", "torch", "--names", "encoder.*", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == str(out) + "2"
    assert said["tensors"]
    assert all(name.startswith("encoder.") for name in said["tensors"])
    assert main(["export", str(path), str(out)]) == 1
    assert "exists; pass overwrite=True (--overwrite)" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    assert "nowhere does not exist" in capsys.readouterr().err


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["dcp", "torch", "bin"])
def test_no_pickle_is_run(kind: str, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    harmful = pickle.dumps(Harmful(trap))
    found = read_inert(harmful)
    assert isinstance(found, Called)
    assert found.args == (str(trap),)
    path = write(kind, tmp_path)
    if kind == "dcp":
        (path / ".metadata").write_bytes(harmful)
    else:
        torch.save({"w": Harmful(trap)}, path if kind == "torch" else path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.inspect(path)
    assert not trap.exists()


def test_damage_is_named(tmp_path: Path) -> None:
    path = write("dcp", tmp_path)
    data = next(path.glob("*.distcp"))
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"distcp cannot be read: .*needs it"):
        checkpoint.load(path, {name: torch.zeros_like(value) for name, value in STATE.items()})
    metadata = (path / ".metadata").read_bytes()
    for end in range(0, len(metadata), 37):
        (path / ".metadata").write_bytes(metadata[:end])
        with pytest.raises(CheckpointError, match="metadata cannot be read"):
            checkpoint.inspect(path)
    (path / ".metadata").write_bytes(metadata.replace(data.name.encode(), b"../" + data.name.encode()[3:]))
    with pytest.raises(CheckpointError, match="not a file beside it"):
        checkpoint.inspect(path)
    with pytest.raises(ValueError, match="format is 'gguf'; expected one of hf, dcp, torch"):
        checkpoint.export(path, tmp_path / "out", format="gguf")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("torch", tmp_path)

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("phalanx.shard.files._safetensors._take_room", refuse)
    for format in ("hf", "torch"):
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.export(path, tmp_path / "out", format=format)
    assert [each.name for each in tmp_path.iterdir()] == ["torch"]
