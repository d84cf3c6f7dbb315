"""What of the launcher's environment accelerate must not see, where the workers of a job come and go."""

from __future__ import annotations

from collections.abc import MutableMapping

from phalanx.protocol import ENV_ON_FAILURE

HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def hide_ranks(environ: MutableMapping[str, str]) -> None:
    """Take ranks out of the environment of a worker under agents that heal; the job finds its workers by its store.

    >>> seen = {"RANK": "1", "PHALANX_ON_FAILURE": "heal", "HOME": "/root"}
    >>> hide_ranks(seen)
    >>> sorted(seen)
    ['HOME', 'PHALANX_ON_FAILURE']
    """
    if environ.get(ENV_ON_FAILURE) == "heal":
        for name in HIDDEN:
            environ.pop(name, None)
