"""When going on makes no sense: budgets in a window, no progress, nodes that are left out, scripts that say so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx
from phalanx.launch.cli._flags import parse
from phalanx.launch.cli._from_flags import config_from_args
from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.events import LimitReached, read_events
from phalanx.launch.failures._process_failure import ProcessFailure
from phalanx.launch.recovery import _budget, _policy
from phalanx.launch.recovery._budget import NOBODY, NODE_FAILURES, NODE_WINDOW, Failure, dump_failures, parse_failures
from phalanx.launch.recovery._policy import Situation
from phalanx.launch.recovery._streak import Death, after, describe, is_loop
from phalanx.protocol import Action, Recovery, Streak

NOW = Situation(
    heals=True, restarts=0, max_restarts=4, num_nodes=3, min_nodes=1, survivors=1, is_under_way=True, node="a"
)


def live_through(failures: list[tuple[float, str]], **facts) -> list[Recovery]:
    """What is decided about each of some failures, one after the other: what one agent says the next one reads."""
    recovery, decided = Recovery(action=Action.REGROUP, restarts=0, reason=""), []
    for time, node in failures:
        now = replace(NOW, restarts=recovery.restarts, failures=parse_failures(recovery.failures), time=time, node=node)
        recovery = _policy.on_failure(replace(now, **facts), reason="x", is_incurable=False)
        decided.append(recovery)
        if recovery.action is Action.FAIL:
            break
    return decided


histories = st.lists(st.tuples(st.floats(0, 1e5), st.sampled_from("abc")), max_size=60).map(sorted)


@pytest.mark.fast
@given(histories, st.integers(0, 5), st.sampled_from([0.0, 10.0, 3600.0]), st.booleans())
def test_no_window_holds_more_restarts_than_are_allowed(failures, max_restarts, window, heals):
    decided = live_through(failures, max_restarts=max_restarts, window=window, heals=heals, can_regroup=heals)
    times = [
        time for (time, _), one in zip(failures, decided, strict=False) if one.action in (Action.HEAL, Action.RESTART)
    ]
    for end in times:
        inside = [time for time in times if end - window + 1e-3 < time <= end] if window else times
        assert len(inside) <= max_restarts
    for one in decided:
        assert (one.limit == "restarts") == (one.action in (Action.SHRINK, Action.FAIL))


@pytest.mark.fast
def test_a_job_that_fails_now_and_then_never_uses_up_a_window():
    every_three_hours = [(3 * 3600.0 * n, "abc"[n % 3]) for n in range(1000)]
    decided = live_through(every_three_hours, max_restarts=1, window=3600.0)
    assert {one.action for one in decided} == {Action.HEAL}
    assert decided[-1].restarts == 1000
    assert len(decided[-1].failures) < 100, "what no decision asks for any more is forgotten"
    burst = live_through([(0.0, "a"), (1.0, "b"), (2.0, "a")], max_restarts=2, window=3600.0, heals=False)
    assert burst[-1].reason == "x; all 2 restarts are used within 3600 s (the next is free in 3598 s)"


@pytest.mark.fast
@given(histories, st.floats(0, 1e5))
def test_announced_deaths_and_lost_nodes_do_not_count(failures, time):
    known = tuple(Failure(*each) for each in failures)
    now = replace(NOW, restarts=2, failures=known, max_restarts=len(known), window=60.0, time=time)
    for recovery in (_policy.on_leave(now, reason="left"), _policy.on_membership_change(now, reason="lost")):
        assert recovery is not None
        assert recovery.restarts == 2
        kept = parse_failures(recovery.failures)
        assert [one.node for one in kept] == [one.node for one in known]
        assert _budget.used(kept, 2, 60.0, time) == pytest.approx(now.used, abs=1)  # times travel in milliseconds


@pytest.mark.fast
@given(histories, st.integers(1, 4), st.integers(1, 4), st.integers(0, 1))
def test_a_node_is_left_out_for_failures_in_a_row_and_never_if_too_few_would_stay(failures, num_nodes, min_nodes, left):
    facts = {"num_nodes": num_nodes, "min_nodes": min_nodes, "num_left": left, "max_restarts": 1000}
    decided = live_through(failures, **facts)
    for n, recovery in enumerate(decided):
        last = failures[max(0, n + 1 - NODE_FAILURES) : n + 1]
        is_row = len(last) == NODE_FAILURES and len({node for _, node in last}) == 1
        is_soon = is_row and last[0][0] > failures[n][0] - NODE_WINDOW + 1e-3
        if recovery.leave_out:
            assert recovery.leave_out == (failures[n][1],)
            assert is_row
            assert recovery.limit == "node"
            assert f"node {failures[n][1]} is left out" in recovery.reason
        if recovery.leave_out or not is_soon:
            continue
        assert num_nodes - left - 1 < min_nodes or num_nodes - left < 2


@pytest.mark.fast
def test_a_failure_that_is_no_nodes_own_leaves_nobody_out():
    assert not live_through([(float(n), NOBODY) for n in range(4)], max_restarts=9)[-1].leave_out
    travelled = Streak(errors=2, place="step 3", workers=("a", "b"), hosts=("x", "y"))
    now = replace(NOW, failures=tuple(Failure(float(n), "a") for n in range(5)), time=6.0, max_restarts=9)
    assert _policy.on_failure(now, reason="x", is_incurable=False).leave_out == ("a",)
    assert not _policy.on_failure(now, reason="x", is_incurable=False, streak=travelled).leave_out


@pytest.mark.fast
def test_lists_of_failures_survive_strangers():
    texts = ["1.0 a", "nan a", "inf a", "x", "", "2.0", "3.5 node with spaces", "-1 b"]
    assert parse_failures(texts) == (Failure(1.0, "a"), Failure(3.5, "node with spaces"), Failure(-1.0, "b"))
    many = [Failure(float(n), "a") for n in range(500)]
    assert parse_failures(dump_failures(many, 100)) == tuple(many[-100:])


def death(generation: int, worker: str, host: str = "h", **facts) -> Death:
    place = "step 812, slot 5, samples 3, 17"
    facts = {"place": place, "step": 812, "took_part": True, "born": 0, **facts}
    return Death(generation=generation, worker=worker, host=host, **facts)


@pytest.mark.fast
def test_the_same_place_on_another_machine_is_the_code_or_the_data():
    """Workers that were there from the beginning die one after the other: in one place, so that is no wave."""
    streak = Streak()
    for generation, worker in enumerate("abc"):
        assert not is_loop(streak)
        streak = after(streak, death(generation, worker, host=worker.upper()))
    assert is_loop(streak), "the third"
    assert describe(streak) == (
        "step 812, slot 5, samples 3, 17 failed on workers a, b, c: the code or the data, not the machine"
    )
    recovery = _policy.on_failure(NOW, reason="x", is_incurable=False, streak=streak)
    assert recovery.action is Action.FAIL
    assert recovery.limit == "progress"
    assert describe(streak) in recovery.reason
    assert is_loop(after(after(Streak(), death(0, "a")), death(1, "b")), max_errors=1)
    elsewhere = after(streak, death(9, "e", born=9, place="step 812, slot 6, samples 4"))
    assert elsewhere.workers == ("e",)
    assert "in a row died without a step" in describe(elsewhere)
    on = after(streak, death(9, "e", born=9, step=813, place="step 813, slot 5, samples 8"))
    assert (on.errors, on.workers) == (1, ("e",)), "a step further is progress"


@pytest.mark.fast
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abcd"), st.integers(0, 9)), max_size=40))
def test_progress_always_ends_a_streak_and_without_it_a_loop_is_found(deaths):
    """Each death one step further than the last is never a loop; each of a new worker at one step is, at the fourth."""
    going, stuck = Streak(), Streak()
    for generation, (slot, worker, _) in enumerate(deaths):
        place = f"step {generation}, slot {slot}"
        going = after(going, death(generation, worker, step=generation, place=place, born=generation))
        stuck = after(stuck, death(generation, f"{worker}{generation}", place=f"step 5, slot {slot}", born=generation))
        assert not is_loop(going)
        assert is_loop(stuck) == (generation >= 3)


@pytest.mark.fast
def test_a_bad_node_is_left_out_before_the_job_is_given_up_for_it():
    """Its workers die at their start: at the third the node goes; a job that stopped there would be lost for it."""
    streak, failures = Streak(), ()
    for n in range(NODE_FAILURES):
        streak = after(streak, Death(generation=n, born=n, worker=f"a{n}", host="A"))
        now = replace(NOW, restarts=n, failures=failures, time=float(n), max_restarts=9)
        recovery = _policy.on_failure(now, reason="x", is_incurable=False, streak=streak)
        failures = parse_failures(recovery.failures)
    assert (recovery.action, recovery.leave_out, recovery.limit) == (Action.HEAL, ("a",), "node")


@pytest.mark.fast
@pytest.mark.parametrize("facts", [{"step": 812, "place": ""}, {"step": -1}, {"step": -1, "place": ""}])
def test_starting_anew_without_progress_ends_where_workers_tell_how_far_they_got(facts):
    streak = Streak()
    now = replace(NOW, heals=False, can_regroup=False, max_restarts=99)
    for n in range(20):
        streak = after(streak, death(n, f"w{n}", born=n, **facts))
        recovery = _policy.on_failure(now, reason="x", is_incurable=False, streak=streak)
        if recovery.action is Action.FAIL:
            break
    if facts == {"step": -1, "place": ""}:
        assert recovery.action is Action.RESTART, "nobody knows: only the budget ends that"
        return
    assert (n, recovery.limit) == (3, "progress")
    why = (
        "3 starts in a row failed without a step that the job had not reached before" if not streak.place else "slot 5"
    )
    assert why in recovery.reason


@pytest.mark.fast
@given(st.lists(st.integers(0, 3), max_size=30))
def test_a_step_of_any_worker_is_progress_where_all_start_anew(gains):
    """Only the first worker reports, another one dies: ``took_part`` is what the agent makes of that."""
    streak, step, last = Streak(), 0, -1
    for n, gain in enumerate(gains):
        step += gain
        streak = after(streak, death(n, f"w{n}", born=n, step=step, place="", took_part=True))
        last = n if gain or not n else last
        assert is_loop(streak) == (n - last > 2)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("words", "budget"),
    [
        (["--on-failure", "heal"], (100, 3600.0)),
        (["--on-failure", "heal", "--restart-window", "0"], (100, 0.0)),
        (["--on-failure", "heal", "--restart-window", "1d"], (100, 86400.0)),
        (["--on-failure", "heal", "--max-restarts", "7"], (7, 0.0)),
        (["--max-restarts", "7", "--restart-window", "1h"], (7, 3600.0)),
        ([], (0, 0.0)),
    ],
)
def test_a_budget_that_nobody_has_told_is_one_of_an_hour(words, budget):
    config = config_from_args(parse([*words, "x.py"], {}), 1)
    assert (config.max_restarts, config.restart_window) == budget


@pytest.mark.fast
def test_flags_and_their_mistakes():
    args = parse(["--restart-window", "1h", "--max-failures-without-progress", "5", "x.py"], {})
    assert (args.restart_window, args.max_failures_without_progress) == (3600.0, 5)
    for fields in ({"restart_window": -1.0}, {"restart_window": float("inf")}, {"max_failures_without_progress": -1}):
        with pytest.raises(ValueError, match="expected 0"):
            LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, **fields)
    with pytest.raises(ValueError, match="restart-window"):
        parse(["--restart-window", "soon", "x.py"], {})


@pytest.mark.fast
def test_exit_code_93_and_do_not_retry_mean_the_same(tmp_path):
    failure = ProcessFailure(0, 7, 93)
    assert failure.ends_job
    assert failure.is_incurable
    assert "do not retry" in failure.message
    told = tmp_path / "error.json"
    told.write_text(json.dumps({"message": {"message": "ValueError: odd"}}))
    assert ProcessFailure(0, 7, 93, str(told)).ends_job, "also with a file that does not say so"
    assert issubclass(phalanx.DoNotRetry, phalanx.errors.JobStopped)


def test_a_script_that_says_do_not_retry_is_started_once(launcher, tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(
        "import sys, phalanx\nopen(sys.argv[1], 'a').write('x')\nraise phalanx.DoNotRetry('the vocabulary is gone')\n"
    )
    agents = [
        launcher.run("--max-restarts", 5, f"--log-dir={tmp_path / 'log'}", script, tmp_path / "a"),
        launcher.run("--max-restarts", 5, "--on-failure", "heal", "--no-python",
                     "sh", "-c", f"echo >> {tmp_path}/b; exit 93"),
    ]  # fmt: skip
    assert [agent.wait() for agent in agents] == [93, 93], [agent.output for agent in agents]
    assert (len((tmp_path / "a").read_text()), len((tmp_path / "b").read_text())) == (1, 1)
    assert "DoNotRetry: the vocabulary is gone" in agents[0].output
    (path,) = (tmp_path / "log").rglob("events.jsonl")
    assert [event.limit for event in read_events(path) if isinstance(event, LimitReached)] == ["do not retry"]


def test_a_budget_that_is_used_up_is_an_event(launcher, tmp_path):
    agent = launcher.run("--max-restarts", 1, "--restart-window", "1h", f"--log-dir={tmp_path / 'log'}",
                         "--no-python", "sh", "-c", f"echo >> {tmp_path}/starts; exit 3")  # fmt: skip
    assert agent.wait() == 1
    assert len((tmp_path / "starts").read_text()) == 2
    (path,) = (tmp_path / "log").rglob("events.jsonl")
    (event,) = [event for event in read_events(path) if isinstance(event, LimitReached)]
    assert event.limit == "restarts"
    assert "all 1 restarts are used within 3600 s" in event.reason
    assert event.reason in agent.output, "and a sentence"


def test_a_restart_is_free_again_when_its_window_has_passed(launcher, tmp_path):
    """With a total of one restart the second failure would end the job; the script makes it come after the window."""
    script = f"""
        echo >> {tmp_path}/starts
        case $(wc -l < {tmp_path}/starts) in
            1) exit 3 ;;
            2) sleep 3; exit 3 ;;
        esac
    """
    agent = launcher.run("--max-restarts", 1, "--restart-window", 2, f"--log-dir={tmp_path / 'log'}",
                         "--no-python", "sh", "-c", script)  # fmt: skip
    assert agent.wait() == 0, agent.output
    assert len((tmp_path / "starts").read_text()) == 3
    (path,) = (tmp_path / "log").rglob("events.jsonl")
    assert [event for event in read_events(path) if isinstance(event, LimitReached)] == []


FAILING_NODE = """
import os, sys, time
with open(sys.argv[1] + "/starts", "a") as file:
    file.write(f"{sys.argv[2]} {os.environ['PHALANX_GENERATION']} {os.environ['WORLD_SIZE']}\\n")
while not os.path.exists(sys.argv[1] + "/end"):
    if sys.argv[2] == "bad" and os.environ["WORLD_SIZE"] == "2":
        sys.exit(3)
    time.sleep(0.01)
"""


def test_a_node_whose_workers_die_again_and_again_is_left_out_and_the_others_go_on(
    launcher, tmp_path, wait_for, held_port
):
    script = tmp_path / "script.py"
    script.write_text(FAILING_NODE)

    def run(kind: str):
        return launcher.run(
            "--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{held_port}",
            "--rdzv-id", "bad", "--max-restarts", 9, f"--log-dir={tmp_path / kind}", script, tmp_path, kind,
        )  # fmt: skip

    good, bad = run("good"), run("bad")

    def rows() -> list[list[str]]:
        path = tmp_path / "starts"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    wait_for(lambda: ["good", "1"] in [[row[0], row[2]] for row in rows()], "the good node alone", good)
    (tmp_path / "end").touch()
    assert [good.wait(), bad.wait()] == [0, 0], good.output + bad.output
    assert sum(row[0] == "bad" for row in rows()) == NODE_FAILURES, rows()
    assert "this node is left out: " in bad.output
    for agent, kind in ((good, "good"), (bad, "bad")):
        assert "is left out: the last 3 failures were all of its workers" in agent.output
        (path,) = (tmp_path / kind).rglob("events.jsonl")
        (event,) = [event for event in read_events(path) if isinstance(event, LimitReached)]
        assert event.limit == "node"
        assert len(event.nodes) == 1
    launcher.wait_until_empty()
