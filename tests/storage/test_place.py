"""What a user means by a path or URL, and what is said of those that nobody can keep."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from phalanx import checkpoint, shard
from phalanx.elastic import Saves
from phalanx.storage import RemotePath, as_place
from phalanx.storage._errors import remedy
from phalanx.storage._object_bucket import ObjectBucket, Patience

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("runs/1", Path("runs/1")),
        ("file:///data/run%201", Path("/data/run 1")),
        ("file://localhost/data", Path("/data")),
        (Path("a"), Path("a")),
        ("s3://bucket/a/b/", RemotePath(ObjectBucket("s3", "bucket"), "a/b")),
        ("S3://bucket", RemotePath(ObjectBucket("s3", "bucket"), "")),
        ("gs://bucket/a", RemotePath(ObjectBucket("gs", "bucket"), "a")),
        ("az://container/a", RemotePath(ObjectBucket("az", "container"), "a")),
        ("memory://name/a", RemotePath(ObjectBucket("memory", "name"), "a")),
    ],
)
def test_a_path_or_url_leads_somewhere(url: str | Path, place: Path | RemotePath) -> None:
    assert as_place(url) == place


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/a", "scheme 'ftp'; expected one of file, s3, gs, az, memory"),
        ("s3:///a", "names no bucket; expected s3://bucket/path"),
        ("file://elsewhere/a", "names the machine 'elsewhere'"),
        (Path("s3://bucket/a"), "Path dropped a slash of it; pass the URL as text"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused_wherever_it_is_given(url: str | Path, message: str) -> None:
    for use in (
        as_place,
        checkpoint.inspect,
        lambda given: shard.load(given, {}),
        lambda given: Saves(directory=given),
    ):
        with pytest.raises(ValueError, match=message):
            use(url)


def test_a_folder_for_uploads_is_for_urls_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no bucket's URL"):
        Saves(directory=tmp_path, local=tmp_path)


def test_without_the_package_a_url_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'phalanx-train\[cloud\]'"):
        as_place("s3://bucket/a")
    assert as_place("file:///a") == Path("/a")


def test_what_is_remote_is_never_taken_for_a_file_of_this_machine() -> None:
    with pytest.raises(TypeError):
        os.fspath(as_place("memory://name/a"))  # type: ignore[arg-type]  # that is the test


def test_the_time_that_a_request_may_take_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_STORAGE_TIMEOUT", "30")
    assert (Patience.from_environment().total, Patience.from_environment().request) == (30.0, 15.0)
    monkeypatch.setenv("PHALANX_STORAGE_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="is 'soon'; expected a number of seconds above 0"):
        Patience.from_environment()


def test_each_provider_has_its_own_remedy() -> None:
    assert "AZURE_STORAGE_ACCOUNT_NAME" in remedy("az", "GenericError", "Account must be specified")
    assert "GOOGLE_SERVICE_ACCOUNT" in remedy("gs", "PermissionDeniedError", "")
    assert "AWS_ENDPOINT_URL" in remedy("s3", "GenericError", "HTTP error: error sending request")


def test_a_bucket_in_memory_is_a_folder(tmp_path: Path) -> None:
    place = as_place("memory://folder-test/run")
    assert not place.exists()
    assert place.is_dir() is False
    (place / "a").write_bytes(b"1")
    (place / "b" / "c").write_bytes(b"22")
    assert [each.name for each in place.iterdir()] == ["a", "b"]
    assert list(place.walk()) == [("a", 1), ("b/c", 2)]
    assert not (as_place("memory://folder-test") / "ru").exists(), "a folder is no beginning of a name"
    with pytest.raises(FileNotFoundError, match="memory://folder-test/run/d: there is no such object"):
        (place / "d").read_bytes()
    with pytest.raises(ValueError, match="for reading bytes only"):
        (place / "a").open("wb")
