"""Signs control records and verifies them, when the job has a secret.

Owns the envelope: ``{"v":1,"mac":"<hex>","record":<what is signed>}`` with a secret; without one a record (see
``phalanx.protocol``) lies there as it is. The HMAC-SHA256 covers the job, the key and the exact bytes of the record, so
a record can neither be changed nor moved to another key or job. It keeps strangers out; it does not hide what is
written, and it does not stop someone who can record a member's traffic from replaying a record to its own key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from phalanx.comm.stores._complaints import Complaints, clipped
from phalanx.protocol import ENV_SECRET, ENV_SECRET_FILE, RecordError

log = logging.getLogger(__name__)

_SIGNED = b'{"v":1,"mac":"'
_UNSIGNED = b'{"v":1,'
_AFTER_MAC = b'","record":'
_MAC_LENGTH = hashlib.sha256().digest_size * 2


class SignatureError(RecordError):
    """A record is unsigned, or signed with another secret, although the job has one; or the other way
    round."""


class Signer:
    """Seals and opens records of one job.

    >>> signer = Signer("job7", b"a long secret")
    >>> signer.open("node/a", signer.seal("node/a", b'{"x":1}'))
    b'{"x":1}'
    """

    def __init__(self, job: str, secret: bytes | None = None) -> None:
        self._job = job.encode()
        self._secret = secret or None
        self._complaints = Complaints(log)

    @property
    def has_secret(self) -> bool:
        return self._secret is not None

    def seal(self, key: str, record: bytes) -> bytes:
        """Return the envelope of ``record`` for ``key``; without a secret there is none."""
        if self._secret is None:
            return record
        return _SIGNED + self._mac(key, record) + _AFTER_MAC + record + b"}"

    def open(self, key: str, sealed: bytes) -> bytes:
        """Return the record inside; ``SignatureError`` or ``RecordError`` when it cannot be trusted or read."""
        if self._secret is None:
            if is_signed(sealed):
                raise SignatureError(
                    f"the record at {key!r} is signed, but this node has no job secret; set {ENV_SECRET} or "
                    f"{ENV_SECRET_FILE} to the secret of the other nodes"
                )
            return sealed
        if is_signed(sealed):
            start = len(_SIGNED) + _MAC_LENGTH + len(_AFTER_MAC)
            record = sealed[start:-1]
            if hmac.compare_digest(sealed, self.seal(key, record)):
                return record
            raise SignatureError(f"the record at {key!r} is signed with another secret or was changed")
        if sealed.startswith(_UNSIGNED) or sealed.isdigit():
            raise SignatureError(f"the record at {key!r} is not signed, but the job has a secret")
        raise RecordError(f"the record at {key!r} is not one of this release: {clipped(sealed)}")

    def opens(self, key: str, sealed: bytes) -> bool:
        """Return whether the record can be trusted; nothing is logged."""
        try:
            self.open(key, sealed)
        except RecordError:
            return False
        return True

    def open_trusted(self, key: str, sealed: bytes) -> bytes | None:
        """Return the record inside, or None when it cannot be trusted; the log names the key once a minute."""
        try:
            return self.open(key, sealed)
        except RecordError as error:
            self.complain(key, f"refused a record: {error}")
            return None

    def complain(self, key: str, message: str) -> None:
        """Log what is wrong with what a key holds, unless that was done a moment ago."""
        self._complaints.say(key, message)

    def _mac(self, key: str, record: bytes) -> bytes:
        assert self._secret is not None, "only called with a secret"
        message = b"\0".join((self._job, key.encode(), record))
        return hmac.digest(self._secret, message, "sha256").hex().encode()


def is_signed(value: bytes) -> bool:
    """Return whether a value is a signed record, by its form alone."""
    return value.startswith(_SIGNED)


def read_secret(environ: Mapping[str, str] | None = None, path: str | None = None) -> bytes | None:
    """Return the job's secret from ``path``, else from the environment (value or file), else None.

    Raises ``ValueError`` when a file is named but missing, empty or readable by others.
    """
    env = os.environ if environ is None else environ
    if path is None:
        if value := env.get(ENV_SECRET):
            return value.encode()
        path = env.get(ENV_SECRET_FILE)
        if not path:
            return None
    file = Path(path)
    try:
        mode = file.stat().st_mode
        secret = file.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"cannot read the job secret file {path!r}: {error}") from error
    if mode & 0o077:
        raise ValueError(f"job secret file {path!r} is open to other users; run: chmod 600 {path}")
    if not secret:
        raise ValueError(f"job secret file {path!r} is empty")
    return secret
