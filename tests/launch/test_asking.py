"""What a job can be asked for through its store, and what a machine is busy with."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.comm.stores import MemoryStore
from phalanx.launch.recovery._agent_channel import AgentChannel
from phalanx.launch.recovery._asking import Asking
from phalanx.launch.system._node_load import LoadMeter
from phalanx.protocol import SAVE_ASKED, NodeRecord, node_key

pytestmark = pytest.mark.fast


def store_of(*hosts: str) -> MemoryStore:
    store = MemoryStore()
    for ticket, host in enumerate(hosts):
        record = NodeRecord(id=f"{host}_1", ticket=ticket, host=host, addr=host, port=1, local_size=2)
        store.set(node_key(record.id), record.to_json())
    return store


def test_agents_read_what_was_asked_for() -> None:
    store = store_of("b", "a", "ab")
    asking, channel = Asking(store), AgentChannel(store)
    assert [node.host for node in asking.nodes()] == ["b", "a", "ab"], "in the order in which they came"
    assert asking.scale(3) == ["a_1", "ab_1", "b_1"]
    assert channel.read_requests(0, "b_1")[0] == 3
    assert asking.scale(5, "b") == ["b_1"]
    assert asking.drain("ab") == "ab_1"
    assert [channel.read_requests(0, node)[0] for node in ("a_1", "ab_1", "b_1")] == [3, 0, 5]
    assert channel.read_requests(0, "a_1")[3] == ""
    asking.stop("enough")
    assert channel.read_requests(0, "a_1")[3] == "enough"
    assert [asking.save(), asking.save()] == [1, 2]
    store.set(SAVE_ASKED, b"a stranger's")
    assert asking.save() == 1


def test_what_cannot_be_asked_for_is_said() -> None:
    asking = Asking(store_of("a1", "a2"))
    with pytest.raises(ValueError, match="2 nodes of the job matches 'a'; expected the beginning of one of a1_1, a2_1"):
        asking.drain("a")
    for nobody in ("x", ""):
        with pytest.raises(ValueError, match=f"no node of the job matches {nobody!r}"):
            asking.drain(nobody)
    with pytest.raises(ValueError, match="node a1_1 is the only one; phalanx stop ends the job"):
        Asking(store_of("a1")).drain("a1")
    with pytest.raises(ValueError, match="0 workers for each node; expected at least 1"):
        asking.scale(0)
    with pytest.raises(ValueError, match="no node of the job matches 'x'"):
        asking.scale(2, "x")
    with pytest.raises(ValueError, match="the job has no node"):
        Asking(MemoryStore()).scale(2)


def test_the_load_of_a_machine(tmp_path: Path) -> None:
    def write(busy: int, idle: int, received: int) -> None:
        (tmp_path / "net").mkdir(exist_ok=True)
        (tmp_path / "stat").write_text(f"cpu {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1\n")
        (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n")
        rows = f"  lo: 999 0 0 0 0 0 0 0 999 0\neth0: {received} 0 0 0 0 0 0 0 {2 * received} 0\n"
        (tmp_path / "net" / "dev").write_text("Inter\n face\n" + rows)

    write(100, 100, 0)
    meter = LoadMeter(tmp_path)
    write(130, 110, 1000)
    load = meter.read()
    assert load.cpu == 0.75
    assert (load.memory_total, load.memory_used) == (1000 * 1024, 600 * 1024)
    assert load.received > 0
    assert load.sent == pytest.approx(2 * load.received)
    assert LoadMeter(tmp_path / "nowhere").read().cpu == 0.0
