"""What workers that do not write keep of a checkpoint, until it is certain that the writer has written it."""

from __future__ import annotations

from types import SimpleNamespace

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from phalanx.lightning._checkpoint_files import CheckpointFiles

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore")]


class Worker:
    def __init__(self, tmp_path) -> None:
        self.callback = ModelCheckpoint(tmp_path, save_last="link")
        self.callback._fs = fsspec.filesystem("file")
        self.trainer = SimpleNamespace(
            checkpoint_callbacks=[self.callback], is_global_zero=True, strategy=SimpleNamespace(barrier=lambda: None)
        )
        self.files, self.written, self.removed = CheckpointFiles(), {}, []
        self.files.answer_for(self.trainer)

    def save(self, path, checkpoint, *, is_writer=False):
        self.files.note_save(path, checkpoint, lambda one: self.written.update({path: one}), is_writer=is_writer)

    def remove(self, path):
        self.files.note_removal(path, lambda: self.removed.append(path), is_writer=False)


def test_a_successor_writes_what_was_due_as_it_was_then(tmp_path) -> None:
    worker, weights = Worker(tmp_path), torch.ones(3)
    worker.save("a", {"w": weights, "step": 5})
    worker.remove("old")
    worker.save("gone", {})
    worker.remove("gone")
    weights.add_(1)  # as averages that take the place of the weights at the end
    worker.files.settle(worker.trainer)
    assert (worker.written, worker.removed) == ({}, []), "the writer lives"
    worker.files.inherit()
    worker.files.settle(worker.trainer)
    assert worker.written["a"]["w"].tolist() == [1, 1, 1]
    assert worker.removed == ["old", "gone"]
    assert set(worker.written) == {"a"}
    worker.files.settle(worker.trainer)
    assert worker.removed == ["old", "gone"], "once"


def test_after_a_commit_nothing_is_due(tmp_path) -> None:
    worker = Worker(tmp_path)
    worker.save("a", {"step": 5})
    worker.files.forget()
    worker.files.inherit()
    worker.files.settle(worker.trainer)
    assert worker.written == {}
    worker.save("b", {"step": 6}, is_writer=True)
    assert worker.written == {"b": {"step": 6}}


def test_a_link_to_the_last_one_is_made_again(tmp_path) -> None:
    worker = Worker(tmp_path)
    worker.callback._last_checkpoint_saved, worker.callback.last_model_path = str(tmp_path / "a"), str(tmp_path / "l")
    worker.files.inherit()
    worker.files.settle(worker.trainer)
    assert str((tmp_path / "l").readlink()) == "a"


def test_whether_a_file_is_there_is_what_the_job_did_to_it_or_what_was_found_first(tmp_path) -> None:
    worker, (found, absent) = Worker(tmp_path), (str(tmp_path / name) for name in "fa")
    (tmp_path / "f").touch()
    assert worker.callback.file_exists(found, worker.trainer)
    assert not worker.callback.file_exists(absent, worker.trainer)
    (tmp_path / "f").unlink()
    (tmp_path / "a").touch()  # the writer is ahead
    assert worker.callback.file_exists(found, worker.trainer)
    assert not worker.callback.file_exists(absent, worker.trainer)
    worker.save(absent, {})
    worker.remove(found)
    worker.callback._defer_save_until_validation = True
    newcomer = Worker(tmp_path)
    newcomer.files.take(worker.files.state_of(worker.trainer), newcomer.trainer)
    for each in (worker, newcomer):
        assert each.callback.file_exists(absent, each.trainer)
        assert not each.callback.file_exists(found, each.trainer)
        assert each.callback._defer_save_until_validation
