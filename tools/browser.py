"""Drives a headless Chromium over DevTools' pipe: opens pages, evaluates expressions, takes pictures.

Needs nothing but Chromium itself (``apt install chromium``); used by the tests of the live page and by the pictures of
it in the docs.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW = "no Chromium on this machine: apt install chromium"


def find_chromium() -> str:
    """Return its path; "" when there is none."""
    return next(filter(None, map(shutil.which, NAMES)), "")


class Browser:
    """One Chromium with one page; close it by ``with``."""

    def __init__(self, profile: Path, *, width: int = 1200, height: int = 1600, dark: bool = False) -> None:
        to_browser, ours = os.pipe()
        theirs, from_browser = os.pipe()
        os.set_inheritable(to_browser, True)
        os.set_inheritable(from_browser, True)
        flags = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
                 "--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={profile}"]  # fmt: skip
        # DevTools reads descriptor 3 and writes to 4.
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", command, find_chromium(), *flags],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._out, self._in = os.fdopen(ours, "wb", buffering=0), os.fdopen(theirs, "rb", buffering=0)
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.problems: list[str] = []
        """What the page complained of: errors of its script, of the network, and what its policy kept out."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.prefer(dark=dark)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self._out.close()
        self._in.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of DevTools; its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                found: dict[str, Any] = answer["result"]
                return found

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = self._in.read(1 << 16)
            if not data:
                raise RuntimeError("Chromium has ended")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        self._note(found.get("method", ""), found.get("params", {}))
        return found

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['source']}: {params['entry']['text']}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))

    def resize(self, width: int, height: int) -> None:
        """Give the page this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, *, dark: bool) -> None:
        """Say what the person's system prefers."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)

    def ask(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout: float = 60.0) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + timeout
        while not self.ask(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} is not true after {timeout:g} s")
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Press the mouse where an element is, as a person would; what lies above it gets the click."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.ask(f"{where}.scrollIntoView({{block: 'center'}})")
        box = self.ask(f"(b => ({{x: b.x + b.width / 2, y: b.y + b.height / 2}}))({where}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **box, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Click a field and write into it."""
        self.click(selector)
        self.call("Input.insertText", text=text)

    def fit(self) -> None:
        """Make the window as high as the page."""
        width, height = self.ask("[innerWidth, document.documentElement.scrollHeight]")
        self.resize(width, height)

    def picture(self, path: Path) -> None:
        """Take a picture of the page."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
