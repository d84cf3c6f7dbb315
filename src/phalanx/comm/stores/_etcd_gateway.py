"""Talks to an etcd v3 cluster through its JSON gateway.

Owns endpoints, fail-over and errors; knows nothing of stores. A request that one member cannot answer (it is down,
restarts, has lost its leader, or is silent) goes to the next one, until the cluster has not answered for ``PATIENCE``
seconds: then ``StoreLost``. From then on, until it answers again, every request is tried once with each member. So a
request may reach etcd twice: callers send only what may be repeated (see ``_etcd`` for how ``add`` and
``compare_and_set`` are made so).
Where the address says ``follow``, members come and go, and who they are is asked every ``FOLLOW`` seconds of use.
Rejected: giving up as soon as every member refuses connections. That is what a member looks like that restarts.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from phalanx.comm.stores._etcd_access import Access
from phalanx.errors import StoreError, StoreLost

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

PATIENCE = 20.0
"""Seconds that a cluster may be away: the election of a new leader, the restart of its only member. More than the
default lease of a node, so that a job is not given up before a node of it would be."""

FOLLOW = 20.0
"""Seconds of use after which a client asks who the members of a cluster are that it follows."""
FOLLOW_EARLY = 2.0
"""``FOLLOW`` as long as fewer than three are known: the cluster may just be growing."""

_RETRY_CODES = {1, 4, 8, 10, 14}  # cancelled, deadline exceeded, resource exhausted, aborted, unavailable
_RETRY_WORDS = ("raft: stopped", "raft proposal dropped")
"""What a member says without a code of its own: it was taken out just now, or there is no leader at the moment."""
NOT_FOUND = 5
UNAUTHENTICATED = 16


class EtcdError(StoreError):
    """etcd understood a request and refused it; ``code`` is the gRPC status."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class Outage:
    """Since when a cluster has not answered; shared by all clients of it in a family, so that they give up together."""

    def __init__(self) -> None:
        self._since: float | None = None

    def began(self) -> float:
        """Return when this one began; it begins now if there was none."""
        since = self._since
        if since is None:
            since = self._since = time.monotonic()
        return since

    def end(self) -> None:
        self._since = None


class KnownMembers:
    """Says where a cluster is; shared by all clients of it in a family. ``address`` stays what the first of them was
    told."""

    def __init__(self, endpoints: Sequence[str], *, encrypted: bool) -> None:
        self.endpoints = tuple(endpoints)
        self.address = f"{'etcds' if encrypted else 'etcd'}://" + ",".join(endpoints)
        self._asked_at = time.monotonic()
        self.is_ending = False
        """Whether the cluster is about to end, so that nobody need wait for its answers."""

    def is_due(self) -> bool:
        """Return whether it is time to ask who the members are; whoever asks is to do so now."""
        now = time.monotonic()
        if now < self._asked_at + (FOLLOW if len(self.endpoints) > 2 else FOLLOW_EARLY):
            return False
        self._asked_at = now
        return True

    def take(self, answer: dict[str, Any]) -> None:
        """Take a list of members as etcd tells it: those with a vote, at the first address that each gives out."""
        found = [
            str(member["clientURLs"][0]).partition("://")[2]
            for member in answer.get("members", [])
            if member.get("clientURLs") and not member.get("isLearner")
        ]
        if found:  # else nobody has begun to serve clients yet
            self.endpoints = tuple(found)


class Gateway:
    """A client of the cluster at ``endpoints`` (``host:port`` each). Thread-safe."""

    def __init__(
        self,
        endpoints: Sequence[str],
        access: Access | None = None,
        outage: Outage | None = None,
        known: KnownMembers | None = None,
    ) -> None:
        import httpx  # optional: only those who use etcd need it

        self.outage = outage or Outage()
        self.access = access or Access()
        self._known = known or KnownMembers(endpoints, encrypted=self.access.encrypted)
        self.address = self._known.address
        self._token = ""
        self._current = 0
        self._lock = threading.Lock()
        self._client: httpx.Client | None = httpx.Client(
            timeout=httpx.Timeout(3.0, connect=1.0),
            limits=httpx.Limits(max_connections=64),
            trust_env=False,  # no proxy between a job and its store
            verify=self.access.verification(),
        )

    def client(self) -> httpx.Client:
        if self._client is None:
            raise StoreLost(f"store {self.address} was closed by this client", address=self.address)
        return self._client

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where the members are, as far as is known."""
        return self._known.endpoints

    @property
    def patience(self) -> float:
        """How long a request waits for a cluster that does not answer."""
        return 0.0 if self._known.is_ending else PATIENCE

    def hurry(self) -> None:
        """Have nobody in this family wait any more: the cluster is about to end, and that is no loss."""
        self._known.is_ending = True

    def url(self, path: str) -> str:
        return self._origin() + path

    def _origin(self) -> str:
        endpoints = self.endpoints  # once: another thread may learn of others
        return f"{self.access.scheme}://{endpoints[self._current % len(endpoints)]}"

    def headers(self) -> dict[str, str]:
        """Return what shows who asks; logs in if that has not been done."""
        if not self.access.user:
            return {}
        if not self._token:
            login = {"name": self.access.user, "password": self.access.password}
            try:
                self._token = str(self._post("/v3/auth/authenticate", login, Attempts(self), {})["token"])
            except EtcdError as error:
                message = f"{self.address} refused user {self.access.user!r}: {error}; check user and password"
                raise EtcdError(message, code=error.code) from error
        return {"Authorization": self._token}

    def log_in_again(self) -> None:
        """Log in once more: the login has run out, or a member that was restarted does not know it."""
        self._token = ""

    def another(self) -> Gateway:
        """Return one more client of the same cluster."""
        return Gateway(self.endpoints, self.access, self.outage, self._known)

    def call(self, path: str, body: dict[str, Any], *, patience: float | None = None) -> dict[str, Any]:
        """Send one request that may be repeated, and return the answer. ``patience``: ``PATIENCE`` unless given."""
        self.follow()
        attempts = Attempts(self, patience)
        try:
            return self._post(path, body, attempts, self.headers())
        except EtcdError as error:
            if error.code != UNAUTHENTICATED or not self.access.user:
                raise
        self.log_in_again()
        return self._post(path, body, attempts, self.headers())

    def _post(self, path: str, body: dict[str, Any], attempts: Attempts, headers: dict[str, str]) -> dict[str, Any]:
        import httpx  # optional, see __init__

        while True:
            url = self.url(path)
            try:
                response = self.client().post(url, json=body, headers=headers)
            except httpx.TransportError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):  # no time will mend that
                    raise StoreLost(
                        f"{self.address}: the certificate of {url} is not trusted: {error}; name the authority "
                        "that signed it with ca=FILE",
                        address=self.address,
                    ) from error
                attempts.failed(url, error)
            except RuntimeError as error:  # closed by another thread in the middle of the call
                self.client()
                raise StoreLost(f"lost the store {self.address}: {error}", address=self.address) from error
            else:
                answer = _answer(response)
                if response.status_code == 200:
                    self.outage.end()
                    return answer
                error_here = EtcdError(f"{self.address}: {answer.get('error')}", code=int(answer.get("code", 14)))
                if error_here.code not in _RETRY_CODES and not any(word in str(error_here) for word in _RETRY_WORDS):
                    self.outage.end()
                    raise error_here
                attempts.failed(url, error_here)

    def follow(self) -> None:
        """Ask who the members are, when that is due; whoever cannot be asked now is asked later."""
        if not (self.access.follow and self._known.is_due()):
            return
        try:
            self._known.take(self._post("/v3/cluster/member/list", {}, Attempts(self, 0.0), self.headers()))
        except StoreError as error:
            log.debug("%s: cannot ask who the members are: %s", self.address, error)

    def learn(self, answer: dict[str, Any]) -> None:
        """Take who the members are from an answer that somebody got for another reason, for the whole family."""
        self._known.take(answer)

    def next_endpoint(self, after: str) -> None:
        """Move on, unless another thread did so already."""
        with self._lock:
            if after.startswith(self._origin() + "/"):
                self._current = (self._current + 1) % len(self.endpoints)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


class Attempts:
    """Counts what went wrong in one request and decides when to give up."""

    def __init__(self, gateway: Gateway, patience: float | None = None) -> None:
        self._gateway = gateway
        self._patience = patience
        self._since: float | None = None  # others may be answered meanwhile: this request has its own limit too
        self._count = 0

    def failed(self, url: str, error: Exception) -> None:
        """Go to the next member, or give up."""
        address = self._gateway.address
        self._count += 1
        outage = self._gateway.outage.began()
        self._since = outage if self._since is None else min(outage, self._since)
        patience = self._gateway.patience if self._patience is None else self._patience
        is_over = time.monotonic() >= self._since + patience
        if is_over and self._count >= len(self._gateway.endpoints):
            message = f"lost the store {address}: {type(error).__name__}: {error}"
            raise StoreLost(message, address=address) from error
        self._gateway.next_endpoint(url)
        time.sleep(0.05)


def _answer(response: httpx.Response) -> dict[str, Any]:
    """Return the first JSON object of the body (lease/keepalive answers with a stream of one)."""
    try:
        answer = response.json()
    except ValueError:
        text = response.text[:200]
        if "CommonName of client" in text:
            remedy = "etcd takes users through its gateway only from certificates without a common name"
            return {
                "error": f"{text.strip()}; {remedy}: make cert= one that has an organization only",
                "code": 3,
            }
        return {"error": text, "code": 14}
    if not isinstance(answer, dict):
        return {"error": repr(answer)[:200], "code": 14}
    return answer


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def unb64(text: str) -> bytes:
    return base64.b64decode(text)


def as_text(text: str) -> str | None:
    """Return a key as text; None for one that is none, which only a stranger can have written."""
    try:
        return unb64(text).decode()
    except UnicodeDecodeError:
        return None


def range_end(prefix: bytes) -> bytes:
    """Return the first key after all that start with ``prefix``."""
    for index in reversed(range(len(prefix))):
        if prefix[index] < 0xFF:
            return prefix[:index] + bytes([prefix[index] + 1])
    return b"\x00"  # etcd's word for "to the end"
