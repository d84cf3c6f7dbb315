"""Jobs on hosts in a box: rendezvous on every backend, collectives, elastic jobs under every fault between hosts."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.elastic.cluster import errors_of
from tests.hosts import faults
from tests.hosts.box import Box, new_box
from tests.hosts.jobs import HostJob, etcd_on, undisturbed

FOLDER = Path(__file__).parent
NUM_STEPS = 12


@pytest.mark.soak
def test_two_hosts_of_two_workers_and_one_vanishes(tmp_path):
    """Silently, and for good: no process of it says goodbye, and no kernel resets its connections."""
    expected = undisturbed(tmp_path / "quiet", NUM_STEPS)
    with new_box(2) as box:
        job = HostJob(tmp_path / "job", box, num_steps=NUM_STEPS, nodes="1:2", store="host0:29400", per_host=2, hold=4)
        try:
            job.wait_workers(4)
            job.wait_step(4)
            box.hosts[1].power_off()
            assert job.forget(box.hosts[1]) != 0
            job.next_commit()
            assert len(job.newest_round()) == 2
            job.release()
            verdict = job.finish()
            assert verdict.num_steps == NUM_STEPS
            assert job.committed_twice() == {}
            assert job.digests() == {expected}
        finally:
            job.close()


def test_expected_errors_are_those_of_workers_that_were_left_out():
    ejected = "phalanx.elastic.membership._coordinator.Ejected: worker a.0 is not among the members of generation 1"
    chain = (
        "Traceback (most recent call last)\n  File\nRuntimeError: x\n\nThe above exception was the direct cause of\n\n"
        f"Traceback (most recent call last)\n  File\n{ejected}\n"
    )
    assert faults.expected_errors(chain) == errors_of(chain) == ["RuntimeError: x", ejected]
    assert faults.expected_errors("Traceback (most recent call last)\n  File\nRuntimeError: y\n") == []


def test_the_table_shows_the_slowest_run_of_each_fault():
    first = faults.FAULTS[0]
    seen = [
        faults.Seen(store=store, sharded=False, fault=first.name, promise=first.promise, num_going_on=3,
                    next_commit=seconds, all_again=0.0)
        for store, seconds in (("c10d", 1.0), ("etcd", 2.0))
    ]  # fmt: skip
    *_, row = faults.table(seen).strip().splitlines()
    assert row.split(" | ")[2:] == ["`c10d`, `etcd`", "2", "2.0 s", "0.0 s |"]


def run_on_all(box: Box, directory: Path, script: str, *flags: str, per_host: int) -> list[str]:
    """``phalanx run`` on every host; what each rank wrote down."""
    directory.mkdir(parents=True)
    words = [sys.executable, "-m", "phalanx", "run", f"--nnodes={len(box.hosts)}", f"--nproc-per-node={per_host}"]
    agents = [
        subprocess.Popen(
            host.inside(*words, *flags, f"--node-rank={number}", str(FOLDER / script), str(directory)),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for number, host in enumerate(box.hosts)
    ]  # fmt: skip
    told = [agent.communicate(timeout=250)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * len(agents), "\n".join(told)
    return [path.read_text() for path in sorted(directory.glob("rank*"))]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["c10d", "c10d over IPv6", "c10d by name", "static", "etcd", "file"])
def test_rendezvous_and_collectives_on_every_backend(backend, tmp_path):
    """Two hosts of two workers each: shared memory on each host, gloo between them."""
    with ExitStack() as stack:
        box = stack.enter_context(new_box(2))
        kind = backend.split()[0]
        where = ("--rdzv-backend", kind, "--rdzv-id", "box", "--rdzv-endpoint")
        first = box.hosts[0]
        flags = {
            "c10d": lambda: (*where, f"{first.address}:29400"),
            "c10d over IPv6": lambda: (*where, f"[{first.main.address6}]:29400"),
            "c10d by name": lambda: (*where, f"{first.name}:29400"),
            "static": lambda: ("--rdzv-backend", "static", "--master-addr", first.address, "--master-port", "29500"),
            "etcd": lambda: (*where, stack.enter_context(etcd_on(box.hosts, tmp_path / "etcd"))),
            "file": lambda: (*where, str(tmp_path / "store")),
        }[backend]()
        told = run_on_all(box, tmp_path / "out", "collectives_script.py", *flags, per_host=2)
        assert told == ["4 two_level"] * 4


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("sharded", [False, True], ids=["unsharded", "sharded"])
@pytest.mark.parametrize("store", faults.STORES)
def test_what_is_promised_for_every_fault(store, sharded, tmp_path):
    """The table of docs/clusters.md, without writing it."""
    chosen = [fault for fault in faults.FAULTS if store in fault.stores]
    assert len(faults.run_table(tmp_path, store=store, sharded=sharded, faults=chosen)) == len(chosen)
