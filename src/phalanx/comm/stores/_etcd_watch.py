"""Watches an etcd prefix: a thread reads the stream, ``wait`` takes what has arrived.

Guarantees: every change after the watch was made, once and in order, across reconnections and changes of leader,
because each connection starts at the revision after the last one seen. A stream that stays silent is reopened
every ``SILENCE`` seconds, so that a member that vanished is noticed. What cannot be mended is raised by ``wait``.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from typing import Any

from phalanx.comm._background import Background
from phalanx.comm.stores._etcd_gateway import Attempts, Gateway, as_text, b64, range_end, unb64
from phalanx.comm.stores._interface import Change, Watch
from phalanx.errors import StoreError, StoreLost

SILENCE = 5.0


class EtcdWatch(Watch):
    """Changes of the keys under ``prefix`` after ``revision``; ``cut`` characters are taken off every key."""

    def __init__(self, gateway: Gateway, prefix: bytes, cut: int, revision: int) -> None:
        self._gateway = gateway
        self._prefix = prefix
        self._cut = cut
        self._next = revision + 1
        self._arrived: queue.SimpleQueue[list[Change] | Exception] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._closed = threading.Event()
        self._socket: socket.socket | None = None
        # Not begun again: ``wait`` raises what ended it, and its caller makes a new watch and reads everything anew.
        self._thread = Background(self._run, "phalanx-etcd-watch", on_failure=self._fail, attempts=1)
        self._thread.start()

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, StoreError):
            self._arrived.put(error)
        else:
            failure = StoreLost(f"lost the watch of {self._gateway.address}: {error!r}", address=self._gateway.address)
            failure.__cause__ = error
            self._arrived.put(failure)

    def wait(self, timeout: float) -> list[Change]:
        if self._failure is not None:
            raise self._failure
        if self._closed.is_set():
            raise ValueError("this watch is closed")
        deadline = time.monotonic() + timeout
        changes: list[Change] = []
        while True:
            try:
                left = 0.0 if changes else max(0.0, deadline - time.monotonic())
                item = self._arrived.get(timeout=left) if left else self._arrived.get_nowait()
            except queue.Empty:
                return changes
            if isinstance(item, Exception):
                self._failure = item
                if changes:
                    return changes
                raise item
            changes += item

    def close(self) -> None:
        self._closed.set()
        # The socket is shut down until the thread has seen it: it may be opening a new one at this moment.
        while self._thread.is_alive():
            if self._socket is not None:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
            self._thread.join(0.02)
        self._gateway.close()

    def _run(self) -> None:
        import httpx  # optional: only those who use etcd need it

        attempts = Attempts(self._gateway)
        while not self._closed.is_set():
            self._gateway.follow()
            url = self._gateway.url("/v3/watch")
            started = self._next
            try:
                self._read_stream(url)
            except httpx.ReadTimeout:
                attempts = Attempts(self._gateway)  # silence is no failure
            except httpx.TransportError as error:
                if self._next != started:
                    attempts = Attempts(self._gateway)
                attempts.failed(url, error)

    def _read_stream(self, url: str) -> None:
        import httpx  # optional: only those who use etcd need it

        request = {
            "key": b64(self._prefix),
            "range_end": b64(range_end(self._prefix)),
            "start_revision": str(self._next),
        }
        with self._gateway.client().stream(
            "POST",
            url,
            json={"create_request": request},
            headers={"Grpc-Metadata-hasleader": "true", **self._gateway.headers()},
            timeout=httpx.Timeout(SILENCE, connect=1.0),
        ) as response:
            self._gateway.outage.end()
            self._socket = response.extensions["network_stream"].get_extra_info("socket")
            for line in response.iter_lines():
                if self._closed.is_set():
                    return
                if line.strip():
                    self._take(json.loads(line))
        raise httpx.RemoteProtocolError("the stream of changes ended")

    def _take(self, message: dict[str, Any]) -> None:
        import httpx  # optional: only those who use etcd need it

        if "error" in message:
            if "auth token" in str(message["error"]):
                self._gateway.log_in_again()
            raise httpx.RemoteProtocolError(str(message["error"]))  # no leader any more: ask another member
        result = message["result"]
        if "compact_revision" in result:
            raise StoreError(f"{self._gateway.address}: the watch fell behind; make a new one and read items again")
        if result.get("canceled"):
            raise httpx.RemoteProtocolError(f"the watch was cancelled: {result.get('cancel_reason', '')}")
        events = result.get("events", [])
        if events:
            self._next = int(events[-1]["kv"]["mod_revision"]) + 1
            self._arrived.put([change for event in events if (change := self._change(event)) is not None])

    def _change(self, event: dict[str, Any]) -> Change | None:
        key = as_text(event["kv"]["key"])
        if key is None:
            return None  # a stranger's
        deleted = event.get("type") == "DELETE"
        return Change(key[self._cut :], None if deleted else unb64(event["kv"].get("value", "")))
