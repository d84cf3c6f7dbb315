"""Hosts with two interfaces: ``phalanx doctor`` measures each path, and what works is used and told to others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.hosts.box import Box, Host, new_box
from tests.hosts.test_jobs import run_on_all
from tests.networks import run

PHALANX = (sys.executable, "-m", "phalanx")
SECOND = "10.78.0"


def ask(host: Host, *peers: str) -> dict[str, Any]:
    command = host.inside(*PHALANX, "doctor", "--peers", *peers, "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def add_interfaces(box: Box) -> None:
    """Give every host ``eth1``, with an address of a network of its own."""
    for number, host in enumerate(box.hosts, start=1):
        port, inside = f"second{number}", host.main.namespace
        run("-n", host.switch, "link", "add", port, "type", "veth", "peer", "name", "eth1", "netns", inside)
        run("-n", host.switch, "link", "set", port, "master", "switch", "up")
        run("-n", inside, "addr", "add", f"{SECOND}.{number}/24", "dev", "eth1")
        run("-n", inside, "link", "set", "eth1", "up")


@contextmanager
def listening(host: Host) -> Iterator[None]:
    """It ends with the host: what is killed here is what entered the host for it."""
    command = host.inside(*PHALANX, "doctor", "--listen", "[::]", "--seconds", "150")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as listener:
        try:
            assert listener.stdout is not None
            assert "answering probes at [::]:29398 for 150 s" in listener.stdout.readline()
            yield
        finally:
            listener.kill()


@pytest.mark.timeout(250)
def test_each_path_is_measured_and_the_one_that_works_is_used_and_told() -> None:
    with new_box(2) as box:
        zero, one = box.hosts
        add_interfaces(box)
        with listening(one):
            found = ask(zero, "host1")
            shown = {path["address"]: (path["interface"], path["is_used"]) for path in found["paths"]}
            assert shown == {
                one.main.address: ("eth0", True),
                one.main.address6: ("eth0", False),
                f"{SECOND}.2": ("eth1", False),  # by the peer's own word
            }
            for path in found["paths"]:
                assert min(path["latency"], path["sent"], path["received"]) > 0, path
            last = found["findings"][-1]["text"]
            assert last == "in a job whose endpoint is host1, the others are told that this machine is host0"

            with open(one.hosts_file, "a") as file:
                file.write(f"{SECOND}.2 host1\n")
            box.cut(zero.main, one.main)  # what the first two addresses lead to is silent
            found = ask(zero, "host1")
            (used,) = [path for path in found["paths"] if path["is_used"]]
            assert (used["address"], used["interface"]) == (f"{SECOND}.2", "eth1")
            lost = {path["address"] for path in found["paths"] if path["error"]}
            assert lost == {one.main.address, one.main.address6}
            last = found["findings"][-1]["text"]
            assert last.endswith(f"the others are told that this machine is {SECOND}.1"), "its name is cut off"
        nobody = ask(zero, f"{SECOND}.2:29397")
        assert nobody["worst"] == "bad"
        assert "Is `phalanx doctor --listen 0.0.0.0:29397` running there" in nobody["findings"][0]["text"]


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_job_forms_on_the_interface_that_reaches_its_endpoint(tmp_path: Path) -> None:
    """The hosts' names lead to the first interface, over which nothing passes; the endpoint is on the second."""
    with new_box(2) as box:
        add_interfaces(box)
        box.cut(box.hosts[0].main, box.hosts[1].main)
        where = ("--rdzv-backend", "c10d", "--rdzv-id", "box", "--rdzv-endpoint", f"{SECOND}.1:29400")
        told = run_on_all(box, tmp_path / "out", "collectives_script.py", *where, per_host=2)
        assert told == ["4 two_level"] * 4
