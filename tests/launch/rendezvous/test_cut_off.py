"""A machine that is cut off from the network, as a network namespace whose link goes down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.launch.rendezvous import RendezvousParameters, get_rendezvous_handler

REMOTE = """
import sys
from phalanx.launch.rendezvous import RendezvousParameters, get_rendezvous_handler
handler = get_rendezvous_handler(
    RendezvousParameters(
        "c10d", sys.argv[1], "cut", 1, 2, sys.argv[2], lease=4, join_timeout=100, last_call_timeout=100
    )
)
info = handler.next_rendezvous()
print("joined", info.rank, info.world_size, flush=True)
print("ended", handler.watch_generation(info.generation).wait(200).kind, flush=True)
"""


pytestmark = pytest.mark.timeout(500)


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=90)


@pytest.fixture
def namespace() -> Iterator[tuple[str, str, str, str]]:
    """A namespace, the link to it, the address on this side of it and that on the other."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    name = f"phx{uuid.uuid4().hex[:6]}"
    made = ip("netns", "add", name)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    link = f"{name}a"
    # Another run on this machine may be at the same test: each has a network of its own.
    high, low = uuid.uuid4().bytes[:2]
    here, there = (f"10.213.{high}.{low // 4 * 4 + host}" for host in (1, 2))
    try:
        for command in (
            f"link add {link} type veth peer name {name}b netns {name}",
            f"addr add {here}/30 dev {link}",
            f"link set {link} up",
            f"-n {name} addr add {there}/30 dev {name}b",
            f"-n {name} link set {name}b up",
            f"-n {name} link set lo up",
        ):
            done = ip(*command.split())
            if done.returncode:
                pytest.skip(f"ip {command}: {done.stderr.strip()}")
        yield name, link, here, there
    finally:
        ip("link", "del", link)
        ip("netns", "del", name)


def test_a_machine_that_is_cut_off_loses_its_lease_and_notices_it(
    namespace: tuple[str, str, str, str],
) -> None:
    name, link, here, there = namespace
    # The last call is long: the other one imports torch first, and would find the job begun without it.
    patience = {"join_timeout": 100, "last_call_timeout": 100}
    params = RendezvousParameters("c10d", f"{here}:0", "cut", 1, 2, here, lease=40, **patience)
    handler = get_rendezvous_handler(params)
    endpoint = handler.store_url.removeprefix("tcp://")
    remote = subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-c", REMOTE, endpoint, there],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"},
    )
    assert remote.stdout is not None
    try:
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(handler.next_rendezvous)
            assert remote.stdout.readline().split()[0] == "joined"
            info = joined.result(100)
        assert info.world_size == 2
        assert ip("link", "set", link, "down").returncode == 0
        end = handler.watch_generation(info.generation).wait(100)
        assert end is not None
        assert end.kind == "broken"
        assert "lost its lease" in end.reason
        assert handler.next_rendezvous().world_size == 1
        assert remote.stdout.readline().split() == ["ended", "lost"]
    finally:
        remote.kill()
        remote.wait(30)
        remote.stdout.close()
        handler.shutdown()
