"""Decides who may look at a job, and who may change it.

Bound to loopback, whoever is on the machine may look; requests that name another host are refused, so that a web page
from elsewhere cannot read along (DNS rebinding). Bound elsewhere, looking needs the token, which follows from the job's
secret, so that the next agent that serves has the same one. Changing needs the secret itself, which never travels: a
request is signed with it, over a number that is good once.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from typing import Any

from phalanx.watch._http import HttpRequest, is_loopback

COOKIE = "phalanx"
NONCE_LIFE = 120.0
MAX_NONCES = 1000


class Refused(Exception):
    """A request that is not answered; ``status`` says how."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def token_of(secret: bytes | None) -> str:
    """Return the token for looking at a job; a new one where there is no secret."""
    if not secret:
        return secrets.token_urlsafe(24)
    return hmac.digest(secret, b"phalanx: look at the job", "sha256").hex()[:40]


def sign(secret: bytes, action: str, body: bytes) -> str:
    """Return the signature of a request to change something."""
    return hmac.digest(secret, b"phalanx: change the job\n" + action.encode() + b"\n" + body, "sha256").hex()


class PageAccess:
    """The rules of one server. ``token`` None: whoever reaches it may look."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        token: str | None = None,
        secret: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.token = token if token is not None or is_loopback(host) else token_of(secret)
        self._is_local = is_loopback(host)
        self._secret = secret
        self._clock = clock
        self._lock = threading.Lock()
        self._nonces: dict[str, float] = {}

    @property
    def can_change(self) -> bool:
        return bool(self._secret)

    def check_look(self, request: HttpRequest) -> None:
        """``Refused`` unless the client may look."""
        self._check_host(request)
        if self.token is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip() or _cookie(request)
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise Refused(401, "a token is needed: open the address that phalanx run printed, or send it as Bearer")

    def _check_host(self, request: HttpRequest) -> None:
        name = request.headers.get("host", "")
        host = name.rpartition(":")[0] if not name.endswith("]") and ":" in name else name
        if self._is_local and not is_loopback(host.strip("[]")):
            raise Refused(403, f"host {name[:100]!r}; expected localhost: this page is for this machine only")

    def is_token(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def nonce(self) -> str:
        """Return a number for one request."""
        now = self._clock()
        with self._lock:
            self._nonces = {one: end for one, end in self._nonces.items() if end > now}
            if len(self._nonces) >= MAX_NONCES:
                raise Refused(429, "too many requests are being made; try again in a minute")
            made = secrets.token_hex(16)
            self._nonces[made] = now + NONCE_LIFE
        return made

    def check_change(self, request: HttpRequest, action: str) -> dict[str, Any]:
        """Return what a signed request asks for; ``Refused`` when it is not signed with the job's secret."""
        if not self._secret:
            raise Refused(403, "this job has no secret, so nobody can prove that it is theirs; give it one")
        expected = sign(self._secret, action, request.body)
        if not hmac.compare_digest(request.headers.get("x-phalanx-signature", "").encode(), expected.encode()):
            raise Refused(403, "the request is not signed with the job's secret")
        try:
            wish = json.loads(request.body)
        except (ValueError, RecursionError):
            wish = None
        if not isinstance(wish, dict) or wish.get("confirm") is not True:
            raise Refused(400, 'expected an object with "confirm": true')
        with self._lock:
            if self._nonces.pop(str(wish.get("nonce")), 0.0) <= self._clock():
                raise Refused(403, "the request was made before, or too long ago; ask for a new number")
        return wish


def _cookie(request: HttpRequest) -> str:
    try:
        found = SimpleCookie(request.headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""
