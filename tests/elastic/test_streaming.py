"""Jobs over shards on disk: one digest, whatever happens to workers and loader processes."""

from __future__ import annotations

import functools
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import streaming_script
import torch
from cluster import Cluster
from scripted_world import Die, World
from torch import nn
from torch.nn import functional as F

from phalanx.comm import simulate
from phalanx.data import Concatenated, MixedOrder, ShardedDataset, ShardOrder
from phalanx.elastic import DataOptions, Job, RunOptions, Saves
from phalanx.elastic.audit import check_directory
from sharded_samples import Numbers, parquet_dataset, plain_pair, tar_dataset, write_parquets, write_tars

SIZES = [9, 0, 14, 6, 11, 3, 8, 12, 7, 10]
SCRIPT = Path(__file__).parent / "streaming_script.py"


def make_job(dataset, group=None, saves=None, num_workers=0, log_dir=None, **data) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
    return Job(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        dataset,
        num_slots=4,
        slot_batch_size=3,
        seed=2,
        data=DataOptions(**{"shuffle": "shards", "num_workers": num_workers, **data}),
        saves=saves,
        run=RunOptions(progress=False, group=group, verify=True, log_dir=log_dir),
    )


def train(job, **limits) -> str:
    for step in job.steps(**limits):
        job.saving.wait_idle()
        for micro in step:
            micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
        step.commit()
    job.close()
    return job.digest()


@pytest.fixture(scope="module", params=["tar", "parquet"])
def make_dataset(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], ShardedDataset]:
    """Makes the dataset anew, as every process does; tar and Parquet files of the same samples."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "tar":
        write_tars(folder, SIZES)
        return functools.partial(tar_dataset, folder)
    pytest.importorskip("pyarrow", reason="pip install -c constraints.txt 'phalanx-train[parquet]'")
    write_parquets(folder, SIZES, rows=5)
    return functools.partial(parquet_dataset, folder)


def test_one_digest_for_any_number_of_workers_loader_processes_and_resumes(make_dataset, tmp_path):
    digest = train(make_job(make_dataset(), log_dir=tmp_path / "logs"), epochs=2)
    assert check_directory(tmp_path / "logs").problems == []
    found = simulate(5).run(lambda group: train(make_job(make_dataset(), group), epochs=2))
    assert set(found) == {digest}, "more workers than slots"
    assert train(make_job(make_dataset(), num_workers=3), epochs=2) == digest, "loader processes"
    saves = Saves(directory=tmp_path / "saves", every=1)
    train(make_job(make_dataset(), saves=saves), max_steps=5)

    def resume(group):
        return train(make_job(make_dataset(), group, saves=saves), epochs=2)

    assert set(simulate(3).run(resume)) == {digest}, "resumed by more workers"


def test_a_kill_and_a_join_give_the_digest_of_an_undisturbed_run(make_dataset, tmp_path, monkeypatch):
    """Threads as workers: b dies in step 4, d joins at a boundary; as one worker alone."""

    def make_world(name):
        world = World(tmp_path / name, monkeypatch)
        world.make_dataset, world.data = wide(make_dataset), DataOptions(shuffle="shards")
        world.num_steps = 8
        return world

    alone = make_world("alone")
    alone.agree(0, "a")
    alone.start("a")
    digest = alone.join()["a"]
    assert isinstance(digest, str), digest
    world = make_world("storm")
    world.agree(0, "a", "b", "c")
    at_work = threading.Event()

    def watch(job, step):
        if step.number == 5:
            at_work.set()
            world.await_newcomer()

    def die(job, step):
        if step.number == 4:
            world.break_(0, "b")
            world.agree(1, "a", "d", "c")
            raise Die

    world.start("a", on_step=watch)
    world.start("b", on_step=die)
    world.start("c")
    assert at_work.wait(100)
    world.start("d", 1)
    results = world.join()
    assert isinstance(results.pop("b"), Die)
    assert results == dict.fromkeys("acd", digest)


def wide(make_dataset):
    """The dataset with the eight inputs that the model of ``World`` takes; no noise, since threads share generators."""

    def transform(sample):
        x, y = plain_pair(sample)
        return torch.cat([x, x]), y

    def make():
        dataset = make_dataset()
        dataset.transform = transform
        return dataset

    return make


def test_a_changed_shard_is_refused_by_name_when_a_job_resumes(tmp_path):
    write_tars(tmp_path, SIZES)
    saves = Saves(directory=tmp_path / "saves", every=1)
    train(make_job(tar_dataset(tmp_path), saves=saves), max_steps=2)
    write_tars(tmp_path / "other", [*SIZES[:2], 13])
    (tmp_path / "other" / "train-0002.tar").replace(tmp_path / "train-0002.tar")
    with pytest.raises(ValueError, match=r"of other shards: changed since then: train-0002\.tar"):
        train(make_job(tar_dataset(tmp_path), saves=saves), epochs=2)


def test_a_mix_of_shards_trains_alike_on_any_number_of_workers():
    def to_pair(number):
        return torch.full((4,), number / 50), torch.tensor(number % 3)

    def run(group):
        parts = [ShardedDataset(Numbers(sizes), to_pair) for sizes in ([7] * 9, [4] * 8)]
        order = MixedOrder([ShardOrder(part, window=2) for part in parts], [2, 1])
        job = make_job(Concatenated(parts), group, order=order, shuffle=True)
        digest = train(job, epochs=1)
        opened = sum(sum(part.source.opened.values()) for part in parts)
        return digest, opened

    ((digest, _),) = [run(None)]
    results = simulate(2).run(run)
    assert {found for found, _ in results} == {digest}
    assert all(opened <= 17 for _, opened in results), "about half of the shards each, not all of them"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder in which the names of loaders' sockets fit into the 108 bytes that the kernel has for them."""
    with tempfile.TemporaryDirectory(prefix="ph-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def test_real_processes_with_a_kill_and_a_join_keep_their_loaders_and_the_digest(tmp_path, short_path, monkeypatch):
    """Two loader processes each, a worker killed, two more brought in; loader processes of survivors live on."""
    write_tars(tmp_path / "data", [9, 14, 6, 11, 3, 8, 12, 7] * 4)
    monkeypatch.setenv("STREAM_DATA", str(tmp_path / "data"))
    num_steps = 30
    (tmp_path / "alone").mkdir()
    done = streaming_script.run(tmp_path / "alone", num_steps, pace=0.0, num_workers=0)
    cluster = Cluster(short_path / "storm", 2, num_steps, hold=8, script=SCRIPT, script_flag="--loaders=2")
    try:
        cluster.wait_step(8)
        cluster.wait_workers(2)
        first, second = cluster.newest_round()
        cluster.signal(second)
        cluster.wait_until(lambda: len(cluster.newest_round()) == 2 and second not in cluster.newest_round(), "healed")
        cluster.hold(16)
        cluster.wait_step(16)
        cluster.resize(3)
        cluster.wait_workers(3)
        cluster.release()
        cluster.finish()
        assert cluster.digests() == {done}
        loaders = (short_path / "storm" / f"loaders-{first}").read_text().split()
        assert len(loaders) == 2, "the survivor's loader processes were never replaced"
    finally:
        cluster.close()
