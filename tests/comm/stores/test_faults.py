"""Stores and their clients that die, hang or are many: real processes on loopback."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from phalanx.comm.stores import Change, FileStore, Store, TCPStore, _etcd_gateway, _torch_link, connect
from phalanx.errors import StoreLost, StoreTimeout

pytestmark = pytest.mark.timeout(240)  # processes here import torch, which takes a while on a busy machine

# Test folders are no packages; conftest is loaded by its path to share its servers.
_spec = util.spec_from_file_location("store_servers", Path(__file__).with_name("conftest.py"))
assert _spec is not None
assert _spec.loader is not None
servers = util.module_from_spec(_spec)
sys.modules["store_servers"] = servers
_spec.loader.exec_module(servers)


@pytest.fixture
def processes() -> Iterator[Any]:
    """Starts a Python process with the given code and arguments; whatever is left is killed by its pid."""
    with ExitStack() as stack:

        def start(code: str, *arguments: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                stdout=subprocess.PIPE,
                stdin=subprocess.PIPE,
                text=True,
                env=dict(os.environ),
            )
            stack.callback(finish, process)
            return process

        yield start


def finish(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait(60)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


@pytest.fixture(params=["tcp", "etcd"])
def mortal(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server of its own, to be killed."""
    monkeypatch.setattr(_etcd_gateway, "PATIENCE", 2.0)
    if request.param == "tcp":
        with servers.tcp_server() as server:
            yield server
    else:
        with servers.etcd_cluster(1, tmp_path) as (server,):
            yield server


class TestServerGone:
    def test_every_call_and_every_blocked_wait_says_which_store_is_lost(self, mortal: Any) -> None:
        store, waiter, watcher = (connect(mortal.url) for _ in range(3))
        store.set("k", b"v")
        lease = store.lease(60)
        watch = watcher.watch("k")
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(waiter.wait, ["never"], 100)
            watching = pool.submit(watch.wait, 100)
            with pytest.raises(TimeoutError):
                waiting.result(0.2)
            mortal.kill()
            for blocked in (waiting, watching):
                with pytest.raises(StoreLost) as caught:
                    blocked.result(60)
                assert caught.value.address == mortal.url
        calls = [
            lambda: store.get("k"),
            lambda: store.get_many(["k", "l", "m", "n"]),
            lambda: store.set("k", b"w"),
            lambda: store.add("n"),
            lambda: store.compare_and_set("k", b"v", b"w"),
            lambda: store.wait(["k"], 10),
            lambda: store.delete("k"),
            lambda: store.items(),
            lambda: store.watch(),
            lambda: store.lease(5),
            lambda: store.clone(),
            lambda: store.as_c10d().set("k", b"w"),
            lease.refresh,
            lambda: watch.wait(10),
        ]
        for call in calls:
            with pytest.raises(StoreLost) as caught:
                call()
            assert caught.value.address == mortal.url
        watch.close()
        for client in (store, waiter, watcher):
            client.close()

    def test_connecting_to_nothing_gives_up_in_time(self) -> None:
        with servers.held_ports(1) as (port,):
            for scheme in ("tcp", "etcd"):
                url = f"{scheme}://127.0.0.1:{port}"
                with pytest.raises(StoreLost) as caught:
                    connect(url, timeout=0.3)
                assert caught.value.address == url


def read_for_ever(store: Store) -> None:
    while True:
        store.get("k")


def test_a_tcp_server_that_hangs_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with servers.tcp_server() as server:
        store = connect(server.url)
        store.set("k", b"v")
        with monkeypatch.context() as patch:
            patch.setattr(_torch_link, "REPLY_TIMEOUT", 1.0)
            _torch_link.bound_replies(int(server.url.rsplit(":", 1)[1]))  # of the store that is there
        os.kill(server.process.pid, signal.SIGSTOP)
        with pytest.raises(StoreLost) as caught:
            read_for_ever(store)  # the signal takes effect a moment later
        assert caught.value.address == server.url
        os.kill(server.process.pid, signal.SIGCONT)
        with pytest.raises(StoreLost):  # for good: late answers must not be taken for new ones
            store.get("k")
        assert connect(server.url).get("k") == b"v"


def test_a_directory_that_is_removed_is_a_lost_store(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "s")
    store.set("k", b"v")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ["never"], 100)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        shutil.rmtree(tmp_path / "s")
        with pytest.raises(StoreLost) as caught:
            waiting.result(60)
    assert caught.value.address == store.address
    for call in (lambda: store.get("k"), lambda: store.set("k", b""), store.items, lambda: store.add("n")):
        with pytest.raises(StoreLost):
            call()


def find_leader(members: list[Any]) -> Any:
    """The member that says so of itself. On a machine that stalls they may be electing one."""
    import httpx

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for member in members:
            url = member.url.replace("etcd://", "http://") + "/v3/maintenance/status"
            status = httpx.post(url, json={}, trust_env=False, timeout=60).json()
            if "leader" in status and status["leader"] == status["header"]["member_id"]:
                return member
        time.sleep(0.05)
    raise AssertionError("no member says that it leads")


def test_an_etcd_cluster_survives_its_leader(tmp_path: Path) -> None:
    with servers.etcd_cluster(3, tmp_path) as members:
        store = connect(servers.cluster_url(members))
        watch = store.watch("n")
        total, seen = 0, []
        for _ in range(10):
            total = store.add("n")
        find_leader(members).kill()
        for number in range(10):
            assert store.add("n") == total + number + 1
        assert store.compare_and_set("n", b"20", b"end")
        while not seen or seen[-1] != Change("n", b"end"):
            changes = watch.wait(60)
            assert changes, f"the watch stopped after {seen}"
            seen += changes
        assert [change.value for change in seen] == [b"%d" % number for number in range(1, 21)] + [b"end"]
        watch.close()
        store.close()


def test_an_etcd_member_that_restarts_is_waited_for(tmp_path: Path) -> None:
    """Its only member is away for longer than a few refused connections take; every kind of call gets through."""
    with servers.etcd_cluster(1, tmp_path) as (server,):
        store, waiter = connect(server.url), connect(server.url)
        store.set("k", b"v")
        watch, lease = store.watch("n"), store.lease(60)
        with ThreadPoolExecutor(4) as pool:
            waiting, watching = pool.submit(waiter.wait, ["late"], 100), pool.submit(watch.wait, 100)
            server.kill()
            reading, refreshing = pool.submit(store.get, "k"), pool.submit(lease.refresh)
            with pytest.raises(TimeoutError):
                reading.result(1.0)
            server.start_again()
            assert reading.result(60) == b"v"
            assert refreshing.result(60)
            clone = store.clone()
            assert clone.add("n") == 1
            assert watching.result(60) == [Change("n", b"1")]
            store.set("late", b"here")
            assert waiting.result(60) == [b"here"]
        watch.close()
        for client in (store, waiter, clone):
            client.close()


OWNER = """
import sys
from phalanx.comm.stores import connect
from phalanx.errors import StoreError
store = connect(sys.argv[1]).namespace(sys.argv[2])
while True:
    lease = store.lease(float(sys.argv[3]))
    try:
        store.set("node", b"alive", lease=lease)
        break
    except StoreError:  # this process stalled for longer than the lease lasts
        continue
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["tcp", "file", "etcd"])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that processes can reach."""
    if request.param == "file":
        return f"file://{tmp_path}/store"
    return str(request.getfixturevalue(f"{request.param}_url"))


def test_the_keys_of_a_killed_owner_vanish(shared_url: str, processes: Any, tmp_path: Path) -> None:
    space = f"owner/{tmp_path.name}"
    owner = processes(OWNER, shared_url, space, "1")
    assert owner.stdout.readline() == "ready\n"
    owner.kill()
    root = connect(shared_url)
    store: Store = root.namespace(space)
    with store.watch("node") as watch:
        while store.get("node") is not None:  # already gone when this process was slow
            watch.wait(60)
    with connect(shared_url) as late:
        assert late.namespace(space).items() == {}
    root.close()


# One import of torch for all processes: the rest are forked after it, before any thread or store exists.
FORK = """
import json, os, sys, traceback
from phalanx.comm.stores import connect

def say(value):
    os.write(1, (json.dumps(value) + "\\n").encode())  # one write: lines of several processes never mix

def fork_all(count, work):
    pids = []
    for index in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with connect(sys.argv[1]) as root:
                    work(index, root)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    sys.exit(any([os.waitpid(pid, 0)[1] for pid in pids]))
"""

COUNT = """
def work(index, root):
    store = root.namespace(sys.argv[2])
    store.add("ready")
    store.wait(["go"], 200)
    numbers = [store.add("n") for _ in range(5)]
    for number in numbers:
        done = False
        while not done:
            before = store.get("list")
            done = store.compare_and_set("list", before, (before or b"") + b"%d " % number)
    say(numbers)

fork_all(16, work)
"""


def test_sixteen_processes_lose_nothing(shared_url: str, processes: Any, tmp_path: Path) -> None:
    space = f"count/{tmp_path.name}"
    clients = processes(FORK + COUNT, shared_url, space)
    with connect(shared_url) as root:
        store = root.namespace(space)
        servers.wait_until(lambda: store.get("ready") == b"16", 200)
        store.set("go", b"")
        lines = [json.loads(clients.stdout.readline()) for _ in range(16)]
        assert clients.wait(60) == 0
        assert sorted(number for numbers in lines for number in numbers) == list(range(1, 81))
        assert sorted(int(word) for word in (store.get("list") or b"").split()) == list(range(1, 81))
        assert store.get("n") == b"80"


HOLD_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_killed_holder_of_the_file_lock_blocks_nobody(processes: Any, tmp_path: Path) -> None:
    store = FileStore(tmp_path / "s", timeout=0.2)
    store.set("k", b"v")
    holder = processes(HOLD_LOCK, str(tmp_path / "s" / "lock"))
    assert holder.stdout.readline() == "held\n"
    assert store.get("k") == b"v"  # readers need no lock
    with pytest.raises(StoreLost, match="held the lock"):
        store.set("k", b"w")
    holder.kill()
    holder.wait(30)
    store.set("k", b"w")
    assert store.get("k") == b"w"


def test_the_lock_file_is_free_after_a_write(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "s")
    store.set("k", b"v")
    with open(tmp_path / "s" / "lock", "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(StoreTimeout):
            store.wait(["absent"], 0.01)


GLOO = """
from datetime import timedelta
import torch
import torch.distributed as dist

def work(rank, root):
    torch.set_num_threads(1)
    for generation in range(2):
        store = root.namespace(f"{sys.argv[2]}/{generation}").as_c10d()
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        tensor = torch.full((5,), float(rank + 1))
        group.allreduce([tensor]).wait()
        assert tensor.tolist() == [3.0] * 5, tensor
    store = root.namespace(f"{sys.argv[2]}/default").as_c10d()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.barrier()
    say([key for key in root.items() if "gloo/" in key])
    dist.destroy_process_group()

fork_all(2, work)
"""


def test_gloo_groups_form_over_it(shared_url: str, processes: Any, tmp_path: Path) -> None:
    ranks = processes(FORK + GLOO, shared_url, f"gloo/{tmp_path.name}")
    for _ in range(2):
        assert json.loads(ranks.stdout.readline()) == [], "what torch writes must lie apart"
    assert ranks.wait(60) == 0


def test_a_tcp_server_listens_on_its_own_address_only() -> None:
    import psutil

    with TCPStore.serve() as store:
        port = int(store.address.rsplit(":", 1)[1])
        listening = [
            found.laddr.ip
            for found in psutil.Process().net_connections("inet")
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port
        ]
        assert listening == ["127.0.0.1"]
