"""Who is alive: processes that are killed, stopped, or take the place of another in the watcher's books."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from phalanx.comm.failure import _liveness
from phalanx.comm.failure._failure import FailureDetector
from phalanx.comm.failure._liveness import Identity, own_identity
from phalanx.errors import PeerLost, PeerTimeout

pytestmark = pytest.mark.fast


@contextmanager
def sleeper() -> Iterator[tuple[subprocess.Popen[bytes], Identity]]:
    """A process that does nothing, and who it is. Its standard output stands for a connection."""
    with subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE) as process:
        started = _liveness._proc_stat(process.pid)[1]
        try:
            yield process, replace(own_identity(), pid=process.pid, started=started)
        finally:
            process.kill()


def test_who_sees_a_connection_close_sees_that_its_owner_died() -> None:
    for _ in range(30):
        with sleeper() as (process, identity):
            assert identity.is_alive()
            process.kill()
            assert process.stdout is not None
            assert process.stdout.read() == b""
            assert not identity.is_alive(), "it has closed its side, but is not gone yet"


def test_a_death_is_told_to_everybody_who_watches() -> None:
    told = [threading.Event(), threading.Event()]
    with sleeper() as (process, identity):
        for event in told:
            assert _liveness.watch_deaths(identity, lambda who, event=event: event.set())
        assert not any(event.is_set() for event in told)
        process.kill()
        assert all(event.wait(60) for event in told)


def test_an_old_event_does_not_count_for_the_process_that_has_the_number_now() -> None:
    told: list[Identity] = []
    watcher = _liveness._Watcher()
    with sleeper() as (_, identity):
        assert watcher.add(identity, told.append)
        watcher._tell(watcher._fds[identity])  # as if it had been said of a process that was forgotten meanwhile
        watcher._tell(10**6)
        assert told == []
        assert identity in watcher._fds, "it is watched as before"
        watcher.remove(identity, told.append)
        assert watcher._fds == {}


THREADED = """
import os, sys, threading
leave = threading.Event()
thread = threading.Thread(target=leave.wait)
thread.start()
print(thread.native_id, flush=True)
sys.stdin.readline()
leave.set()
thread.join()
print("alone", flush=True)
sys.stdin.readline()
"""


@contextmanager
def threaded() -> Iterator[tuple[subprocess.Popen[str], Identity]]:
    """A process with a second thread, which ends at the first line that it is told."""
    command = [sys.executable, "-c", THREADED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        thread = int(process.stdout.readline())
        started = _liveness._proc_stat(process.pid)[1]
        try:
            yield process, replace(own_identity(), pid=process.pid, started=started, thread=thread)
        finally:
            process.kill()


def test_the_end_of_its_threads_tells_of_a_death_before_the_process_is_gone() -> None:
    told = threading.Event()
    watcher = _liveness._Watcher()
    with threaded() as (process, identity):
        assert watcher.add(identity, lambda who: told.set())
        if identity not in watcher._threads:
            pytest.skip("this kernel cannot watch threads (Linux 6.9 can)")
        watcher._epoll.unregister(watcher._fds[identity])  # as long as the kernel frees its memory it says nothing
        process.kill()
        assert told.wait(60)
        assert watcher._fds == watcher._threads == watcher._identities == {}


def test_a_thread_that_ends_alone_is_no_death() -> None:
    told = threading.Event()
    watcher = _liveness._Watcher()
    with threaded() as (process, identity):
        assert watcher.add(identity, lambda who: told.set())
        assert process.stdin is not None
        assert process.stdout is not None
        print("go", file=process.stdin, flush=True)
        assert process.stdout.readline() == "alone\n"
        deadline = time.monotonic() + 60
        while identity in watcher._threads and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not told.is_set()
        assert identity in watcher._fds, "the process is watched as before"
        process.kill()
        assert told.wait(60)


def test_everybody_tells_by_which_thread_its_end_is_noticed() -> None:
    first, second = own_identity(), own_identity()
    assert first.thread == second.thread != 0
    assert first == replace(first, thread=0), "it says how to watch a process, not which one it is"


def detector(peer: Identity) -> FailureDetector:
    found = FailureDetector(rank=0, size=2, timeout=60.0, peers={0: own_identity(), 1: peer})
    found.start(lambda: None)
    return found


def test_a_closed_connection_means_a_death_a_stop_or_neither() -> None:
    closed = RuntimeError("Connection closed by peer [127.0.0.1]:1")
    with sleeper() as (process, identity):
        failures = detector(identity)
        cause = failures.settle(closed)
        assert isinstance(cause, PeerLost)
        assert cause.ranks == ()
        failures.stop()
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while not identity.is_stopped() and time.monotonic() < deadline:
            time.sleep(0.001)
        failures = detector(identity)
        cause = failures.settle(closed)
        assert isinstance(cause, PeerTimeout), "whoever closed had waited for this one"
        assert cause.ranks == (1,)
        failures.stop()
        failures = detector(identity)
        cause = failures.settle(RuntimeError("ProcessGroupGloo::allreduce: unsupported device type meta"))
        assert "unsupported device type meta" in str(cause), "nothing was closed: a stopped rank is no reason"
        failures.stop()
        process.kill()
        assert process.stdout is not None
        process.stdout.read()
        failures = detector(identity)
        cause = failures.settle(closed)
        assert isinstance(cause, PeerLost)
        assert cause.ranks == (1,)
        failures.stop()
