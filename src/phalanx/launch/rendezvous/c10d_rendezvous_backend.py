"""Keeps the record of a rendezvous in a c10d store: torch's ``C10dRendezvousBackend``, for handlers made by hand.

The backend ``c10d`` of ``--rdzv-backend`` does not need it: it has a key for each record.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

from phalanx.launch.rendezvous._interface import RendezvousConnectionError
from phalanx.launch.rendezvous._torch_settings import RendezvousBackend, Token

__all__ = ["C10dRendezvousBackend"]

_NOTHING = "nothing."
"""What the key holds while there is no record (a c10d store waits for a key that is not there); not base64."""


class C10dRendezvousBackend(RendezvousBackend):
    """A record at one key of a c10d store that can compare and set."""

    def __init__(self, store: Any, run_id: str) -> None:
        if not run_id:
            raise ValueError("the run id is empty; expected the name of the job, the same on all nodes")
        self._store = store
        self._key = f"phalanx.rendezvous.{run_id}"
        self._call("compare_set", self._key, "", _NOTHING)

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        return _decode(self._call("get", self._key))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        new = b64encode(state)
        expected = token.decode() if isinstance(token, bytes) else _NOTHING
        found = self._call("compare_set", self._key, expected, new.decode())
        decoded = _decode(found)
        return None if decoded is None else (*decoded, found == new)

    def _call(self, method: str, *args: Any) -> bytes:
        try:
            return bytes(getattr(self._store, method)(*args))
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError(f"the c10d store of the rendezvous does not answer: {error}") from error


def _decode(found: bytes) -> tuple[bytes, Token] | None:
    return None if found == _NOTHING.encode() else (b64decode(found), found)
