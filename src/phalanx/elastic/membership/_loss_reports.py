"""Sees to it that everybody hears of a loss: waits for the agents to end the generation, tells them what else there is.

Owns what this worker has said about a loss, and says it again should it be gone. Agents decide who is to blame.
"""

from __future__ import annotations

import time
from contextlib import suppress

from phalanx import protocol
from phalanx.comm.stores import Store
from phalanx.comm.stores._polling import slice_after
from phalanx.elastic.membership._rounds import Membership
from phalanx.errors import CommError, PeerTimeout, StoreTimeout
from phalanx.protocol import PRESENT, JobKeys, timeouts


class LossReports:
    def __init__(self, store: Store, keys: JobKeys, worker_id: str) -> None:
        self._store = store
        self._keys = keys
        self._worker_id = worker_id
        self._told: tuple[int, protocol.LostContact] | None = None

    def make_sure_broken(
        self, membership: Membership, cause: CommError, step: int = -1, *, evaluating: bool = False
    ) -> None:
        """Agents break a generation when they see a death. What only workers see they tell the agents, which break it;
        where these cannot, since they form the next one already, this worker tells the others by itself."""
        key = protocol.broken_key(membership.generation)
        began, has_told = time.monotonic(), False
        while (waited := time.monotonic() - began) < timeouts.BREAK_AFTER:
            with suppress(StoreTimeout):
                self._store.wait([key], slice_after(waited))
                return
            if not evaluating and self._store.get(self._keys.done) is not None:
                return
            if waited > timeouts.TELL_AFTER and not has_told:
                self._tell_lost_contact(membership, cause, step)
                has_told = True
        broken = protocol.Broken(reason=f"worker {self._worker_id} lost contact: {cause}", at_once=True)
        self._store.compare_and_set(key, None, broken.to_json())

    def _tell_lost_contact(self, membership: Membership, cause: CommError, step: int) -> None:
        ranks = getattr(cause, "ranks", ()) or getattr(cause, "suspects", ())
        self.tell_agents(
            membership.generation,
            protocol.LostContact(
                by=self._worker_id,
                of=tuple(membership.workers[rank] for rank in ranks if rank < len(membership.workers)),
                late=isinstance(cause, PeerTimeout),
                peers=membership.workers,
                step=step,
                reason=(str(cause).splitlines() or [""])[0][:300],
            ),
        )

    def tell_agents(self, generation: int, word: protocol.LostContact) -> None:
        """First what is said, then that something is: agents look at that last key only."""
        self._told = (generation, word)
        self._store.set(protocol.regroups_key(self._worker_id), PRESENT)  # they are about to ask
        self._store.set(protocol.contact_key(generation, self._worker_id), word.to_json())
        self._store.set(protocol.any_contact_key(generation), PRESENT)

    def tell_again(self, generation: int) -> None:
        """Should nobody have heard why the generation cannot go on: a stranger may have written over it."""
        if self._told is not None and self._told[0] == generation:
            keys = [protocol.contact_key(generation, self._worker_id), protocol.any_contact_key(generation)]
            if None in self._store.get_many(keys):
                self.tell_agents(*self._told)
