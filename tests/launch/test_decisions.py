"""The agent's pure parts: policy, worker ids, environment, hang rule, failures."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx import protocol
from phalanx.comm.stores import MemoryStore
from phalanx.launch.agent._worker_ids import WorkerIds
from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.failures._process_failure import ChildFailedError, ProcessFailure
from phalanx.launch.hang._detector import HangDetector
from phalanx.launch.recovery import _policy
from phalanx.launch.recovery._agent_channel import AgentChannel, parse_wish
from phalanx.launch.recovery._policy import Situation
from phalanx.launch.recovery._streak import Death, after, is_loop
from phalanx.launch.system._signals import parse_signals
from phalanx.launch.workers._worker_environment import (
    JobFacts,
    RankAssignment,
    resolver_defaults,
    thread_defaults,
    worker_environment,
)
from phalanx.protocol import Action, ProgressReport, Recovery, Streak, recovery_key
from phalanx.world import World

pytestmark = pytest.mark.fast


def at(**report: int) -> bytes:
    return ProgressReport(**report).to_json()


situations = st.builds(
    Situation,
    heals=st.booleans(),
    restarts=st.integers(0, 4),
    max_restarts=st.integers(0, 4),
    num_nodes=st.integers(1, 4),
    min_nodes=st.integers(1, 4),
    survivors=st.integers(0, 4),
    is_under_way=st.booleans(),
    num_left=st.integers(0, 1),
    is_finishing=st.booleans(),
    can_regroup=st.booleans(),
    streak=st.builds(Streak, errors=st.integers(0, 5), step=st.integers(-1, 1)),
)


@given(situations, st.booleans())
def test_failures_never_use_more_restarts_than_allowed(now, is_incurable):
    recovery = _policy.on_failure(now, reason="x", is_incurable=is_incurable)
    if recovery.action in (Action.RESTART, Action.HEAL):
        assert recovery.restarts == now.restarts + 1 <= now.max_restarts
        assert not is_incurable
    else:
        assert recovery.restarts == now.restarts
    assert recovery.action is not Action.REGROUP
    if not now.heals:
        assert recovery.action in (Action.RESTART, Action.FAIL)
    if recovery.action is Action.SHRINK:
        assert now.survivors or now.num_nodes - 1 >= now.min_nodes
        assert not now.is_finishing, "what the lost one does after the last step would be missing"
        assert now.can_regroup
    if recovery.action is not Action.FAIL:
        assert recovery.starts_anew is not now.keeps_survivors


def test_a_replacement_that_cannot_start_does_not_kill_the_survivors():
    now = Situation(heals=True, restarts=0, max_restarts=9, num_nodes=1, min_nodes=1, survivors=2, is_under_way=True)
    assert _policy.on_failure(now, reason="x", is_incurable=True).action is Action.SHRINK


@given(situations, st.booleans())
def test_a_worker_that_stops_the_job_ends_it_whoever_survives(now, is_incurable):
    recovery = _policy.on_failure(now, reason="x", is_incurable=is_incurable, ends_job=True)
    assert (recovery.action, recovery.restarts) == (Action.FAIL, now.restarts)


class Started:
    def __init__(self, *, runs: bool, fails: bool = False) -> None:
        self.is_running = runs
        self.wants_successor = fails


def test_survivors_keep_their_place_and_successors_take_the_dead_ones():
    worker_ids = WorkerIds("n", 4)
    started = {
        "n.0": Started(runs=True),
        "n.1": Started(runs=False, fails=True),
        "n.2": Started(runs=False),
        "n.3": Started(runs=True),
    }
    assert worker_ids.close_ranks(started, replace=True) == {"n.1": "n.4", "n.2": None}
    assert worker_ids.ids == ["n.0", "n.4", "n.3"]
    started["n.4"] = Started(runs=False, fails=True)
    assert worker_ids.close_ranks(started, replace=False) == {"n.4": None}
    assert worker_ids.ids == ["n.0", "n.3"]
    worker_ids.grow(3)
    assert worker_ids.ids == ["n.0", "n.3", "n.5"]  # an id is never given twice
    worker_ids.renew(1)
    assert worker_ids.ids == ["n.6"]


ASSIGNMENT = RankAssignment(
    worker_id="w7", rank=5, local_rank=1, world_size=8, local_size=4, node_rank=1, num_nodes=2, generation=3,
    master_addr="node0", master_port=1234, store_url="tcp://node0:29400", role_rank=1, role_size=4,
)  # fmt: skip
JOB = JobFacts(run_id="j", restarts=2)
CONFIG = LaunchConfig(1, 2, 4, role="trainer", max_restarts=4, on_failure="heal")


def test_workers_get_torchruns_variables_and_ours():
    env = worker_environment(ASSIGNMENT, JOB, CONFIG, {})
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
    assert env[protocol.ENV_WORKER_ID] == "w7"
    assert env[protocol.ENV_STORE] == "tcp://node0:29400"
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
    assert worker_environment(ASSIGNMENT, JOB, CONFIG, outer)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_virtual_local_rank_shows_each_worker_its_own_device():
    config = LaunchConfig(1, 2, 4, virtual_local_rank=True)
    env = worker_environment(ASSIGNMENT, JOB, config, {"CUDA_VISIBLE_DEVICES": "4, 6,7"})
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", "6")
    assert worker_environment(ASSIGNMENT, JOB, config, {})["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(ValueError, match="local rank 1 has no device: CUDA_VISIBLE_DEVICES=4 lists 1"):
        worker_environment(ASSIGNMENT, JOB, config, {"CUDA_VISIBLE_DEVICES": "4"})


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


def test_a_worker_that_starts_has_a_limit_of_its_own():
    """Imports, and whatever precedes the first step that it computes."""
    hang = HangDetector(10, start_timeout=100)
    hang.observe({"old": at(step=4), "new": None}, now=0)
    hang.observe({"old": at(step=5), "new": None}, now=1)
    assert hang.hanging(now=12) == ["old"]
    hang.observe({"old": at(step=6), "new": at(step=-1, count=0)}, now=50)
    hang.observe({"old": at(step=6), "new": at(step=6, count=0)}, now=51)  # has the state, has its first to make
    assert hang.hanging(now=70) == ["old"]
    assert hang.hanging(now=152) == ["old", "new"]
    hang.observe({"old": at(step=7), "new": at(step=7)}, now=160)
    assert sorted(hang.hanging(now=171)) == ["new", "old"]
    assert (hang.limit("new"), hang.limit("unknown")) == (10, 100)


def test_one_that_is_stopped_while_it_starts_is_not_given_the_time_to_start():
    hang = HangDetector(10, start_timeout=1000)
    hang.observe({"old": at(step=4), "new": None}, now=0)
    hang.observe({"old": at(step=5), "new": None}, now=100, stopped={"new"})
    assert hang.hanging(now=109) == []  # it has only just been seen stopped
    assert hang.hanging(now=111) == ["new", "old"]
    hang.observe({"old": at(step=6), "new": None}, now=112)  # somebody let it go on
    assert hang.hanging(now=120) == []


def test_a_worker_that_says_that_it_computes_has_started():
    hang = HangDetector(10, start_timeout=1000)
    hang.observe({"w": at(step=5, count=0, waits=3)}, now=0)
    assert hang.limit("w") == 1000
    hang.observe({"w": at(step=5, count=1, waits=3)}, now=1)
    assert hang.limit("w") == 10


def test_time_in_which_nobody_looked_is_not_held_against_a_worker():
    """All processes of a job were stopped and continued: then the last report is old, and nobody hangs."""
    hang = HangDetector(10, interval=0.5)
    hang.observe({"w": b"1", "v": b"1"}, now=0, stopped={"v"})
    hang.observe({"w": b"1", "v": b"1"}, now=1, stopped={"v"})
    hang.observe({"w": b"1", "v": b"1"}, now=1001, stopped={"v"})
    assert hang.hanging(now=1001) == []
    for now in range(1002, 1011):
        hang.observe({"w": b"1", "v": b"2"}, now=now)
    assert hang.hanging(now=1010) == ["w"]


def test_every_generation_has_one_recovery():
    channel = AgentChannel(MemoryStore())
    first = Recovery(action=Action.RESTART, restarts=1, reason="rank 1")
    second = Recovery(action=Action.FAIL, restarts=0, reason="rank 2")
    assert channel.decide(0, first) == first
    assert channel.decide(0, second) == first
    assert [channel.recovery_before(g).restarts for g in (0, 1, 9)] == [0, 1, 0]


def test_everything_in_a_recovery_travels_to_the_other_agents():
    channel = AgentChannel(MemoryStore())
    streak = Streak(errors=2, kills=1, generation=4, begin=7, step=9)
    streak = replace(streak, place="step 9, slot 2", workers=("a", "b"), hosts=("h", "i"))
    sent = Recovery(action=Action.REGROUP, restarts=3, reason="x", starts_anew=True, streak=streak, ports_taken=2)
    sent = replace(sent, failures=("12.500 n", "13.000 m"), leave_out=("n",), limit="node")
    channel.decide(4, sent)
    assert channel.recovery_before(5) == sent


def test_what_an_agent_said_for_good_is_written_again_when_it_is_gone():
    store, lasting = MemoryStore(), {}
    channel = AgentChannel(store, lasting)
    channel.say_done(4, 1, "done")
    channel.say_ended("w")
    said = store.items()
    assert lasting == said
    for key in said:
        store.delete(key)
    AgentChannel(store).put_right({**lasting, "other": b"1"})
    assert store.items() == {**said, "other": b"1"}
    store.set("other", b"2")
    AgentChannel(store).put_right({"other": b"1"})
    assert store.get("other") == b"2"


@pytest.mark.parametrize("garbage", [b'{"v":1}', b'{"v":1,"action":"heal","restarts":[]}', b"[]"])
def test_a_recovery_that_is_none_is_named_and_written_over(garbage, caplog):
    store = MemoryStore()
    store.set(recovery_key(0), garbage)
    assert AgentChannel(store).recovery(0) is None
    assert "recovery record" in caplog.text
    sent = Recovery(action=Action.REGROUP, restarts=0, reason="x")
    assert AgentChannel(store).decide(0, sent) == sent == AgentChannel(store).recovery(0)


def crash(generation: int, *, born: int | None = None, **facts) -> Death:
    return Death(generation=generation, born=generation if born is None else born, **facts)


def streak_of(*deaths: Death) -> Streak:
    streak = Streak()
    for death in deaths:
        streak = after(streak, death)
    return streak


def test_the_fourth_death_in_a_row_is_a_crash_loop():
    assert not is_loop(streak_of(*(crash(g) for g in range(3))))
    assert is_loop(streak_of(*(crash(g) for g in range(4))))


def test_a_wave_that_is_noticed_over_several_generations_counts_once():
    streak = streak_of(*(crash(g, born=0) for g in range(8)))
    assert (streak.errors, is_loop(streak)) == (1, False)


def test_a_step_in_between_ends_a_streak_but_the_same_step_again_does_not():
    at = [crash(g, step=57, took_part=True) for g in range(4)]
    assert is_loop(streak_of(*at))  # from a save to the same bad sample, again and again
    on = [crash(g, step=57 + g, took_part=True) for g in range(100)]
    assert not is_loop(streak_of(*on))


def test_who_is_killed_is_replaced_more_often_than_who_crashes():
    kills = [crash(g, is_killed=True) for g in range(11)]
    assert not is_loop(streak_of(*kills[:10], crash(10)))
    assert is_loop(streak_of(*kills))


def test_of_scripts_that_report_no_steps_a_long_life_is_taken_for_progress():
    assert not is_loop(streak_of(*(crash(g, lived=1e4) for g in range(100))))


def test_replacements_that_cannot_start_leave_a_job_that_goes_on_with_fewer():
    """The script was edited under a running job: survivors train on, whoever starts now dies."""
    streak = streak_of(crash(0, step=10, took_part=True), *(crash(g, step=10 + g) for g in range(1, 4)))
    now = Situation(heals=True, restarts=3, max_restarts=9, num_nodes=1, min_nodes=1, survivors=2, is_under_way=True)
    recovery = _policy.on_failure(now, reason="x", is_incurable=False, streak=streak)
    assert (recovery.action, recovery.streak) == (Action.SHRINK, Streak())
    plain = replace(now, can_regroup=False)
    recovery = _policy.on_failure(plain, reason="x", is_incurable=False, streak=streak)
    assert recovery.action is Action.FAIL
    assert "3 replacements in a row died" in recovery.reason


def test_a_crash_loop_under_restart_is_bounded_by_its_restarts_alone():
    streak = streak_of(*(crash(g) for g in range(9)))
    now = Situation(heals=False, restarts=8, max_restarts=9, num_nodes=1, min_nodes=1, survivors=0)
    assert _policy.on_failure(now, reason="x", is_incurable=False, streak=streak).action is Action.RESTART


def test_workers_that_cannot_regroup_start_anew_whatever_happens():
    now = Situation(heals=True, restarts=0, max_restarts=1, num_nodes=2, min_nodes=1, survivors=3, can_regroup=False)
    failed = _policy.on_failure(now, reason="x", is_incurable=False)
    assert (failed.action, failed.starts_anew, failed.restarts) == (Action.RESTART, True, 1)
    changed = _policy.on_membership_change(now, reason="x")
    assert (changed.action, changed.starts_anew, changed.restarts) == (Action.REGROUP, True, 0)
    used = _policy.on_failure(replace(now, restarts=1), reason="x", is_incurable=False)
    assert used.action is Action.FAIL  # they could not go on with fewer


def test_one_word_counts_for_a_role_and_every_role_must_have_spoken():
    workers = {"trainer": ["a", "b"], "reader": ["c"]}
    assert not _policy.all_can_regroup(workers, {"a"})
    assert _policy.all_can_regroup(workers, {"b", "c"})


def test_ports_that_are_taken_again_and_again_end_the_job():
    now = Situation(heals=False, restarts=0, max_restarts=9, num_nodes=1, min_nodes=1, survivors=0)
    for count in range(1, _policy.MAX_PORTS):
        recovery = _policy.on_port_taken(now, reason="x", is_chosen=False)
        assert (recovery.action, recovery.ports_taken) == (Action.REGROUP, count)
        now = replace(now, ports_taken=recovery.ports_taken)
    assert _policy.on_port_taken(now, reason="x", is_chosen=False).action is Action.FAIL


@pytest.mark.parametrize(
    ("fields", "is_from_outside"),
    [
        ({"exitcode": -9}, True),
        ({"exitcode": -9, "note": "it hung"}, False),
        ({"exitcode": -11}, False),
        ({"exitcode": 1, "message": "NameError: name 'x' is not defined"}, False),
        ({"exitcode": 1, "message": "DistNetworkError: The client socket has failed to connect"}, True),
        ({"exitcode": 1, "message": "torch.distributed.DistNetworkError: failed to recv"}, True),
    ],
)
def test_who_was_killed_or_complains_did_not_fail_by_itself(fields, is_from_outside):
    assert ProcessFailure(local_rank=0, pid=1, **fields).is_from_outside is is_from_outside


def test_failures_of_all_nodes_are_found_again():
    channel = AgentChannel(MemoryStore())
    for rank, seconds in ((0, 20.0), (3, 10.0)):
        where = {"rank": rank, "worker_id": f"w{rank}", "host": f"h{rank}", "generation": 2, "local_rank": 0}
        channel.report(ProcessFailure(pid=rank, exitcode=-9, timestamp=seconds, stderr_tail=("a", "b"), **where))
    found = channel.failures(2)
    assert sorted(found) == [0, 3]
    assert found[3].stderr_tail == ("a", "b")
    error = ChildFailedError("job", found)
    assert error.get_first_failure()[0] == 3
    text = str(error)
    assert text.index("h3") < text.index("h0")
    assert channel.failures(1) == {}


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
    AgentChannel(store).report(ProcessFailure(message=huge, traceback=huge, stderr_tail=(huge,) * 20, **where))
    (data,) = store.items("agents/failures/0/").values()
    assert len(data) < 500_000
    told = AgentChannel(store).failures(0)[0]
    for text in (told.message, told.traceback, *told.stderr_tail):
        assert text.startswith("aaa")
        assert "characters left out" in text
        assert text.endswith("az")


def test_wishes_that_make_no_sense_are_no_wishes():
    assert [parse_wish(data) for data in (None, b"", b"x", b"-1", b"9" * 10)] == [None] * 5
    assert [parse_wish(data) for data in (b"0", b"3")] == [0, 3]  # none: the node is to be drained


def test_report_shows_what_is_known(tmp_path):
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "E: x", "extraInfo": {"py_callstack": "T", "timestamp": "5"}}}))
    failure = ProcessFailure(
        exitcode=1,
        error_file=str(path),
        timestamp=9.0,
        local_rank=0,
        pid=1,
        rank=0,
        stderr_tail=("last words",),
    )
    assert (failure.message, failure.traceback, failure.timestamp) == ("E: x", "T", 5.0)
    text = ChildFailedError("train.py", {0: failure}).format_msg()
    for expected in ("train.py FAILED", "E: x", "last words", "exitcode  : 1"):
        assert expected in text
    bare = ProcessFailure(exitcode=-11, error_file="", timestamp=9.0, local_rank=0, pid=1)
    assert (bare.signal_name(), bare.timestamp) == ("SIGSEGV", 9.0)
    assert "SIGSEGV" in bare.message
    path.write_text("{half a rec")
    torn = ProcessFailure(exitcode=3, error_file=str(path), timestamp=9.0, local_rank=0, pid=1)
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
