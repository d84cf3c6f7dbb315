"""The box itself: who reaches whom under which fault, and that nothing is left of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.hosts.box import Box, Host, Place, new_box
from tests.networks import ip

ASK = """
import socket, sys
with socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET) as asking:
    asking.settimeout(float(sys.argv[2]))
    try:
        asking.connect((sys.argv[1], 9))
    except ConnectionRefusedError:
        print("reached")  # nobody listens: the host itself has answered
    except OSError as error:
        print("not reached")
"""


def reaches(host: Host, place: Place, *, patience: float = 0.4, v6: bool = False) -> bool:
    """Whether a packet goes there and its answer comes back."""
    address = place.address6 if v6 else place.address
    return host.call(sys.executable, "-S", "-c", ASK, address, str(patience)).strip() == "reached"


def test_hosts_reach_one_another_and_faults_are_what_they_say():
    with new_box(3, split_workers=True) as box:
        zero, one, two = box.hosts
        assert [host.call("hostname").strip() for host in box.hosts] == ["host0", "host1", "host2"]
        assert zero.call("cat", "/proc/1/comm") == one.call("cat", "/proc/1/comm") != Path("/proc/1/comm").read_text()
        assert reaches(zero, one.main, patience=30)
        assert reaches(zero, one.main, patience=30, v6=True)
        assert reaches(zero, one.workers, patience=30)

        box.cut(zero.main, one.main)
        assert not reaches(zero, one.main)
        assert not reaches(zero, one.main, v6=True)
        assert reaches(zero, one.workers, patience=30), "only what was cut is cut"
        assert reaches(zero, two.main, patience=30)
        box.mend(zero.main, one.main)
        assert reaches(zero, one.main, patience=30)

        box.cut(zero.main, one.main, one_way=True)
        assert not reaches(one, zero.main), "the question arrives and the answer does not"
        box.mend(zero.main, one.main, one_way=True)

        box.split([zero, one], [two])
        assert reaches(zero, one.main, patience=30)
        assert not reaches(two, zero.main)
        assert not reaches(one, two.workers)
        box.rejoin([zero, one], [two])
        assert reaches(two, zero.main, patience=30)

        for hurt, heal in ((one.link_down, one.link_up), (one.silence, one.restore)):
            hurt()
            assert not reaches(zero, one.main)
            heal()
            assert reaches(zero, one.main, patience=30)


def test_a_host_without_power_has_no_process_and_comes_back_with_none():
    with new_box(2) as box:
        zero, one = box.hosts
        left = subprocess.Popen(one.inside("sleep", "1000"))
        one.power_off()
        assert left.wait(30) != 0
        assert not reaches(zero, one.main)
        with pytest.raises(AssertionError, match="host1 is off"):
            one.inside("true")
        one.power_on()
        assert reaches(zero, one.main, patience=30)
        assert "sleep" not in one.call("sh", "-c", "cat /proc/[0-9]*/comm")


def test_a_slow_link_is_as_slow_as_it_was_told():
    """Bandwidth needs tbf and delay netem; each is tried where the kernel has it."""
    with new_box(2) as box:
        zero, _ = box.hosts
        zero.shape(rate="10mbit")
        text = zero.call("tc", "qdisc", "show", "dev", "eth0")
        assert "tbf" in text
        assert "rate 10Mbit" in text
        zero.unshape()
        assert "tbf" not in zero.call("tc", "qdisc", "show", "dev", "eth0")


def test_delay_and_loss_are_told_to_both_ends_of_a_link():
    with new_box(2) as box:
        zero, _ = box.hosts
        zero.shape(delay="30ms", loss="1%")
        assert "delay 30ms loss 1%" in zero.call("tc", "qdisc", "show", "dev", "eth0")
        zero.unshape()


def test_nothing_is_left_when_a_test_fails():
    seen: list[Box] = []
    processes: list[subprocess.Popen[bytes]] = []

    def fail() -> None:
        with new_box(2, split_workers=True) as box:
            seen.append(box)
            processes.append(subprocess.Popen(box.hosts[0].inside("sleep", "1000")))
            raise RuntimeError("a test that fails")

    with pytest.raises(RuntimeError, match="a test that fails"):
        fail()
    (box,) = seen
    assert processes[0].wait(30) != 0
    names = {place.namespace for host in box.hosts for place in host.places} | {box.hosts[0].switch}
    assert not names & {line.split()[0] for line in ip("netns", "list").stdout.splitlines()}
    assert not any(host.is_on for host in box.hosts)
    assert not box.hosts[0].hosts_file.parent.exists()
