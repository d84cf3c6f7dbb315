"""What a newcomer sees: the page that ``make demo`` prints shows the kill and the join as they happen, in Chromium."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tools.browser import HOW, Browser, find_chromium

DEMO = Path(__file__).parent.parent.parent / "examples" / "demo.py"


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(not find_chromium(), reason=HOW)
def test_the_page_that_the_demo_prints_shows_a_kill_and_a_join(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--steps=120", f"--out={tmp_path / 'out'}"]
    with Browser(tmp_path / "profile") as browser:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
        )  # fmt: skip
        assert process.stdout is not None
        try:
            said: list[str] = []
            while not (found := re.search(r"open (http://\S+) to watch", "".join(said))):
                line = process.stdout.readline()
                assert line, f"no address was printed:\n{''.join(said)}"
                said.append(line)
            browser.open(found[1])
            browser.ask("window.isTheSamePage = true")
            browser.wait_for("document.querySelectorAll('[data-mark=death]').length === 1")
            browser.wait_for("document.getElementById('tiles').textContent.includes('4 / 4')")
            assert browser.ask("window.isTheSamePage") is True
            browser.wait_for(  # the second job, at the same address
                "document.getElementById('n-copies').textContent.includes('2 copies')", timeout=200
            )
            browser.wait_for("document.getElementById('tiles').textContent.includes('4 / 4')", timeout=200)
            assert browser.ask("window.isTheSamePage") is True, "it went on by itself"
        finally:
            process.send_signal(signal.SIGINT)  # it ends its job with itself; how it ends otherwise has its own test
            process.wait(200)
            process.stdout.close()
