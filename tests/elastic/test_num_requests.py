"""What a regroup asks of the store does not grow with the number of workers: counted, with workers in threads."""

from __future__ import annotations

import pytest
from benchmarks._scale_model import Costs, Simulated
from benchmarks._simulated_regroup import WAYS, Regroup, SimulatedJob

from phalanx.protocol import timeouts

pytestmark = [pytest.mark.fast, pytest.mark.timeout(300)]

# Requests of the worker that writes the round and is rank 0 of its group, and of each of the others, at most.
MOST = {"loss": (10, 5), "survivors": (3, 2), "newcomer": (13, 7)}


def regroup(way: str, num_workers: int, monkeypatch: pytest.MonkeyPatch) -> Regroup:
    # On a busy machine a second worker would think that the first does not get to it, rightly, and be counted.
    monkeypatch.setattr(timeouts, "CONVENE_AFTER", 1e9)
    return SimulatedJob(num_workers, patient=True).run(way)


@pytest.mark.parametrize("way", WAYS)
def test_requests_and_keys_of_a_worker_are_the_same_for_any_number_of_workers(way, monkeypatch):
    first_most, others_most = MOST[way]
    for num_workers in (5, 20):
        first, *others = regroup(way, num_workers, monkeypatch).requests
        assert first.total <= first_most, first.named
        for one in others:
            assert one.total <= others_most, one.named
            assert one.num_keys <= 2 * others_most, f"it asks for a key of each of the others: {one.named}"


def test_all_bytes_of_a_worker_are_lists_of_members_which_it_reads_a_few_times(monkeypatch):
    small, large = (regroup("loss", size, monkeypatch).requests for size in (5, 21))
    for rank in (0, 2):
        per_member = (large[rank].num_bytes - small[rank].num_bytes) / 16
        assert per_member < 1200, "a list of lists: what each worker writes would grow with the number of workers"
    assert large[2].num_bytes - small[2].num_bytes < 16 * 400


def test_the_model_makes_as_many_requests_for_any_number_of_workers_and_gives_the_same_time_twice():
    small, large, again = (Simulated(size, Costs()) for size in (64, 256, 256))
    seconds = [model.run() for model in (small, large, again)]
    assert seconds[1] == seconds[2] > seconds[0]
    assert large.num_requests / 256 < 1.3 * small.num_requests / 64
