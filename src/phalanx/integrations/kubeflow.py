"""Tells Kubeflow Trainer how far a job is: ``Job(trackers=[TrainJobStatus(total_steps=1000)])``.

Kubeflow's controller (with its feature ``TrainJobRuntimeStatus``) gives the pods of a TrainJob an address and a token;
what is posted there stands in the TrainJob's status. The worker that logs posts, in a thread, so that no step waits for
the controller; what it cannot post is said once, and training goes on. Elsewhere this does nothing.
"""

from __future__ import annotations

import json
import logging
import os
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from phalanx.comm import _background as background

__all__ = ["TrainJobStatus"]

log = logging.getLogger(__name__)

_URL, _TOKEN, _CA = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "TOKEN", "CA_CERT"))
_TIMEOUT = 5.0
"""Seconds that the controller has for an answer."""


class TrainJobStatus:
    """A tracker that reports percent, seconds left and the newest values, every ``interval`` seconds at most.

    >>> TrainJobStatus(total_steps=1000).total_steps
    1000
    """

    def __init__(self, total_steps: int, *, interval: float = 10.0, environ: Mapping[str, str] = os.environ) -> None:
        if total_steps < 1:
            raise ValueError(f"total_steps is {total_steps}; expected at least 1")
        self.total_steps = total_steps
        self._interval = interval
        self._url, self._token, self._ca = (environ.get(name, "") for name in (_URL, _TOKEN, _CA))
        self._changed = threading.Condition()
        self._newest: tuple[int, dict[str, float]] | None = None
        self._is_closing = False
        self._has_complained = False
        self._began = (0, 0.0)
        self._thread: background.Background | None = None

    def begin(self, run: str, step: int) -> int:
        self._began = (step, time.monotonic())
        if self._url:
            self._is_closing = False
            self._thread = background.start(self._run, "phalanx-trainjob", on_failure=self._complain)
        return step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with self._changed:
            self._newest = (step + 1, dict(values))
            self._changed.notify()

    def close(self) -> None:
        """Report the newest values, and end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(2 * _TIMEOUT)
            self._thread = None

    def _run(self) -> None:
        told_at = -self._interval
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._is_closing)
                self._changed.wait_for(lambda: self._is_closing, told_at + self._interval - time.monotonic())
                newest, self._newest, is_over = self._newest, None, self._is_closing
            if newest is not None:
                told_at = time.monotonic()
                self._post(*newest)
            if is_over:
                return

    def _post(self, num_done: int, values: Mapping[str, float]) -> None:
        first, began = self._began
        per_step = (time.monotonic() - began) / max(1, num_done - first)
        record = status(num_done, self.total_steps, per_step, values)
        try:
            token = Path(self._token).read_text().strip()  # each time: it is renewed
            context = ssl.create_default_context(cafile=self._ca or None) if self._url.startswith("https") else None
            request = urllib.request.Request(
                self._url,
                data=json.dumps({"trainerStatus": record}).encode(),
                headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
                method="POST",
            )
            with urllib.request.urlopen(request, timeout=_TIMEOUT, context=context):
                pass
        except (OSError, ValueError) as error:
            self._complain(error)

    def _complain(self, error: BaseException) -> None:
        if not self._has_complained:
            log.warning("cannot tell Kubeflow how far the job is (%s): %s", self._url, error)
        self._has_complained = True


def status(num_done: int, total: int, seconds_per_step: float, values: Mapping[str, float]) -> dict[str, Any]:
    """Return what Kubeflow calls the status of a trainer.

    >>> made = status(250, 1000, 2.0, {"loss": 0.5})
    >>> made["progressPercentage"], made["estimatedRemainingSeconds"], made["metrics"]
    (25, 1500, [{'name': 'loss', 'value': '0.5'}])
    """
    return {
        "progressPercentage": min(100, 100 * num_done // total),
        "estimatedRemainingSeconds": int(max(0, total - num_done) * seconds_per_step),
        "metrics": [{"name": name, "value": str(value)} for name, value in values.items()],
        "lastUpdatedTime": datetime.now(timezone.utc).isoformat(),
    }
