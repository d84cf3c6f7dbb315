"""Those who live on one host go on before the agents know: in a model of all interleavings, and with real kills."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import NUM_STEPS, Cluster
from survivor_model import explore

from phalanx import protocol
from phalanx.comm.stores import MemoryStore, job_store
from phalanx.elastic.membership._coordinator import RegroupTimeout
from phalanx.elastic.membership._rounds import Membership
from phalanx.elastic.membership._store_coordinator import StoreCoordinator
from phalanx.elastic.membership._store_monitor import Signals, StoreMonitor
from phalanx.protocol import JobKeys, timeouts

pytestmark = pytest.mark.timeout(400)

HOLD = 40


@pytest.mark.fast
@pytest.mark.parametrize(("workers", "num_deaths"), [("ab", 1), ("abc", 2), ("abcd", 1)])
def test_whoever_dies_when_the_living_come_to_one_group(workers, num_deaths):
    assert explore(tuple(workers), num_deaths) > 10


@pytest.mark.soak
def test_whichever_two_of_four_die_when_the_living_come_to_one_group():
    assert explore(tuple("abcd"), 2) > 1000


@pytest.mark.fast
@pytest.mark.parametrize(
    ("flaw", "what"),
    [
        ("waits for those who left", "come to nothing"),
        ("suspects the living", "leaves out one that lives"),
        ("forgets whom it knew", "leaves out one that lives"),
    ],
)
def test_the_model_notices(flaw, what):
    with pytest.raises(AssertionError, match=what):
        explore(tuple("abc"), 1, frozenset({flaw}))


@pytest.mark.soak
@pytest.mark.parametrize("flaw", ["stays when left", "goes on in silence"])
def test_the_model_of_four_notices(flaw):
    with pytest.raises(AssertionError, match="come to nothing"):
        explore(tuple("abcd"), 2, frozenset({flaw}))


@pytest.mark.fast
def test_who_was_left_in_a_group_by_one_that_went_on_gives_it_up_after_a_while(monkeypatch):
    store, keys, signals = MemoryStore(), JobKeys(), Signals()
    monitor = StoreMonitor(store, keys, Membership(1, 0, ("c", "d"), 1, None), "d", signals)
    store.set(protocol.broken_key(1), protocol.Broken(reason="b died", workers=("b",)).to_json())
    monkeypatch.setattr(timeouts, "UNFINISHED_STEP", -1.0)
    assert (monitor._look(), signals.wish) == (False, True)  # nobody of this round is gone
    store.set(keys.ready(2, "d"), protocol.Ready(step=1).to_json())  # its own says nothing
    assert not monitor._look()
    store.set(keys.ready(2, "c"), protocol.Ready(step=1).to_json())
    monkeypatch.setattr(timeouts, "UNFINISHED_STEP", 60.0)
    assert not monitor._look()  # c may have crossed a boundary, and d is about to
    monkeypatch.setattr(timeouts, "UNFINISHED_STEP", -1.0)
    assert monitor._look()
    assert "b died" in str(signals.broken)


@pytest.mark.fast
def test_who_finds_a_generation_over_says_that_it_went_on():
    root = MemoryStore()
    store, keys = job_store(root.clone(), "j"), JobKeys()
    store.set(protocol.broken_key(1), protocol.Broken(reason="b died", workers=("b",)).to_json())
    coordinator = StoreCoordinator(root, "j", "c", 0, timeout=0.2, comm_timeout=5.0)
    with pytest.raises(RegroupTimeout, match="generation 2"):
        coordinator.rejoin(1, protocol.Ready(step=7, peers=("c", "d")))
    assert store.get(keys.ready(1, "c")) is not None


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path / "job", 3, NUM_STEPS, hold=HOLD)
    yield cluster
    cluster.close()


def zygote_of(agent: int) -> int:
    """The process that forks an agent's workers, and tells it of their ends."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return next(int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "phalanx-zygote\n")


def test_survivors_go_on_before_anybody_has_told_the_agents(cluster, undisturbed):
    cluster.wait_step(5)
    first, second, third = cluster.pids()
    zygote = zygote_of(cluster.process.pid)
    os.kill(zygote, signal.SIGSTOP)
    try:
        cluster.signal(second)
        cluster.wait_until(lambda: cluster.newest_round() == [first, third], "a round of the survivors")
        cluster.wait_step(cluster.step() + 5)
        (survived,) = [e for e in cluster.events("regrouped") if e["left"] and e["worker"] == first]
        assert (survived["generation"], survived["round"], survived["left"]) == (0, 1, [second])
    finally:
        os.kill(zygote, signal.SIGCONT)
    cluster.wait_until(lambda: len(set(cluster.newest_round()) - {first, third}) == 1, "the replacement's place")
    newest = max(cluster.events("regrouped"), key=lambda e: (e["generation"], e["round"]))
    assert newest["generation"] == 1, "they followed the agents at a step boundary"
    cluster.release()
    verdict = cluster.finish()
    assert verdict.num_steps == NUM_STEPS
    assert cluster.digests() == {undisturbed}
    made = [int((cluster.directory / f"made-{worker}").read_text()) for worker in (first, third)]
    assert max(made) <= 2, "room for gradients was made anew for a step that was lost"
