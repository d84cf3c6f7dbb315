"""Saves of a tensor parallel job: the model's own tensors, read at any number of workers, of any degree and of none."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from elastic_training import Count
from safetensors import safe_open
from sharded_training import sha
from tensor_training import make_job, train
from torch.nn import functional as F

from phalanx.comm import simulate
from phalanx.elastic import Guard, Outcome, RunOptions, Saves, job_mesh
from phalanx.elastic.checkpoint._saves import SaveError, check_save
from phalanx.elastic.checkpoint._tensor_files import Chunk, FileRecord, StoredRange, check_tiles

pytestmark = pytest.mark.timeout(600)


def run(group: Any, degree: int, copies: Any, directory: Any, max_steps: int) -> tuple[list[Any], str, str]:
    """Train with a save at step 3, with whole replicas if the degree is 0; the steps, the weights, the digest."""
    saves = None if directory is None else Saves(directory=directory, every=3)
    mesh, extra = (job_mesh(tp=degree), {"copies": copies}) if degree else (None, {})
    options = RunOptions(progress=False, group=group, threads=1)
    count = Count()
    count.count = 0 if directory is not None and list(directory.iterdir()) else 7  # who resumes has to be told
    job = make_job(mesh, saves=saves, run=options, state={"count": count}, **extra)
    told = train(job, max_steps=max_steps)
    job.saving.wait_idle()
    return told, sha(job.full_state_dict()), job.digest()


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[Any], str, str]:
    return simulate(2).run(run, 2, 1, None, 6)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("saves")
    simulate(4).run(run, 2, 2, directory, 3)
    return directory


@pytest.mark.parametrize(("size", "copies"), [(2, 1), (5, 2)])
def test_another_number_of_workers_goes_on_with_the_same_bits(undisturbed, saved, tmp_path, size, copies):
    shutil.copytree(saved, tmp_path / "saves")
    for told, weights, digest in simulate(size).run(run, 2, copies, tmp_path / "saves", 6):
        assert [number for number, *_ in told] == [3, 4, 5]
        assert told == undisturbed[0][3:]
        assert (weights, digest) == undisturbed[1:]


def test_a_save_has_the_models_tensors_and_parts_that_other_tools_can_join(saved):
    folder = next(saved.glob("step-*003"))
    manifest = check_save(folder, b"")
    keys = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            keys += opened.keys()
    assert "2.bias" in keys, "what is not cut is written once, by the first lane"
    assert any(key.startswith("0.down.weight[dim 1, part 1 of 2]") for key in keys)
    assert not any(key.startswith("0.up.weight[dim") for key in keys), "ranges of the tensor itself"
    with manifest.open() as files:
        up, down = files.read("0.up.weight"), files.read("0.down.weight")
        assert (up.shape, down.shape) == ((48, 8), (8, 48))
        for part in range(2):
            chunk = Chunk(1, part, 2)
            assert torch.equal(files.read_part("0.down.weight", chunk, 5, 77), chunk.of(down).reshape(-1)[5:77])
        assert torch.equal(files.read("0.down.weight", 50, 60), down.view(-1)[50:60])
        third = Chunk(1, 2, 3)
        assert torch.equal(files.read_part("0.down.weight", third, 0, 128), third.of(down).reshape(-1))


def other_degree(saved, tmp_path, size, degree):
    """Go on from the save of two lanes; what the first step of it says."""
    copy = shutil.copytree(saved, tmp_path / f"saves{size}-{degree}")
    found = [told[0] for told, _, _ in simulate(size).run(run, degree, 1, copy, 4)]
    assert len(set(found)) == 1
    return found[0]


def test_jobs_of_another_degree_and_of_none_go_on_from_it(undisturbed, saved, tmp_path):
    for size, degree in ((1, 0), (3, 3)):
        number, *values = other_degree(saved, tmp_path, size, degree)
        assert number == 3
        assert values == pytest.approx(undisturbed[0][3][1:], rel=1e-5)


def test_lanes_go_on_from_the_save_of_whole_replicas(undisturbed, tmp_path):
    simulate(2).run(run, 0, "all", tmp_path, 3)
    (told, *_), *_ = simulate(2).run(run, 2, 1, tmp_path, 4)
    assert told[0][0] == 3
    assert told[0][1:] == pytest.approx(undisturbed[0][3][1:], rel=1e-5)


def spiking(group: Any, degree: int, directory: Any) -> tuple[list[Any], list[Any], Any, str, str]:
    """Train with a loss that explodes at step 18; outcomes, steps, the guard's record, weights and digest."""
    mesh, extra = (job_mesh(tp=degree), {"copies": 2}) if degree else (None, {})
    job = make_job(
        mesh,
        saves=Saves(directory=directory, every=5, keep=2),
        run=RunOptions(progress=False, group=group, verify=True, threads=1),
        guard=Guard(spike=50.0, on_spike="rollback"),
        **extra,
    )
    outcomes, told = [], []
    for step in job.steps(max_steps=21):
        for micro in step:
            loss = F.cross_entropy(job.model(micro.inputs), micro.targets)
            micro.backward(loss * 1e4 if step.number == 18 else loss)
        outcomes.append(step.commit(max_grad_norm=0.5))
        if step.number > 18:
            told += [step.loss, step.grad_norm]
        job.saving.wait_idle()
    return outcomes, told, job.guarding.record, sha(job.full_state_dict()), job.digest()


def test_the_guards_rollback_takes_all_lanes_back_to_the_last_good_save(tmp_path):
    plain = spiking(None, 0, tmp_path / "plain")
    found = simulate(2).run(spiking, 2, tmp_path / "two") + simulate(5).run(spiking, 2, tmp_path / "five")
    for one in found:
        assert one == found[0]
    assert found[0][0] == plain[0]
    assert found[0][0][18] is Outcome.SKIPPED
    assert found[0][2].rollbacks == 1
    assert found[0][1] == pytest.approx(plain[1], rel=1e-4), "they go on from the same step's weights"


def part(index: int, begin: int, end: int, *, count: int = 2) -> StoredRange:
    return StoredRange("w", torch.float32, (2, 4), begin, end, chunk=Chunk(1, index, count))


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([part(0, 0, 4), part(1, 0, 3)], "elements 3 to 4 of part 1 of 2 of w are in no file"),
        ([part(0, 0, 4)], "elements 0 to 4 of part 1 of 2 of w are in no file"),
        ([part(0, 0, 4), part(0, 2, 4), part(1, 0, 4)], "elements 2 to 4 of part 0 of 2 of w are there twice or never"),
        ([part(0, 0, 4), part(1, 0, 2, count=4)], "files disagree about w"),
        ([part(0, 0, 4), StoredRange("w", torch.float32, (2, 4), 4, 8)], "files disagree about w"),
        ([part(0, 0, 4), part(1, 0, 2), part(1, 2, 4)], ""),
    ],
)
def test_parts_that_are_no_tensor_together_are_told(ranges, message):
    records = [FileRecord("tensors.safetensors", "", tuple(ranges))]
    assert check_tiles(records, ["w"]).startswith(message)
    again = [FileRecord.from_json(json.loads(json.dumps(record.to_json())), "a file") for record in records]
    assert again == records


@pytest.mark.parametrize("values", [[2, 0, 2], [1, 2, 2], [1, 0, 3], [1, 0, 0], [1, 0]])
def test_parts_that_cannot_be_are_refused(values):
    body = {"file": "a.safetensors", "checksum": "", "ranges": [["w", "float32", [2, 4], 0, 4, *values]]}
    with pytest.raises(SaveError):
        FileRecord.from_json(body, "a manifest", SaveError)
