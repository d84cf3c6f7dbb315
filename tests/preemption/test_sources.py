"""Sources of notices, against servers on loopback that speak the clouds' protocols, well and badly."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.preemption.metadata_services import Aws, Azure, Gcp, serving

import phalanx.preemption
from phalanx.preemption import (
    AwsNotices,
    AzureNotices,
    FileNotices,
    FunctionNotices,
    GcpNotices,
    Notice,
    SignalNotices,
    SourceProblem,
    _metadata_request,
    parse_source,
)

pytestmark = pytest.mark.fast

SOURCES = {"aws": (AwsNotices, Aws), "gcp": (GcpNotices, Gcp), "azure": (AzureNotices, Azure)}


def test_public_names():
    assert sorted(phalanx.preemption.__all__) == [
        "AwsNotices", "AzureNotices", "FileNotices", "FunctionNotices", "GcpNotices", "Notice", "NoticeSource",
        "SignalNotices", "SourceProblem", "parse_source",
    ]  # fmt: skip


def test_aws_asks_with_one_token_until_it_expires_and_404_is_no_notice():
    cloud = Aws()
    with serving(cloud) as service:
        source = AwsNotices(endpoint=service.url)
        assert [source.look(0.0), source.look(0.0)] == [None, None]
        assert [method for method, _ in service.asked].count("PUT") == 1
        cloud.expire()
        assert source.look(0.0) is None
        assert [method for method, _ in service.asked].count("PUT") == 2
        cloud.values["spot/instance-action"] = '{"action": "terminate", "time": "1970-01-01T00:02:00Z"}'
        assert source.look(0.0) == Notice(source="aws", reason="AWS will terminate this instance", at=120.0)


def test_aws_rebalance_advice_is_a_notice_unless_only_interruptions_are_asked_for():
    cloud = Aws()
    cloud.values["events/recommendations/rebalance"] = '{"noticeTime": "2020-10-27T08:22:00Z"}'
    with serving(cloud) as service:
        notice = parse_source(f"aws:{service.url}").look(0.0)
        assert notice is not None
        assert "rebalance" in notice.reason
        assert notice.at is None
        assert parse_source(f"aws-spot:{service.url}/").look(0.0) is None


def test_gcp_preemption_and_final_maintenance_are_notices_and_migration_is_none():
    cloud = Gcp()
    with serving(cloud) as service:
        source = parse_source(f"gcp:{service.url}")
        assert source.look(5.0) is None
        cloud.values["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
        assert source.look(5.0) is None
        cloud.values["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
        assert "maintenance" in source.look(5.0).reason
        cloud.values["preempted"] = "TRUE"
        assert source.look(5.0) == Notice(source="gcp", reason="Google Cloud preempts this instance", at=35.0)
        del cloud.values["preempted"], cloud.values["maintenance-event"]
        assert source.look(5.0) is None


def test_azure_events_count_for_the_machine_that_they_name_and_a_freeze_does_not():
    cloud = Azure("vm_1")
    with serving(cloud) as service:
        source = parse_source(f"azure:{service.url}")
        assert source.look(0.0) is None
        cloud.add("Preempt", "vm_0", "vm_2")
        cloud.add("Freeze", "vm_1")
        assert source.look(0.0) is None
        cloud.add("Preempt", "vm_0", "vm_1")
        notice = source.look(0.0)
        assert notice == Notice(
            source="azure", reason="Azure has scheduled the event Preempt for this machine", at=1474309787.0
        )
        cloud.events[-1]["NotBefore"] = ""  # as it is once the event has started
        assert source.look(0.0).at is None
        assert sum("compute/name" in path for _, path in service.asked) == 1


@pytest.mark.parametrize("name", SOURCES)
def test_nobody_there_is_a_problem_that_names_the_address(name):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody listens: connections are refused
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(SourceProblem, match=rf"{url}/.* cannot be asked: ConnectionRefusedError"):
            SOURCES[name][0](endpoint=url).look(0.0)


@pytest.mark.parametrize("name", SOURCES)
def test_a_service_that_does_not_answer_or_not_to_the_end_is_given_up_in_time(name, monkeypatch):
    """The limit is of the request as a whole: a byte now and then does not put it off."""
    monkeypatch.setattr(_metadata_request.ask, "__kwdefaults__", {**_metadata_request.ask.__kwdefaults__, "limit": 0.2})
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are taken by the kernel, and that is all
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SourceProblem, match="cannot be asked"):
            SOURCES[name][0](endpoint=url).look(0.0)
    with serving(lambda *_: (200, {"Metadata-Flavor": "Google"}, "x" * 100_000)) as service:
        service.trickle = 0.05
        with pytest.raises(SourceProblem):
            SOURCES[name][0](endpoint=service.url).look(0.0)
    assert time.monotonic() - began < 60  # 100,000 bytes would take more than an hour


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(
    ("status", "body"),
    [(200, ""), (200, "<html>log in first</html>"), (200, "[1, 2]"), (200, "{}"), (200, '{"Events": [7]}'),
     (200, '{"action": 3}'), (200, "[" * 50_000), (200, "y" * (1 << 19)), (500, "oops"), (403, ""), (302, "")],
)  # fmt: skip
def test_garbage_is_never_taken_for_a_notice(name, status, body):
    def answer(method, path, headers):
        if path == "/latest/api/token":
            return 200, {}, "token"
        if "compute/name" in path:
            return 200, {}, "vm"
        return status, {"Metadata-Flavor": "Google", "Location": "http://127.0.0.1:1/elsewhere"}, body

    with serving(answer) as service, pytest.raises(SourceProblem):
        SOURCES[name][0](endpoint=service.url).look(0.0)


def test_who_answers_without_googles_flavor_is_not_google_and_a_token_of_nonsense_is_not_sent_on():
    with serving(lambda *_: (200, {}, "TRUE")) as service, pytest.raises(SourceProblem, match="not Google's"):
        GcpNotices(endpoint=service.url).look(0.0)
    with serving(lambda *_: (200, {}, "a\nb: c")) as service:
        with pytest.raises(SourceProblem, match="no token"):
            AwsNotices(endpoint=service.url).look(0.0)
        assert len(service.asked) == 1


@given(st.text(max_size=40))
def test_any_text_is_a_time_or_none(text):
    found = _metadata_request.parse_time(text)
    assert found is None or isinstance(found, float)


def test_a_file_is_a_notice_when_it_is_there_and_says_why(tmp_path: Path):
    path = tmp_path / "leave"
    source = parse_source(f"file:{path}")
    assert source.look(0.0) is None
    assert FileNotices(path=f"{tmp_path}/no/folder").look(0.0) is None
    path.touch()
    assert source.look(0.0) == Notice(source="file", reason=f"{path} is there")
    path.write_text("maintenance at noon\n")
    assert source.look(0.0).reason == "maintenance at noon"
    with pytest.raises(SourceProblem, match="cannot be read"):
        FileNotices(path=str(tmp_path)).look(0.0)


def give_notice() -> str:
    return "the function says so"


def test_a_function_gives_notice_by_what_it_returns(tmp_path: Path, monkeypatch):
    (tmp_path / "my_cluster.py").write_text("def leaving():\n    return 'rack 7 goes down'\n\nnumber = 7\n")
    monkeypatch.chdir(tmp_path)
    source = parse_source("call:my_cluster:leaving")
    assert source.look(0.0) == Notice(source="call:my_cluster:leaving", reason="rack 7 goes down")
    notice = Notice(source="mine", reason="x", at=3.0)
    said = {None: None, False: None, True: Notice(source="function", reason="<lambda> says so"), notice: notice}
    for returned, wanted in said.items():
        assert FunctionNotices(function=lambda returned=returned: returned).look(0.0) == wanted
    with pytest.raises(SourceProblem, match="returned 7"):
        FunctionNotices(function=lambda: 7).look(0.0)  # type: ignore[arg-type,return-value]
    with pytest.raises(SourceProblem, match="ZeroDivisionError"):
        FunctionNotices(function=lambda: 1 / 0).look(0.0)  # type: ignore[arg-type,return-value]
    wrong = {"my_cluster:missing": "cannot be found", "my_cluster:number": "is a int", "nowhere:f": "No module"}
    for name, problem in wrong.items():
        with pytest.raises(ValueError, match=problem):
            parse_source(f"call:{name}")


def test_signals_are_notices_with_the_time_that_is_left():
    assert parse_source("slurm").signals == (signal.SIGUSR1, signal.SIGUSR2)
    assert parse_source("slurm:SIGUSR2").signals == (signal.SIGUSR2,)
    assert parse_source("signal:sigterm").signals == (signal.SIGTERM,)
    pod = parse_source("kubernetes:60")
    assert isinstance(pod, SignalNotices)
    assert pod.notice(signal.SIGTERM, 10.0) == Notice(source="kubernetes", reason="the agent got SIGTERM", at=70.0)
    assert parse_source("kubernetes").grace == 30.0


@pytest.mark.parametrize(
    "text",
    ["", "amazon", "file", "file:", "call:", "signal", "signal:SIGKILL", "signal:NONE", "kubernetes:soon",
     "kubernetes:-1", "kubernetes:inf", "aws:169.254.169.254", "gcp:https://x", "slurm:USR9"],
)  # fmt: skip
def test_what_is_no_source_is_refused_in_one_line(text):
    with pytest.raises(ValueError) as raised:
        parse_source(text)
    assert "expected" in str(raised.value)
    assert "\n" not in str(raised.value)
