"""Asks the metadata service of a cloud: one small HTTP request, which ends in time whatever the other side does.

Owns the way of one request. No proxy is used, no redirect followed: the service is on this machine's own link, and
whoever else answers is not it. An answer longer than ``MAX_BYTES`` is none.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from phalanx.preemption._notice import SourceProblem

if TYPE_CHECKING:
    from http.client import HTTPConnection

MAX_BYTES = 1 << 18
LIMIT = 5.0
"""Seconds that a request may take as a whole."""
INTERVAL = 5.0
"""Seconds between two questions, as clouds recommend."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    text: str

    def expect_ok(self, what: str) -> str:
        """Return the text of an answer with status 200."""
        if self.status != 200:
            raise SourceProblem(f"{what} answered with status {self.status}; expected 200. It said {self.text[:80]!r}")
        return self.text


def ask(url: str, *, method: str = "GET", headers: Mapping[str, str] | None = None, limit: float = LIMIT) -> Answer:
    """Send a request to the metadata service, and return its answer, whatever its status.

    Raises:
        SourceProblem: nobody is there, or did not answer in time or in HTTP.
    """
    from http.client import HTTPConnection, HTTPException  # start-up: few agents ask

    parts = urlsplit(url)
    if parts.hostname is None:
        raise ValueError(f"{url!r} names no machine; expected an address such as http://169.254.169.254")
    connection = HTTPConnection(parts.hostname, parts.port, timeout=limit)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    timer = threading.Timer(limit, _hang_up, [connection])  # a timeout of a socket counts anew with each byte
    timer.daemon = True
    timer.start()
    try:
        connection.request(method, target, headers=dict(headers or {}))
        response = connection.getresponse()
        body = response.read(MAX_BYTES + 1)
        found = {name.lower(): value for name, value in response.getheaders()}
    except (OSError, HTTPException, ValueError, AttributeError) as error:  # the last: hung up on while it connected
        raise SourceProblem(f"{url} cannot be asked: {type(error).__name__}: {error}") from error
    finally:
        timer.cancel()
        connection.close()
    if len(body) > MAX_BYTES:
        raise SourceProblem(f"{url} answered with more than {MAX_BYTES} bytes; that is no metadata service")
    return Answer(status=response.status, headers=found, text=body.decode("utf-8", "replace").strip())


def _hang_up(connection: HTTPConnection) -> None:
    import socket  # start-up: loaded with http.client

    with suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_RDWR)


def parse_object(text: str, what: str) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceProblem(f"{what} said {text[:80]!r}, which is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise SourceProblem(f"{what} said {text[:80]!r}; expected a JSON object")
    return found


def parse_time(text: object) -> float | None:
    """Return seconds since 1970 of a time as clouds write it; None for what is none.

    >>> parse_time("1970-01-01T00:02:00Z"), parse_time("Thu, 01 Jan 1970 00:02:00 GMT"), parse_time("soon")
    (120.0, 120.0, None)
    """
    from email.utils import parsedate_to_datetime  # start-up: few agents ask

    if not isinstance(text, str) or not text:
        return None
    for is_iso in (True, False):
        try:
            found = datetime.fromisoformat(text.replace("Z", "+00:00")) if is_iso else parsedate_to_datetime(text)
            return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
        except (ValueError, TypeError, OverflowError, IndexError):
            continue
    return None
