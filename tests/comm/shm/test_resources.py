"""What the transport leaves behind (nothing), who can get at its memory (nobody else), and what happens without any."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from phalanx.comm.failure._liveness import own_identity
from phalanx.comm.transports import _auto
from phalanx.comm.transports.shm import _segment_join
from phalanx.comm.transports.shm._common_file import BlankFiles
from phalanx.comm.transports.shm._segment_layout import SegmentLayout
from phalanx.errors import PeerLost
from phalanx.launch.cli import _doctor
from processes import run_processes


def footprint() -> tuple[int, int, int]:
    """Open descriptors, mapped segments, threads of this process."""
    # abort() does not wait for the background thread, which keeps the segment until it ends
    for thread in threading.enumerate():
        if thread.name == "phalanx-shm":
            thread.join(60)
    gc.collect()
    with open("/proc/self/maps") as maps:
        segments = sum("memfd:phalanx" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), segments, threading.active_count()


def regroup_often(worker, rounds: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    store = worker.store()
    shared = None
    before = (0, 0, 0)
    for generation in range(rounds):
        group = _group(worker, store, generation)
        if shared is None:
            shared = group.shared_empty((1 << 18,), torch.float32)
        tensor = torch.ones(10)
        group.all_reduce(tensor)
        group.all_reduce(shared.fill_(1.0))
        temporary = group.shared_empty((1 << 18,), torch.float32).fill_(2.0)
        work = group.all_reduce(temporary, async_op=True)
        pair = group.subgroup([0, 1])
        work.wait()
        if pair is not None:
            pair.barrier()
        assert tensor.eq(worker.size).all()
        assert shared.eq(worker.size).all()
        assert temporary.eq(2 * worker.size).all()
        group.barrier()
        group.close() if generation % 2 else group.abort()
        del group, pair, work, temporary
        if generation == 20:
            before = footprint()
    return before, footprint()


def _group(worker, store, generation: int):
    from phalanx.comm import Group

    return Group.create(store, worker.rank, worker.size, timeout=60.0, job="leak", generation=generation)


@pytest.mark.timeout(300)
def test_two_hundred_regroups_leak_nothing() -> None:
    for outcome in run_processes(3, regroup_often, 200, timeout=200.0):
        before, after = outcome.value
        assert after == before


def be_pried_upon(worker) -> list[str]:
    group = worker.group(backend="auto")
    shared = group.shared_empty((1 << 18,), torch.float32)
    group.all_reduce(shared)
    links = {fd: _link(fd) for fd in os.listdir("/proc/self/fd")}
    ours = [fd for fd, name in links.items() if "memfd:phalanx" in name]
    assert len(ours) == 1, "the shared tensor's; nobody keeps one to the segment"
    assert os.stat(f"/proc/self/fd/{ours[0]}").st_mode & 0o777 == 0o600
    tried = []
    if os.geteuid() == 0:
        with open("/proc/self/maps") as maps:
            ranges = [line.split()[0] for line in maps if "memfd:phalanx" in line]
        paths = [f"/proc/{os.getpid()}/fd/{ours[0]}"]
        paths += [f"/proc/{os.getpid()}/map_files/{_short(span)}" for span in ranges]
        tried = [open_as_stranger(path) for path in paths]
    group.barrier()
    return tried


def open_as_stranger(path: str) -> str:
    """What a process of another user gets when it opens ``path``."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            os.open(path, os.O_RDWR)
            answer = "opened"
        except OSError as error:
            answer = type(error).__name__
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # that of the listing itself
        return ""


def _short(span: str) -> str:
    """As names under map_files are written: without leading zeros."""
    return "-".join(f"{int(part, 16):x}" for part in span.split("-"))


def test_another_user_cannot_open_the_memory() -> None:
    outcomes = run_processes(2, be_pried_upon)
    if os.geteuid() != 0:
        pytest.skip("only root can become another user to try")
    for outcome in outcomes:
        assert len(outcome.value) >= 3
        assert set(outcome.value) == {"PermissionError"}


def die_together(worker, folder: Path) -> None:
    group = worker.group(backend="auto")
    buffer = group.shared_empty((1 << 20,), torch.float32)
    group.all_reduce(buffer)
    mapped = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    shared = {fields[5] for fields in mapped if fields[1].endswith("s") and len(fields) == 6}
    (folder / str(group.rank)).write_text("\n".join(sorted(shared)))
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_when_all_are_killed(tmp_path: Path) -> None:
    """What the dead had mapped is either nameless, so that the kernel frees it with its last user, or gone."""
    outcomes = run_processes(3, die_together, tmp_path)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 3
    for rank in range(3):
        shared = (tmp_path / str(rank)).read_text().splitlines()
        assert any("memfd:phalanx" in name for name in shared), shared
        assert [name for name in shared if name.startswith("/dev/shm/") and Path(name).exists()] == []


def do_without(worker, what: str) -> tuple[str, float, list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda item: lines.append(item.getMessage())
    logging.getLogger("phalanx.comm").addHandler(handler)
    logging.getLogger("phalanx.comm").setLevel(logging.INFO)

    def fail(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    if what == "memfd" and worker.rank == 0:
        _segment_join.new_file = fail
    if what == "proc" and worker.rank == 1:
        _segment_join.open_file_of = fail
    group = worker.group(backend="auto")
    tensor = torch.ones(3)
    group.all_reduce(tensor)
    return group.backend, tensor[0].item(), lines


@pytest.mark.parametrize("what", ["memfd", "proc"])
def test_without_shared_memory_gloo_takes_over_with_one_line_in_the_log(what: str) -> None:
    outcomes = run_processes(2, do_without, what)
    assert [outcome.value[:2] for outcome in outcomes] == [("gloo", 2.0)] * 2
    (line,), others = (outcome.value[2] for outcome in outcomes)
    assert "gloo, since rank" in line
    assert "Function not implemented" in line
    assert others == [], "one rank speaks for all"


def test_with_shared_memory_the_log_says_so_in_one_line() -> None:
    outcomes = run_processes(2, do_without, "nothing")
    assert [outcome.value[:2] for outcome in outcomes] == [("shm", 2.0)] * 2
    (line,), others = (outcome.value[2] for outcome in outcomes)
    assert "shm, since all 2 ranks share host" in line
    assert others == [], "one rank speaks for all"


def ask_for_gloo(worker) -> tuple[str, str, float, int]:
    group = worker.group(backend="gloo")
    tensor = torch.ones(1 << 20)
    group.all_reduce(tensor)
    group.barrier()
    return group.backend, type(group._transport).__name__, tensor[-1].item(), footprint()[1]


def test_gloo_by_name_is_gloo_also_where_memory_could_be_shared() -> None:
    for outcome in run_processes(2, ask_for_gloo):
        assert outcome.value == ("gloo", "C10dTransport", 2.0, 0)


def foresee_and_leave_nothing(worker) -> tuple[str, tuple[int, int, int], tuple[int, int, int]]:
    own_identity()  # who a process is takes a thread, once: others notice its end by that of the thread
    before = footprint()
    kind = _auto.foresee().kind
    return kind, before, footprint()


def test_the_doctor_foresees_shared_memory_and_its_trial_leaves_nothing() -> None:
    """In a process of its own: here, what other tests left may be closed in between."""
    kind, before, after = run_processes(1, foresee_and_leave_nothing)[0].value
    assert kind == "shm"
    assert after == before


@pytest.mark.fast
def test_the_doctor_foresees_what_workers_here_will_get(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _auto.foresee().kind == "shm"

    def fail(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(_segment_join, "new_file", fail)
    choice = _auto.foresee()
    assert choice.kind == "gloo"
    assert "Function not implemented" in choice.why


def test_the_doctor_says_what_carries_tensors_and_why() -> None:
    (finding,) = _doctor.check_transport()
    assert finding.level == "ok"
    assert "transport between workers here: shm, since all 2 ranks share host" in finding.text


@pytest.mark.fast
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_group_needs_far_less_than_a_container_offers(size: int) -> None:
    assert SegmentLayout(size=size).total_bytes <= 32 * 1024 * 1024


def die_while_the_group_forms(worker) -> bool:
    if worker.rank == 1:
        _segment_join._map = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost):
        worker.group(backend="auto", timeout=60.0)
    return True


def test_a_death_while_the_group_forms_is_noticed() -> None:
    assert [o.value for o in run_processes(3, die_while_the_group_forms)] == [True, None, True]


def test_a_file_of_nothing_stays_open_while_someone_is_about_to_map_it():
    """Threads hide windows of different sizes at the same time; each maps the file that it was given."""
    files = BlankFiles()
    small = files.at_least(4096)
    large = files.at_least(8192)
    assert os.fstat(small.fd).st_size == 4096
    assert files.at_least(4096) is large
    assert os.pread(large.fd, 9000, 0) == b"\xff" * 8192
