"""The copies that a save writes lie in the memory of the save before, and never in memory that somebody still reads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.elastic import Saves
from phalanx.elastic.checkpoint._save_memory import Staging
from phalanx.elastic.checkpoint._saving import Saving
from phalanx.events._writer import EventLog

pytestmark = pytest.mark.fast

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
SHAPES = st.lists(st.integers(0, 5), max_size=3)


def place_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@given(kinds=st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6), seed=st.integers(0, 99))
def test_copies_are_what_was_there_in_order(kinds, seed):
    torch.manual_seed(seed)
    tensors = [torch.randint(0, 2, shape).to(dtype) for dtype, shape in kinds]
    tensors += [torch.rand(3, 4).t(), torch.empty(2, device="meta"), torch.rand(3, requires_grad=True)]
    copies = Staging().copy(tensors)
    assert [(c.dtype, c.shape, c.device.type) for c in copies] == [(t.dtype, t.shape, t.device.type) for t in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        if not tensor.is_meta:
            assert torch.equal(copy, tensor)
            assert copy.is_contiguous()
            assert not copy.requires_grad
            assert not copy.numel() or copy.data_ptr() != tensor.data_ptr()


def test_memory_is_used_again_when_nobody_has_a_tensor_of_it():
    staging, state = Staging(), [torch.rand(1000), torch.rand(10)]
    copies = staging.copy(state)
    place, last = place_of(copies[0]), copies.pop()
    del copies  # but the last one is read still
    other = staging.copy(state)
    assert place_of(other[0]) != place
    assert torch.equal(last, state[1])
    del other, last
    assert place_of(staging.copy(state)[0]) == place, "the one that came back last"


def test_memory_of_another_size_is_not_kept_for_ever():
    staging = Staging()
    large = staging.copy([torch.rand(10_000)])
    place = place_of(large[0])
    del large
    assert place_of(staging.copy([torch.rand(9_000)])[0]) == place
    staging.copy([torch.rand(10)])
    assert staging._kept is not None
    assert staging._kept.nbytes < 1000


def test_a_save_that_is_being_written_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A second save comes while the first is at the disk; both are what they were when they were submitted."""
    from phalanx.elastic.checkpoint import _save_writer

    begun, may_go_on = threading.Event(), threading.Event()
    written: list[float] = []
    write_save = _save_writer.write_save

    def slowly(directory, step, tree, tensors, **options):
        begun.set()
        assert may_go_on.wait(60)
        written.append(float(tensors[0].sum()))
        return write_save(directory, step, tree, tensors, **options)

    monkeypatch.setattr(_save_writer, "write_save", slowly)
    saving = Saving(Saves(directory=tmp_path, keep=5), EventLog(None))
    weight = torch.zeros(1000)
    for step in (1, 2):
        weight += 1
        saving.submit(step, {"weight": weight})
        assert begun.wait(60)
    may_go_on.set()
    saving.wait_idle()
    weight += 1
    saving.submit(3, {"weight": weight})
    saving.wait_idle()
    assert written == [1000.0, 2000.0, 3000.0]
    assert torch.equal(saving.load_good(2)["weight"], torch.full((1000,), 2.0))


def test_a_save_that_is_written_gives_its_memory_to_the_next_one(tmp_path: Path):
    """The thread that wrote it keeps nothing of it while it waits: the next save would need as much again."""
    saving = Saving(Saves(directory=tmp_path), EventLog(None))
    places = []
    for step in (1, 2, 3):
        saving.submit(step, {"weight": torch.rand(1000)})
        saving.wait_idle()
        assert saving._staging._kept is not None, "it came back"
        places.append(saving._staging._kept.ctypes.data)
    assert len(set(places)) == 1


def test_a_save_that_the_disk_took_at_last_gives_its_memory_back(tmp_path: Path):
    (tmp_path / "saves").touch()  # a file where the directory should be
    saving = Saving(Saves(directory=tmp_path / "saves"), EventLog(None))
    saving.submit(1, {"weight": torch.rand(1000)})
    with pytest.raises(OSError):
        saving.wait_idle()
    (tmp_path / "saves").unlink()
    saving.wait_idle()
    assert saving._staging._kept is not None
