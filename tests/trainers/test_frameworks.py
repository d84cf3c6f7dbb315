"""What the adapters share: the check of another framework at import, and what a loader means for a job."""

from __future__ import annotations

import subprocess
import sys

import pytest
from killing import Shards
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from phalanx.data import ShardedDataset
from phalanx.integrations.accelerate import hide_ranks
from phalanx.integrations.frameworks import Framework, FrameworkError
from phalanx.integrations.step_loader import LoaderPlan, SharedBatches, StepLoader

pytestmark = pytest.mark.fast


def test_a_framework_is_refused_by_its_release_and_by_the_names_that_it_lacks():
    known = {"distribution": "torch", "extra": "x", "first": (2,), "before": (99,)}
    Framework(**known, names=("torch.nn:Linear.forward",)).check()
    with pytest.raises(FrameworkError, match=r"torch \S+ has no torch.nn:Linear.backward, torch.none:x, which Phalanx"):
        Framework(**known, names=("torch.nn:Linear.backward", "torch.none:x")).check()
    Framework(**known, names=("torch.nn:Linear.__init__=in_features",)).check()
    with pytest.raises(FrameworkError, match=r"has no torch.nn:Linear.__init__=breadth, torch.nn:Linear.none=weight,"):
        Framework(**known, names=("torch.nn:Linear.__init__=breadth", "torch.nn:Linear.none=weight")).check()
    with pytest.raises(FrameworkError, match=r"torch \S+ is installed; Phalanx knows torch>=98,<99: pip install"):
        Framework(**{**known, "first": (98,)}).check()
    with pytest.raises(FrameworkError, match=r"no-such-thing is not installed; .*phalanx-train\[x\]"):
        Framework(**{**known, "distribution": "no-such-thing"}).check()


def test_importing_phalanx_loads_no_framework():
    code = "import sys, phalanx, phalanx.elastic; print({'lightning', 'transformers', 'accelerate'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "set()"


def test_a_loader_becomes_slots():
    plan = LoaderPlan.of(DataLoader(range(100), batch_size=4, shuffle=True, drop_last=True))
    assert (plan.slot_batch_size, plan.data.shuffle, plan.data.tail) == (4, True, "drop")
    assert (plan.steps_per_epoch(8), plan.steps_per_epoch(6)) == (3, 4)
    numbers = iter(range(10))
    loader = StepLoader(plan, 8, lambda: next(numbers))
    assert (len(loader), next(iter(loader)), next(iter(loader))) == (3, 0, 1)
    sharded = ShardedDataset(Shards(lambda number: number, 4, 8))
    assert LoaderPlan.of(DataLoader(sharded, batch_size=4, shuffle=True)).data.shuffle == "shards"
    assert LoaderPlan.of(DataLoader(sharded, batch_size=4)).data.shuffle is False
    assert list(SharedBatches(shared := DataLoader(range(8), batch_size=2))) == [shared]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([1, 2], "is a list; expected one torch.utils.data.DataLoader"),
        (DataLoader(Stream()), "use phalanx.data.ShardedDataset"),
        (
            DataLoader(range(9), sampler=WeightedRandomSampler([1.0] * 9, 9)),
            "over a WeightedRandomSampler",
        ),
        (DataLoader(range(9), batch_sampler=[[1], [2]]), "has a list over"),
        (DataLoader(range(9), sampler=RandomSampler(range(9), num_samples=5)), "leaves some out"),
        (DataLoader(range(9), batch_size=None), "has a NoneType over"),
    ],
)
def test_a_loader_that_has_no_slots_is_refused(loader, message):
    with pytest.raises(ValueError, match=message):
        LoaderPlan.of(loader)


def test_ranks_are_hidden_only_where_workers_come_and_go():
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    kept = {**ranks, "PHALANX_ON_FAILURE": "restart"}
    hide_ranks(kept)
    assert kept == {**ranks, "PHALANX_ON_FAILURE": "restart"}
