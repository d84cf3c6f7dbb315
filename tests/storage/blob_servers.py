"""Small servers on loopback that speak what Google's and Azure's object storage speak, as far as our client asks.

Written from the providers' public descriptions of their protocols: Google's XML API (objects, multi-part uploads, list
version 2, generation preconditions) and Azure's Blob service (block blobs, block lists, shared keys). They hold objects
in memory, show an object when its last part is committed and not before, refuse what is not signed, and fail on demand.
They are no proof of what the real services do beyond that.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

TIME = "2026-01-01T00:00:00.000Z"
KEY = base64.b64encode(b"a key of thirty-two bytes, no more").decode()


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Request:
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: Any
    body: bytes


def range_of(header: str, size: int) -> tuple[int, int]:
    begin, end = header.removeprefix("bytes=").split("-")
    return int(begin), min(size, int(end) + 1) if end else size


class BlobServer:
    """What both have in common: objects, faults, ranges."""

    def __init__(self, *buckets: str) -> None:
        self.objects: dict[str, dict[str, bytes]] = {bucket: {} for bucket in buckets}
        self.parts: dict[tuple[str, str], bytes] = {}
        """Of uploads that are not complete: by upload (or key) and part."""
        self.requests: list[tuple[str, str]] = []
        self.failures: list[tuple[str, str]] = []
        """A method and a pattern of the path with its query, each for one request that gets a 500 or 503."""
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def takes(self, method: str, path: str) -> bool:
        """Note a request; whether it is answered in earnest."""
        with self.lock:
            self.requests.append((method, path))
            for failure in self.failures:
                if failure[0] == method and re.search(failure[1], path):
                    self.failures.remove(failure)
                    return False
        return True

    def answer(self, request: Request) -> Answer:
        raise NotImplementedError

    def error(self, status: int, code: str) -> Answer:
        return Answer(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())

    def read(self, request: Request) -> Answer:
        data = self.objects[request.bucket].get(request.key)
        if data is None:
            return self.missing()
        headers = {"ETag": etag(data), "Last-Modified": formatdate(0, usegmt=True), "x-goog-generation": "1"}
        if request.method == "GET" and (wanted := request.headers.get("Range") or request.headers.get("x-ms-range")):
            begin, end = range_of(wanted, len(data))
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
            return Answer(206, data[begin:end], headers)
        return Answer(200, data, headers)

    def missing(self) -> Answer:
        raise NotImplementedError

    def store(self, request: Request, data: bytes) -> Answer:
        self.objects[request.bucket][request.key] = data
        return Answer(201, b"", {"ETag": etag(data), "x-goog-generation": "1"})


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


class GoogleServer(BlobServer):
    """The XML API."""

    @property
    def environment(self) -> dict[str, str]:
        """With an account that needs no token; should a client ask for one all the same, it asks this server."""
        account = {"gcs_base_url": self.url, "disable_oauth": True, "client_email": "", "private_key": "",
                   "private_key_id": ""}  # fmt: skip
        here = self.url.removeprefix("http://")
        return {
            "GOOGLE_BASE_URL": self.url,
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account),
            **dict.fromkeys(("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT"), here),
        }

    def missing(self) -> Answer:
        return self.error(404, "NoSuchKey")

    def answer(self, request: Request) -> Answer:
        if request.bucket not in self.objects:
            return self.error(404, "NoSuchBucket")
        if not request.key:
            return self._list(request)
        upload = request.query.get("uploadId")
        if request.method in ("GET", "HEAD"):
            return self.read(request)
        if request.method == "POST" and "uploads" in request.query:
            text = f"<InitiateMultipartUploadResult><Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
            return Answer(
                200, f"{text}<UploadId>up-{len(self.requests)}</UploadId></InitiateMultipartUploadResult>".encode()
            )
        if request.method == "PUT" and upload:
            self.parts[upload, request.query["partNumber"]] = request.body
            return Answer(200, b"", {"ETag": etag(request.body)})
        if request.method == "POST" and upload:
            numbers = re.findall(rb"<PartNumber>(\d+)</PartNumber>", request.body)
            data = b"".join(self.parts.pop((upload, number.decode())) for number in numbers)
            self.store(request, data)
            text = f"<CompleteMultipartUploadResult><ETag>{escape(etag(data))}</ETag></CompleteMultipartUploadResult>"
            return Answer(200, text.encode(), {"x-goog-generation": "1"})
        if request.method == "DELETE":
            if upload:
                return Answer(204)
            return Answer(204) if self.objects[request.bucket].pop(request.key, None) is not None else self.missing()
        if request.headers.get("x-goog-if-generation-match") == "0" and request.key in self.objects[request.bucket]:
            return self.error(412, "PreconditionFailed")
        return self.store(request, request.body)

    def _list(self, request: Request) -> Answer:
        assert request.query.get("list-type") == "2", request.query
        found = sorted(k for k in self.objects[request.bucket] if k.startswith(request.query.get("prefix", "")))
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[request.bucket][key])}</Size>"
            f"<LastModified>{TIME}</LastModified><ETag>x</ETag></Contents>"
            for key in found
        )
        return Answer(200, f"<ListBucketResult>{entries}<IsTruncated>false</IsTruncated></ListBucketResult>".encode())


class AzureServer(BlobServer):
    """The Blob service; a block is there for nobody until its list is committed."""

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ENDPOINT": self.url,
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        }

    def missing(self) -> Answer:
        return self.error(404, "BlobNotFound")

    def answer(self, request: Request) -> Answer:
        if not str(request.headers.get("Authorization", "")).startswith("SharedKey account:"):
            return self.error(403, "AuthenticationFailed")
        if request.bucket not in self.objects:
            return self.error(404, "ContainerNotFound")
        kind = request.query.get("comp")
        if kind == "batch":
            return self._remove(request)
        if request.method == "GET" and kind == "list":
            return self._list(request)
        if request.method in ("GET", "HEAD"):
            return self.read(request)
        if request.method == "DELETE":
            return Answer(202) if self.objects[request.bucket].pop(request.key, None) is not None else self.missing()
        if kind == "block":
            self.parts[request.key, request.query["blockid"]] = request.body
            return Answer(201)
        if kind == "blocklist":
            blocks = re.findall(rb"<(?:Uncommitted|Latest)>(.*?)</", request.body)
            return self.store(request, b"".join(self.parts.pop((request.key, one.decode())) for one in blocks))
        if request.headers.get("If-None-Match") == "*" and request.key in self.objects[request.bucket]:
            return self.error(409, "BlobAlreadyExists")
        return self.store(request, request.body)

    def _remove(self, request: Request) -> Answer:
        """Answer a batch of removals, each by a part of its own."""
        parts = []
        for path in re.findall(rb"^DELETE (\S+) HTTP", request.body, re.M):
            key = unquote(urlsplit(path.decode()).path).lstrip("/").partition("/")[2]
            there = self.objects[request.bucket].pop(key, None) is not None
            line = "202 Accepted" if there else "404 Not Found\r\nx-ms-error-code: BlobNotFound"
            head = f"--batch\r\nContent-Type: application/http\r\nContent-ID: {len(parts)}\r\n\r\n"
            parts.append(f"{head}HTTP/1.1 {line}\r\nContent-Length: 0\r\n\r\n")
        body = "".join([*parts, "--batch--\r\n"]).encode()
        return Answer(202, body, {"Content-Type": "multipart/mixed; boundary=batch"})

    def _list(self, request: Request) -> Answer:
        found = sorted(k for k in self.objects[request.bucket] if k.startswith(request.query.get("prefix", "")))
        entries = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{formatdate(0, usegmt=True)}</Last-Modified>"
            f"<Etag>x</Etag><Content-Length>{len(self.objects[request.bucket][key])}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type><BlobType>BlockBlob</BlobType></Properties></Blob>"
            for key in found
        )
        text = f"<EnumerationResults><Blobs>{entries}</Blobs><NextMarker /></EnumerationResults>"
        return Answer(200, text.encode())


class QuietHandler(BaseHTTPRequestHandler):
    """Says nothing, and takes a client that gave up for what it is."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError, BrokenPipeError):  # a client that gave up
            super().handle()


def _handler_of(server: BlobServer) -> type[BaseHTTPRequestHandler]:
    class Handler(QuietHandler):
        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            parts = urlsplit(self.path)
            bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
            query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
            if server.takes(self.command, self.path):
                with server.lock:
                    answer = server.answer(Request(self.command, bucket, key, query, self.headers, body))
            else:
                answer = server.error(503, "ServerBusy")
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = serve

    return Handler
