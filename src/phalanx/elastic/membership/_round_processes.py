"""Puts who the workers of a round are into its record, so that nobody of them has to ask.

Each says who it is when it declares that it is ready; of those that were in the last round its group knows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from phalanx.comm.failure._identities import identity_of, pack_identities, unpack_identities
from phalanx.comm.failure._liveness import Identity, own_identity
from phalanx.elastic.membership._rounds import Membership
from phalanx.protocol import Ready, Round


def identities_of(membership: Membership) -> dict[str, Identity]:
    """Return who the workers of a round are, by what its group knows."""
    if membership.group is None:
        return {membership.workers[0]: own_identity()}
    return {membership.workers[rank]: identity for rank, identity in membership.group.identities.items()}


def declared_identities(ready: Mapping[str, Ready]) -> dict[str, Identity]:
    """Return who the workers are that have said so, in words that can be read."""
    found: dict[str, Identity] = {}
    for worker, one in ready.items():
        with suppress(ValueError):
            found[worker] = identity_of(0, one.process)
    return found


def processes_of(record: Round) -> dict[int, Identity] | None:
    """Return who the workers of a round are, by rank, if its record says so: then all of them know it."""
    with suppress(ValueError):
        found = unpack_identities(record.processes)
        if len(found) == len(record.workers):
            return found
    return None


def with_processes(choice: Round, known: Mapping[str, Identity]) -> Round:
    """Return the round with who its workers are, if that is known of all of them."""
    if not choice.workers or not set(choice.workers) <= set(known):
        return choice
    return replace(choice, processes=pack_identities([known[worker] for worker in choice.workers]).decode())
