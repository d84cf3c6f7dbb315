"""Makes one HTML file about a job: the page, with the data inside. Nothing is fetched when it is opened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.watch._audit import audit_record
from phalanx.watch._files import Tail
from phalanx.watch._hub import Hub
from phalanx.watch._page_file import page_html
from phalanx.watch._view import JobView


def report_data(directories: Sequence[Path], *, facts: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Return what the report of a job shows, from its event files; ``facts`` are shown at its end."""
    hub = Hub()
    Tail(hub, directories).look()
    data: dict[str, Any] = hub.read(with_details)
    audits = [found["text"] for directory in directories if (found := audit_record(directory))]
    data["commits"]["audit"] = "; ".join(audits)
    more = [("lines that were no events", str(hub.view.num_bad))] if hub.view.num_bad else []
    return {**data, "live": False, "facts": [*facts, *more]}


def with_details(view: JobView) -> dict[str, Any]:
    """Return the page's data as of the last event, with what a click on a worker shows."""
    details = {worker: life.detail() for worker, life in view.lifelines.lives.items()}
    return {**view.page(view.latest), "details": details}


def write_report(out: Path, data: dict[str, Any]) -> None:
    """Write the file; it appears as a whole. ``OSError`` when it cannot be written."""
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        partial.write_text(page_html(data), encoding="utf-8")
        os.replace(partial, out)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
