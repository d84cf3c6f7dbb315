"""A real server of the S3 protocol on loopback, with a proxy in front of it that does what a network does.

``Fault`` says to which requests (by method and a pattern of the path with its query) something happens, and how often:
an answer of the server's own (``status``), none at all until the test ends (``hang``), a connection that breaks
(``drop``), half of an answer and then a break (``cut``), or a wait for the test's word (``hold``).
"""

from __future__ import annotations

import http.client
import logging
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from blob_servers import QuietHandler
from moto.server import ThreadedMotoServer

DENIED = b"<Error><Code>%s</Code><Message>The server does not know you.</Message></Error>"


@dataclass
class Fault:
    method: str
    pattern: str
    kind: str = "status"
    times: int = 1
    status: int = 500
    body: bytes = b"<Error><Code>InternalError</Code><Message>no</Message></Error>"
    struck: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


class S3Server:
    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._moto.start()
        self.behind: tuple[str, int] = self._moto.get_host_and_port()
        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._proxy.daemon_threads = True
        self._thread = threading.Thread(target=self._proxy.serve_forever, daemon=True)
        self._thread.start()
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._proxy.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def make_bucket(self, name: str) -> None:
        httpx.put(f"http://{self.behind[0]}:{self.behind[1]}/{name}").raise_for_status()

    def keys(self, bucket: str) -> list[str]:
        """What is in a bucket, asked of the server itself."""
        text = httpx.get(f"http://{self.behind[0]}:{self.behind[1]}/{bucket}?list-type=2").text
        return re.findall(r"<Key>(.*?)</Key>", text)

    def strike(self, *args: Any, **keywords: Any) -> Fault:
        fault = Fault(*args, **keywords)
        self.faults.append(fault)
        return fault

    def calm(self) -> None:
        """End all faults, and let go whatever waits in one."""
        for fault in self.faults:
            fault.times = 0
            fault.release.set()
        self.faults.clear()
        self.requests.clear()

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.requests.append((method, path))
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and re.search(fault.pattern, path):
                    fault.times -= 1
                    fault.struck.set()
                    return fault
        return None

    def stop(self) -> None:
        self.calm()
        self._proxy.shutdown()
        self._proxy.server_close()
        self._moto.stop()


def _handler_of(server: S3Server) -> type[BaseHTTPRequestHandler]:
    class Handler(QuietHandler):
        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            fault = server.fault_for(self.command, self.path)
            if fault is not None and self._is_dealt_with(fault):
                return
            behind = http.client.HTTPConnection(*server.behind)
            behind.request(self.command, self.path, body, dict(self.headers))
            answer = behind.getresponse()
            data = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                    self.send_header(name, value)
            if answer.getheader("content-length") is None:
                self.send_header("content-length", str(len(data)))
            self.end_headers()
            if fault is not None and fault.kind == "cut":
                data = data[: len(data) // 2]
                self.close_connection = True
            self.wfile.write(data)
            behind.close()

        def _is_dealt_with(self, fault: Fault) -> bool:
            """Whether the server behind does not hear of this request."""
            if fault.kind == "status":
                self.send_response(fault.status)
                self.send_header("content-length", str(len(fault.body)))
                self.end_headers()
                self.wfile.write(fault.body)
            elif fault.kind == "hang":
                fault.release.wait()
                self.close_connection = True
            elif fault.kind == "drop":
                self.close_connection = True
            elif fault.kind == "hold":
                fault.release.wait()
                return False
            return fault.kind not in ("cut", "hold")

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

    return Handler
