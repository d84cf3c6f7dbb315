"""Says who this process is among the workers: one immutable value, read from the environment in one place.

Owns the environment contract between launcher and worker. Does not talk to anyone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of one worker in one generation of a job.

    >>> World(rank=1, size=4).is_first
    False
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    job: str = "local"
    generation: int = 0
    restart_count: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"world size is {self.size}; expected at least 1")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is outside [0, {self.size})")

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> World:
        """Read the variables that a launcher sets; a process started by hand is a world of one.

        >>> World.from_env({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}).rank
        2
        """
        env = os.environ if environ is None else environ

        def number(name: str, default: int) -> int:
            text = env.get(name, "")
            if not text:
                return default
            try:
                return int(text)
            except ValueError:
                raise ValueError(f"environment variable {name}={text!r}; expected an integer") from None

        size = number("WORLD_SIZE", 1)
        return cls(
            rank=number("RANK", 0),
            size=size,
            local_rank=number("LOCAL_RANK", 0),
            local_size=number("LOCAL_WORLD_SIZE", size),
            node_rank=number("GROUP_RANK", 0),
            num_nodes=number("GROUP_WORLD_SIZE", 1),
            job=env.get("TORCHELASTIC_RUN_ID", "") or "local",
            generation=number("PHALANX_GENERATION", 0),
            restart_count=number("TORCHELASTIC_RESTART_COUNT", 0),
        )
