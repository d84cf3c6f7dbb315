"""``phalanx doctor --peers`` and ``--listen``: paths are measured, named and compared; strangers do no harm."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from phalanx import _reach
from phalanx.launch.cli import _doctor, _doctor_peers
from phalanx.launch.cli._doctor_peers import Path, findings_of, measure_peer
from phalanx.launch.system import _path_probe
from phalanx.launch.system._path_probe import HELLO, NotAListener, PathListener, PathProbe, PathSpeed

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def _short_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_path_probe, "_SPAN", 0.01)


@pytest.fixture
def listener() -> Iterator[PathListener]:
    with PathListener("127.0.0.1", 0, ["127.0.0.1", "127.0.0.2"]) as made:
        yield made


def probe(address: tuple[str, int]) -> tuple[PathSpeed, list[str]]:
    with PathProbe(socket.create_connection(address, 60.0), 60.0) as end:
        return end.measure(), end.addresses()


def wait_until(condition, seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not come to that"
        time.sleep(0.01)


# -- the two ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.5", "::1"])
def test_a_path_is_measured_in_both_directions(host: str) -> None:
    with PathListener(host, 0, ["10.0.0.1"]) as listener:
        speed, told = probe(listener.address)
        assert min(speed.latency, speed.sent, speed.received) > 0
        assert told == ["10.0.0.1"]
        wait_until(lambda: listener.num_answered == 1)


GARBAGE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    os.urandom(4096),
    HELLO[:-1] + b"\0",
    HELLO + b"X\0\0\0\0",
    HELLO + b"E\xff\xff\xff\xff",
    HELLO + b"T\xff\xff\xff\xff",
    HELLO + b"G\x10\0\0\1",
    HELLO + b"A\0\0\0\1",
    HELLO + b"E\0\0\0\x08abc",
]


def test_garbage_is_not_answered_and_the_next_is(listener: PathListener) -> None:
    for number, junk in enumerate(GARBAGE, start=1):
        with socket.create_connection(listener.address, 60.0) as stranger:
            stranger.settimeout(60.0)
            answer = b""
            with suppress(OSError):  # it closed with bytes of ours unread
                stranger.sendall(junk)
                stranger.shutdown(socket.SHUT_WR)
                while part := stranger.recv(1 << 16):
                    answer += part
            assert answer in (b"", HELLO), junk
        wait_until(lambda expected=number: listener.num_refused == expected)
    assert probe(listener.address)[0].latency > 0


def test_who_says_nothing_is_left_after_a_time() -> None:
    listener = PathListener("127.0.0.1", 0, session=0.2)
    with listener, socket.create_connection(listener.address, 60.0) as silent:
        silent.settimeout(60.0)
        assert silent.recv(1) == b"", "it closes by itself"


def test_bytes_are_bounded_by_what_the_quickest_path_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_path_probe, "_MAX_BYTES", _path_probe._FIRST)
    monkeypatch.setattr(_path_probe, "_SPAN", 1e6)  # no transfer lasts long enough to tell: every try is made
    with PathListener("127.0.0.1", 0) as listener:
        measured, _ = probe(listener.address)
        assert min(measured.sent, measured.received) > 0
        with socket.create_connection(listener.address, 60.0) as greedy:
            greedy.settimeout(60.0)
            greedy.sendall(HELLO + (b"G" + _path_probe._FIRST.to_bytes(4, "big")) * 7)
            assert len(b"".join(iter(lambda: greedy.recv(1 << 16), b""))) == len(HELLO) + 6 * _path_probe._FIRST


def test_there_is_room_for_some_at_a_time(listener: PathListener, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [socket.create_connection(listener.address, 60.0) for _ in range(_path_probe.MAX_CONNECTIONS)]
    try:
        for connection in held:
            connection.sendall(HELLO)
            assert connection.recv(len(HELLO)) == HELLO
        with pytest.raises(NotAListener):
            probe(listener.address)
    finally:
        for connection in held:
            connection.close()
    wait_until(lambda: listener.num_refused >= _path_probe.MAX_CONNECTIONS)
    wait_until(lambda: listener._places._value == _path_probe.MAX_CONNECTIONS)  # type: ignore[attr-defined]
    assert probe(listener.address)[0].sent > 0


def test_a_listener_ends_when_it_is_closed() -> None:
    before = threading.active_count()
    with PathListener("127.0.0.1", 0) as listener:
        probe(listener.address)
    wait_until(lambda: threading.active_count() <= before)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.address, 5.0)


# -- what is measured, and what it means ----------------------------------------------------------------------------


def test_each_address_of_a_peer_is_a_path_and_the_first_that_answers_is_used(
    monkeypatch: pytest.MonkeyPatch, listener: PathListener
) -> None:
    port = listener.address[1]
    for module in (_reach, _doctor_peers):
        monkeypatch.setattr(
            module, "addresses_of", lambda host: ["127.0.0.3", "127.0.0.1"] if host == "peer" else [host]
        )
    paths = list(measure_peer("peer", port, 30.0))
    assert [(path.address, path.is_used, path.interface) for path in paths if not path.error] == [
        ("127.0.0.1", True, "lo"),
    ]
    (failed,) = [path for path in paths if path.error]
    assert failed.address == "127.0.0.3"
    assert "Connection refused" in failed.error
    levels = [finding.level for finding in findings_of("peer", port, paths)]
    assert levels == ["ok", "warn"]


def test_a_peer_that_is_something_else_is_named(held_port: int) -> None:
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]

        def answer() -> None:
            with other.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
                connection.recv(64)

        thread = threading.Thread(target=answer)
        thread.start()
        paths = list(measure_peer("127.0.0.2", port, 5.0))
        thread.join(60)
    (finding,) = findings_of("127.0.0.2", port, paths)
    assert finding.level == "bad"
    assert "it answers b'SSH-2.0-OpenSSH_" in finding.text
    (finding,) = findings_of("peer", held_port, list(measure_peer("127.0.0.1", held_port, 0.1)))
    assert f"Connection refused. Is `phalanx doctor --listen 0.0.0.0:{held_port}` running there" in finding.text


def test_the_words_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor_peers, "advertised_address", lambda name, *where: f"named by {where}")
    slow = Path("n1", "10.0.0.8", "10.0.0.7", "eth0", latency=0.0002, sent=11e6, received=12e6, is_used=True)
    fast = Path("n1", "10.1.0.8", "10.1.0.7", "ib0", latency=0.00002, sent=3e9, received=2.2e9)
    alike = Path("n1", "fd00::8", "fd00::7", "eth0", latency=0.0002, sent=11e6, received=12e6)
    first, second, third, last = findings_of("n1", 5, [slow, fast, alike])
    assert first.text == (
        "n1: a job will use eth0 (10.0.0.7 to 10.0.0.8): round trip 0.20 ms, 11 MB/s there, 12 MB/s back; that is slow"
    )
    assert "n1: 200.0 times as fast is ib0 (10.1.0.7 to 10.1.0.8)" in second.text
    assert "name 10.1.0.8 in the endpoint" in second.text
    assert "GLOO_SOCKET_IFNAME=ib0" in second.text
    assert third.text.startswith("n1: also reached by eth0 (fd00::7 to fd00::8)")
    assert last.text.endswith("the others are told that this machine is named by ('10.0.0.8', 5)")
    assert [finding.level for finding in (first, second, third, last)] == ["warn", "warn", "ok", "ok"]


# -- the command ----------------------------------------------------------------------------------------------------


def test_both_ends_in_one_command(capsys: pytest.CaptureFixture[str], held_port: int) -> None:
    here = f"127.0.0.1:{held_port}"
    assert _doctor.main(["--listen", here, "--peers", here, "--seconds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["worst"] == "ok"
    assert f"answering probes at {here} for 2 s; only this machine gets there" in found["findings"][0]["text"]
    (path,) = found["paths"]
    assert (path["address"], path["interface"], path["is_used"], path["error"]) == ("127.0.0.1", "lo", True, "")
    assert min(path["latency"], path["sent"], path["received"]) > 0


def test_nobody_there_is_bad_and_nonsense_is_refused(capsys: pytest.CaptureFixture[str], held_port: int) -> None:
    assert _doctor.main(["--peers", f"127.0.0.1:{held_port}", "--seconds", "0.1"]) == 1
    printed = capsys.readouterr().out
    assert "bad   127.0.0.1: 127.0.0.1 port" in printed
    assert printed.endswith("Something is wrong; see bad.\n")
    with pytest.raises(SystemExit):
        _doctor.main(["--peers", "host:port"])
    assert "'host:port' is no host; expected HOST, HOST:PORT or [IPv6]:PORT" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert _doctor.main(["--listen", str(taken.getsockname()[1]), "--seconds", "1"]) == 1
    assert "bad   cannot listen at 127.0.0.1 port" in capsys.readouterr().out
