"""Records, messages and files that others have written: read whole, or refused with the error that is documented."""

from __future__ import annotations

import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from junk import changed, junk, long, quick, raw, torn
from phalanx.comm.stores import MemoryStore
from phalanx.comm.stores._signing import Signer
from phalanx.launch import events
from phalanx.launch.failures._process_failure import ChildFailedError, ProcessFailure
from phalanx.launch.recovery._agent_channel import (
    AgentChannel,
    parse_failure,
    parse_recovery,
    parse_stacks_request,
    parse_wish,
)
from phalanx.launch.recovery._streak import Streak
from phalanx.launch.rendezvous._records import (
    Closing,
    GenerationRecord,
    LeaderRecord,
    NodeRecord,
    Seat,
    load_count,
)
from phalanx.launch.workers._messages import MessageError, parse_message, receive_message, send_message
from phalanx.protocol import Broken, LostContact, Member, Members, RecordError, Setbacks

NODE = NodeRecord(id="n", ticket=3, host="h", addr="a", port=1, local_size=2, worker_ids=("n.0", "n.1"))
MEMBER = Member(id="n.0", rank=0, node_rank=0, local_rank=0, local_size=1, host="h")
FAILURE = ProcessFailure(
    local_rank=0, pid=7, exitcode=-9, rank=2, message="m", timestamp=5.0, stderr_tail=("x",)
)
VERDICT = json.dumps(
    {"v": 1, "action": "heal", "restarts": 2, "reason": "r", "starts_anew": False, "ports_taken": 0,
     "replace": ["n.1"], "lost_contact": {"count": 1, "step": 4},
     "streak": Streak().to_record()}
).encode()  # fmt: skip
RECORDS = {
    "members": (
        Members.from_json,
        Members(generation=1, workers=(MEMBER,), num_nodes=1, master_addr="a", master_port=1).to_json(),
    ),
    "lost contact": (
        LostContact.from_json,
        LostContact(by="n.0", reason="r", of=("n.1",), peers=("n.0", "n.1"), step=4).to_json(),
    ),
    "broken": (Broken.from_json, Broken(reason="r", workers=("n.0",)).to_json()),
    "node": (NodeRecord.from_json, NODE.to_json()),
    "generation": (GenerationRecord.from_json, GenerationRecord(3, (Seat.of(NODE),)).to_json()),
    "leader": (LeaderRecord.from_json, LeaderRecord("n", 3, 1, 4).to_json()),
    "recovery": (parse_recovery, VERDICT),
    "failure": (parse_failure, json.dumps({"v": 1, **FAILURE.to_record()}).encode()),
    "stacks": (parse_stacks_request, b'{"v":1,"reason":"r"}'),
    "setbacks": (Setbacks.from_json, Setbacks().plus(5, 3).to_json()),
    "closing": (Closing.from_json, Closing(reason="r", outcome="failed", time=3.0).to_json()),
    "waiting": (lambda data: load_count(data, "count"), b"7"),
}


def fuzz(given_settings):
    @pytest.mark.parametrize("name", RECORDS)
    @given_settings
    @given(st.data())
    def test(name, data) -> None:
        parse, good = RECORDS[name]
        parse(good)
        bad = data.draw(
            st.one_of(
                raw, torn(good), changed(json.loads(good)).map(lambda value: json.dumps(value).encode())
            )
        )
        try:
            hash(parse(bad)) if name != "failure" else parse(bad)
        except RecordError:
            pass

    return test


test_a_record_is_read_or_refused = pytest.mark.fast(fuzz(quick))
test_a_record_is_read_or_refused_many_times = pytest.mark.soak(fuzz(long))


@pytest.mark.fast
def test_records_come_back_as_they_were() -> None:
    assert NodeRecord.from_json(NODE.to_json()) == NODE
    generation = GenerationRecord(3, (Seat.of(NODE),))
    assert GenerationRecord.from_json(generation.to_json()) == generation
    found = parse_failure(json.dumps({"v": 1, **FAILURE.to_record()}).encode())
    assert (found.rank, found.exitcode, found.stderr_tail) == (2, -9, ("x",))


@pytest.mark.fast
def test_a_node_that_claims_more_workers_than_machines_have_is_refused() -> None:
    """The names of its workers would be made up by every other node."""
    with pytest.raises(RecordError, match="a node of 1000000000 workers"):
        NodeRecord.from_json(NODE.to_json().replace(b'"local_size":2', b'"local_size":1000000000'))


@pytest.mark.fast
@quick
@given(raw)
def test_wishes_are_numbers_or_nothing(data) -> None:
    assert parse_wish(data) is None or parse_wish(data) >= 1


@pytest.mark.fast
def test_one_unreadable_failure_does_not_hide_the_others() -> None:
    channel = AgentChannel(MemoryStore())
    channel._store.set("agents/failures/0/stranger", b"\xff")
    channel.report(FAILURE)
    assert list(channel.failures(0)) == [2]


@pytest.mark.fast
@quick
@given(st.one_of(raw, torn(Signer("j", b"s").seal("k", b"{}")), torn(Signer("j").seal("k", b"{}"))))
def test_envelopes_are_opened_or_refused(data) -> None:
    for secret in (b"s", None):
        try:
            Signer("j", secret).open("k", data)
        except RecordError:
            pass


EVENT = events.to_json(events.WorkerExited(job="j", worker_id="w", rank=0, local_rank=0, pid=1, exit_code=-9))
FREE = events.to_json(events.Event(name="n", metadata={"a": 1}))


def fuzz_events(given_settings):
    @given_settings
    @given(
        st.one_of(
            changed(json.loads(EVENT)).map(json.dumps), changed(json.loads(FREE)).map(json.dumps),
            raw.map(lambda data: data.decode(errors="replace")),
            torn(EVENT.encode()).map(lambda data: data.decode(errors="replace")),
        )
    )  # fmt: skip
    def test(line) -> None:
        try:
            events.from_json(line)
        except ValueError:
            pass

    return test


test_an_event_is_read_or_refused = pytest.mark.fast(fuzz_events(quick))
test_an_event_is_read_or_refused_many_times = pytest.mark.soak(fuzz_events(long))


@pytest.mark.fast
def test_events_come_back_as_they_were_and_torn_lines_are_skipped(tmp_path) -> None:
    assert events.to_json(events.from_json(EVENT)) == EVENT
    assert events.to_json(events.from_json(FREE)) == FREE
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        b"\xff\xfe\n" + EVENT.encode() + b'\n{"v":1,"kind":[]}\n' + b"[" * 100_000 + b"\n" + FREE.encode()[:9]
    )
    assert [event.kind for event in events.read_events(path)] == ["worker_exited"]


@pytest.mark.fast
@quick
@given(
    st.one_of(
        junk,
        changed(
            {
                "message": {"message": "m", "extraInfo": {"py_callstack": "s", "timestamp": "17"}},
                "phalanx": {"time": 1.0, "is_incurable": True},
            }
        ),
    )
)
def test_an_error_file_never_breaks_the_report(tmp_path_factory, value) -> None:
    path = tmp_path_factory.getbasetemp() / "error.json"
    path.write_text(json.dumps(value))
    failure = ProcessFailure.observe(
        exitcode=1, error_file=str(path), ended_at=1.0, local_rank=0, pid=1, rank=0
    )
    assert ChildFailedError("train.py", {0: failure}).format_msg()


@pytest.mark.fast
@quick
@given(st.one_of(raw, changed({"kind": "fork", "token": "1"}).map(lambda value: json.dumps(value).encode())))
def test_messages_are_objects_or_refused(data) -> None:
    try:
        assert isinstance(parse_message(data), dict)
    except MessageError:
        pass


@pytest.mark.fast
def test_a_length_that_no_message_has_is_refused_before_memory_is_taken() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_message(ours, {"kind": "ready"})
        assert receive_message(theirs) == ({"kind": "ready"}, [])
        ours.send(b"\xff\xff\xff\xff")
        with pytest.raises(MessageError, match="4294967295 bytes"):
            receive_message(theirs)
        ours.send(b"\x00\x00\x00\x02")
        ours.close()
        assert receive_message(theirs) is None, "half a message is none"
