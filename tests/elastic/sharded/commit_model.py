"""A model of the commit protocol of sharded jobs, searched over all interleavings and crashes.

Workers are program counters over ``OPERATIONS``; a cell's content is the number of updates in it. The decisions are
the real ones: ``assign``, ``transfers``, ``trimmed`` and ``choose_recovery``. Messages and collectives are
asynchronous: what a worker sent, or its arrival at a collective, stays when it dies. A survivor may notice a loss at
any time, later than others; so every state with a dead worker is also one from which recovery begins, and it is tried
from each of them. A recovery goes worker by worker, and more may die meanwhile.

Promise that is checked: while fewer workers are lost than every cell has copies (of the holdings on which all agree),
no cell is lost, every worker can follow the most advanced one, and all cells of all workers contain the same steps. A
variant of the protocol (``Variant``) that breaks it raises ``Broken`` with the way that led there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

from phalanx.elastic.reduce._norm_blocks import BLOCK
from phalanx.elastic.sharded._assignment import assign, trimmed
from phalanx.elastic.sharded._cell_table import CellTable, SectionShape, cell_table
from phalanx.elastic.sharded._holdings import Holdings, Transfer
from phalanx.elastic.sharded._recovery_choice import NotPrepared, Resume, RollForward, StateReport, choose_recovery
from phalanx.elastic.sharded._transfer_plan import transfers

OPERATIONS = (
    "send cells",  # at the boundary: copies of the slice, at this version; what was moved a step ago is dropped
    "receive cells",  # from here on this worker goes by the new holdings, whether or not others have received theirs
    "enter reduce",  # the step's first collectives: who passes knows that the slice has arrived everywhere
    "pass reduce",  # the owner has the reduced gradients
    "send gradients",  # to the mirrors
    "receive gradients",  # prepared
    "enter commit",
    "pass commit",  # everybody was prepared
    "apply",
)
FINDINGS = ("enter findings", "pass findings")
"""Behind the commit point, if something is not finite: all tell which gradients, and decide alike."""
SLICE = 2
"""Copies that move at one boundary."""


class Variant(Enum):
    RIGHT = "as designed"
    NO_BARRIER = "who is prepared applies, without the commit point"
    NO_GRADIENT_TO_MIRRORS = "mirrors get no gradient"
    BARRIER_BEFORE_MIRRORS = "the commit point is entered before the mirrored gradients have arrived"
    GRADIENT_FREED_EARLY = "a gradient is freed at the commit point, before it is applied"
    GRADIENT_FREED_AT_LOSS = "a loss that is noticed drops the gradients at once"
    WRONG_VERSION = "a cell is sent as it was a step ago"
    COUNTED_BEFORE_ARRIVAL = "a new holder counts as one before the cell is there"
    DROPPED_BEFORE_ARRIVAL = "who gives a cell away drops it when it is sent"
    UNPREPARED_BEHIND_COMMIT = "who notices a loss behind the commit point counts as not prepared any more"
    NOT_MIRRORED_AFTER_MOVE = "a new holder does not get gradients in the first step"


class Broken(AssertionError):
    """The protocol did not keep its promise."""


@dataclass(frozen=True)
class Worker:
    name: str
    alive: bool = True
    version: int = 0
    turn: int = 0
    """Operations done since the group formed."""
    cells: tuple[tuple[int, int], ...] = ()
    """Cells and their contents."""
    gradients: frozenset[int] = frozenset()
    """Cells whose reduced gradient of the step is here."""

    @property
    def contents(self) -> dict[int, int]:
        return dict(self.cells)

    def operation(self, program: tuple[str, ...]) -> str:
        return program[self.turn % len(program)]


@dataclass(frozen=True)
class Slice:
    """What happens to the holdings at a boundary, as everybody computes it."""

    before: Holdings
    moves: tuple[Transfer, ...]
    during: Holdings
    """In the step that follows: who gives a copy away still has it."""
    dropped: tuple[Transfer, ...]
    """Moves of the slice before, whose old copies go now."""

    @property
    def is_empty(self) -> bool:
        return not self.moves and not self.dropped


@dataclass(frozen=True)
class State:
    workers: tuple[Worker, ...]
    holdings: Holdings
    """On which the group was formed."""
    is_recovering: bool = False
    num_deaths: int = 0
    """Ever."""

    def with_worker(self, worker: Worker) -> State:
        return replace(self, workers=tuple(worker if one.name == worker.name else one for one in self.workers))


@dataclass(frozen=True)
class Model:
    """A job of ``size`` workers; with ``joining`` of them new, without cells."""

    size: int
    copies: int
    variant: Variant = Variant.RIGHT
    joining: int = 0
    max_deaths: int = 2
    num_steps: int = 2
    has_findings: bool = False

    @property
    def table(self) -> CellTable:
        return _table(self.size)

    @property
    def program(self) -> tuple[str, ...]:
        names = [*OPERATIONS[:-1], *(FINDINGS if self.has_findings else ()), OPERATIONS[-1]]
        if self.variant is Variant.NO_BARRIER:
            names = [name for name in names if "commit" not in name]
        elif self.variant is Variant.NO_GRADIENT_TO_MIRRORS:
            names = [name for name in names if "gradients" not in name]
        elif self.variant is Variant.BARRIER_BEFORE_MIRRORS:
            names = [*names[:4], "enter commit", "pass commit", "send gradients", "receive gradients", "apply"]
        return tuple(names)

    def first(self) -> State:
        names = tuple(f"w{i}" for i in range(self.size))
        holdings = assign(self.table, names[: self.size - self.joining], self.copies, {})
        workers = tuple(Worker(name, cells=tuple((cell, 0) for cell in holdings.held_by(name))) for name in names)
        return self._formed(State(workers, holdings))

    def _formed(self, state: State) -> State:
        return replace(state, workers=tuple(self._past_empty_slice(state, worker) for worker in state.workers))

    # -- what is agreed ---------------------------------------------------------------------------------------

    def step_of(self, worker: Worker) -> int:
        """Steps since the group formed."""
        return worker.turn // len(self.program)

    def settled(self, worker: Worker) -> int:
        """Return how many slices the worker knows to have arrived."""
        is_past = worker.turn % len(self.program) > self.program.index("pass reduce")
        return self.step_of(worker) + is_past

    def agreed(self, state: State, number: int) -> Slice:
        """Return the slice at the boundary before this step of the group."""
        return _agreed(self.size, state.holdings, tuple(w.name for w in state.workers), self.copies, number)

    def allowed_deaths(self, state: State) -> int:
        """Fewer than the copies that everybody knows of; the workers of the group that are dead count."""
        settled = self.agreed(state, min(self.settled(worker) for worker in state.workers)).before
        return min(len(each) for each in settled.holders) - 1 - sum(not worker.alive for worker in state.workers)

    # -- steps ------------------------------------------------------------------------------------------------

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        for worker in state.workers:
            if not worker.alive:
                continue
            if state.num_deaths < self.max_deaths and self.allowed_deaths(state) > 0:
                dead = state.with_worker(replace(worker, alive=False))
                yield f"{worker.name} dies", replace(dead, num_deaths=state.num_deaths + 1)
            if not state.is_recovering and worker.version < self.num_steps:
                moved = self._advance(state, worker)
                if moved is not None:
                    event = f"{worker.name}: {worker.operation(self.program)}"
                    yield event, state.with_worker(self._past_empty_slice(state, moved))
        if not all(worker.alive for worker in state.workers):
            yield from self._recover(state)

    def _advance(self, state: State, worker: Worker) -> Worker | None:
        """Return the worker after its next operation; None if that has to wait."""
        name, after = worker.operation(self.program), replace(worker, turn=worker.turn + 1)
        slice_ = self.agreed(state, self.step_of(worker))
        if name == "send cells":
            is_early = self.variant is Variant.DROPPED_BEFORE_ARRIVAL
            gone = slice_.moves if is_early else slice_.dropped
            return self._without(after, {move.cell for move in gone if move.drop == worker.name})
        if name == "receive cells":
            return self._receive_cells(state, worker, after, slice_.moves)
        if name == "pass reduce" and self._all_did(state, worker, "enter reduce"):
            return replace(after, gradients=frozenset(slice_.during.owned_by(worker.name)))
        if name == "receive gradients":
            return self._receive_gradients(state, worker, after, slice_)
        if name == "pass commit" and self._all_did(state, worker, "enter commit"):
            return replace(after, gradients=frozenset()) if self.variant is Variant.GRADIENT_FREED_EARLY else after
        if name == "pass findings" and self._all_did(state, worker, "enter findings"):
            return after
        if name == "apply":
            return replace(self._applied(worker), turn=worker.turn + 1)
        return None if name.startswith("pass") else after

    def _past_empty_slice(self, state: State, worker: Worker) -> Worker:
        """Skip what nobody has to do: it would only multiply the states."""
        if worker.turn % len(self.program) == 0 and self.agreed(state, self.step_of(worker)).is_empty:
            return replace(worker, turn=worker.turn + self.program.index("enter reduce"))
        return worker

    def _receive_cells(self, state: State, worker: Worker, after: Worker, moves: tuple[Transfer, ...]) -> Worker | None:
        found = dict(worker.cells)
        for move in moves:
            if move.target == worker.name:
                if not self._did(state, move.source, worker, "send cells"):
                    return None
                version = worker.version - (self.variant is Variant.WRONG_VERSION)
                found[move.cell] = version
        return replace(after, cells=tuple(sorted(found.items())))

    def _receive_gradients(self, state: State, worker: Worker, after: Worker, slice_: Slice) -> Worker | None:
        known = slice_.before if self.variant is Variant.NOT_MIRRORED_AFTER_MOVE else slice_.during
        mirrored = [cell for cell in known.held_by(worker.name) if known.holders[cell][0] != worker.name]
        owners = {known.holders[cell][0] for cell in mirrored}
        if all(self._did(state, owner, worker, "send gradients") for owner in owners):
            return replace(after, gradients=worker.gradients | frozenset(mirrored))
        return None

    def _applied(self, worker: Worker) -> Worker:
        cells = tuple((cell, content + (cell in worker.gradients)) for cell, content in worker.cells)
        return replace(worker, version=worker.version + 1, cells=cells, gradients=frozenset())

    def _without(self, worker: Worker, cells: set[int]) -> Worker:
        return replace(worker, cells=tuple(one for one in worker.cells if one[0] not in cells))

    def _did(self, state: State, name: str, as_of: Worker, operation: str) -> bool:
        """Say whether worker ``name`` has done an operation of the step that ``as_of`` is in, dead or alive."""
        needed = self.step_of(as_of) * len(self.program) + self.program.index(operation)
        return any(worker.name == name and worker.turn > needed for worker in state.workers)

    def _all_did(self, state: State, as_of: Worker, operation: str) -> bool:
        return all(self._did(state, worker.name, as_of, operation) for worker in state.workers)

    # -- recovery ---------------------------------------------------------------------------------------------

    def report(self, state: State, worker: Worker) -> StateReport:
        slice_ = self.agreed(state, self.step_of(worker))
        held = set(worker.contents)
        if self.variant is Variant.COUNTED_BEFORE_ARRIVAL:
            held |= {move.cell for move in slice_.moves if move.target == worker.name}
        place, program = worker.turn % len(self.program), self.program
        has_numbers = place > program.index("receive gradients" if "receive gradients" in program else "pass reduce")
        has_gradients = self.variant is Variant.NO_GRADIENT_TO_MIRRORS or held <= worker.gradients
        is_prepared = has_numbers and has_gradients and self.variant is not Variant.GRADIENT_FREED_AT_LOSS
        if self.variant is Variant.UNPREPARED_BEHIND_COMMIT:
            is_prepared = is_prepared and place <= program.index("pass commit")
        owned = tuple(cell for cell in sorted(held) if slice_.during.holders[cell][0] == worker.name)
        return StateReport(
            worker.name, worker.version, worker.version if is_prepared else None, tuple(sorted(held)), owned
        )

    def _recover(self, state: State) -> Iterator[tuple[str, State]]:
        """All survivors have noticed: decide, and carry out the next part of the decision."""
        alive = [worker for worker in state.workers if worker.alive]
        try:
            choice = choose_recovery([self.report(state, worker) for worker in alive], len(self.table))
        except NotPrepared as error:
            raise Broken(str(error)) from error
        if isinstance(choice, Resume):
            raise Broken(f"no survivor holds the cells {choice.lost}")
        if isinstance(choice, RollForward):
            for worker in alive:
                if worker.name in choice.behind:
                    rolled = replace(self._applied(worker), turn=(self.step_of(worker) + 1) * len(self.program))
                    yield f"{worker.name} follows", replace(state.with_worker(rolled), is_recovering=True)
            return
        names = [worker.name for worker in alive]
        holdings = trimmed(self.table, choice.holdings, names, self.copies)
        formed = []
        for worker in alive:
            missing = set(holdings.held_by(worker.name)) - set(worker.contents)
            if missing:
                raise Broken(f"{worker.name} counts as a holder of the cells {missing}, which it has not")
            kept = self._without(worker, set(worker.contents) - set(holdings.held_by(worker.name)))
            formed.append(replace(kept, turn=0, gradients=frozenset()))
        anew = State(tuple(formed), holdings, num_deaths=state.num_deaths)
        yield "the group forms anew", self._formed(anew)

    # -- the promise ------------------------------------------------------------------------------------------

    def check(self, state: State) -> None:
        """Raise unless every cell that a survivor has contains the steps that the survivor has committed."""
        for worker in state.workers:
            for cell, content in worker.cells:
                if worker.alive and content != worker.version:
                    raise Broken(f"{worker.name} has committed {worker.version} steps, its cell {cell} has {content}")
        versions = {worker.version for worker in state.workers if worker.alive}
        if max(versions) - min(versions) > 1:
            raise Broken(f"survivors have committed {sorted(versions)} steps")


@dataclass
class Search:
    num_states: int = 0
    num_ends: int = 0
    """States in which all survivors have committed all steps."""
    num_recoveries: int = 0


def search(model: Model) -> Search:
    """Visit every state that can be reached; ``Broken`` with the way to the first that breaks the promise."""
    first = model.first()
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    stack, found = [first], Search()
    while stack:
        state = stack.pop()
        try:
            model.check(state)
            following = list(model.successors(state))
        except Broken as error:
            raise Broken(f"{error}; the way there: {', '.join(_way(came_from, state))}") from error
        found.num_ends += all(w.version >= model.num_steps for w in state.workers if w.alive)
        found.num_recoveries += any(event == "the group forms anew" for event, _ in following)
        if not following and any(w.alive and w.version < model.num_steps for w in state.workers):
            raise Broken(f"all wait for ever; the way there: {', '.join(_way(came_from, state))}")
        for event, after in following:
            if after not in came_from:
                came_from[after] = (state, event)
                stack.append(after)
    found.num_states = len(came_from)
    return found


def _way(came_from: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    events = []
    step = came_from[state]
    while step is not None:
        state, event = step
        events.append(event)
        step = came_from[state]
    return events[::-1]


@cache
def _table(size: int) -> CellTable:
    return cell_table([[SectionShape((size * BLOCK,))]], whole_matrices=False, num_cells=size)


@cache
def _agreed(size: int, holdings: Holdings, names: tuple[str, ...], copies: int, number: int) -> Slice:
    dropped: tuple[Transfer, ...] = ()
    if number:
        last = _agreed(size, holdings, names, copies, number - 1)
        holdings, dropped = last.before.after(last.moves), last.moves
    moves = transfers(_table(size), holdings, names, copies, {})[:SLICE]
    during = holdings.after([replace(move, drop=None) for move in moves])
    return Slice(holdings, moves, during, tuple(move for move in dropped if move.drop is not None))
