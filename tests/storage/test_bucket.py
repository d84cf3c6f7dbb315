"""Objects go to a server of the S3 protocol and come back whatever the network does; what cannot be had says why."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from s3_server import DENIED, S3Server

from phalanx.storage import NotStored, RemotePath, StorageError, as_place
from phalanx.storage._object_bucket import PART
from phalanx.storage._transfer import download_file, upload_file, upload_folder

SIZE = 2 * PART + 1000


@pytest.fixture
def place(bucket: str) -> RemotePath:
    found = as_place(f"s3://{bucket}/run")
    assert isinstance(found, RemotePath)
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "big"
    path.write_bytes(os.urandom(SIZE))
    return path


def test_a_large_object_goes_in_parts_and_comes_in_ranges(
    s3: S3Server, place: RemotePath, file: Path, tmp_path: Path
) -> None:
    upload_file(file, place / "big")
    assert sum("partNumber" in path for _, path in s3.requests) == 3
    s3.requests.clear()
    data = file.read_bytes()
    assert (place / "big").read_range(5, SIZE - 10) == data[5:-5]
    assert sum(method == "GET" for method, _ in s3.requests) == 3
    with (place / "big").open() as opened:
        assert opened.read(10) == data[:10]
        opened.seek(-10, os.SEEK_END)
        assert opened.read() == data[-10:]
    download_file(place / "big", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data


def test_requests_that_are_not_answered_are_made_again(
    s3: S3Server, place: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_STORAGE_TIMEOUT", "10")
    (tmp_path / "small").write_bytes(b"some")
    faults = [s3.strike("PUT", "small", kind="hang"), s3.strike("GET", "small", kind="hang")]
    upload_file(tmp_path / "small", place / "small")
    assert (place / "small").read_range(1, 2) == b"om"
    assert all(fault.struck.is_set() for fault in faults)


@pytest.mark.parametrize("kind", ["status", "drop"])
def test_an_upload_survives_what_the_network_does(s3: S3Server, place: RemotePath, file: Path, kind: str) -> None:
    faults = [s3.strike("PUT", "partNumber=2", kind=kind), s3.strike("POST", "uploads", kind=kind)]
    upload_file(file, place / "big")
    assert all(fault.struck.is_set() for fault in faults)
    assert (place / "big").read_bytes() == file.read_bytes()


def test_a_download_survives_what_the_network_does(s3: S3Server, place: RemotePath, file: Path) -> None:
    upload_file(file, place / "big")
    for kind in ("status", "drop", "cut"):
        fault = s3.strike("GET", "big", kind=kind, times=2, status=503)
        assert (place / "big").read_range(0, SIZE) == file.read_bytes(), kind
        assert fault.struck.is_set()


def test_a_server_that_stays_in_trouble_is_given_up(
    s3: S3Server, place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_STORAGE_TIMEOUT", "1")
    s3.strike("GET", "a$", times=10**6)
    with pytest.raises(StorageError, match=r"s3://.*/run/a: reading it failed: .*500.*InternalError.*try again later"):
        (place / "a").read_bytes()
    s3.calm()
    s3.strike("PUT", "a$", kind="hang", times=10**6)
    with pytest.raises(StorageError, match=r"writing 1 bytes failed: .*AWS_ENDPOINT_URL"):
        (place / "a").write_bytes(b"1")


def test_an_endpoint_that_is_not_there_says_so(
    s3: S3Server, place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setenv("PHALANX_STORAGE_TIMEOUT", "0.5")
        for use in (lambda: place.is_dir(), lambda: place.is_file(), lambda: (place / "a").write_bytes(b"")):
            with pytest.raises(StorageError, match=r"can be reached from here \(AWS_ENDPOINT_URL"):
                use()


@pytest.mark.parametrize("code", [b"InvalidAccessKeyId", b"SignatureDoesNotMatch", b"AccessDenied"])
def test_credentials_that_the_server_refuses_are_named(s3: S3Server, place: RemotePath, code: bytes) -> None:
    for method, use in (("PUT", lambda: place.write_bytes(b"1")), ("GET", lambda: place.read_bytes())):
        s3.strike(method, "run", status=403, body=DENIED % code)
        with pytest.raises(StorageError, match=rf"run: .*{code.decode()}.*AWS_ACCESS_KEY_ID"):
            use()


def test_no_credentials_at_all_are_named(s3: S3Server, place: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", s3.url)  # where a machine in the cloud would have its role
    monkeypatch.setenv("PHALANX_STORAGE_TIMEOUT", "0.5")
    s3.strike("PUT", "/latest/api/token", status=403, times=10**6, body=b"no")
    with pytest.raises(StorageError, match="AWS_ACCESS_KEY_ID"):
        place.read_bytes()


def test_a_missing_bucket_is_named(s3: S3Server, tmp_path: Path) -> None:
    place = as_place("s3://no-such-bucket/run")
    assert isinstance(place, RemotePath)
    for use in (lambda: place.read_bytes(), lambda: place.is_dir(), lambda: place.write_bytes(b"")):
        with pytest.raises(StorageError, match=r"s3://no-such-bucket/run: .*NoSuchBucket.*Create the bucket first"):
            use()


def test_a_folder_is_committed_by_its_last_object(s3: S3Server, place: RemotePath, bucket: str, tmp_path: Path) -> None:
    for name in ("a", "b", "index"):
        (tmp_path / name).write_text(name)
    assert upload_folder(tmp_path, place, "index")
    (tmp_path / "b").rename(tmp_path / "c")
    fault = s3.strike("PUT", "/c", status=403)
    with pytest.raises(StorageError):
        upload_folder(tmp_path, place, "index")
    assert fault.struck.is_set()
    assert "run/index" not in s3.keys(bucket), "half a folder is not to be seen"
    s3.calm()
    assert not upload_folder(tmp_path, place, "index", is_unwanted=lambda: True)
    assert upload_folder(tmp_path, place, "index")
    assert s3.keys(bucket) == ["run/a", "run/c", "run/index"], "what the folder has no more is gone"


def test_the_first_of_two_writers_creates(place: RemotePath) -> None:
    assert (place / "once").create(b"1")
    assert not (place / "once").create(b"2")
    assert (place / "once").read_bytes() == b"1"
    (place / "once").unlink()
    with pytest.raises(NotStored):
        (place / "once").unlink()
    (place / "once").unlink(missing_ok=True)
