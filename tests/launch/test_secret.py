"""A secret by default, and servers that listen where others were told to look and nowhere else."""

from __future__ import annotations

import logging
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.comm.stores import connect
from phalanx.comm.stores._signing import Signer, is_signed
from phalanx.launch.cli._scale import scale
from phalanx.launch.rendezvous import RendezvousParameters, get_rendezvous_handler
from phalanx.launch.rendezvous import _own_secret as own_secret
from phalanx.launch.rendezvous._own_secret import OwnSecret, known_secrets
from phalanx.launch.system import _listen_address
from phalanx.launch.system._folders import create_locked
from phalanx.launch.system._listen_address import bind_address
from phalanx.protocol import job_prefix


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("PHALANX_JOB_SECRET", raising=False)
    monkeypatch.delenv("PHALANX_JOB_SECRET_FILE", raising=False)
    monkeypatch.setattr(own_secret, "_shared_folder", lambda: tmp_path / "private")
    return tmp_path / "private"


@pytest.mark.fast
def test_the_file_of_a_secret_is_private_comes_back_and_goes_with_the_job(folder: Path) -> None:
    first, second = OwnSecret("a/b"), OwnSecret("a/b")
    path = Path(first.keep())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(known_secrets("a/b")) == sorted([first.value, second.value])
    assert known_secrets("a") == []
    path.unlink()  # by somebody who tidies up
    assert Path(first.keep()).read_bytes() == first.value
    (folder / "a%2Fb.99999999.00.secret").write_bytes(b"of an agent that was killed")
    assert len(known_secrets("a/b")) == 2
    assert not (folder / "a%2Fb.99999999.00.secret").exists()
    elsewhere = folder / "a%2Fb.99999999.01.secret"  # of an agent in a container of its own: no such pid here
    lock = create_locked(str(elsewhere), b"theirs")
    try:
        assert b"theirs" in known_secrets("a/b")
    finally:
        os.close(lock)
    assert b"theirs" not in known_secrets("a/b")
    assert not elsewhere.exists()
    first.remove()
    second.remove()
    assert not folder.exists()


@pytest.mark.fast
def test_a_disk_that_takes_a_part_of_a_secret_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", lambda fd, data: len(data) // 2)
    with pytest.raises(OSError, match="No space left"):
        create_locked(str(tmp_path / "a.secret"), b"hush")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fast
def test_a_folder_that_others_can_enter_is_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    (folder / f"job.{os.getpid()}.00.secret").write_bytes(b"planted")
    assert known_secrets("job") == []
    made = OwnSecret("job")
    assert not made.keep().startswith(str(folder))
    made.remove()


def test_a_job_on_one_node_signs_with_a_secret_of_its_own_and_its_user_can_scale_it(folder: Path) -> None:
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "mine", 1, 1))
    try:
        info = handler.next_rendezvous()
        with connect(handler.store_url) as store:
            values = store.namespace(job_prefix("mine")).items()
            plain = [key for key, value in values.items() if not is_signed(value) and "/bell/" not in key]
            assert plain == []
            assert Signer("mine", Path(handler.secret_file).read_bytes()).opens("rdzv/proof", values["rdzv/proof"])
        spare = get_rendezvous_handler(
            RendezvousParameters("c10d", handler.store_url.removeprefix("tcp://"), "mine", 1, 1, is_host=False)
        )
        assert spare._signer.has_secret  # type: ignore[attr-defined]
        spare.shutdown()
        assert scale(handler.store_url, "mine", 3) == [info.node.id]
        folder.rename(folder.parent / "away")
        with pytest.raises(ValueError, match="set PHALANX_JOB_SECRET"):
            scale(handler.store_url, "mine", 3)
        (folder.parent / "away").rename(folder)
    finally:
        handler.shutdown()
    assert not folder.exists()


def test_several_nodes_without_a_secret_are_told_in_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "open", 1, 2)).shutdown()
    told = [record.getMessage() for record in caplog.records]
    (line,) = [text for text in told if "secret" in text]
    (other,) = [text for text in told if text != line]
    assert other.startswith("the job's store is at tcp://localhost:")
    assert line.startswith("job open has no secret: whoever reaches its store at tcp://127.0.0.1:")
    assert "--rdzv-conf secret_file=FILE" in line


ECHO = """
import os, pathlib, sys
path = os.environ["PHALANX_JOB_SECRET_FILE"]
assert os.environ.get("PHALANX_JOB_SECRET", "") == "", "an environment is shown to many"
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(path + " " + pathlib.Path(path).read_text())
"""


def test_workers_find_the_secret_in_a_file_that_ends_with_the_job(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ECHO)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_JOB_SECRET")}
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node=2", "script.py", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environ, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / rank).read_text() for rank in "01")
    path, secret = first.split()
    assert first == second
    assert len(secret) == 64
    assert not os.path.exists(path)


@pytest.mark.fast
def test_servers_listen_at_the_address_that_others_were_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert [bind_address(host) for host in ("localhost", "127.0.0.1", "127.0.0.2")] == [
        "127.0.0.1", "127.0.0.1", "127.0.0.2",
    ]  # fmt: skip
    names = {"both": ["127.0.1.1", "10.9.8.7"], "debian": ["127.0.1.1"], "elsewhere": []}
    monkeypatch.setattr(_listen_address, "_own_addresses", names.get)
    assert bind_address("both") == "10.9.8.7"
    assert caplog.records == []
    assert bind_address("debian") == "0.0.0.0"
    assert bind_address("elsewhere") == "0.0.0.0"
    assert [record.args for record in caplog.records] == [
        ("debian", "to the loopback interface only"),
        ("elsewhere", "to no address of this machine"),
    ]


def test_the_rendezvous_store_is_not_reached_at_another_address(folder: Path) -> None:
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "127.0.0.2:0", "there", 1, 2, is_host=True))
    try:
        port = int(handler.store_url.rpartition(":")[2])
        socket.create_connection(("127.0.0.2", port), timeout=20).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=20)
    finally:
        handler.shutdown()
