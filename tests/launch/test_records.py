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
from phalanx.launch.recovery._agent_channel import AgentChannel, parse_failure, parse_wish
from phalanx.launch.workers._messages import MessageError, parse_message, receive_message, send_message
from phalanx.protocol import RecordError, failures_prefix

FAILURE = ProcessFailure(local_rank=0, pid=7, exitcode=-9, rank=2, message="m", timestamp=5.0, stderr_tail=("x",))


@pytest.mark.fast
def test_what_others_are_told_of_a_failure_is_what_they_read() -> None:
    channel = AgentChannel(MemoryStore())
    channel.report(FAILURE)
    found = channel.failures(0)[2]
    assert (found.rank, found.exitcode, found.stderr_tail) == (2, -9, ("x",))
    with pytest.raises(RecordError):
        parse_failure(b'{"v":1}')


@pytest.mark.fast
@quick
@given(raw)
def test_wishes_are_numbers_or_nothing(data) -> None:
    assert parse_wish(data) is None or parse_wish(data) >= 1


@pytest.mark.fast
def test_one_unreadable_failure_does_not_hide_the_others() -> None:
    channel = AgentChannel(MemoryStore())
    channel._store.set(f"{failures_prefix(0)}stranger", b"\xff")
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
test_an_event_is_read_or_refused_many_times = pytest.mark.soak(pytest.mark.timeout(1800)(fuzz_events(long)))


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
    failure = ProcessFailure(exitcode=1, error_file=str(path), timestamp=1.0, local_rank=0, pid=1, rank=0)
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
