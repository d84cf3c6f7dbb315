"""Sharded checkpoints, files of others and exports, in a bucket: each rank the ranges that it needs, all or nothing."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from s3_server import S3Server

import phalanx
from phalanx import checkpoint, shard
from phalanx.__main__ import main
from phalanx.shard import CheckpointError
from phalanx.storage import RemotePath, as_place
from phalanx.storage._transfer import upload_file, upload_folder
from phalanx.tensor import Shard, distribute_tensor, init_device_mesh

STATE = {
    "encoder.weight": torch.arange(600_000, dtype=torch.float32).view(600, 1000),
    "encoder.bias": torch.linspace(-1, 1, 5, dtype=torch.bfloat16),
    "count": torch.tensor(7),
}


def fresh() -> str:
    return f"memory://{uuid.uuid4().hex}/saved"


def remote_of(url: str) -> RemotePath:
    place = as_place(url)
    assert isinstance(place, RemotePath)
    return place


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in STATE.items()}


def sharded_state(group: Any, dim: int, values: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (group.size,))
    return {
        name: distribute_tensor(value, mesh, [Shard(dim)]) if value.dim() == 2 else value
        for name, value in values.items()
    }


def save_on(size: int, url: str, scale: float = 1.0, **keywords: Any) -> None:
    values = {name: value * scale for name, value in STATE.items()}
    phalanx.simulate(size).run(lambda group: shard.save(sharded_state(group, 0, values), url, **keywords))


@pytest.mark.parametrize("scheme", ["memory", "s3"])
def test_any_layout_from_any_other(scheme: str, request: pytest.FixtureRequest) -> None:
    url = fresh() if scheme == "memory" else f"s3://{request.getfixturevalue('bucket')}/saved"
    save_on(3, url)

    def read(group: Any, dim: int) -> bool:
        state = sharded_state(group, dim, zeros())
        shard.load(url, state)
        weight = state["encoder.weight"].full_tensor()
        return torch.equal(weight, STATE["encoder.weight"]) and torch.equal(state["count"], STATE["count"])

    assert all(phalanx.simulate(2).run(read, 0))
    assert all(phalanx.simulate(2).run(read, 1))
    plain = zeros()
    shard.load(url, plain)
    assert all(torch.equal(plain[name], STATE[name]) for name in STATE)


def test_a_rank_fetches_the_blocks_that_it_needs() -> None:
    url = fresh()
    values = {"table": torch.arange(2_000_000, dtype=torch.float32).view(2000, 1000)}
    phalanx.simulate(1).run(lambda _: shard.save(values, url))
    saved = shard.Checkpoint(url)
    part = saved.read("table", shard.layout._boxes.Box((0, 0), (10, 1000)))
    assert torch.equal(part, values["table"][:10])
    assert saved.bytes_read == 1 << 20, "one block of eight"


def test_a_checkpoint_is_replaced_at_once_and_never_mixed(s3: S3Server, bucket: str) -> None:
    url = f"s3://{bucket}/saved"
    save_on(2, url)
    with pytest.raises(Exception, match="exists; pass overwrite=True"):
        save_on(2, url)
    s3.strike("PUT", r"rank-00001-of-00002", status=403)
    with pytest.raises(Exception, match="rank 1"):
        save_on(2, url, scale=2.0, overwrite=True)
    found = zeros()
    shard.load(url, found)
    assert torch.equal(found["encoder.weight"], STATE["encoder.weight"]), "the old one is there, complete"
    save_on(2, url, scale=2.0, overwrite=True)
    shard.load(url, found)
    assert torch.equal(found["encoder.weight"], 2 * STATE["encoder.weight"])
    assert len(s3.keys(bucket)) == 3, "two files and the index; what was there before is gone"


def test_damage_and_absence_are_named() -> None:
    url = fresh()
    with pytest.raises(CheckpointError, match=r"no checkpoint at memory://.*index.json is missing"):
        shard.load(url, zeros())
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.inspect(url)
    save_on(1, url)
    (file,) = (each for each in remote_of(url).iterdir() if each.name.startswith("rank"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="is damaged"):
        shard.load(url, zeros())
    file.write_bytes(bytes(data[:-1]))
    with pytest.raises(CheckpointError, match="is torn"):
        shard.load(url, zeros())


def upload_as(kind: str, folder: Path, url: str) -> None:
    """Have somebody else's tool write STATE, and somebody upload it."""
    path = folder / kind
    if kind == "safetensors":
        safetensors.torch.save_file(STATE, path)
    elif kind == "torch":
        torch.save(STATE, path)
    elif kind == "hf":
        path.mkdir()
        safetensors.torch.save_file({"encoder.weight": STATE["encoder.weight"]}, path / "a.safetensors")
        safetensors.torch.save_file({k: STATE[k] for k in ("encoder.bias", "count")}, path / "b.safetensors")
        files = {"encoder.weight": "a.safetensors", "encoder.bias": "b.safetensors", "count": "b.safetensors"}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
        upload_folder(path, remote_of(url), "model.safetensors.index.json")
        return
    else:
        dcp.save(STATE, checkpoint_id=path, no_dist=True)
        upload_folder(path, remote_of(url), ".metadata")
        return
    upload_file(path, remote_of(url))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["safetensors", "torch", "hf", "dcp"])
def test_files_of_others_are_shown_and_loaded(kind: str, tmp_path: Path) -> None:
    url = fresh()
    upload_as(kind, tmp_path, url)
    assert {row.name: row.shape for row in checkpoint.inspect(url).tensors} == {
        "count": (),
        "encoder.bias": (5,),
        "encoder.weight": (600, 1000),
    }
    found = zeros()
    checkpoint.load(url, found)
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)

    def columns(group: Any) -> bool:
        state = sharded_state(group, 1, zeros())
        shard.load(url, state)
        return torch.equal(state["encoder.weight"].full_tensor(), STATE["encoder.weight"])

    assert all(phalanx.simulate(2).run(columns))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("format", ["hf", "dcp", "torch"])
def test_the_commands_take_urls(format: str, s3: S3Server, bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = f"s3://{bucket}/saved", f"s3://{bucket}/exported"
    save_on(2, source)
    assert main(["export", source, target, "--format", format]) == 0
    assert f"to {target}" in capsys.readouterr().out
    assert main(["export", source, target, "--format", format]) == 1
    assert f"{target} exists; pass overwrite=True (--overwrite)" in capsys.readouterr().err
    assert main(["inspect", target]) == 0
    assert "600 x 1000" in capsys.readouterr().out
    for words in (["inspect", "s3://no-such-bucket/a"], ["export", source, "s3://no-such-bucket/a"]):
        assert main(words) == 1
        assert "Create the bucket first" in capsys.readouterr().err
    assert main(["inspect", "ftp://host/a"]) == 1
    assert "expected one of file, s3, gs, az, memory" in capsys.readouterr().err
    found = zeros()
    checkpoint.load(target, found)
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)


def test_full_files_go_to_a_bucket() -> None:
    url = fresh()

    def save(group: Any, **keywords: Any) -> None:
        shard.save_full(sharded_state(group, 0, STATE), url, process_group=group, max_file_bytes=1000, **keywords)

    phalanx.simulate(2).run(save)
    assert [each.name for each in remote_of(url).iterdir()][-1] == "model.safetensors.index.json"
    with pytest.raises(Exception, match="exists; pass overwrite=True"):
        phalanx.simulate(2).run(save)
    phalanx.simulate(2).run(lambda group: save(group, overwrite=True))
    found = zeros()
    shard.load(url, found)
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize(
    "data",
    [b"", b"1234567", (10**9).to_bytes(8, "little"), b"\x02" + bytes(7) + b"[]", b"\x05" + bytes(7) + b'{"a":'],
)
def test_what_is_no_safetensors_file_says_so(data: bytes) -> None:
    url = fresh()
    remote_of(url).write_bytes(data)
    with pytest.raises(CheckpointError, match="cannot be read as a safetensors file"):
        checkpoint.inspect(url)
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    remote_of(url).write_bytes(len(header).to_bytes(8, "little") + header + bytes(15))
    with pytest.raises(CheckpointError, match=r"does not lie at \[0, 16\]"):
        checkpoint.inspect(url)
