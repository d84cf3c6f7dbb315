"""What schedulers say: host lists as Slurm writes them, and the variables of Slurm, MPI and Kubernetes."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.cli._flags import UsageError, parse
from phalanx.launch.cli._from_flags import config_from_args
from phalanx.launch.rendezvous._allocation import find_allocation
from phalanx.launch.rendezvous._hostlist import MAX_HOSTS, expand_counts, expand_hosts
from phalanx.world import FIRST_PORT, NUM_PORTS, World, mpi_variables, port_of

pytestmark = pytest.mark.fast

WORDS = st.text("abcxyz-.", min_size=1, max_size=5)


@st.composite
def brackets(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A bracketed list, and the numbers that it stands for, each written by hand."""
    pieces, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        first, more, width = draw(st.integers(0, 120)), draw(st.integers(0, 4)), draw(st.integers(1, 4))
        texts = [str(number).rjust(max(width, len(str(first))), "0") for number in range(first, first + more + 1)]
        pieces.append(texts[0] if not more else f"{texts[0]}-{draw(st.sampled_from([texts[-1], str(first + more)]))}")
        numbers += texts
    return "[" + ",".join(pieces) + "]", numbers


@st.composite
def names(draw: st.DrawFn) -> tuple[str, list[str]]:
    """One entry of a host list, and the hosts that it stands for: all combinations, in the order of a counter."""
    parts = draw(st.lists(st.one_of(WORDS.map(lambda word: (word, [word])), brackets()), min_size=1, max_size=4))
    hosts = ["".join(each) for each in itertools.product(*(choices for _, choices in parts))]
    return "".join(text for text, _ in parts), hosts


@given(st.lists(names(), min_size=1, max_size=4))
def test_a_list_stands_for_the_hosts_that_it_was_made_of(entries):
    text = ",".join(entry for entry, _ in entries)
    assert expand_hosts(text) == [host for _, hosts in entries for host in hosts]


@given(st.text("ab0123[],-() x", max_size=20))
def test_any_text_is_a_list_or_a_clear_error(text):
    for read in (expand_hosts, expand_counts):
        try:
            found = read(text)
        except ValueError as error:
            found, told = [], str(error)
        else:
            told = ""
        assert found or repr(text) in told


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=1))
def test_counts_stand_for_themselves(pairs):
    text = ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in pairs)
    assert expand_counts(text) == [count for count, times in pairs for _ in range(times)]


@pytest.mark.parametrize(
    ("text", "what"),
    [("", "name of a host"), ("a,,b", "name of a host"), ("a[1", "not closed"), ("a]1", "too many"),
     ("a[[1]]", "too many"), ("a[]", "brackets"), ("a[2-1]", "ends before"), ("a[x]", "brackets"),
     (f"a[0-{MAX_HOSTS}]", "more than"), ("a[0-2000]b[0-2000]", "more than"), ("a b", "name of a host")],
)  # fmt: skip
def test_what_is_no_list_is_named(text, what):
    with pytest.raises(ValueError, match=what):
        expand_hosts(text)


def test_slurms_own_tool_reads_lists_as_we_do():
    if shutil.which("scontrol") is None:
        pytest.skip("no scontrol here (apt-get install slurm-client)")
    for text in ("gpu[01-03,7],login0", "rack[1-2]n[0-1]", "a[008-011]", "x", "n[1,3,5]"):
        done = subprocess.run(["scontrol", "show", "hostnames", text], capture_output=True, text=True, timeout=90)
        if done.returncode:
            pytest.skip(f"scontrol does not work here without a cluster: {done.stderr.strip()}")
        assert expand_hosts(text) == done.stdout.split(), text


SLURM = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NODELIST": "gpu[08-11]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURMD_NODENAME": "gpu10", "SLURM_JOB_NODELIST": "gpu[01-20]",
}  # fmt: skip


def flags(*argv: str):
    return config_from_args(parse([*argv, "script.py"], {}), 2)


def test_srun_says_all_that_phalanx_run_needs(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    for backend in ("slurm", "auto"):
        config = flags("--rdzv-backend", backend)
        assert (config.min_nodes, config.max_nodes, config.rdzv_backend) == (4, 4, "c10d")
        assert config.rdzv_endpoint == f"gpu08:{port_of('slurm-17.0.0')}"
        assert config.run_id == "slurm-17.0.0"
        assert config.rdzv_configs["is_host"] == "false"
    assert flags().max_nodes == 1, "nobody asked: as before"
    config = flags("--rdzv-backend", "slurm", "--nnodes", "3:4", "--rdzv-id", "mine", "--rdzv-endpoint", "elsewhere:1")
    assert (config.min_nodes, config.max_nodes, config.run_id) == (3, 4, "mine")
    assert (config.rdzv_endpoint, "is_host" in config.rdzv_configs) == ("elsewhere:1", False)
    monkeypatch.setenv("SLURMD_NODENAME", "gpu08")
    assert flags("--rdzv-backend", "slurm").rdzv_configs["is_host"] == "true"
    with pytest.raises(UsageError, match="slurm has started 4 agents only"):
        flags("--rdzv-backend", "slurm", "--nnodes", "5")
    with pytest.raises(UsageError, match="exclude each other"):
        flags("--rdzv-backend", "slurm", "--standalone")


def test_a_scheduler_and_an_etcd_of_the_jobs_own_go_together_and_no_other_backend_does(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    config = flags("--rdzv-backend", "slurm", "--rdzv-conf", "embedded=3")
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("etcd", f"gpu08:{port_of('slurm-17.0.0')}")
    assert config.rdzv_configs == {"embedded": "3", "is_host": "false"}
    assert flags("--rdzv-backend", "slurm", "--rdzv-conf", "embedded=0").rdzv_backend == "c10d"
    where = ("--nnodes", "3", "--rdzv-endpoint", "node0:1", "--rdzv-conf", "embedded=3")
    for backend in ("c10d", "static", "file"):
        with pytest.raises(UsageError, match=f"embedded=3 and --rdzv-backend {backend}"):
            flags("--rdzv-backend", backend, *where)
    assert flags("--rdzv-backend", "etcd", *where).rdzv_backend == "etcd"


def test_a_requeued_job_and_another_step_are_other_runs():
    found = [
        find_allocation("slurm", SLURM | more) for more in ({}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_STEP_ID": "1"})
    ]
    assert len({each.job for each in found}) == len({each.port for each in found}) == 3


def test_one_task_needs_no_endpoint(monkeypatch):
    for name, value in (SLURM | {"SLURM_STEP_NODELIST": "gpu08", "SLURM_STEP_TASKS_PER_NODE": "1"}).items():
        monkeypatch.setenv(name, value)
    config = flags("--rdzv-backend", "auto")
    assert (config.max_nodes, config.rdzv_endpoint) == (1, "localhost:0")


@pytest.mark.parametrize(
    ("change", "what"),
    [({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID or SLURM_JOBID is not set; was phalanx run started by srun?"),
     ({"SLURM_STEP_TASKS_PER_NODE": "1(x3)"}, "4 hosts .* task counts for 3"),
     ({"SLURM_STEP_NODELIST": "gpu[1"}, "not closed"),
     ({"SLURMD_NODENAME": "", "SLURM_NODEID": "x"}, "SLURM_NODEID='x'; expected a number")],
)  # fmt: skip
def test_what_slurm_does_not_say_is_named(change, what):
    with pytest.raises(ValueError, match=what):
        find_allocation("slurm", SLURM | change)


def test_several_tasks_per_host_are_several_agents():
    found = find_allocation("slurm", SLURM | {"SLURM_STEP_TASKS_PER_NODE": "0,2(x2),1"})
    assert (found.num_agents, found.host) == (5, "gpu09")


OMPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "3141",
}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_processes_of_mpirun_know_their_world():
    world = World.from_env(OMPI)
    assert (world.rank, world.size, world.local_rank, world.local_size, world.job) == (1, 4, 1, 4, "mpi-3141")
    assert mpi_variables(OMPI)["MASTER_ADDR"] == "127.0.0.1"
    assert FIRST_PORT <= int(mpi_variables(OMPI)["MASTER_PORT"]) < FIRST_PORT + NUM_PORTS
    world = World.from_env(HYDRA)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 1, 2)
    assert "MASTER_ADDR" not in mpi_variables(HYDRA), "several hosts: nobody says which is the first"
    assert World.from_env(OMPI | {"RANK": "0", "WORLD_SIZE": "2"}).size == 2, (
        "a launcher under mpirun has the last word"
    )
    assert World.from_env({"PMI_RANK": "3"}).size == 1, "half of it says nothing"
    with pytest.raises(ValueError, match="RANK='x'; expected an integer"):
        World.from_env(OMPI | {"OMPI_COMM_WORLD_RANK": "x"})


def test_mpirun_says_what_phalanx_run_needs(monkeypatch):
    for name, value in OMPI.items():
        monkeypatch.setenv(name, value)
    for backend in ("mpi", "auto"):
        config = flags("--rdzv-backend", backend)
        assert (config.max_nodes, config.run_id, config.rdzv_configs["is_host"]) == (4, "mpi-3141", "false")
        assert config.rdzv_endpoint == f"127.0.0.1:{port_of('mpi-3141')}"
    with pytest.raises(ValueError, match=re.escape("-x MASTER_ADDR=HOST")):
        find_allocation("mpi", HYDRA)
    found = find_allocation("mpi", HYDRA | {"MASTER_ADDR": "fd77::1", "MASTER_PORT": "4000"})
    assert (found.endpoint, found.serves) == ("[fd77::1]:4000", False)
    with pytest.raises(ValueError, match="was phalanx run started by mpirun"):
        find_allocation("mpi", {})


def test_an_indexed_job_says_what_phalanx_run_needs():
    told = {"JOB_COMPLETION_INDEX": "0", "PHALANX_NUM_PODS": "4", "PHALANX_JOB_NAME": "train", "PHALANX_SERVICE": "all"}
    found = find_allocation("auto", told)
    assert (found.endpoint, found.num_agents, found.serves, found.job) == ("train-0.all:29400", 4, True, "train")
    with pytest.raises(ValueError, match="PHALANX_NUM_PODS is not set; see examples/kubernetes"):
        find_allocation("auto", told | {"PHALANX_NUM_PODS": ""})
