"""Random interleavings of joins, deaths, delays and pauses on a simulated clock, one store call at a time.

Every node runs the real ``Participant`` against a real ``MemoryStore``; a scheduler lets exactly one node do
exactly one store call at a time, so a node can be stopped, or die, between any two of its calls (a leader
between writing a generation and announcing it, for example). Nothing sleeps: time moves only when the
schedule says so.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from phalanx.comm.stores import MemoryStore
from phalanx.comm.stores._signing import Signer
from phalanx.launch.rendezvous._decide import Rules
from phalanx.launch.rendezvous._leader import end_generation
from phalanx.launch.rendezvous._participant import Participant
from phalanx.launch.rendezvous._store_records import END_KEYS
from phalanx.protocol import FORMED, LEADER, Broken, Members, NodeRecord, broken_key, members_key

LEASE = 8.0


class Killed(BaseException):
    """Unwinds the thread of a node that the schedule killed."""


class Turnstile:
    """Lets a node's thread run up to its next store call, and no further."""

    def __init__(self) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self.killed = self.finished = False
        self.pending: tuple[str, object] = ("", "")

    def enter(self, call: str = "", key: object = "") -> None:
        """The node's thread: hand over before a call, and wait for the next turn."""
        self.pending = (call, key)
        self._done.release()
        self._go.acquire()
        if self.killed:
            raise Killed

    def turn(self) -> None:
        """The scheduler: let the node go on until it enters again or ends."""
        if not self.finished:
            self._go.release()
            self._done.acquire()

    def finish(self) -> None:
        self.finished = True
        self._done.release()


class SteppedStore:
    """A store whose every call waits for the node's turn."""

    def __init__(self, store: Any, turnstile: Turnstile) -> None:
        self._store, self._turnstile = store, turnstile

    def clone(self) -> SteppedStore:
        return SteppedStore(self._store.clone(), self._turnstile)  # no turn: nodes clone when they are made

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def stepped(*args: Any, **kwargs: Any) -> Any:
            self._turnstile.enter(name, args[0] if args else "")
            result = method(*args, **kwargs)
            return SteppedStore(result, self._turnstile) if name == "watch" else result

        return stepped


class Node:
    """One simulated machine: an agent that joins, runs, and joins again when its generation is over."""

    def __init__(self, job: Job, name: str, jitter: float) -> None:
        self.job, self.name = job, name
        self.turnstile = Turnstile()
        store: Any = SteppedStore(job.store.clone(), self.turnstile)
        record = NodeRecord(id=name, ticket=0, host=name, addr=name, port=1, local_size=1)
        self.participant = Participant(store, Signer("sim"), job.rules, record, lease=LEASE, jitter=jitter)
        self.wants = 0
        self.holds: Members | None = None
        self.wish = ""
        self.frozen = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()
        self.turnstile._done.acquire()

    @property
    def alive(self) -> bool:
        return not self.turnstile.finished

    def _run(self) -> None:
        try:
            self.turnstile.enter()
            self.participant.register(self.wants, 1, self.job.now)
            while self.wish != "leave":
                self.participant.step(self.job.now)
                self._act_as_agent()
                self.participant.pause(0.0)
            self.participant.leave()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.turnstile.finish()

    def _act_as_agent(self) -> None:
        participant, facts = self.participant, self.participant.facts
        if self.holds is None:
            if (found := participant.membership(self.wants)) is not None:
                self.holds = found[0]
                self.job.check_seat(self, *found)
            elif facts.evicted:
                participant.register(self.wants, 1, self.job.now)
            return
        generation = self.holds.generation
        if self.wish == "break":
            self.wish = ""
            end_generation(participant.store, participant.signer, generation, "broken", Broken(reason="sim"))
        superseded = facts.latest is not None and facts.latest.generation > generation
        if generation in facts.ends or facts.evicted or superseded:
            self.holds, self.wants = None, generation + 1
            participant.register(self.wants, 1, self.job.now)


class Job:
    """The scheduler, and the checks that hold at every moment."""

    def __init__(self, rules: Rules, seed: int) -> None:
        self.rules = rules
        self.random = random.Random(seed)
        self.now = 0.0
        self.store = MemoryStore(clock=lambda: self.now)
        self.nodes: list[Node] = []
        self.generations: dict[int, bytes] = {}

    def start(self) -> None:
        self.nodes.append(Node(self, f"node{len(self.nodes)}", self.random.random()))

    def live(self) -> list[Node]:
        return [node for node in self.nodes if node.alive]

    def act(self, action: str, amount: int) -> None:
        """One line of a script. Everybody runs, in random order; a frozen node only when it is singled
        out."""
        live = self.live()
        if action == "start":
            if len(live) < self.rules.max_nodes + 1:
                self.start()
        elif action == "wait":
            self.now += amount / 5
        elif action == "run":
            for _ in range(amount * len(live)):
                self.turn(self.random.choice([node for node in live if not node.frozen] or live))
        elif live:
            node = live[amount % len(live)]
            if action == "kill":
                self.kill(node)
            elif action == "freeze":
                node.frozen = not node.frozen
            elif action == "single":
                for _ in range(amount):
                    self.turn(node)
            else:
                node.wish = node.wish or action

    def turn(self, node: Node) -> None:
        node.turnstile.turn()
        if node.error is not None:
            raise node.error
        self.check_generations()

    def kill(self, node: Node) -> None:
        node.turnstile.killed = True
        node.turnstile.turn()
        node.thread.join()

    def end(self) -> None:
        for node in self.live():
            self.kill(node)

    # -- what must hold at every moment --

    def check_generations(self) -> None:
        number = len(self.generations)
        while (raw := self.store.get(members_key(number))) is not None:
            record = Members.from_json(Signer("sim").open(members_key(number), raw))
            assert record.generation == number
            assert self.rules.min_nodes <= len(record.nodes) <= self.rules.max_nodes
            assert len({seat.id for seat in record.nodes}) == len(record.nodes), "a node has two ranks"
            if number:
                self.check_succession(number, record)
            self.generations[number] = raw
            number += 1
        for known, raw in list(self.generations.items())[-2:]:
            assert self.store.get(members_key(known)) == raw, "a decided generation was changed"

    def check_succession(self, number: int, record: Members) -> None:
        ends = [self.store.get(end_key(number - 1)) for end_key in END_KEYS.values()]
        assert any(ends), f"generation {number} formed while {number - 1} was running"
        key = members_key(number - 1)
        before = Members.from_json(Signer("sim").open(key, self.generations[number - 1]))
        for rank, seat in enumerate(before.nodes[: len(record.nodes)]):
            if seat.id in {other.id for other in record.nodes}:
                assert record.nodes[rank].id == seat.id, "a survivor lost its rank without need"

    def check_seat(self, node: Node, record: Members, rank: int) -> None:
        key = members_key(record.generation)
        decided = Members.from_json(Signer("sim").open(key, self.generations[record.generation]))
        assert record == decided, "two nodes see different members of one generation"
        assert decided.nodes[rank].id == node.name
        assert record.generation >= node.wants

    # -- what must come to be when faults stop --

    def settle(self) -> None:
        """Run everybody fairly; in the end all live nodes that fit are in one generation."""
        if len(self.live()) < self.rules.min_nodes:
            return
        for _ in range(60):
            for _ in range(30):
                for node in self.live():
                    self.turn(node)
            self.now += 0.5
            if self.is_settled():
                break
        live = self.live()
        if len(live) >= self.rules.min_nodes:  # who wished to leave is gone by now
            assert self.is_settled(), f"no progress: {[(n.name, n.wants, n.holds) for n in live]}"

    def is_settled(self) -> bool:
        live = self.live()
        if not self.generations or len(live) < self.rules.min_nodes:
            return False
        held = {None if node.holds is None else node.holds.generation for node in live} - {None}
        latest = max(self.generations)
        holders = [node for node in live if node.holds is not None and node.holds.generation == latest]
        running = not any(self.store.get(end_key(latest)) for end_key in END_KEYS.values())
        if held != {latest} or not running or len(holders) != min(len(live), self.rules.max_nodes):
            return False
        members = Members.from_json(self.store.get(members_key(latest)) or b"")
        return len(members.workers) == len(holders)


def play(min_nodes: int, spread: int, seed: int, script: list[tuple[str, int]]) -> Job:
    rules = Rules(min_nodes=min_nodes, max_nodes=min_nodes + spread, last_call=3.0, rejoin=5.0, admit_delay=0.5)
    job = Job(rules, seed)
    try:
        for _ in range(min_nodes):
            job.start()
        for action, amount in script:
            job.act(action, amount)
        job.settle()
    finally:
        job.end()
    return job


ACTIONS = st.tuples(
    st.sampled_from(
        [
            "run",
            "run",
            "run",
            "run",
            "wait",
            "wait",
            "start",
            "start",
            "single",
            "freeze",
            "kill",
            "break",
            "leave",
        ]
    ),
    st.integers(1, 25),
)


def explore(examples: int) -> Callable[..., None]:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(
        min_nodes=st.integers(1, 3),
        spread=st.integers(0, 3),
        seed=st.integers(0, 2**16),
        script=st.lists(ACTIONS, min_size=20, max_size=60),
    )
    def check(min_nodes: int, spread: int, seed: int, script: list[tuple[str, int]]) -> None:
        play(min_nodes, spread, seed, script)

    return check


@pytest.mark.fast
def test_some_interleavings_keep_every_invariant() -> None:
    explore(25)()


def test_many_interleavings_keep_every_invariant() -> None:
    explore(150)()


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_thousands_of_interleavings_keep_every_invariant() -> None:
    explore(5000)()


# -- directed: the moments that matter most --


def run_until(job: Job, node: Node, call: str, key: str) -> None:
    """Run everybody until ``node`` is about to make this store call."""
    for _ in range(2000):
        if node.turnstile.pending[0] == call and str(node.turnstile.pending[1]).startswith(key):
            return
        for each in job.live():
            job.turn(each)
            if node.turnstile.pending[0] == call and str(node.turnstile.pending[1]).startswith(key):
                return
    raise AssertionError(f"{node.name} never came to {call} {key}")


def two_nodes() -> Job:
    job = Job(Rules(min_nodes=1, max_nodes=2, last_call=3.0, rejoin=5.0, admit_delay=0.5), seed=1)
    for _ in range(2):
        job.start()
    for _ in range(40):
        job.turn(job.nodes[0])  # it leads
    return job


@pytest.mark.fast
def test_a_leader_that_slept_before_its_decision_cannot_decide_a_second_time() -> None:
    job = two_nodes()
    try:
        sleeper, other = job.nodes
        run_until(job, sleeper, "compare_and_set", members_key(0))
        for _ in range(60):  # the lease of the sleeper runs out, the other one takes over and decides
            job.now += 0.5
            for _ in range(20):
                job.turn(other)
        decided = job.generations[0]
        assert other.holds is not None
        assert [seat.id for seat in other.holds.nodes] == [other.name]
        for _ in range(20):
            job.turn(sleeper)
        assert job.store.get(members_key(0)) == decided
        job.settle()
    finally:
        job.end()


@pytest.mark.fast
def test_what_a_dead_leader_left_undone_is_finished_by_the_next() -> None:
    job = two_nodes()
    try:
        leader, other = job.nodes
        run_until(job, leader, "set", FORMED)  # decided, but told nobody
        job.kill(leader)
        assert job.generations
        assert job.store.get(FORMED) is None
        for _ in range(30):
            job.now += 0.5
            for _ in range(20):
                job.turn(other)
        assert job.store.get(broken_key(0)) is not None
        job.settle()
    finally:
        job.end()


@pytest.mark.fast
def test_a_node_that_lost_its_lease_unseen_still_counts_as_lost() -> None:
    job = two_nodes()
    try:
        job.settle()
        leader, other = job.nodes
        before = job.generations.keys()
        number = max(before)
        for _ in range(12):  # the leader goes on, the other sleeps beyond its lease and registers again at once
            job.now += LEASE / 2 / 4
            for _ in range(12 if leader.holds else 0):
                job.turn(leader)
        job.settle()
        assert job.store.get(broken_key(number)) is not None
        assert other.holds is not None
        assert other.holds.generation > number
    finally:
        job.end()


@pytest.mark.fast
@pytest.mark.parametrize("victim", [0, 1], ids=["the leader", "a follower"])
@pytest.mark.parametrize("jitter", [0.0, 0.999])
def test_a_node_that_dies_is_out_of_the_generation_at_most_a_lease_later(victim: int, jitter: float) -> None:
    job = Job(Rules(min_nodes=1, max_nodes=3, last_call=3.0, rejoin=5.0, admit_delay=0.5), seed=1)
    try:
        for _ in range(3):
            job.nodes.append(Node(job, f"node{len(job.nodes)}", jitter))
            for _ in range(40):
                job.turn(job.nodes[-1])
        job.settle()
        assert [node.participant._leading is not None for node in job.nodes] == [True, False, False]
        before, dead = max(job.generations), job.nodes[victim]
        died_at = job.now
        job.kill(dead)
        while max(job.generations) == before and job.now < died_at + 10 * LEASE:
            job.now += 0.05
            for _ in range(10):
                for node in job.live():
                    job.turn(node)
        assert job.now <= died_at + LEASE
        key = members_key(before + 1)
        after = Members.from_json(Signer("sim").open(key, job.generations[before + 1]))
        assert sorted(seat.id for seat in after.nodes) == sorted(node.name for node in job.live())
    finally:
        job.end()


@pytest.mark.fast
def test_of_two_that_stand_at_once_one_leads() -> None:
    job = Job(Rules(min_nodes=1, max_nodes=2, last_call=3.0), seed=1)
    try:
        job.start()
        job.start()
        first, second = job.nodes
        run_until_alone(job, first, "compare_and_set", LEADER)
        run_until_alone(job, second, "compare_and_set", LEADER)
        for node in (first, second):
            for _ in range(40):
                job.turn(node)
        assert [node.participant._leading is not None for node in (first, second)] == [True, False]
    finally:
        job.end()


@pytest.mark.fast
def test_followers_hear_of_a_generation_without_waiting_for_their_next_look() -> None:
    job = Job(Rules(min_nodes=2, max_nodes=2), seed=1)
    try:
        for _ in range(2):
            job.start()
        for _ in range(100):  # no time passes
            for node in job.live():
                job.turn(node)
        assert [node.holds is not None for node in job.nodes] == [True, True]
    finally:
        job.end()


@pytest.mark.fast
def test_a_leader_that_lost_its_lease_leads_no_more() -> None:
    job = two_nodes()
    try:
        leader = job.nodes[0]
        assert leader.participant._leading is not None
        job.now += LEASE
        for _ in range(6):
            job.turn(leader)
        assert leader.participant._leading is None
    finally:
        job.end()


def run_until_alone(job: Job, node: Node, call: str, key: str) -> None:
    """Run one node until it is about to make this store call."""
    for _ in range(200):
        pending, at = node.turnstile.pending
        if pending == call and str(at).startswith(key):
            return
        job.turn(node)
    raise AssertionError(f"{node.name} never came to {call} {key}")
