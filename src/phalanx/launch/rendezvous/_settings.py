"""Lists the settings that the built-in rendezvous backends know (``--rdzv-conf``, ``rdzv_configs``).

Imports nothing heavy: a wrong key is answered before anything is started. Backends that others register have keys of
their own, which nobody here can check.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

BUILT_IN_BACKENDS = ("c10d", "etcd", "etcd-v2", "file", "static")

SETTINGS = frozenset(
    {
        "admit_delay", "ca_cert", "close_timeout", "embedded", "is_host", "join_timeout", "keep_alive_interval",
        "keep_alive_max_attempt", "last_call_timeout", "lease", "password_file", "protocol", "rank", "read_timeout",
        "rejoin_timeout", "secret_file", "ssl_cert", "ssl_cert_key", "store_type", "timeout", "topology", "user",
    }
)  # fmt: skip

WITHOUT_EFFECT = frozenset({"heartbeat_timeout", "use_libuv"})
"""Taken for torch's sake: they tune how its rendezvous does what ours does otherwise, and change no result."""


def check_settings(keys: Iterable[str], backend: str) -> None:
    """``ValueError`` when a built-in backend does not know a key, with the nearest one that it knows.

    >>> check_settings(["lease", "join_timout"], "c10d")
    Traceback (most recent call last):
    ...
    ValueError: the rendezvous setting 'join_timout' is unknown (did you mean 'join_timeout'?); expected one of ...
    """
    if backend not in BUILT_IN_BACKENDS:
        return
    for key in keys:
        if key in SETTINGS or key in WITHOUT_EFFECT:
            continue
        near = difflib.get_close_matches(key, sorted(SETTINGS), n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"the rendezvous setting {key!r} is unknown{hint}; expected one of {', '.join(sorted(SETTINGS))}"
        )
