"""Which zygote forks the next worker when one is killed (on pretended ones), and what a real one's forks die of."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import time

import pytest

from phalanx.launch.workers._processes import ProcessStartError, WorkerProcess, Zygote
from phalanx.launch.workers._zygotes import MAX_ATTEMPTS, Zygotes

pytestmark = pytest.mark.fast


class Pretended:
    def __init__(self, name: str, *, is_ready: bool = True) -> None:
        self.pid = 1
        self.name = name
        self.is_ready = is_ready
        self.is_gone = False
        self.is_idle = False
        self.is_closed = False

    def start(self, on_exit, on_gone) -> None:
        self._tell = on_gone

    def die(self) -> None:
        self.is_gone, self.is_ready = True, False
        self._tell(self)

    def wait_ready(self) -> None:
        if self.is_gone:
            raise ProcessStartError("gone")

    def park(self) -> str:
        self.wait_ready()
        return f"forked by {self.name}"

    def close(self) -> None:
        self.is_closed = True


class Nursery:
    """Makes successors and remembers them."""

    def __init__(self, *, dead: bool = False) -> None:
        self.made: list[Pretended] = []
        self.dead = dead

    def __call__(self, is_warm: bool) -> Pretended:
        made = Pretended("warm" if is_warm else "cold", is_ready=not is_warm)
        made.is_gone = self.dead
        self.made.append(made)
        return made


def test_workers_are_execd_until_the_successor_is_warm():
    first, nursery = Pretended("the first"), Nursery()
    zygotes = Zygotes(first, nursery, is_warm=True)
    zygotes.start(lambda process: None)
    assert zygotes.park() == ("forked by the first", True)
    first.die()
    assert [made.name for made in nursery.made] == ["warm", "cold"]
    assert zygotes.park() == ("forked by cold", False)
    nursery.made[0].is_ready = True
    assert zygotes.park() == ("forked by warm", True)
    nursery.made[0].die()  # the cold one is still there
    assert zygotes.park() == ("forked by cold", False)
    assert [made.name for made in nursery.made] == ["warm", "cold", "warm"]
    nursery.made[1].is_idle = True
    assert not zygotes.is_idle, "what stands by is to be warm: the third one is still importing"
    nursery.made[2].is_idle = True
    assert zygotes.is_idle
    zygotes.close()
    assert all(made.is_closed for made in (first, *nursery.made))


def test_a_death_that_was_not_noticed_yet_is_noticed_when_a_worker_is_wanted():
    first, nursery = Pretended("the first"), Nursery()
    zygotes = Zygotes(first, nursery)
    zygotes.start(lambda process: None)
    first.is_gone = True
    assert zygotes.park() == ("forked by cold", False)
    first.die()  # old news
    assert len(nursery.made) == 1
    zygotes.close()


def test_zygotes_that_all_die_are_an_error_in_the_end():
    first, nursery = Pretended("the first"), Nursery(dead=True)
    zygotes = Zygotes(first, nursery)
    zygotes.start(lambda process: None)
    first.die()
    with pytest.raises(ProcessStartError, match=f"{MAX_ATTEMPTS} zygotes in a row were killed"):
        zygotes.park()
    zygotes.close()


def test_one_that_holds_the_callers_functions_has_no_successor():
    first = Pretended("the first")
    zygotes = Zygotes(first, None, is_warm=True)
    zygotes.start(lambda process: None)
    first.die()
    with pytest.raises(ProcessStartError):
        zygotes.park()
    zygotes.close()


def test_sigterm_to_a_fork_that_is_no_worker_yet_ends_it_and_nobody_else():
    exits: queue.Queue[WorkerProcess] = queue.Queue()
    zygote = Zygote.execute()
    try:
        zygote.start(exits.put)
        zygote.wait_ready()
        bystander = zygote.park()
        for _ in range(20):
            process = zygote.park()
            process.send_signal(signal.SIGTERM, to_group=False)  # at once: it has hardly begun to run
            ended = exits.get(timeout=60)
            assert (ended.pid, ended.exit_code) == (process.pid, -signal.SIGTERM)
        assert bystander.waits
    finally:
        zygote.close()


def test_a_process_with_more_than_a_thousand_descriptors_reaps_its_zygote():
    """``select.select`` refuses descriptors above 1023, which a job with many files and workers has."""
    spare = [os.dup(0) for _ in range(1024)]
    try:
        child = subprocess.Popen([sys.executable, "-c", "pass"])
        zygote = object.__new__(Zygote)
        zygote._child, zygote.pid = None, child.pid
        assert zygote._wait_reaped(60.0)
        child.wait()
    finally:
        for fd in spare:
            os.close(fd)


def test_what_is_sent_beside_an_order_kills_nobody_and_the_end_of_the_agent_kills(tmp_path):
    """The kernel may tell of the last bytes of an order when the worker runs already: it must not be what ends it."""
    orders, lifeline = socket.socketpair(), socket.socketpair()
    mark = tmp_path / "runs"
    waits = f"import pathlib, time; pathlib.Path({str(mark)!r}).touch(); time.sleep(600)"
    order = {"kind": "exec", "command": [sys.executable, "-S", "-c", waits], "env": {}, "cpus": [], "cwd": "/"}
    fds = [orders[1].fileno(), lifeline[1].fileno()]
    code = (
        "import os, socket, sys; from phalanx.launch.workers._child import run_parked; os.setsid();"
        "run_parked(*(socket.socket(fileno=int(fd)) for fd in sys.argv[1:]), {})"
    )
    with subprocess.Popen([sys.executable, "-c", code, *map(str, fds)], pass_fds=fds) as child:
        try:
            for end in (orders[1], lifeline[1]):
                end.close()
            watched = os.dup(orders[0].fileno())
            worker = WorkerProcess(child.pid, orders[0], lifeline[0])
            worker.order({**order, "name": "late"}, {})
            with socket.socket(fileno=watched) as late, contextlib.suppress(BrokenPipeError):
                late.send(b"late")
            until = time.monotonic() + 100
            while not mark.exists() and child.poll() is None and time.monotonic() < until:
                time.sleep(0.02)
            assert mark.exists()
            assert child.poll() is None
            worker.let_go()
            assert child.wait(100) == -signal.SIGKILL
        finally:
            child.kill()
