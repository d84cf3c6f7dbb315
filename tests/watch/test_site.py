"""The server of a job: what it shows, to whom, and what it never does."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from watching import EVIL, SECRET, Served

from phalanx.events import _event_types as types
from phalanx.watch._access import PageAccess, sign, token_of
from phalanx.watch._http import MAX_BODY
from phalanx.watch._metrics import families
from phalanx.watch._site import VIEWS
from phalanx.watch._view import JobView

pytestmark = pytest.mark.fast


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served(PageAccess(secret=SECRET), text=EVIL)
    yield made
    made.close()


@pytest.fixture
def guarded() -> Iterator[Served]:
    """As one that is bound to all addresses: it needs a token."""
    made = Served(PageAccess(host="0.0.0.0", secret=SECRET))
    yield made
    made.close()


def test_the_api_tells_the_story(served: Served) -> None:
    ask = served.client
    summary = ask.json("/api/v1/summary")
    assert summary["state"] == "succeeded"
    assert (summary["step"], summary["total_steps"], summary["workers"], summary["generation"]) == (4, 10, 2, 1)
    assert summary["loss"] == 0.5
    assert summary["goodput"]["failures"] == 1
    assert summary["last_failure"]["text"].startswith("rank 1 on h: ")
    ends = {row["worker"]: row["end"] for row in ask.json("/api/v1/workers")}
    assert ends == {"n.a": "finished", "n.b": "died", "n.c": "left"}
    marks = {row["worker"]: [mark[1] for mark in row["marks"]] for row in ask.json("/api/v1/workers")}
    assert marks == {"n.a": ["join", "save", "lost", "end"], "n.b": ["join", "death"], "n.c": ["hang", "leave"]}
    assert [row["left"] for row in ask.json("/api/v1/rounds")] == [[], ["n.b"], []]
    (incident,) = ask.json("/api/v1/incidents")
    assert incident["cause"] == "ValueError"
    assert [incident[f"{name}_ms"] for name in ("detected", "regrouped", "next_step", "full")] == [20, 100, 500, 1500]
    assert ask.json("/api/v1/commits")["holds_to"] == 4
    assert ask.json("/api/v1/commits")["digests_equal"] is True
    saves = ask.json("/api/v1/saves")
    assert (saves["last_step"], saves["at_risk_steps"], saves["verified_step"]) == (3, 1, 3)
    assert [(one["step"], one["verified"]) for one in saves["written"]] == [(3, True)]
    out, node = ask.json("/api/v1/nodes")
    assert (out["node"], out["left_out"]) == ("m", "node m is left out: all failures were its")
    assert (node["cpu"], node["left_out"], node["restarts"]) == (0.5, "", 1)
    assert (node["received"], node["sent"]) == (1500, 2_500_000)
    copies = ask.json("/api/v1/copies")
    assert (copies["copies"], copies["mirrors"], copies["unprotected_bytes"]) == (2, {"n.a": ["n.c"]}, 0)
    assert copies["cells"] == {"n.a": [9, 5, 0]}
    parts = ask.json("/api/v1/goodput")
    assert sum(parts["parts"].values()) == pytest.approx(parts["worker_seconds"])
    for name in VIEWS:
        status, headers, _ = ask.ask(f"/api/v1/{name}")
        assert status == 200, name
        assert ask.ask(f"/api/v1/{name}", If_None_Match=headers["etag"])[0] == 304
    assert ask.json("/api/v1/worker/n.b")["stderr"] == [EVIL]
    hung = ask.json("/api/v1/worker/n.c")
    assert hung["stacks"] == f"in all_reduce: {EVIL}"
    assert [mark[2] for mark in hung["marks"]] == ["made no progress for 5 s", "left after step 4"]
    assert ask.json("/api/v1/worker/n.a")["stderr"] == ["last line of n.a"]
    assert ask.ask("/api/v1/worker/nobody")[0] == 404
    assert ask.ask("/api/v1/nothing")[0] == 404
    assert len(ask.json("/api/v1/events?since=3&limit=2")["events"]) == 2


def test_a_probe_sees_whether_the_agent_lives(guarded: Served) -> None:
    assert guarded.client.ask("/healthz")[0] == 200  # without a token
    guarded.host.alive_at = lambda: 0.0  # type: ignore[method-assign]
    assert guarded.client.ask("/healthz")[0] == 503


def test_metrics_can_be_parsed_and_follow_the_conventions(served: Served) -> None:
    status, headers, body = served.client.ask("/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    values = {sample.name: sample for family in families.values() for sample in family.samples}
    assert values["phalanx_step"].value == 4
    assert values["phalanx_workers"].value == 2
    assert values["phalanx_saves_total"].value == values["phalanx_saves_verified_total"].value == 1
    paced = families["phalanx_worker_step_seconds"].samples
    assert paced
    assert all({"job", "node", "rank", "generation", "part"} == set(sample.labels) for sample in paced)
    failures = families["phalanx_failures"].samples
    assert {sample.labels["node"] for sample in failures} == {"h"}
    assert {sample.labels["cause"]: sample.value for sample in failures} == {"ValueError": 1}
    assert all(sample.labels["job"] == "j" for family in families.values() for sample in family.samples)
    assert families["phalanx_step_seconds"].type == "histogram"
    assert values["phalanx_step_seconds_count"].value == 6
    assert values["phalanx_step_seconds_sum"].value == pytest.approx(6.0)
    assert values["phalanx_regroup_seconds_count"].value == 2
    seconds = sum(sample.value for sample in families["phalanx_worker_seconds"].samples)
    assert seconds == pytest.approx(served.hub.view.accounts.result().total / 1e6)
    slots = {sample.labels["rank"]: sample.value for sample in families["phalanx_worker_slots"].samples}
    assert slots == {"0": 2}
    for name in families:
        assert not name.endswith(("_ms", "_kb", "_minutes")), "base units"


def test_a_label_cannot_break_out_of_its_line() -> None:
    served = Served(PageAccess())
    served.hub.view.machines.failures["h", 'a"b\\c\nphalanx_evil 1'] += 1
    body = served.client.ask("/metrics")[2].decode()
    served.close()
    families = {family.name: family for family in text_string_to_metric_families(body)}
    assert "phalanx_evil" not in families
    assert any(sample.labels["cause"].startswith('a"b') for sample in families["phalanx_failures"].samples)


def test_the_stream_replays_what_a_client_has_missed(served: Served) -> None:
    ask = served.client
    first = ask.stream("/events", 4)
    assert first[0]["event"] == "generation_formed"
    assert json.loads(first[0]["data"])["num_workers"] == 2
    again = ask.stream("/events", 2, Last_Event_ID=first[1]["id"])
    assert [event["id"] for event in again] == [first[2]["id"], first[3]["id"]]
    other = ask.stream("/events", 1, Last_Event_ID="another-99999")  # of the agent that served before
    assert other[0]["id"] == first[0]["id"]
    kinds = ask.stream("/events?kinds=saved,lost", 2)
    assert [event["event"] for event in kinds] == ["saved", "lost"]
    bulk = ask.stream("/events?bulk=1&kinds=times,node_load", 3)
    assert [event["event"] for event in bulk] == ["times", "times", "node_load"]


def test_the_stream_brings_what_happens_now(served: Served) -> None:
    number = served.hub.number
    soon = threading.Timer(0.1, served.hub.add, [types.Saved(worker="n.a", time=109.0, step=4, path="/saves/4")])
    soon.start()
    (event,) = served.client.stream(f"/events?since={number}", 1)
    soon.join()
    assert event["event"] == "saved"
    assert event["id"] == f"{served.hub.name}-{number + 1}"


def test_what_an_error_says_cannot_become_a_tag(served: Served) -> None:
    status, headers, body = served.client.ask("/")
    assert status == 200
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert b"alert(1)" not in body, "the page itself holds no data"
    assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
    assert b"https://" not in body
    answers = [served.client.ask(path) for path in ("/api/v1/page", "/api/v1/worker/n.b", "/api/v1/events")]
    for status, headers, body in answers:
        assert status == 200
        assert headers["content-type"] == "application/json", "never text that a browser would take for HTML"
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert b"alert(1)" in body
    (event,) = [e for e in served.client.stream("/events", 14) if e["event"] == "worker_failed"]
    assert json.loads(event["data"])["message"] == EVIL, "one line, whatever the text holds"


def test_bound_elsewhere_it_needs_the_token(guarded: Served) -> None:
    ask, token = guarded.client, token_of(SECRET)
    for path in ("/", "/metrics", "/events", "/api/v1/page", "/api/v1/nonce", "/nothing"):
        assert ask.ask(path)[0] == 401, path
        assert ask.ask(path, Authorization="Bearer wrong")[0] == 401, path
    assert ask.ask("/metrics", Authorization=f"Bearer {token}")[0] == 200
    assert ask.ask("/?token=wrong")[0] == 401
    status, headers, _ = ask.ask(f"/?token={token}")
    assert (status, headers["location"]) == (303, "/")
    assert "HttpOnly" in headers["set-cookie"]
    assert "SameSite=Strict" in headers["set-cookie"]
    assert ask.ask("/", Cookie=headers["set-cookie"].partition(";")[0])[0] == 200
    assert token_of(SECRET) == token != token_of(b"another")
    assert token_of(None) != token_of(None)


def test_on_loopback_a_page_from_elsewhere_cannot_read_along(served: Served) -> None:
    """A name of the attacker's that resolves to 127.0.0.1: the browser sends that name."""
    for host in ("evil.example", "evil.example:80", "10.0.0.1:9"):
        assert served.client.ask("/api/v1/page", Host=host)[0] == 403, host
    for host in ("localhost:1", "127.0.0.1", "[::1]:80"):
        assert served.client.ask("/api/v1/summary", Host=host)[0] == 200, host


def test_actions_need_the_secret_a_confirmation_and_a_number_that_is_good_once(served: Served) -> None:
    ask = served.client

    def post(
        action: str, wish: dict[str, Any], secret: bytes = SECRET, signature: str | None = None
    ) -> tuple[int, Any]:
        body = json.dumps(wish).encode()
        signed = sign(secret, action, body) if signature is None else signature
        status, _, answer = ask.ask(f"/api/v1/actions/{action}", method="POST", body=body, X_Phalanx_Signature=signed)
        return status, json.loads(answer)

    def nonce() -> str:
        return str(ask.json("/api/v1/nonce")["nonce"])

    good = {"nonce": nonce(), "confirm": True, "nproc": 3}
    assert post("scale", good, b"another secret")[0] == 403
    assert post("scale", good, signature="")[0] == 403
    assert post("stop", good, signature=sign(SECRET, "scale", json.dumps(good).encode()))[0] == 403, "of another action"
    assert post("scale", {**good, "confirm": False})[0] == 400
    assert post("scale", {**good, "nonce": "made up"})[0] == 403
    assert served.host.done == []
    assert post("scale", good) == (200, {"done": "scale is done"})
    assert served.host.done == [("scale", good)]
    assert post("scale", good)[0] == 403, "a request that somebody recorded"
    assert post("nonsense", {"nonce": nonce(), "confirm": True})[0] == 409
    assert ask.ask("/api/v1/page", method="POST", body=b"{}")[0] == 404
    assert len(served.host.done) == 1


def test_a_job_without_a_secret_cannot_be_changed() -> None:
    served = Served(PageAccess())
    body = json.dumps({"nonce": served.client.json("/api/v1/nonce")["nonce"], "confirm": True}).encode()
    status, _, answer = served.client.ask(
        "/api/v1/actions/stop", method="POST", body=body, X_Phalanx_Signature=sign(b"", "stop", body)
    )
    served.close()
    assert status == 403
    assert b"no secret" in answer
    assert served.host.done == []


def test_a_client_that_misbehaves_harms_nobody(served: Served) -> None:
    port = served.server.port
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]  # say nothing
    with socket.create_connection(("127.0.0.1", port)) as half:
        half.sendall(b"GET /api/v1/page HT")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", "/api/v1/actions/stop", headers={"Content-Length": str(MAX_BODY + 1)})
        assert connection.getresponse().status == 413
        connection.close()
        assert served.client.ask("/api/v1/summary")[0] == 200
    for one in idle:
        one.close()
    assert served.client.ask("/" + "x" * 5000)[0] == 404
    assert served.client.ask("/%2e%2e/etc/passwd")[0] == 404


def test_a_restart_of_all_workers_counts_once_and_a_heal_by_its_workers() -> None:
    view = JobView("j")

    def value() -> float:
        [found] = [family for family in families(view, 10.0) if family.name == "phalanx_restarts_total"]
        return found.samples[0][1]

    for rank in (0, 1):  # each agent tells of it
        where: dict[str, Any] = {"job": "j", "generation": 0, "node_rank": rank, "time": 5.0}
        view.take(types.GenerationEnded(**where, how="restart", reason="n.b failed"))
        view.take(types.JobRestarted(**where, restart_count=1, max_restarts=3, reason="n.b failed"))
        assert value() == 1
    where = {"job": "j", "generation": 1, "time": 6.0}
    view.take(types.GenerationEnded(**where, how="heal", reason="n.b failed"))
    view.take(types.JobRestarted(**where, restart_count=2, max_restarts=3, reason="n.b failed"))
    view.take(types.WorkerReplaced(**where, host="h", old_worker_id="n.b", worker_id="n.c", rank=1))
    assert value() == 2


def test_what_a_host_measures_itself_stands_below_the_metrics_of_the_job(served: Served) -> None:
    served.host.metrics = lambda: "# TYPE mine gauge\nmine 7.0\n"  # type: ignore[method-assign]
    text = served.client.ask("/metrics")[2].decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert found["mine"].samples[0].value == 7
    assert "phalanx_step" in found
