"""One failure, one proposal: the agent of the dead worker decides once, and the others follow what stands."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from phalanx.comm.stores._sealed import SealedStore
from phalanx.launch import LaunchConfig, elastic_launch
from phalanx.launch.agent._generation import Generation
from phalanx.launch.rendezvous import RendezvousParameters, get_rendezvous_handler
from phalanx.protocol import Action, Recovery, recovery_key

DIES_ONCE = """
test "$TORCHELASTIC_RESTART_COUNT" = 0 || exit 0
test "$RANK" = 1 && kill -9 $$
exec sleep 100
"""
KILLED = Recovery(action=Action.RESTART, restarts=1, reason="rank 1 was killed")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a recovery was proposed, and each key of one written."""
    found: Counter[str] = Counter()
    propose, swap, put = Generation.propose, SealedStore.compare_and_set, SealedStore.set
    keys = {recovery_key(number) for number in range(9)}

    def proposed(self: Generation, recovery: Recovery) -> Recovery:
        found["proposed"] += 1
        return propose(self, recovery)

    def swapped(self: SealedStore, key: str, *values: bytes | None) -> bool:
        found[key] += key in keys
        return swap(self, key, *values)

    def written(self: SealedStore, key: str, *values: bytes, **more: object) -> None:
        found[key] += key in keys
        put(self, key, *values, **more)

    monkeypatch.setattr(Generation, "propose", proposed)
    monkeypatch.setattr(SealedStore, "compare_and_set", swapped)
    monkeypatch.setattr(SealedStore, "set", written)
    return found


def test_for_one_killed_worker_one_recovery_is_proposed_and_written(counted: Counter[str], tmp_path: Path) -> None:
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, start_method="exec", rdzv_backend="file",
        rdzv_endpoint=str(tmp_path), run_id="j",
    )  # fmt: skip
    elastic_launch(config, "sh")("-c", DIES_ONCE)
    assert +counted == {"proposed": 1, recovery_key(0): 1}


def test_who_hears_that_a_generation_is_over_follows_what_stands(counted: Counter[str], tmp_path: Path) -> None:
    handler = get_rendezvous_handler(RendezvousParameters("file", str(tmp_path), "j", 1, 1))
    try:
        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)
        info = handler.next_rendezvous()
        first, other = (Generation(config, info, handler, {}) for _ in range(2))
        assert first.propose(KILLED) == KILLED
        assert other.agreed(lambda: pytest.fail("a second proposal")) == KILLED
        assert +counted == {"proposed": 1, recovery_key(0): 1}
    finally:
        handler.shutdown()


def test_where_nothing_stands_who_hears_it_proposes(counted: Counter[str], tmp_path: Path) -> None:
    """A worker, or an agent that was lost in between, has only said that the generation is over."""
    handler = get_rendezvous_handler(RendezvousParameters("file", str(tmp_path), "j", 1, 1))
    try:
        generation = Generation(LaunchConfig(1, 1, 1), handler.next_rendezvous(), handler, {})
        assert generation.agreed(lambda: KILLED) == KILLED
        assert counted["proposed"] == 1
    finally:
        handler.shutdown()
