"""``gs://`` and ``az://``: the same promises as ``s3://``, through the clients of Google's and Azure's protocols."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blob_servers import AzureServer, BlobServer, GoogleServer
from elastic_training import make_job, train

from phalanx import checkpoint, shard
from phalanx.comm import simulate
from phalanx.elastic import RunOptions, Saves
from phalanx.storage import NotStored, RemotePath, StorageError, as_place
from phalanx.storage._object_bucket import PART
from phalanx.storage._transfer import download_folder, upload_file, upload_folder

SIZE = 2 * PART + 1000
SERVERS = {"gs": GoogleServer, "az": AzureServer}


@pytest.fixture(params=SERVERS)
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def server(scheme: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlobServer]:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    made = SERVERS[scheme]("bucket")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    made.stop()


@pytest.fixture
def place(scheme: str, server: BlobServer) -> RemotePath:
    found = as_place(f"{scheme}://bucket/run")
    assert isinstance(found, RemotePath)
    return found


def test_a_large_object_goes_in_parts_and_comes_in_ranges_whatever_the_network_does(
    scheme: str, server: BlobServer, place: RemotePath, tmp_path: Path
) -> None:
    (tmp_path / "big").write_bytes(os.urandom(SIZE))
    part = "partNumber=2" if scheme == "gs" else "comp=block&|comp=block$|comp=block,"
    server.failures += [("PUT", part), ("GET", "big"), ("GET", "big")]
    upload_file(tmp_path / "big", place / "big")
    assert sum(method == "PUT" and ("partNumber" in path or "blockid" in path) for method, path in server.requests) >= 3
    data = (tmp_path / "big").read_bytes()
    assert (place / "big").size() == SIZE
    assert (place / "big").read_range(5, SIZE - 10) == data[5:-5]
    assert not server.failures, "each of them struck"


def test_a_folder_is_committed_by_its_last_object_and_listed_and_removed(
    server: BlobServer, place: RemotePath, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name in ("a", "b c", "index"):
        (source / name).write_text(name)
    assert upload_folder(source, place, "index")
    written = [path for method, path in server.requests if method == "PUT"]
    assert "index" in written[-1]
    download_folder(place, target)
    assert {path.name: path.read_text() for path in target.iterdir()} == {"a": "a", "b c": "b c", "index": "index"}
    (source / "a").unlink()
    assert upload_folder(source, place, "index")
    assert sorted(server.objects["bucket"]) == ["run/b c", "run/index"], "what the folder has no more is gone"


def test_the_first_of_two_writers_creates(place: RemotePath) -> None:
    assert (place / "once").create(b"1")
    assert not (place / "once").create(b"2")
    assert (place / "once").read_bytes() == b"1"
    (place / "once").unlink()
    with pytest.raises(NotStored):
        (place / "once").read_bytes()


def test_what_is_not_there_or_not_allowed_is_named(
    scheme: str, server: BlobServer, place: RemotePath, monkeypatch: Any
) -> None:
    gone = as_place(f"{scheme}://no-such-bucket/run")
    assert isinstance(gone, RemotePath)
    with pytest.raises(StorageError, match="Create the bucket first"):
        gone.write_bytes(b"1")
    monkeypatch.setenv("PHALANX_STORAGE_TIMEOUT", "1")
    server.failures += [("GET", "run.*a$")] * 1000
    with pytest.raises(StorageError, match=rf"{scheme}://bucket/run/a: reading it failed: .*503"):
        (place / "a").read_bytes()


def test_a_job_resumes_from_its_bucket_and_a_sharded_checkpoint_is_read_in_parts(
    scheme: str, server: BlobServer, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    url, run = f"{scheme}://bucket/job", RunOptions(progress=False, threads=1)

    def job_in(local: str) -> Any:
        return make_job(saves=Saves(directory=url, local=tmp_path / local, every=2, keep=2), run=run)

    undisturbed = make_job(run=run)
    train(undisturbed, max_steps=5)
    train(job_in("first"), max_steps=4, wait_for_saves=True)
    assert checkpoint.inspect(url).step == 4
    resumed = job_in("second")
    assert len(train(resumed, max_steps=5)) == 1
    assert resumed.digest() == undisturbed.digest()
    table = torch.arange(1000.0).view(100, 10)
    simulate(2).run(lambda group: shard.save({"table": table}, f"{scheme}://bucket/table"))
    back = {"table": torch.zeros(100, 10)}
    shard.load(f"{scheme}://bucket/table", back)
    assert torch.equal(back["table"], table)
