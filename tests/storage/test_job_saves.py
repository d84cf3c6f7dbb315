"""A job's saves in a bucket: made here, uploaded in the background, committed by the manifest, resumed anywhere."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import sharded_training
import torch
from elastic_training import make_job, train
from s3_server import S3Server

from phalanx import checkpoint
from phalanx.comm import simulate
from phalanx.elastic import NoReadableSave, RunOptions, Saves
from phalanx.elastic.checkpoint import _save_writer
from phalanx.elastic.checkpoint._bucket_saves import BucketSaves
from phalanx.elastic.checkpoint._save_writer import SaveWriter
from phalanx.storage import RemotePath, StorageError, as_place

SCRIPT = Path(__file__).parent / "uploading_script.py"
QUIET = RunOptions(progress=False, threads=1)
DENIED = b"<Error><Code>AccessDenied</Code><Message>not you</Message></Error>"


def fresh() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


def remote_of(url: str) -> RemotePath:
    place = as_place(url)
    assert isinstance(place, RemotePath)
    return place


def job_with(url: str, local: Path, **keywords: Any) -> Any:
    return make_job(saves=Saves(directory=url, local=local, every=2, **keywords), run=QUIET)


def steps_in(url: str) -> list[int]:
    return [
        int(name.removeprefix("step-"))
        for name in sorted(each.name for each in remote_of(url).iterdir())
        if "-0" in name
    ]


@pytest.fixture(scope="module")
def undisturbed() -> str:
    torch.set_num_threads(1)
    job = make_job(run=QUIET)
    train(job, max_steps=7)
    digest: str = job.digest()
    return digest


def test_a_job_resumes_from_a_bucket_on_another_machine(tmp_path: Path, bucket: str, undisturbed: str) -> None:
    url = f"s3://{bucket}/run"
    train(job_with(url, tmp_path / "first", keep=2), max_steps=6, wait_for_saves=True)
    assert steps_in(url) == [4, 6], "older saves are gone"
    resumed = job_with(url, tmp_path / "second", keep=2)
    assert len(train(resumed, max_steps=7)) == 1
    assert resumed.digest() == undisturbed
    contents = checkpoint.inspect(url)
    assert (contents.step, contents.format) == (6, "save of a phalanx job")
    assert contents.path == f"{url}/step-000000000006"
    state = {name: torch.zeros_like(value) for name, value in resumed.model.state_dict().items()}
    checkpoint.load(url, state)
    exported = tmp_path / "exported"
    checkpoint.export(url, exported)
    again = {name: torch.zeros_like(value) for name, value in state.items()}
    checkpoint.load(exported, again)
    assert all(torch.equal(state[name], again[name]) for name in state)


def test_steps_do_not_wait_for_an_upload(tmp_path: Path, bucket: str, s3: S3Server) -> None:
    """The upload of the first save hangs until the last step is done: the steps are not behind it."""
    url = f"s3://{bucket}/run"
    held = s3.strike("PUT", r"state\.json", kind="hold", times=1)
    job = job_with(url, tmp_path / "local", keep=9)
    for step in job.steps(max_steps=6):
        for micro in step:
            micro.backward(torch.nn.functional.cross_entropy(job.model(micro.inputs), micro.targets))
        step.commit()
        if step.number == 2:
            assert held.struck.wait(120)
        if step.number == 5:
            assert "run/step-000000000002/state.json" not in s3.keys(bucket)
            held.release.set()
    job.saving.wait_idle()
    assert 6 in steps_in(url)
    job.close()


def test_a_bucket_that_refuses_does_not_end_training(tmp_path: Path, bucket: str, s3: S3Server) -> None:
    url = f"s3://{bucket}/run"
    told: list[tuple[int, str]] = []
    saved: list[str] = []
    writer = SaveWriter(
        BucketSaves(remote_of(url), tmp_path),
        keep=2,
        on_saved=lambda step, path: saved.append(str(path)),
        on_failed=lambda step, error, delay: told.append((step, str(error))),
    )
    s3.strike("PUT", r"tensors", status=403, body=DENIED, times=10**6)
    writer.submit((4, {"step": 4}, [torch.ones(3)]))
    with pytest.raises(StorageError, match="AccessDenied"):
        writer.wait_idle()
    assert {step for step, _ in told} == {4}
    s3.calm()
    writer.wait_idle()
    writer.close()
    assert saved == [f"{url}/step-000000000004"]


def test_a_full_local_disk_is_told_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    job = job_with(fresh(), tmp_path)

    def full(*args: object, **keywords: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(_save_writer, "write_save", full)
        with pytest.raises(OSError, match="No space left"):
            job.save()
    assert f"No space left on device in {tmp_path}, where it is made first (Saves(local=...)" in capfd.readouterr().err
    job.save()
    assert steps_in(str(job.saving.options.directory)) == [0]
    job.close()


def test_saves_that_were_removed_from_the_bucket_do_not_come_back_from_the_disk(tmp_path: Path) -> None:
    url = fresh()
    train(job_with(url, tmp_path), max_steps=4, wait_for_saves=True)
    place = remote_of(url)
    for name, _ in list(place.walk()):
        (place / name).unlink()
    assert len(train(job_with(url, tmp_path), max_steps=3)) == 3, "it begins at step 0"


def test_a_damaged_copy_is_fetched_again_and_a_damaged_save_is_told(tmp_path: Path) -> None:
    url = fresh()
    train(job_with(url, tmp_path), max_steps=4, wait_for_saves=True)
    (local,) = tmp_path.iterdir()
    (local / "step-000000000004" / "tensors.safetensors").write_bytes(b"torn")
    assert len(train(job_with(url, tmp_path), max_steps=5)) == 1, "the bucket has a good one"
    (remote_of(url) / "step-000000000004" / "tensors.safetensors").write_bytes(b"torn")
    shutil.rmtree(local)
    with pytest.warns(RuntimeWarning, match="does not match its checksum; the save before it is used"):
        assert len(train(job_with(url, tmp_path), max_steps=5)) == 3
    for name, _ in list(remote_of(url).walk()):
        if name.endswith("safetensors"):
            (remote_of(url) / name).write_bytes(b"torn")
    shutil.rmtree(local)
    with pytest.raises(NoReadableSave, match="none of them can be read"):
        train(job_with(url, tmp_path), max_steps=5)


def test_a_bucket_out_of_reach_at_the_start_says_so(tmp_path: Path, s3: S3Server) -> None:
    with pytest.raises(NoReadableSave, match=r"s3://no-such-bucket/run: .*Create the bucket first"):
        train(job_with("s3://no-such-bucket/run", tmp_path), max_steps=1)


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match=r"belongs to user .*Saves\(local=...\)"):
        _ = BucketSaves(remote_of(fresh()), tmp_path).folder


def test_the_last_good_save_and_the_newest_stay(tmp_path: Path) -> None:
    url = fresh()
    saves = BucketSaves(remote_of(url), tmp_path)
    for step in (1, 2, 3, 4, 5):
        folder = _save_writer.write_save(saves.folder, step, {"step": step}, [torch.ones(2)], keep=9)
        saves.upload(folder, keep=1, clean_since={3: 2}.get(step))
    assert saves.good_save() == "step-000000000002"
    assert steps_in(url) == [2, 5]
    assert saves.upload(tmp_path / "step-000000000009", keep=1) is None, "it was removed here meanwhile"


@pytest.mark.parametrize("scheme", ["memory", "s3"])
def test_sharded_workers_need_no_disk_in_common(tmp_path: Path, scheme: str, request: pytest.FixtureRequest) -> None:
    url = fresh() if scheme == "memory" else f"s3://{request.getfixturevalue('bucket')}/run"

    def part(group: Any, max_steps: int, sharded: bool, copies: int | None) -> tuple[int, str]:
        saves = Saves(directory=url, local=tmp_path / str(group.rank), every=2, keep=2)
        run = RunOptions(progress=False, group=group, threads=1)
        job = sharded_training.make_job(sharded=sharded, copies=copies, saves=saves, run=run)
        told = sharded_training.train(job, max_steps=max_steps)
        job.saving.wait_idle()
        return len(told), job.digest()

    alone = sharded_training.make_job(sharded=False, run=QUIET)
    sharded_training.train(alone, max_steps=7)
    simulate(2).run(part, 4, True, 2)
    assert steps_in(url) == [2, 4]
    assert {name.rpartition("/")[2] for name, _ in remote_of(url).walk() if name.endswith(".json")} == {"state.json"}
    assert [steps for steps, _ in simulate(3).run(part, 6, True, 1)] == [2, 2, 2]
    (found,) = simulate(1).run(part, 7, False, None)
    assert found == (1, alone.digest())


def test_a_worker_killed_in_mid_upload_leaves_nothing_that_is_seen(
    tmp_path: Path, bucket: str, s3: S3Server, undisturbed: str
) -> None:
    url = f"s3://{bucket}/run"
    held = s3.strike("PUT", r"step-000000000004/tensors", kind="hold")
    command = [sys.executable, str(SCRIPT), url, str(tmp_path / "first"), "6"]
    worker = subprocess.Popen(command, env={**os.environ, **s3.environment}, stdout=subprocess.PIPE, text=True)
    try:
        assert held.struck.wait(200), "the upload of step 4 has begun"
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=60)
    held.release.set()
    assert steps_in(url) == [2] or checkpoint.inspect(url).step == 2
    assert "run/step-000000000004/state.json" not in s3.keys(bucket)
    resumed = job_with(url, tmp_path / "second")
    assert len(train(resumed, max_steps=7, wait_for_saves=True)) == 5, "from step 2 on"
    assert resumed.digest() == undisturbed
    assert steps_in(url) == [2, 4, 6]
