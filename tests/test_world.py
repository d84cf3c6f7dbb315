"""The environment contract: what a worker learns from its variables."""

from __future__ import annotations

import pytest

from phalanx.protocol import Broken, Member, MemberNode, Members, RecordError
from phalanx.world import World

pytestmark = pytest.mark.fast


def test_reads_what_a_launcher_sets() -> None:
    env = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "job7",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "PHALANX_GENERATION": "2",
    }
    world = World.from_env(env)
    assert world == World(
        rank=5,
        size=8,
        local_rank=1,
        local_size=4,
        node_rank=1,
        num_nodes=2,
        job="job7",
        generation=2,
        restart_count=3,
    )
    assert not world.is_first


def test_a_process_started_by_hand_is_alone() -> None:
    assert World.from_env({}) == World()
    assert World().is_first


def test_wrong_values_are_named() -> None:
    with pytest.raises(ValueError, match="RANK='two'; expected an integer"):
        World.from_env({"RANK": "two"})
    with pytest.raises(ValueError, match=r"rank 4 is outside \[0, 4\)"):
        World(rank=4, size=4)
    with pytest.raises(ValueError, match="world size is 0"):
        World(size=0)


def test_records_survive_the_trip_through_the_store() -> None:
    node = MemberNode("n0", 1, "node0", "127.0.0.1", 9, 1, worker_ids=("n0/3",))
    members = Members(2, (node,))
    assert Members.from_json(members.to_json()) == members
    assert members.workers == (Member("n0/3", rank=0, node_rank=0, local_rank=0, local_size=1, host="node0"),)
    broken = Broken(reason="died", workers=("n0/3",))
    assert Broken.from_json(broken.to_json()) == broken


@pytest.mark.parametrize("data", [b"", b"[]", b"\x80\x04", b'{"v":99,"reason":"x","workers":[]}'])
def test_foreign_records_are_refused(data: bytes) -> None:
    with pytest.raises(RecordError, match="broken record"):
        Broken.from_json(data)
