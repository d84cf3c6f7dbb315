"""Which transport carries a group's bytes when the user says ``auto``, and why.

Owns the decision, a pure function of where the ranks are, so that all of them decide alike, and the fallback: whatever
keeps the ranks of one host from sharing memory is found by all of them together, said in one log line, and gloo takes
over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.comm._liveness import Identity
from phalanx.comm._shm import ShmTransport, ShmUnavailable
from phalanx.comm._shm._join import obstacle
from phalanx.comm._transport import Transport

if TYPE_CHECKING:
    from phalanx.comm._create import Place
    from phalanx.comm._group import Interrupt

log = logging.getLogger("phalanx.comm")


@dataclass(frozen=True)
class Choice:
    """The kind of transport (``shm`` or ``gloo``) and the reason in words."""

    kind: str
    why: str


def choose(identities: Mapping[int, Identity]) -> Choice:
    """What carries CPU tensors between these ranks."""
    if len(identities) == 1:
        return Choice("shm", "a single rank")
    reason = obstacle(identities)
    if reason is None:
        return Choice("shm", f"all {len(identities)} ranks share host {identities[0].host}")
    return Choice("gloo", reason)


def connect_auto(
    place: Place, identities: Mapping[int, Identity], interrupt: Interrupt, make_gloo: Callable[[], Transport]
) -> Transport:
    """The transport for CPU tensors; collective."""
    choice = choose(identities)
    if choice.kind == "shm":
        try:
            transport = ShmTransport.create(
                place.store,
                place.rank,
                place.size,
                timeout=place.timeout,
                generation=place.generation,
                identities=identities,
                interrupt=interrupt,
            )
        except ShmUnavailable as error:
            log.info("generation %d: gloo, since %s", place.generation, error)
            return make_gloo()
        log.debug("generation %d: shared memory, since %s", place.generation, choice.why)
        return transport
    log.info("generation %d: gloo, since %s", place.generation, choice.why)
    return make_gloo()
