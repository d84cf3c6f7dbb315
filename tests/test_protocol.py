"""What agents and workers write to the store: every record comes back as it was, or is refused as documented.

Also that there is one of each: no key has two names, every record has its version, and agents outlast their workers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx
from junk import changed, long, quick, raw, torn
from phalanx import protocol
from phalanx.elastic.membership._make_coordinator import make_coordinator
from phalanx.elastic.membership._store_coordinator import StoreCoordinator
from phalanx.launch import LaunchConfig
from phalanx.launch.agent._generation import Generation
from phalanx.launch.rendezvous import RendezvousParameters, get_rendezvous_handler
from phalanx.launch.workers._worker_environment import worker_environment
from phalanx.protocol import (
    Action,
    Broken,
    Closing,
    ClusterRecord,
    ContactLosses,
    EtcdOffer,
    EtcdRequest,
    Evaluation,
    FailureReport,
    Finish,
    LeaderRecord,
    LostContact,
    MemberNode,
    Members,
    NodeRecord,
    PageAddress,
    ProgressReport,
    Ready,
    RecordError,
    Recovery,
    Round,
    Setbacks,
    StacksRequest,
    StopRequest,
    StoreRecord,
    Streak,
    WorkPosition,
    parse_count,
    timeouts,
)

SOURCE = Path(phalanx.__file__).parent
NODE = NodeRecord(id="n", ticket=3, host="h", addr="a", port=1, local_size=2, worker_ids=("n.0", "n.1"))
RECORDS: list[StoreRecord] = [
    NODE,
    Members(3, (MemberNode.of(NODE),)),
    LeaderRecord("n", 3, 1, 4),
    Broken(reason="r", workers=("n.0",), at_once=True),
    Closing(reason="r", outcome="failed", time=3.0),
    Recovery(
        action=Action.HEAL,
        restarts=2,
        reason="r",
        streak=Streak(errors=1, step=4),
        replace=("n.1",),
        lost_contact=ContactLosses(count=1, step=4),
        failures=("12.5 n",),
        leave_out=("n",),
        limit="node",
    ),
    WorkPosition(step=812, slot=5, samples="3, 17"),
    FailureReport(local_rank=0, pid=7, exitcode=-9, rank=2, host="h", message="m", stderr_tail=("x",)),
    ProgressReport(step=3, count=2, waits=-1),
    LostContact(by="n.0", reason="r", of=("n.1",), late=True, peers=("n.0", "n.1"), step=4),
    Setbacks().plus(5, 3),
    StacksRequest(reason="r"),
    StopRequest(reason="r"),
    PageAddress(url="http://h:1/", host="h", is_local=False),
    Ready(step=3, evaluations=1, evaluating=True, peers=("a",)),
    Round(("a", "b")),
    Finish(generation=1, round=0, step=9, workers=("a",), hosts=("h",)),
    ClusterRecord(founder="n", began=3.5, members=("h:1", "i:1")),
    EtcdOffer(peer="http://h:2", client="http://h:1", leaves=True),
    EtcdRequest(member="9", cluster="n=http://h:2"),
    Evaluation({"loss": 0.5, "worst": float("inf")}),
]


@pytest.mark.fast
def test_every_record_is_tried_here() -> None:
    exported = (getattr(protocol, name) for name in protocol.__all__)
    kinds = {
        kind
        for kind in exported
        if isinstance(kind, type) and issubclass(kind, StoreRecord) and kind is not StoreRecord
    }
    assert kinds == {type(record) for record in RECORDS}


@pytest.mark.fast
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_come_back_as_they_were_and_have_a_version(record: StoreRecord) -> None:
    data = record.to_json()
    assert type(record).from_json(data) == record
    assert json.loads(data)["v"] == protocol.VERSION
    with pytest.raises(RecordError, match=f"{record.what} has an unknown version"):
        type(record).from_json(data.replace(b'"v":1', b'"v":2', 1))


def fuzz(given_settings):
    @pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
    @given_settings
    @given(st.data())
    def test(record: StoreRecord, data: st.DataObject) -> None:
        good = record.to_json()
        bad = data.draw(
            st.one_of(raw, torn(good), changed(json.loads(good)).map(lambda value: json.dumps(value).encode()))
        )
        try:
            found = type(record).from_json(bad)
        except RecordError:
            return
        found.to_json()
        assert isinstance(record, Evaluation) or isinstance(hash(found), int)

    return test


test_a_record_is_read_or_refused = pytest.mark.fast(fuzz(quick))
test_a_record_is_read_or_refused_many_times = pytest.mark.soak(fuzz(long))


@pytest.mark.fast
@quick
@given(st.one_of(raw, st.integers().map(lambda number: b"%d" % number)))
def test_a_count_is_a_number_or_refused(data: bytes) -> None:
    try:
        assert parse_count(data, "count") >= 0
    except RecordError:
        pass


@pytest.mark.fast
def test_a_node_that_claims_more_workers_than_machines_have_is_refused() -> None:
    """The names of its workers would be made up by every other node."""
    for record in (NODE, Members(3, (MemberNode.of(NODE),))):
        data = record.to_json().replace(b'"local_size":2', b'"local_size":1000000000')
        data = data.replace(b'"a",1,2', b'"a",1,1000000000')
        with pytest.raises(RecordError, match="a node of 1000000000 workers"):
            type(record).from_json(data)


@pytest.mark.fast
def test_keys_are_named_in_one_place_and_none_twice() -> None:
    found: dict[str, str] = {}
    for name in protocol.__all__:
        value = getattr(protocol, name)
        if name.endswith(("_key", "_prefix")):
            arguments = ["done" if one == "stage" else f"<{one}>" for one in value.__annotations__ if one != "return"]
            value = value(*arguments)
        elif not (isinstance(value, str) and re.fullmatch("[A-Z_]+", name)):
            continue
        assert value not in found, f"{name} and {found[value]} are the same key"
        found[value] = name
    keys = protocol.JobKeys()
    own = [
        keys.done,
        keys.committed,
        keys.leaving(1),
        keys.round(1, 2),
        keys.ready(1, "w"),
        keys.keeps(1, "w"),
    ]
    assert len({*found, *own}) == len(found) + len(own)
    written = re.compile(r"""["'](?:agents|asked|elastic|ended|etcd|gen|phalanx|progress|rdzv|regroups|watch|wish)/""")
    elsewhere = [
        str(path.relative_to(SOURCE))
        for package in ("launch", "elastic")
        for path in (SOURCE / package).rglob("*.py")
        if written.search(path.read_text())
    ]
    assert elsewhere == []


@pytest.mark.fast
def test_an_agent_outlasts_its_workers_whatever_the_user_gives() -> None:
    assert timeouts.regroup_timeout() == 600.0
    for join in (1.0, 90.0, timeouts.JOIN, 1e6):
        assert 0 < timeouts.regroup_timeout(join) < join
    assert timeouts.BREAK_AFTER > timeouts.TELL_AFTER + timeouts.CONTACT_INTERVAL + timeouts.CONTACT_SETTLE


@pytest.mark.parametrize(("conf", "expected"), [({}, 600.0), ({"join_timeout": 90}, 60.0)])
def test_one_flag_says_how_long_agents_and_their_workers_wait(
    tmp_path: Path, conf: dict[str, int], expected: float
) -> None:
    """From ``--rdzv-conf`` through the agent's handler and the worker's environment to the worker that waits."""
    handler = get_rendezvous_handler(RendezvousParameters("file", str(tmp_path), "j", 1, 1, **conf))
    try:
        info = handler.next_rendezvous()
        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, on_failure="heal")
        generation = Generation(config, info, handler, {})
        (assignment,) = generation.assignments()
        env = worker_environment(assignment, generation.job_facts(), config, {})
        coordinator = make_coordinator(None, env, comm_timeout=5.0)
        assert isinstance(coordinator, StoreCoordinator)
        assert coordinator.timeout == expected < handler.join_timeout == conf.get("join_timeout", timeouts.JOIN)
        coordinator.close()
    finally:
        handler.shutdown()
