"""The agent's pure parts: policy, roster, environment, hang rule, failures."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx import membership
from phalanx.comm.stores import MemoryStore
from phalanx.launch import _policy
from phalanx.launch._environment import (
    JobFacts,
    Place,
    resolver_defaults,
    thread_defaults,
    worker_environment,
)
from phalanx.launch._failures import ChildFailedError, ProcessFailure
from phalanx.launch._hang import HangDetector
from phalanx.launch._journal import Journal, parse_wish
from phalanx.launch._policy import Action, Situation, Verdict
from phalanx.launch._roster import Roster
from phalanx.launch._signals import parse_signals
from phalanx.world import World

pytestmark = pytest.mark.fast

situations = st.builds(
    Situation,
    heals=st.booleans(),
    restarts=st.integers(0, 4),
    max_restarts=st.integers(0, 4),
    num_nodes=st.integers(1, 4),
    min_nodes=st.integers(1, 4),
    survivors=st.integers(0, 4),
    is_under_way=st.booleans(),
)


@given(situations, st.booleans())
def test_failures_never_use_more_restarts_than_allowed(now, is_incurable):
    verdict = _policy.on_failure(now, reason="x", is_incurable=is_incurable)
    if verdict.action in (Action.RESTART, Action.HEAL):
        assert verdict.restarts == now.restarts + 1 <= now.max_restarts
        assert not is_incurable
    else:
        assert verdict.restarts == now.restarts
    assert verdict.action is not Action.REGROUP
    if not now.heals:
        assert verdict.action in (Action.RESTART, Action.FAIL)
    if verdict.action is Action.SHRINK:
        assert now.survivors or now.num_nodes - 1 >= now.min_nodes


def test_a_replacement_that_cannot_start_does_not_kill_the_survivors():
    now = Situation(
        heals=True, restarts=0, max_restarts=9, num_nodes=1, min_nodes=1, survivors=2, is_under_way=True
    )
    assert _policy.on_failure(now, reason="x", is_incurable=True).action is Action.SHRINK


@given(situations, st.booleans())
def test_a_worker_that_stops_the_job_ends_it_whoever_survives(now, is_incurable):
    verdict = _policy.on_failure(now, reason="x", is_incurable=is_incurable, ends_job=True)
    assert (verdict.action, verdict.restarts) == (Action.FAIL, now.restarts)


class Started:
    def __init__(self, *, runs: bool, fails: bool = False) -> None:
        self.is_running = runs
        self.wants_successor = fails


def test_survivors_keep_their_place_and_successors_take_the_dead_ones():
    roster = Roster("n", 4)
    started = {
        "n.0": Started(runs=True),
        "n.1": Started(runs=False, fails=True),
        "n.2": Started(runs=False),
        "n.3": Started(runs=True),
    }
    assert roster.close_ranks(started, replace=True) == {"n.1": "n.4", "n.2": None}
    assert roster.ids == ["n.0", "n.4", "n.3"]
    started["n.4"] = Started(runs=False, fails=True)
    assert roster.close_ranks(started, replace=False) == {"n.4": None}
    assert roster.ids == ["n.0", "n.3"]
    roster.grow(3)
    assert roster.ids == ["n.0", "n.3", "n.5"]  # an id is never given twice
    roster.renew(1)
    assert roster.ids == ["n.6"]


PLACE = Place(
    worker_id="w7", rank=5, local_rank=1, world_size=8, local_size=4, node_rank=1, num_nodes=2, generation=3,
    master_addr="node0", master_port=1234, store_url="tcp://node0:29400", role_rank=1, role_size=4,
)  # fmt: skip
JOB = JobFacts(
    run_id="j", role="trainer", restarts=2, max_restarts=4, on_failure="heal", use_agent_store=True
)


def test_workers_get_torchruns_variables_and_ours():
    env = worker_environment(PLACE, JOB, {})
    assert {name: env[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME")} == {
        "RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "1", "ROLE_RANK": "1", "ROLE_NAME": "trainer",
    }  # fmt: skip
    assert {name: env[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")} == {
        "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "4",
    }  # fmt: skip
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("node0", "1234")
    assert env["TORCHELASTIC_RESTART_COUNT"] == "2"
    assert env["TORCHELASTIC_MAX_RESTARTS"] == "4"
    assert env["TORCHELASTIC_RUN_ID"] == "j"
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert env["OMP_NUM_THREADS"] == "1"
    assert env[membership.ENV_WORKER_ID] == "w7"
    assert env[membership.ENV_STORE] == "tcp://node0:29400"
    assert World.from_env(env) == World(
        rank=5,
        size=8,
        local_rank=1,
        local_size=4,
        node_rank=1,
        num_nodes=2,
        job="j",
        generation=3,
        restart_count=2,
    )


def test_what_the_user_set_is_kept():
    assert thread_defaults(4, {"OMP_NUM_THREADS": "3"}) == {}
    assert thread_defaults(1, {}) == {}
    assert resolver_defaults({"RES_OPTIONS": "rotate"}) == {}
    outer = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    assert worker_environment(PLACE, JOB, outer)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_virtual_local_rank_shows_each_worker_its_own_device():
    job = JobFacts(**{**vars(JOB), "virtual_local_rank": True})
    env = worker_environment(PLACE, job, {"CUDA_VISIBLE_DEVICES": "4, 6,7"})
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", "6")
    assert worker_environment(PLACE, job, {})["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(ValueError, match="local rank 1 has no device: CUDA_VISIBLE_DEVICES=4 lists 1"):
        worker_environment(PLACE, job, {"CUDA_VISIBLE_DEVICES": "4"})


def test_silent_workers_are_never_suspected():
    hang = HangDetector(10)
    hang.observe({"a": None, "b": None}, now=0)
    assert hang.hanging(now=1e6) == []


def test_progress_keeps_a_worker_out_of_suspicion():
    hang = HangDetector(10)
    for now in range(0, 100, 5):
        hang.observe({"a": str(now).encode(), "b": b"stuck"}, now)
    assert hang.hanging(now=99) == ["b"]
    hang.reset(now=99)
    assert hang.hanging(now=100) == []
    hang.observe({"a": b"new"}, now=200)  # b is gone
    assert hang.hanging(now=205) == []


def test_every_generation_has_one_verdict():
    journal = Journal(MemoryStore())
    first = Verdict(action=Action.RESTART, restarts=1, reason="rank 1")
    second = Verdict(action=Action.FAIL, restarts=0, reason="rank 2")
    assert journal.decide(0, first) == first
    assert journal.decide(0, second) == first
    assert (journal.restarts_before(0), journal.restarts_before(1), journal.restarts_before(9)) == (0, 1, 0)


def test_failures_of_all_nodes_are_found_again():
    journal = Journal(MemoryStore())
    for rank, seconds in ((0, 20.0), (3, 10.0)):
        where = {"rank": rank, "worker_id": f"w{rank}", "host": f"h{rank}", "generation": 2, "local_rank": 0}
        journal.report(
            ProcessFailure(pid=rank, exitcode=-9, timestamp=seconds, stderr_tail=("a", "b"), **where)
        )
    found = journal.failures(2)
    assert sorted(found) == [0, 3]
    assert found[3].stderr_tail == ("a", "b")
    error = ChildFailedError("job", found)
    assert error.get_first_failure()[0] == 3
    text = str(error)
    assert text.index("h3") < text.index("h0")
    assert journal.failures(1) == {}


def test_who_complains_of_a_lost_peer_is_not_the_cause_though_it_was_noticed_first():
    """A peer's connection closes before the end of its process is noticed: the times say the wrong thing."""
    common = {"local_rank": 0, "pid": 1}
    killed = ProcessFailure(exitcode=-9, timestamp=20.0, message="killed by SIGKILL", **common)
    raised = ProcessFailure(exitcode=1, timestamp=21.0, message="ValueError: 7", **common)
    for said in (
        "RuntimeError: Connection closed by peer [::1]:5",
        "PeerLost: rank 1",
        "x: Connection reset by peer",
    ):
        complains = ProcessFailure(exitcode=1, timestamp=10.0, message=said, **common)
        assert ChildFailedError("job", {0: complains, 1: killed, 2: raised}).get_first_failure()[0] == 1
        stopped = replace(complains, exitcode=-15)  # by its agent, when it had complained but not ended
        assert ChildFailedError("job", {0: stopped, 1: killed, 2: raised}).get_first_failure()[0] == 1
        assert ChildFailedError("job", {0: complains}).get_first_failure()[0] == 0


def test_a_huge_failure_is_told_to_others_in_a_size_that_every_store_takes():
    store = MemoryStore()
    where = {"rank": 0, "worker_id": "w", "generation": 0, "local_rank": 0, "pid": 1, "exitcode": 1}
    huge = "a" * 1_000_000 + "z"
    Journal(store).report(ProcessFailure(message=huge, traceback=huge, stderr_tail=(huge,) * 20, **where))
    (data,) = store.items("agents/failures/0/").values()
    assert len(data) < 500_000
    told = Journal(store).failures(0)[0]
    for text in (told.message, told.traceback, *told.stderr_tail):
        assert text.startswith("aaa")
        assert "characters left out" in text
        assert text.endswith("az")


def test_wishes_that_make_no_sense_are_no_wishes():
    assert [parse_wish(data) for data in (None, b"", b"x", b"0", b"-1", b"3")] == [None] * 5 + [3]


def test_report_shows_what_is_known(tmp_path):
    path = tmp_path / "error.json"
    path.write_text(
        json.dumps({"message": {"message": "E: x", "extraInfo": {"py_callstack": "T", "timestamp": "5"}}})
    )
    failure = ProcessFailure.observe(
        exitcode=1,
        error_file=str(path),
        ended_at=9.0,
        local_rank=0,
        pid=1,
        rank=0,
        stderr_tail=("last words",),
    )
    assert (failure.message, failure.traceback, failure.timestamp) == ("E: x", "T", 5.0)
    text = ChildFailedError("train.py", {0: failure}).format_msg()
    for expected in ("train.py FAILED", "E: x", "last words", "exitcode  : 1"):
        assert expected in text
    bare = ProcessFailure.observe(exitcode=-11, error_file="", ended_at=9.0, local_rank=0, pid=1)
    assert (bare.signal_name(), bare.timestamp) == ("SIGSEGV", 9.0)
    assert "SIGSEGV" in bare.message
    path.write_text("{half a rec")
    torn = ProcessFailure.observe(exitcode=3, error_file=str(path), ended_at=9.0, local_rank=0, pid=1)
    assert torn.message == "exit code 3"


def test_errors_survive_pickling():
    error = ChildFailedError("x", {1: ProcessFailure(local_rank=1, pid=7, exitcode=2, rank=1, timestamp=1.0)})
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    with pytest.raises(ValueError, match="at least one failure"):
        ChildFailedError("x", {})


@pytest.mark.parametrize("names", ["SIGFOO", "SIGKILL", "SIGTERM,SIGSTOP"])
def test_signals_that_cannot_be_handled_are_refused(names):
    with pytest.raises(ValueError, match="SIG"):
        parse_signals(names)
