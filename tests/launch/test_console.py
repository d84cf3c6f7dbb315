"""What a person at a terminal sees: equal lines once, one live line at the bottom, nothing lost or out of order."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.telemetry._line_merger import HOLD, LineMerger
from phalanx.launch.telemetry._pump import LogPump, Sinks
from phalanx.launch.telemetry._terminal import Terminal, logging_above

pytestmark = pytest.mark.fast

lines = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([b"a", b"b", b"c"]), st.floats(0, 0.3)), max_size=40)


def ranks_of(prefix: bytes) -> list[int]:
    found = []
    for part in prefix.split(b" ")[1].split(b","):
        first, _, last = part.partition(b"-")
        found += list(range(int(first), int(last or first) + 1))
    return found


@given(lines)
def test_each_rank_keeps_its_lines_and_their_order(given: list[tuple[int, bytes, float]]) -> None:
    merger, now = LineMerger(), 0.0
    out: list[tuple[int, bytes]] = []
    for rank, line, pause in given:
        now += pause
        out += merger.due(now)
        merger.add(rank, 1, line, now)
    out += merger.due(now + 2 * HOLD)
    assert not merger.is_holding
    shown: dict[int, list[bytes]] = {rank: [] for rank in range(4)}
    for fd, text in out:
        prefix, _, line = text.rstrip(b"\n").partition(b": ")
        assert fd == 1
        for rank in ranks_of(prefix):
            shown[rank].append(line)
    assert shown == {rank: [line for who, line, _ in given if who == rank] for rank in range(4)}


def test_the_pump_merges_what_ranks_print_at_the_same_time() -> None:
    read_end, write_end = os.pipe()
    pump = LogPump()
    pump.start()
    try:
        streams = [pump.add(Sinks(console_fd=write_end, rank=rank, merger=pump.merger)) for rank in range(3)]
        for fd in streams:
            os.write(fd, b"loading\nhalf of a")
        os.write(streams[1], b" line\n")
        for fd in streams:
            os.close(fd)
        pump.drain()
    finally:
        pump.close()
        os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        assert file.read() == b"ranks 0-2: loading\nrank 1: half of a line\nranks 0,2: half of a\n"


def test_output_scrolls_above_the_live_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)  # plain where it is absent
    read_end, write_end = os.pipe()
    terminal = Terminal(write_end)
    terminal.show("step 1")
    terminal.show("step 1")  # nothing has changed
    terminal.write(write_end, b"hello\n")
    terminal.write(write_end, b"no end")
    terminal.show("step 2")
    terminal.write(write_end, b"\n")
    terminal.show("step 3")
    terminal.show("step 4\nlast: a failure")
    terminal.write(write_end, b"bye\n")
    terminal.show("")
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        shown = file.read()
    erase = b"\r\x1b[2K"
    erase_both, block = erase + b"\x1b[1A" + erase, b"step 4\nlast: a failure"
    assert shown.startswith(b"step 1" + erase + b"hello\nstep 1" + erase + b"no end\nstep 3" + erase + block)
    assert shown.endswith(b"step 3" + erase + block + erase_both + b"bye\n" + block + erase_both)


def test_what_the_agent_logs_goes_above_the_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    terminal = Terminal(write_end)
    monkeypatch.setattr(terminal, "write", lambda fd, data: os.write(write_end, b"<" + data + b">"))
    try:
        with logging_above(terminal):
            logging.getLogger("phalanx.test").error("a node was lost")
        assert handler.stream is sys.stderr
    finally:
        logging.getLogger().removeHandler(handler)
        os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        assert b"a node was lost" in file.read()


def config(nproc: int = 2, nodes: int = 1, **more: Any) -> LaunchConfig:
    return LaunchConfig(min_nodes=1, max_nodes=nodes, nproc_per_node=nproc, **more)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_lines_have_their_ranks_when_there_is_more_than_one_worker(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a file or a pipe, where one could not tell whose line it is."""
    monkeypatch.setattr(os, "isatty", lambda fd: is_terminal)
    assert config().merges_lines
    assert config(nproc=1, nodes=2).merges_lines, "the lines of all nodes may lie in one file"
    assert not config(nproc=1).merges_lines, "one worker's output is its own"
    assert config(nproc=1, console="merged").merges_lines
    assert not config(console="plain").merges_lines
    assert config().shows_line == is_terminal
    assert not config(console="plain").shows_line


def test_the_output_of_several_workers_in_a_pipe_says_whose_it_is(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfor fd, text in (1, 'all say this'), (1, 'I am ' + os.environ['RANK']), (2, 'oh'):\n"
        "    os.write(fd, text.encode() + b'\\n')\n"
    )

    def lines(*flags: str, nproc: int = 3) -> tuple[list[str], list[str]]:
        command = [sys.executable, "-m", "phalanx", "run", f"--nproc-per-node={nproc}", *flags, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return sorted(done.stdout.splitlines()), [line for line in done.stderr.splitlines() if line.endswith("oh")]

    out, err = lines()
    assert {line for line in out if "am" in line} == {f"rank {rank}: I am {rank}" for rank in range(3)}
    for said, text in ((out, "all say this"), (err, "oh")):
        heads = [line.removesuffix(f": {text}") for line in said if line.endswith(text)]
        assert sorted(rank for head in heads for rank in ranks_of(head.encode())) == [0, 1, 2], "each rank's line, once"
    plain = sorted(["all say this"] * 3 + [f"I am {rank}" for rank in range(3)])
    assert lines("--console=plain") == (plain, ["oh"] * 3)
    assert lines(nproc=1) == (["I am 0", "all say this"], ["oh"])
