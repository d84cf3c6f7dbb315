"""The page of a job on several hosts: for whoever has the token, with all hosts on it, and served by the next one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.hosts.box import Host, new_box
from tests.hosts.jobs import HostJob

NUM_STEPS = 16
FETCH = """
import sys, urllib.error, urllib.request
headers = {"Authorization": f"Bearer {sys.argv[2]}"} if sys.argv[2:] else {}
try:
    print(urllib.request.urlopen(urllib.request.Request(sys.argv[1], headers=headers), timeout=30).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


class Commands:
    """``phalanx`` commands from any host; they know where the job's store is, and its secret."""

    def __init__(self, job: HostJob, store: str) -> None:
        self._secret = f"PHALANX_JOB_SECRET_FILE={job.directory / 'secret'}"
        self._where = ["--rdzv-backend=file", f"--rdzv-endpoint={store}", "--rdzv-id=hosts"]

    def lines(self, host: Host, *words: str) -> list[Any]:
        command = [sys.executable, "-m", "phalanx", *words, "--json", *self._where]
        return [json.loads(line) for line in host.call("env", self._secret, *command).splitlines()]

    def one(self, host: Host, *words: str) -> Any:
        [found] = self.lines(host, *words)
        return found


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_every_host_is_on_the_page_and_the_next_agent_serves_it(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with new_box(3) as box:
        job = HostJob(
            tmp_path / "job", box, num_steps=NUM_STEPS, nodes="1:3", store=store, backend="file", hold=4,
            dashboard="0.0.0.0:0", tee="3", log_dir=str(tmp_path / "kept"),
        )  # fmt: skip
        ask = Commands(job, store)
        try:
            job.wait_workers(3)
            job.wait_step(4)
            status = ask.one(box.hosts[2], "status")
            [leads] = [host for host in box.hosts if status["page"].startswith(f"http://{host.address}:")]
            others = [host for host in box.hosts if host is not leads]

            def page() -> Any:
                return ask.one(others[0], "report")

            job.wait_until(
                lambda: {row["host"] for row in page()["workers"] if row["end"] == "running"} == names(box.hosts),
                "the workers of all hosts on the page",
            )
            url = f"{status['page']}api/v1/summary"
            assert others[0].call(sys.executable, "-c", FETCH, url).strip() == "401"
            assert others[0].call(sys.executable, "-c", FETCH, url, "not the token").strip() == "401"

            host_of = {row["worker"]: row["host"] for row in page()["workers"]}
            for worker in job.newest_round():
                job.tell(worker, f"say this is {host_of[worker]}")

            def said(*words: str) -> set[str]:
                return {one["line"] for one in ask.lines(others[0], "logs", *words) if one["stream"] == "stdout"}

            everybody = {f"this is {name}" for name in names(box.hosts)}
            job.wait_until(lambda: is_told(job, everybody), "the lines of all")
            assert said() == everybody
            for host in box.hosts:
                assert said("--node", host.name) == {f"this is {host.name}"}

            leads.power_off()
            job.forget(leads)
            job.next_commit()
            job.wait_until(lambda: ask.one(others[0], "status")["page"] != status["page"], "the next page")
            after = ask.one(others[1], "status")["page"]
            assert any(after.startswith(f"http://{host.address}:") for host in others)
            job.wait_until(lambda: page()["summary"]["step"] > 4, "steps on the next page")
            shown = page()
            assert shown["series"][0][1] <= 4, "what was before is there too"
            ends = {row["host"]: row["end"] for row in shown["workers"] if row["worker"] in host_of}
            assert ends == {leads.name: "died", **{host.name: "running" for host in others}}
            job.release()
            assert job.finish().num_steps == NUM_STEPS
        finally:
            job.close()


def names(hosts: tuple[Host, ...]) -> set[str]:
    return {host.name for host in hosts}


def is_told(job: HostJob, lines: set[str]) -> bool:
    """Whether workers have printed these: what they print goes to the agents' output too."""
    return all(line in job.text() for line in lines)
