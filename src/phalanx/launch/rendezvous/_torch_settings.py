"""Defines how torch's users describe a rendezvous of their own: backend, timeouts, settings. Values only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from phalanx.protocol import timeouts

Token = Any
"""What a backend tells one state of its record from another by."""


class RendezvousBackend(ABC):
    """Keeps one record that all nodes of a job see, and that is replaced only by who has read it last."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which the backend is registered."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the record and its token; None while there is none."""

    @abstractmethod
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the record if its token still is ``token`` (None: if there is none).

        Returns the record that is there now, its token, and whether it is the one that was given.
        """


@dataclass(frozen=True)
class RendezvousTimeout:
    """How long things may take.

    >>> RendezvousTimeout(join=timedelta(seconds=5)).last_call
    datetime.timedelta(seconds=30)
    """

    join: timedelta | None = None
    last_call: timedelta | None = None
    close: timedelta | None = None
    heartbeat: timedelta | None = None
    """Taken for torch's sake: a store that does not answer is noticed by other means."""

    def __post_init__(self) -> None:
        defaults = {"join": 600.0, "last_call": timeouts.LAST_CALL, "close": timeouts.CLOSE, "heartbeat": 5.0}
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None:
                object.__setattr__(self, each.name, timedelta(seconds=defaults[each.name]))
            elif value <= timedelta(0):
                raise ValueError(f"the {each.name} timeout is {value}; expected a positive one")


@dataclass(repr=False, eq=False, frozen=True)
class RendezvousSettings:
    """What a rendezvous was made with."""

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int
