"""A machine that is cut off from the network, as a network namespace whose link goes down."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.networks import Namespace, new_namespace

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


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with new_namespace() as made:
        yield made


def test_a_machine_that_is_cut_off_loses_its_lease_and_notices_it(namespace: Namespace) -> None:
    (link,) = namespace.links
    # The last call is long: the other one imports torch first, and would find the job begun without it.
    patience = {"join_timeout": 100, "last_call_timeout": 100}
    params = RendezvousParameters("c10d", f"{link.here}:0", "cut", 1, 2, link.here, lease=40, **patience)
    handler = get_rendezvous_handler(params)
    endpoint = handler.store_url.removeprefix("tcp://")
    remote = subprocess.Popen(
        namespace.inside(sys.executable, "-c", REMOTE, endpoint, link.there),
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
        link.cut()
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
