"""A model of what follows a death on one host: every interleaving of what survivors and agents read and write.

Workers are small state machines over the store's records, one read or write at a time; who decides what is the code
under test (``choose_round``, ``is_over``). Deaths come at any moment. ``explore`` goes through all states and checks:

- a group whose members are all in it, and so could commit, has all living workers in it, and there is one at most;
- wherever it stands, the job can come to such a group by itself: nobody waits for ever for one that went another way.

``flaws`` leave something out, to see that the checks would notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from phalanx.elastic.membership._rounds import choose_round, is_over
from phalanx.protocol import Broken, Ready

Ids = tuple[str, ...]


@dataclass(frozen=True)
class State:
    """The store, who lives, and where each worker stands: its phase with what the phase knows."""

    alive: frozenset[str]
    places: tuple[tuple[str, tuple[Any, ...]], ...]
    broken: tuple[Ids | None, ...] = ()
    """Of each generation: who was named when the agents ended it."""
    members: tuple[Ids, ...] = ()
    rounds: frozenset[tuple[int, int, Ids]] = frozenset()
    arrived: frozenset[tuple[int, int, str]] = frozenset()
    """Who has said, to the others of a group that forms, that it is there. That stays when it gives up."""
    failed: frozenset[tuple[int, int]] = frozenset()
    """Groups that a member has given up."""
    ready: frozenset[tuple[int, str, Ids]] = frozenset()

    def at(self, worker: str, *place: Any) -> State:
        return replace(self, places=tuple((w, place if w == worker else p) for w, p in self.places))

    def round(self, generation: int, number: int) -> Ids | None:
        return next((ids for g, r, ids in self.rounds if (g, r) == (generation, number)), None)

    def end_of(self, generation: int) -> Broken | None:
        named = self.broken[generation] if generation < len(self.broken) else None
        return None if named is None else Broken(reason="", workers=named)

    def is_committing(self, g: int, r: int, ids: Ids) -> bool:
        places = dict(self.places)
        return all(w in self.alive and places[w] == ("in", g, r, ids) for w in ids)


def start(workers: Ids) -> State:
    places = tuple((worker, ("in", 0, 0, workers)) for worker in workers)
    return State(alive=frozenset(workers), places=places, broken=(None,), members=(workers,))


def deaths(now: State, num_deaths: int) -> Iterator[State]:
    if len(now.places) - len(now.alive) < num_deaths and len(now.alive) > 1:
        yield from (replace(now, alive=now.alive - {worker}) for worker in now.alive)


def moves(now: State, flaws: frozenset[str]) -> Iterator[State]:
    """Return every state that agents and workers may bring about next."""
    yield from agents(now)
    for worker, place in now.places:
        if worker in now.alive:
            yield from PHASES[place[0]](now, worker, flaws, *place[1:])


def agents(now: State) -> Iterator[State]:
    """They hear of a death at some time, end the newest generation, and later form the next one of the others."""
    newest = len(now.members) - 1
    dead = tuple(worker for worker in now.members[newest] if worker not in now.alive)
    if now.broken[newest] is None and dead:
        yield replace(now, broken=(*now.broken[:newest], dead))
    named = now.broken[newest]
    if named is not None:
        following = tuple(worker for worker in now.members[newest] if worker not in named)
        yield replace(now, members=(*now.members, following), broken=(*now.broken, None))


def in_group(now: State, worker: str, flaws: frozenset[str], g: int, r: int, ids: Ids) -> Iterator[State]:
    end = now.end_of(g)
    left = any(g2 == g + 1 and w in ids and w != worker for g2, w, _ in now.ready) and "stays when left" not in flaws
    is_ended = end is not None and (is_over(end, ids) or left)  # in the second case after a while
    if (g, r) in now.failed or any(w not in now.alive for w in ids) or is_ended:
        yield replace(now.at(worker, "lost", g, r, ids), failed=now.failed | {(g, r)})
    elif end is not None and now.is_committing(g, r, ids):  # a step boundary: all of them go on together
        for one in ids:
            now = now.at(one, "await", g + 1, ids)
        yield now


def lost(now: State, worker: str, flaws: frozenset[str], g: int, r: int, ids: Ids) -> Iterator[State]:
    if all(w in now.alive for w in ids):  # one gave the group up, and nobody has died
        yield now.at(worker, "wait", g, ids)
    elif now.round(g, r + 1) is not None:
        yield now.at(worker, "read", g, r + 1, ids)
    else:
        yield now.at(worker, "first", g, r, ids)


def first(now: State, worker: str, flaws: frozenset[str], g: int, r: int, ids: Ids) -> Iterator[State]:
    """It found no next round. Are the agents done? If not, it will write one; another may do so before."""
    if g + 1 < len(now.members):
        yield now.at(worker, "wait", g, ids)
    else:
        living = (worker,) if "suspects the living" in flaws else tuple(w for w in ids if w in now.alive)
        yield now.at(worker, "write", g, r + 1, ids, living)


def write(now: State, worker: str, flaws: frozenset[str], g: int, r: int, ids: Ids, living: Ids) -> Iterator[State]:
    if now.round(g, r) is None:
        now = replace(now, rounds=now.rounds | {(g, r, living)})
    yield now.at(worker, "read", g, r, ids)


def read(now: State, worker: str, flaws: frozenset[str], g: int, r: int, before: Ids) -> Iterator[State]:
    ids = now.round(g, r)
    assert ids is not None, "it has seen or written it"
    if worker not in ids:
        yield now.at(worker, "wait", g, before)
    else:
        yield replace(now, arrived=now.arrived | {(g, r, worker)}).at(worker, "join", g, r, ids)


def join(now: State, worker: str, flaws: frozenset[str], g: int, r: int, ids: Ids) -> Iterator[State]:
    if all((g, r, w) in now.arrived for w in ids):
        yield now.at(worker, "in", g, r, ids)
    gone = any(w not in now.alive for w in ids)
    if r == 0:
        gone = now.end_of(g) is not None
    elif "waits for those who left" not in flaws:
        gone = gone or any(g2 == g + 1 and w in ids and w != worker for g2, w, _ in now.ready)
    if gone:
        yield now.at(worker, "wait", g, ids)


def wait(now: State, worker: str, flaws: frozenset[str], g: int, ids: Ids) -> Iterator[State]:
    if now.end_of(g) is not None:
        yield now.at(worker, "await", g + 1, ids)


def await_round(now: State, worker: str, flaws: frozenset[str], g: int, peers: Ids) -> Iterator[State]:
    if now.end_of(g) is not None:
        if (g, worker, peers) not in now.ready and "goes on in silence" not in flaws:
            now = replace(now, ready=now.ready | {(g, worker, peers)})
        yield now.at(worker, "await", g + 1, peers)
    elif g < len(now.members):
        assert worker in now.members[g], f"{worker} lives and is no member of generation {g}"
        if (g, worker, peers) not in now.ready:
            yield replace(now, ready=now.ready | {(g, worker, peers)})
        elif now.round(g, 0) is not None:
            yield now.at(worker, "read", g, 0, peers)
        else:
            forgets = "forgets whom it knew" in flaws
            ready = {w: Ready(step=1, peers=(w,) if forgets else known) for g2, w, known in now.ready if g2 == g}
            choice = choose_round(now.members[g], ready)
            if choice is not None:  # whoever finds it first writes it: mostly the one that convenes
                yield replace(now, rounds=now.rounds | {(g, 0, choice.workers)})


PHASES = {
    "in": in_group,
    "lost": lost,
    "first": first,
    "write": write,
    "read": read,
    "join": join,
    "wait": wait,
    "await": await_round,
}


def explore(workers: Ids, num_deaths: int, flaws: frozenset[str] = frozenset()) -> int:
    """Go through all states; how many there are. ``AssertionError`` when something is wrong with one of them."""
    first = start(workers)
    before: dict[State, list[State]] = {first: []}
    todo = [first]
    good = []
    while todo:
        now = todo.pop()
        groups = {place[1:] for _, place in now.places if place[0] == "in"}
        committing = [group for group in groups if now.is_committing(*group)]
        for group in committing:
            assert now.alive <= set(group[2]), f"a group leaves out one that lives: {now}"
        assert len(committing) <= 1, f"two groups: {now}"
        if committing:
            good.append(now)
        following = list(moves(now, flaws))
        for after in [*following, *deaths(now, num_deaths)]:
            if after not in before:
                before[after] = []
                todo.append(after)
        for after in following:
            before[after].append(now)
    # Backwards from the good ones, by what agents and workers do: from elsewhere only another death would help.
    fine, todo = set(good), good
    while todo:
        for earlier in before[todo.pop()]:
            if earlier not in fine:
                fine.add(earlier)
                todo.append(earlier)
    stuck = [now for now in before if now not in fine]
    assert not stuck, f"{len(stuck)} of {len(before)} states come to nothing, such as {stuck[0]}"
    return len(before)
