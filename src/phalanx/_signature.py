"""Signs what is kept on disk: sharded checkpoints and the saves of elastic jobs.

Owns the secret's source and the HMAC over the text that describes a checkpoint (with the digests of its bytes). Not the
job's secret: a checkpoint outlives the job that wrote it. Someone with the secret finds whatever was changed by someone
without; a whole older checkpoint put in the place of a newer one has a good signature.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any

ENV_SECRET = "PHALANX_CHECKPOINT_SECRET"


def resolve_secret(secret: bytes | None) -> bytes:
    """Return the secret to use: the given one, else the environment's; empty for none."""
    return os.environ.get(ENV_SECRET, "").encode() if secret is None else secret


def sign(secret: bytes, body: str) -> str:
    """Return the HMAC of a text; a secret is needed."""
    return hmac.new(secret, body.encode(), hashlib.sha256).hexdigest()


def signature_problem(secret: bytes, body: str, mac: Any, *, remedy: str) -> str:
    """Return what is wrong with the signature ``mac`` of ``body``; empty when it is good, or when there is no secret.

    ``remedy`` says how to read what is not signed all the same.

    >>> signature_problem(b"a secret", "text", sign(b"a secret", "text"), remedy="")
    ''
    """
    if not secret:
        return ""
    if mac is None:
        return (
            f"is not signed, but there is a secret; if it was saved without one and you trust it, {remedy} to read it"
        )
    if isinstance(mac, str) and mac.isascii() and hmac.compare_digest(mac, sign(secret, body)):
        return ""
    return "was tampered with, or saved with another secret: its signature does not match"
