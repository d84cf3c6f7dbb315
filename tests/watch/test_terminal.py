"""``phalanx run`` in a terminal: a live block at the bottom, what workers print above it, and nothing left of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cluster import PRELOAD, SCRIPT

ERASE = "\r\x1b[2K"


class Screen:
    """A pseudo terminal, and all that was written to it."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.openpty()
        self._read = bytearray()
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()

    def _follow(self) -> None:
        while True:
            try:
                data = os.read(self.ours, 1 << 16)
            except OSError:  # nobody has it open any more
                return
            if not data:
                return
            self._read += data

    def text(self) -> str:
        """Without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self._read.decode(errors="replace"))

    def wait_for(self, pattern: str, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 150
        while not re.search(pattern, self.text()):
            assert process.poll() is None, self.text()
            assert time.monotonic() < deadline, f"{pattern} was not shown:\n{self.text()}"
            time.sleep(0.02)

    def close(self) -> None:
        """Read what is left."""
        self._reader.join(60)
        os.close(self.ours)


@pytest.mark.timeout(240)
def test_a_run_shows_one_live_block_and_takes_it_away_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "hold").write_text("8")
    screen = Screen()
    command = [
        sys.executable, "-m", "phalanx", "run", "--nproc-per-node=2", "--on-failure=heal", f"--preload={PRELOAD}",
        str(SCRIPT), str(tmp_path), "20", "0.01",
    ]  # fmt: skip
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        command, stdin=screen.theirs, stdout=screen.theirs, stderr=screen.theirs, cwd=tmp_path, env=environ
    )
    os.close(screen.theirs)
    try:
        screen.wait_for(r"step 8/20  loss \d\.\d+  \d+ samples/s  2 workers  generation 0", process)
        workers = [path.name.removeprefix("pid-") for path in tmp_path.glob("pid-*")]
        for worker in workers:
            (tmp_path / f".wish-{worker}").write_text("say hello")
            (tmp_path / f".wish-{worker}").rename(tmp_path / f"fail-{worker}")
        both = r"(rank [01]: hello\r\n[\s\S]*rank [01]: hello|ranks 0-1: hello)"
        screen.wait_for(rf"{both}\r\n[\s\S]*step 8/20", process)
        text = screen.text()
        above = text[: text.index("hello")]
        assert above.rindex(ERASE) > above.rindex("step 8/20"), "the block gives way to what is printed"
        (tmp_path / "hold").unlink()
        assert process.wait(150) == 0, screen.text()
    finally:
        process.kill()
        process.wait()
        screen.close()
    last = screen.text().rpartition("samples/s")[2]
    assert ERASE in last, "nothing of it is left"
