"""Sees who is gone: processes that died, ranks that closed or gave up their group, and whether a wait minds.

A death is told by the process's watcher thread (``_liveness``), which wakes the sleeper. A rank that went after it gave
all that a wait needs is no loss to that wait; the next one that needs it will find out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from phalanx.comm.failure._liveness import Identity, forget_deaths, watch_deaths
from phalanx.comm.transports.shm import _segment_layout as L
from phalanx.comm.transports.shm._segment import Segment
from phalanx.errors import PeerLost


class Peers:
    """The other ranks of one group. ``pids[r]`` is rank r's process."""

    def __init__(self, identities: Mapping[int, Identity], rank: int, generation: int) -> None:
        self.pids = {peer: identity.pid for peer, identity in identities.items()}
        self.generation = generation
        self._rank = rank
        self._ranks: dict[Identity, list[int]] = {}
        self._dead: set[int] = set()
        self._wake: Callable[[], None] | None = None
        own = identities[rank]
        for peer, identity in identities.items():
            if identity != own:
                self._ranks.setdefault(identity, []).append(peer)
        for identity in list(self._ranks):
            watch_deaths(identity, self._died)

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when somebody dies."""
        self._wake = wake

    def _died(self, identity: Identity) -> None:
        self._dead.update(self._ranks[identity])
        wake = self._wake  # once: another thread may close this meanwhile
        if wake is not None:
            wake()

    def close(self) -> None:
        self._wake = None
        for identity in self._ranks:
            forget_deaths(identity, self._died)

    def dead_among(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if rank in self._dead)

    def dead_now(self) -> tuple[int, ...]:
        """Return who is dead, told or not."""
        return tuple(sorted(rank for who, ranks in self._ranks.items() if not who.is_alive() for rank in ranks))

    def lost(self, ranks: tuple[int, ...], doing: str) -> PeerLost:
        names = ", ".join(f"rank {r} (pid {self.pids[r]})" for r in ranks)
        return PeerLost(
            f"rank {self._rank}: {names} of generation {self.generation} died while {doing}; regroup without it",
            generation=self.generation,
            ranks=ranks,
        )

    def loss(self, segment: Segment, tokens: Sequence[int]) -> PeerLost | None:
        """Return the error when one of these waits can never end well: somebody needed is gone, or somebody gave up.

        A negative token is one of several of which any will do.
        """
        words, layout = segment.words, segment.layout
        others = [rank for rank in range(layout.size) if rank != self._rank]
        states = {rank: words[layout.block(rank) + L.STATE] for rank in others}
        required = [token for token in tokens if token > 0]
        alternatives = [-token for token in tokens if token < 0]
        needed = required + alternatives
        dead = tuple(r for r in self.dead_among(others) if any(self._needed(segment, r, token) for token in needed))
        if dead:
            return self.lost(dead, "a collective needed it")
        left = [
            rank
            for rank, state in states.items()
            if state == L.FAILED or (state == L.CLOSED and any(self._needed(segment, rank, t) for t in required))
        ]
        # Of several that may send, one that has left in good order leaves the others to wait for. This rank is among
        # them where another of its receives is at a message: that one comes to an end, or says itself why it cannot.
        senders = {layout.writer(token & L.TOKEN_MASK) for token in alternatives}
        if senders and all(states.get(rank) == L.CLOSED for rank in senders):
            left = sorted({*left, *senders})
        if left:
            # Whoever gave up may have seen a death before this process was told of it: look for oneself.
            dead = self.dead_now()
            if dead:
                return self.lost(dead, "the group was in use")
            return PeerLost(
                f"rank {self._rank}: rank {', '.join(map(str, left))} left the group of generation "
                f"{self.generation}; form the next generation's group, or see that rank's log for why",
                generation=self.generation,
            )
        return None

    def _needed(self, segment: Segment, rank: int, token: int) -> bool:
        """Return whether ``rank`` has yet to do something for this wait: in a collective everybody counts."""
        index, target = token & L.TOKEN_MASK, token >> L.TOKEN_SHIFT
        layout = segment.layout
        if index >= layout.channels_word:
            return layout.writer(index) == rank
        word = (index - L.HEADER_WORDS) % layout.block_words
        return segment.words[layout.block(rank) + word] < target
