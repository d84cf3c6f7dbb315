"""Takes the pictures of the page for the docs: ``make screenshots``. Needs Chromium.

The pages are the reports of a short run of the demo, which kills a worker and adds one: light, dark (of the sharded
job), as wide as a phone, and what a click on the worker that died opens.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from phalanx.watch._report import report_data, write_report
from tools.browser import HOW, Browser, find_chromium

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
PAGES = (
    ("page-light", "elastic", 1200, False),
    ("page-dark", "sharded", 1200, True),
    ("page-phone", "elastic", 390, False),
)
"""Picture, job, width, and whether it is dark."""


def main() -> int:
    """Run the demo and take the pictures; the exit code."""
    if not find_chromium():
        print(HOW, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="phalanx-pictures-") as folder:
        out = Path(folder)
        subprocess.run([sys.executable, str(ROOT / "examples" / "demo.py"), f"--out={out}"], check=True)
        for job in ("elastic", "sharded"):
            write_report(out / f"{job}.html", report_data([out / job / "logs"]))
        take(out)
    return 0


def take(out: Path) -> None:
    """Take the pictures of the reports in a folder."""
    with Browser(out / "profile") as browser:
        for name, job, width, dark in PAGES:
            browser.resize(width, 1000)
            browser.prefer(dark=dark)
            browser.open(f"file://{out / f'{job}.html'}")
            browser.wait_for("document.body && document.body.dataset.shown === '1'")
            browser.fit()
            browser.wait_for("document.body.dataset.shown >= '2'")  # drawn again, without the bar for scrolling
            browser.fit()
            browser.picture(PICTURES / f"{name}.png")
        browser.resize(1200, 760)
        browser.prefer(dark=False)
        browser.ask("document.querySelector('[data-end=died]').dispatchEvent(new MouseEvent('click'))")
        browser.wait_for("document.getElementById('detail').open")
        browser.picture(PICTURES / "page-worker.png")


if __name__ == "__main__":
    sys.exit(main())
