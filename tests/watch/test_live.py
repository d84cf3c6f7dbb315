"""A live job, its page, its commands: a worker is killed, one joins, the agent that serves is killed, a node drained.

Few processes, many assertions: what is shown is what the job's own files say.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import PRELOAD, SCRIPT, Cluster
from watching import Client

from phalanx.__main__ import main
from phalanx.watch._access import sign, token_of

SECRET = "a secret of this test"


def addresses(cluster: Cluster) -> list[str]:
    return re.findall(r"the job is shown at (http://\S+)", cluster.text())


def told_json(capsys: Any, *words: str) -> Any:
    """What a command prints, as JSON."""
    capsys.readouterr()
    assert main(list(words)) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def told_lines(capsys: Any, *words: str) -> list[Any]:
    """What a command prints, a line of JSON each; none where it has nothing to say yet."""
    capsys.readouterr()
    main(list(words))
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def act(client: Client, secret: bytes, action: str, **wish: Any) -> dict[str, Any]:
    body = json.dumps({"nonce": client.json("/api/v1/nonce")["nonce"], "confirm": True, **wish}).encode()
    signature = sign(secret, action, body)
    status, _, answer = client.ask(f"/api/v1/actions/{action}", method="POST", body=body, X_Phalanx_Signature=signature)
    assert status == 200, answer
    found: dict[str, Any] = json.loads(answer)
    return found


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two workers that go no further than step 8, with a page; commands find the job by themselves."""
    cluster = Cluster(
        tmp_path / "job", 2, 24, hold=8, dashboard="0", rdzv_id="shown", log_dir=str(tmp_path / "kept"),
        tee="3", script_flag="--save=1000",
    )  # fmt: skip
    monkeypatch.setattr(tempfile, "tempdir", str(cluster.scratch))
    yield cluster
    cluster.close()


def following(live: Cluster, *words: str) -> subprocess.Popen[str]:
    """A command that follows the job."""
    command = [sys.executable, "-m", "phalanx", *words, "--follow"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(live.scratch)})


def show_logs(live: Cluster, capsys: Any) -> None:
    """What its workers print is shown: of all, of one, and as it comes."""
    for rank, worker in enumerate(live.newest_round()):
        live.tell(worker, f"say this is rank {rank}")

    def lines(*words: str) -> list[tuple[int, str]]:
        said = told_lines(capsys, "logs", "--json", *words)
        return sorted((one["rank"], one["line"]) for one in said if one["stream"] == "stdout")

    live.wait_until(lambda: len(lines()) == 2, "the lines of both")
    assert lines() == [(0, "this is rank 0"), (1, "this is rank 1")]
    assert lines("--rank", "1") == [(1, "this is rank 1")]
    with following(live, "logs", "--rank", "0") as follower:
        try:
            assert follower.stdout is not None
            assert follower.stdout.readline() == "rank 0: this is rank 0\n"
            live.tell(live.newest_round()[0], "say still here")
            assert follower.stdout.readline() == "rank 0: still here\n"
        finally:
            follower.terminate()


def go_on_to_save(live: Cluster, number: int) -> int:
    """Once all workers know of a request for a save, let them do two steps; of which step it is."""
    asked = [live.directory / f"asked-{worker}" for worker in live.newest_round()]
    live.wait_until(
        lambda: all(path.exists() and path.read_text() == str(number) for path in asked), "the request at the workers"
    )
    done = live.step()
    live.hold(done + 2)
    live.wait_until(lambda: len(live.events("saved")) == number, f"save {number}")
    step = live.events("saved")[-1]["step"]
    assert done < step <= done + 2
    return int(step)


@pytest.mark.timeout(240)
def test_a_kill_and_a_join_are_shown_as_they_happen(live: Cluster, tmp_path: Path, capsys: Any) -> None:
    live.wait_workers(2)
    live.wait_step(8)
    page = Client(addresses(live)[0])
    live.wait_until(lambda: page.json("/api/v1/summary")["step"] == 8, "the page at step 8")
    live.wait_until(lambda: told_json(capsys, "status", "--json")["step"] == 8, "step 8 in the store")
    status = told_json(capsys, "status", "--json")
    assert (status["job"], status["state"]) == ("shown", "running")
    assert status["page"] == addresses(live)[0]
    assert [worker["rank"] for worker in status["workers"]] == [0, 1]
    assert status["summary"]["total_steps"] == 24
    assert main(["status"]) == 0
    assert "step 8 of 24" in capsys.readouterr().out

    victim, survivor = live.newest_round()[1], live.newest_round()[0]
    before = page.json("/api/v1/page")["last_event"]
    live.signal(victim)
    live.wait_until(
        lambda: any(one["regrouped_ms"] is not None for one in page.json("/api/v1/incidents")), "the incident"
    )
    kinds = page.stream(f"/events?since={before}&kinds=worker_failed,lost,regrouped", 3)
    assert {event["event"] for event in kinds} >= {"worker_failed", "lost"}
    (incident,) = page.json("/api/v1/incidents")
    assert incident["cause"] == "SIGKILL"
    assert incident["workers"] == [victim]
    detail = page.json(f"/api/v1/worker/{victim}")
    assert detail["end"] == "died"
    assert "SIGKILL" in detail["reason"]
    live.wait_workers(2)  # its successor

    show_logs(live, capsys)

    secret = Path(status["secret_file"]).read_bytes()
    assert "3 worker(s)" in act(page, secret, "scale", nproc=3)["done"]
    live.wait_workers(3)
    assert act(page, secret, "save")["done"]
    first = go_on_to_save(live, 1)
    assert told_json(capsys, "save", "--json") == {"job": "shown", "request": 2}
    second = go_on_to_save(live, 2)
    live.wait_until(lambda: page.json("/api/v1/saves")["verified_step"] == second, "the save on the page")
    assert page.json("/api/v1/audit")["holds"] is True, "of a job that runs, as far as it goes"
    live.wait_until(lambda: page.json("/api/v1/summary")["workers"] == 3, "three workers on the page")

    def slots() -> list[int]:
        """Of those that compute: each tells of its own, a moment after the others."""
        now, rows = live.newest_round(), page.json("/api/v1/workers")
        return [row["slots"][-1][2] for row in rows if row["worker"] in now and row["slots"]]

    live.wait_until(lambda: len(slots()) == 3 and sum(slots()) == 8, "the slots of three workers")
    shown = page.json("/api/v1/page")
    assert {row["worker"]: row["end"] for row in shown["workers"]}[victim] == "died"
    assert sum(any(mark[1] == "join" for mark in row["marks"]) for row in shown["workers"]) == 4
    assert "phalanx_failures_total{" in page.ask("/metrics")[2].decode()
    assert page.ask("/healthz")[0] == 200

    assert main(["events"]) == 0
    assert "worker_failed" in capsys.readouterr().out
    assert main(["report", "-o", str(tmp_path / "live.html")]) == 0
    assert "1 failure" in capsys.readouterr().out
    again = told_json(capsys, "scale", "--nproc=2", "--json")
    assert (again["job"], again["nproc"], len(again["nodes"])) == ("shown", 2, 1)
    live.wait_workers(2)
    live.wait_until(lambda: page.json("/api/v1/summary")["workers"] == 2, "two workers on the page")
    [asked] = [json.loads(event["data"]) for event in page.stream("/events?kinds=left", 1)]
    rows = {row["worker"]: row for row in page.json("/api/v1/workers")}
    assert rows[asked["worker"]]["end"] == "left"
    assert rows[asked["worker"]]["marks"][-1][1] == "leave"

    with following(live, "events", "--json") as follower:
        assert follower.stdout is not None
        json.loads(follower.stdout.readline())  # it follows
        live.release()
        live.finish()
        told, _ = follower.communicate(timeout=60)
        assert follower.returncode == 0
    assert "shut_down" in told.splitlines()[-1]
    text = live.text()
    account = re.search(r"phalanx: (goodput \S+%, 1 failure, MTTR .*)", text)
    assert account, text[-3000:]
    assert main(["report", str(tmp_path / "kept"), "-o", str(tmp_path / "r.html")]) == 0
    assert "1 failure" in capsys.readouterr().out
    data = told_json(capsys, "report", str(tmp_path / "kept"), "--json")
    assert data["summary"]["state"] == "succeeded"
    assert data["commits"]["holds_to"] == 24
    assert data["commits"]["audit"].startswith("audit clean")
    assert data["commits"]["digests_equal"] is True, "RunOptions(verify=True)"
    saved = [(save["step"], save["verified"]) for save in data["saves"]["written"]]
    assert saved == [(first, True), (second, True)], "what was asked for; nothing else saves before step 1000"
    assert data["saves"]["verified_step"] == second
    parts = data["summary"]["goodput"]
    assert sum(parts["parts"].values()) == pytest.approx(parts["worker_seconds"])
    assert parts["parts"]["productive"] > 0
    assert parts["parts"]["regroup"] > 0
    assert data["details"][survivor]["end"] == "finished"
    heat = data["steptimes"]["rows"]
    assert survivor in heat
    assert live.left_behind() == []


def start(directory: Path, endpoint: Path, secret: str, nodes: str = "1:2") -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "phalanx", "run", f"--nnodes={nodes}", "--nproc-per-node=1", "--on-failure=heal",
        "--rdzv-backend=file", f"--rdzv-endpoint={endpoint}", "--rdzv-id=led", "--dashboard=0",
        "--rdzv-conf=lease=8,last_call_timeout=1", f"--preload={PRELOAD}", str(SCRIPT), str(directory), "1000", "0.03",
    ]  # fmt: skip
    environ = {**os.environ, "PHALANX_JOB_SECRET": secret}
    with (directory / "output").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=directory, env=environ)


class Agents:
    """Agents that a test starts, one node each, with the eyes of a cluster on what they do."""

    def __init__(self, tmp_path: Path, secret: str) -> None:
        self.directory, self._endpoint, self._secret = tmp_path / "job", tmp_path / "rendezvous", secret
        self.directory.mkdir()
        self.where = ["--rdzv-backend=file", f"--rdzv-endpoint={self._endpoint}", "--rdzv-id=led"]
        self.running: list[subprocess.Popen[bytes]] = []
        self.eyes = Cluster.__new__(Cluster)
        self.eyes.directory, self.eyes.output = self.directory, (self.directory / "output").open("ab")

    def start(self) -> None:
        """Start one more, and wait until its worker computes with the others."""
        self.running.append(start(self.directory, self._endpoint, self._secret))
        self.eyes.process = self.running[0]
        self.eyes.wait_workers(len(self.running))

    def close(self) -> None:
        for agent in self.running:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
        deadline = time.monotonic() + 30
        while self.eyes.pids() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.eyes.output.close()


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    """Two agents, the second of which came later."""
    monkeypatch.setenv("PHALANX_JOB_SECRET", SECRET)
    made = Agents(tmp_path, SECRET)
    try:
        made.start()
        made.start()
        yield made
    finally:
        made.close()


@pytest.mark.timeout(290)
def test_the_next_agent_serves_when_the_one_that_leads_is_killed(agents: Agents, capsys: Any) -> None:
    eyes, where = agents.eyes, agents.where
    status = told_json(capsys, "status", "--json", *where)
    assert len(status["nodes"]) == 2
    leads = Client(status["page"])
    first = leads.url == addresses(eyes)[0]
    victim, survivor = agents.running[:: 1 if first else -1]
    bearer = f"Bearer {token_of(SECRET.encode())}"
    eyes.wait_until(
        lambda: (
            leads.json("/api/v1/summary", Authorization=bearer)["workers"] == 2
            and len(leads.json("/api/v1/workers")) == 2
        ),
        "the workers of both nodes on the page",
    )
    follows = Client(addresses(eyes)[1 if first else 0])
    eyes.wait_until(lambda: follows.json("/api/v1/summary")["step"], "the steps at the agent that follows")
    step = leads.json("/api/v1/summary")["step"]
    eyes.process = survivor
    command = [sys.executable, "-m", "phalanx", "events", "--follow", "--json", *where]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert follower.stdout is not None
    heard = [follower.stdout.readline()]  # it follows the one that leads
    victim.send_signal(signal.SIGKILL)

    def page() -> str:
        return str(told_json(capsys, "status", "--json", *where)["page"])

    eyes.wait_until(lambda: page() != leads.url, "the address of the next agent in the store")
    after = Client(page())
    assert after.url == follows.url
    eyes.wait_until(lambda: (after.json("/api/v1/summary")["step"] or 0) > step, "steps on the next page")
    assert after.json("/api/v1/series")[0][1] <= step, "what happened before is there too: it followed along"
    (node,) = told_json(capsys, "status", "--json", *where)["nodes"]
    assert main(["drain", node["id"], *where]) == 2
    assert "is the only one" in capsys.readouterr().err
    assert told_json(capsys, "stop", "--json", *where)["job"] == "led"
    assert survivor.wait(100) == 128 + signal.SIGTERM
    heard += follower.communicate(timeout=100)[0].splitlines(keepends=True)
    assert follower.returncode == 0
    assert len(set(heard)) == len(heard), "the next agent tells again what it keeps"
    events = [json.loads(line) for line in heard]
    said = [event.get("event", event.get("kind")) for event in events]
    assert "shut_down" in said[-3:], "it went on at the agent that served next"
    assert said.index("regrouped") < said.index("action" if "action" in said else "shut_down")
    assert "asked through the store: stop" in eyes.text()


@pytest.mark.timeout(290)
def test_a_node_that_is_drained_goes_and_the_others_go_on(agents: Agents, capsys: Any) -> None:
    eyes, where = agents.eyes, agents.where
    nodes = told_json(capsys, "status", "--json", *where)["nodes"]
    assert told_json(capsys, "drain", nodes[-1]["id"], "--json", *where)["node"] == nodes[-1]["id"]
    assert agents.running[1].wait(200) == 0, eyes.text()[-3000:]
    eyes.wait_until(lambda: len(eyes.newest_round()) == 1, "the others without the node")
    (left,) = told_json(capsys, "status", "--json", *where)["nodes"]
    assert left["id"] == nodes[0]["id"]
    assert eyes.events("lost") == [], "nobody was lost: its worker left at a step"
