"""Writes down who processes are, and reads it back: one record for each, or the list of all ranks in one.

A list is compressed, since all ranks read it from one host: most of what it says of a rank is the same for the others.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

from phalanx._fields import Fields, load_json
from phalanx.comm.failure._liveness import Identity

_VERSION = 1


def identity_record(identity: Identity) -> dict[str, Any]:
    return {"v": _VERSION, **identity.to_record()}


def identity_of(rank: int, content: Any) -> Identity:
    """``ValueError`` when it is none of this release."""
    record = Fields(content, f"identity of rank {rank}")
    if record.get("v") != _VERSION:
        raise ValueError(f"identity of rank {rank} has an unknown version: {content!r}; run one release everywhere")
    return Identity(
        machine=record.text("machine"),
        host=record.text("host"),
        pid=record.integer("pid", low=0),
        started=record.integer("started"),
        uid=record.integer("uid"),
        thread=record.integer("thread", low=0),
    )


def load_identity(rank: int, data: bytes) -> Identity:
    return identity_of(rank, load_json(data, f"identity of rank {rank}"))


def pack_identities(identities: Sequence[Identity]) -> bytes:
    """Return the ranks' identities, in the order of the ranks, as one record.

    >>> own = Identity(machine="boot", host="node0", pid=7, started=1, uid=0)
    >>> unpack_identities(pack_identities([own])) == {0: own}
    True
    """
    text = json.dumps({"v": _VERSION, "members": list(map(identity_record, identities))}, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 1))


def unpack_identities(packed: bytes | str) -> dict[int, Identity]:
    """``ValueError`` when it was not packed by this release."""
    try:
        data = zlib.decompress(base64.b64decode(packed, validate=True))
    except (zlib.error, ValueError) as error:
        raise ValueError(f"the list of ranks is no list: {packed[:80]!r}; run one release everywhere") from error
    rows = Fields(load_json(data, "list of ranks"), "list of ranks").items("members")
    return {rank: identity_of(rank, row) for rank, row in enumerate(rows)}
