"""CellStore: what this worker holds of a sharded model, and how it changes when holdings do.

Owns, for each section, the storage with the values of the held ranges, the gradient buffer beside it, the sums over
slots of the owned ranges, and the pieces that the optimizer works on. ``settle`` brings all of it in line with
holdings: values and states that this worker had or was sent (*fragments*) come to their new places; what stays where it
was is not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from phalanx.comm import Group
from phalanx.elastic.sharded._cell_tensor import Key
from phalanx.elastic.sharded._holdings import Holdings
from phalanx.elastic.sharded._model_units import ModelUnits
from phalanx.elastic.sharded._pieces import Piece, State, cut_state, join_states, piece_ranges
from phalanx.elastic.sharded._slot_reduction import OwnerPlan, SlotReduction, owner_plan
from phalanx.elastic.sharded._slot_sums import SlotSums, Spares
from phalanx.fsdp.layout._unit_layout import Range, UnitLayout, intersect, joined
from phalanx.fsdp.unit._section import Section, UnitPlace
from phalanx.fsdp.unit._unit_driver import UnitDriver
from phalanx.fsdp.unit._unit_gather import part_length
from phalanx.fsdp.unit._unit_memory import HEADER, ShardStorage, hand_on

T = TypeVar("T")
P = TypeVar("P", "Fragment", Piece)


@dataclass
class Fragment:
    """Values and states of elements ``begin`` to before ``end`` of a parameter, on their way to a piece."""

    key: Key
    begin: int
    end: int
    values: Tensor
    states: dict[str, State] = field(default_factory=dict)
    """By kind: the optimizer's, and whatever else belongs to weights."""


@dataclass
class HeldSection:
    """One section on this worker."""

    layout: UnitLayout
    held: tuple[Range, ...]
    """What this worker holds."""
    storage: ShardStorage
    grad: Tensor
    """The step's reduced gradient of the held ranges, laid out as the storage is."""
    owned: Sequence[Range]
    """Of the trained parameters, in ``sums``' order."""
    sums: SlotSums
    reduction: SlotReduction | None = None


class CellStore:
    """This worker's cells."""

    def __init__(self, units: ModelUnits, num_slots: int, *, matrices: bool) -> None:
        self.units = units
        self.num_slots = num_slots
        self.matrices = matrices
        self.sections: dict[tuple[int, int], HeldSection] = {}
        self.pieces: list[Piece] = []
        self.held: tuple[int, ...] = ()
        """Cells that are complete here, in ascending order."""
        self._group: Group | None = None
        self._holdings: Holdings | None = None
        """Those that the sections are laid out by."""
        self._plans: dict[str, Any] = {}
        self._spares = Spares()

    def plan(self, name: str, make: Callable[[], T]) -> T:
        """Return what follows from the layouts, made once for as long as they stay."""
        if name not in self._plans:
            self._plans[name] = make()
        found: T = self._plans[name]
        return found

    def clear(self) -> None:
        """Forget all values: others take their places."""
        self._plans = {}
        self.sections, self.pieces, self.held, self._group, self._holdings = {}, [], (), None, None

    # ---- layouts

    def layout(self, u: int, s: int, holdings: Holdings, workers: Sequence[str]) -> UnitLayout:
        """Say which ranges of a section each rank holds and owns."""
        ranks = {worker: rank for rank, worker in enumerate(workers)}
        held: list[list[Range]] = [[] for _ in workers]
        owned: list[list[Range]] = [[] for _ in workers]
        for index in self.units.table.of_section.get((u, s), ()):
            cell = self.units.table.cells[index]
            for position, worker in enumerate(holdings.holders[index]):
                held[ranks[worker]].append((cell.begin, cell.end))
                if not position:
                    owned[ranks[worker]].append((cell.begin, cell.end))
        length = self.units.units[u].sections[s].layout.length
        return UnitLayout(length, tuple(map(joined, held)), tuple(map(joined, owned)))

    # ---- changing

    def settle(
        self,
        holdings: Holdings,
        workers: Sequence[str],
        group: Group,
        driver: UnitDriver,
        received: Sequence[Fragment] = (),
    ) -> None:
        """Hold what ``holdings`` says, in ``group``: from what is here and what was received."""
        rank = group.rank
        self._plans = {}
        self._spares.clear()
        moves = self._group is not group
        if moves:
            self._join(group, driver)
        before, self._holdings = self._holdings, holdings
        here, fragments = _by_section(self.pieces), _by_section(received)
        pieces: list[Piece] = []
        for u, s, section in self.units.sections():
            old, mine = self.sections.get((u, s)), here.get((u, s), [])
            if not moves and old is not None and before is not None and self._is_same(u, s, before, holdings):
                pieces += mine
                continue
            unit = self.units.units[u]
            layout = self.layout(u, s, holdings, workers)
            stays = old is not None and old.held == layout.held[rank]
            if old is not None and not moves and old.layout == layout:
                pieces += mine
                continue
            new = self._held_section(section, layout, unit.place, old if stays else None)
            self.sections[u, s] = new
            if stays:
                pieces += mine
            else:
                found = [*map(_fragment, mine), *fragments.get((u, s), ())]
                pieces += self._make_pieces(u, s, section, new, rank, found)
            section.relocate(unit.number, unit.place, layout, new.storage, self._reducer(section, new, unit.number))
        self.pieces = pieces
        self.held = holdings.held_by(workers[rank])

    def _join(self, group: Group, driver: UnitDriver) -> None:
        """Have all units be those of another group."""
        if self._group is not None:
            hand_on(self._group, group)
        self._group = group
        for unit in self.units.units:
            unit.join(replace(unit.place, group=group, block=None), driver)

    def _is_same(self, u: int, s: int, before: Holdings, after: Holdings) -> bool:
        """Return whether the cells of a section have the same holders in both, in the same order."""
        cells = self.units.table.of_section.get((u, s), range(0))
        part = slice(cells.start, cells.stop)
        return before.holders[part] == after.holders[part]

    def _held_section(
        self, section: Section, layout: UnitLayout, place: UnitPlace, old: HeldSection | None
    ) -> HeldSection:
        rank = place.group.rank
        extents = [e for e, p in zip(section.extents, section.parameters, strict=True) if p.sharded.requires_grad]
        owned = layout.restricted(extents).owned[rank]
        count = sum(stop - start for start, stop in owned)
        if old is not None:
            sums = old.sums if old.sums.count == count else self._sums(section, old.grad, count)
            sums.reset()
            return HeldSection(layout, old.held, old.storage, old.grad, owned, sums)
        # What is sent as it lies must be as long as the longest; else it is packed first, and has its own length.
        count_held = layout.num_held[rank] if layout.has_copies else part_length(layout)
        storage = ShardStorage(place.group, count_held, section.dtype, place.shard_device)
        grad = torch.zeros(layout.num_held[rank], dtype=section.dtype, device=place.shard_device)
        return HeldSection(layout, layout.held[rank], storage, grad, owned, self._sums(section, grad, count))

    def _sums(self, section: Section, grad: Tensor, count: int) -> SlotSums:
        """Return the sums of so many elements: in the gradient itself where it has no others."""
        dtype, device = section.reduce_dtype, section.place.device
        is_all = (count, dtype, device) == (grad.numel(), grad.dtype, grad.device)
        home = grad if is_all else torch.empty(count, dtype=dtype, device=device)
        return SlotSums(home, self.num_slots, self._spares)

    def _reducer(self, section: Section, held: HeldSection, number: int) -> Any:
        plans: dict[tuple[int, ...], OwnerPlan] = {}

        def make(wanted: tuple[int, ...]) -> SlotReduction:
            if wanted not in plans:
                extents = [section.extents[i] for i in wanted]
                plans[wanted] = owner_plan(held.layout, section.place.group.rank, extents)
            place = section.place
            held.reduction = SlotReduction(
                number, plans[wanted], held.sums, section.reduce_dtype, place.device, place.pool
            )
            return held.reduction

        return make

    def _make_pieces(
        self, u: int, s: int, section: Section, held: HeldSection, rank: int, fragments: Sequence[Fragment]
    ) -> list[Piece]:
        found = []
        by_key: dict[Key, list[Fragment]] = {}
        for fragment in fragments:
            by_key.setdefault(fragment.key, []).append(fragment)
        for p, begin, end in piece_ranges(held.layout.held[rank], section.extents):
            first = section.extents[p][0]
            start, stop = held.layout.local_span(rank, begin, end)
            shape = section.parameters[p].shape if self.matrices else (end - begin,)
            values = held.storage.alias(start, shape)
            parts = _covering(by_key.get((u, s, p), ()), begin, end)
            covered = sum(min(end, f.end) - max(begin, f.begin) for f in parts)
            assert covered == end - begin, (
                f"{covered} of {end - begin} elements of {(u, s, p)} at {begin - first} are here"
            )
            for part in parts:
                a, b = max(begin, part.begin), min(end, part.end)
                values.reshape(-1)[a - begin : b - begin].copy_(
                    part.values.reshape(-1)[a - part.begin : b - part.begin]
                )
            tensor = nn.Parameter(values, section.parameters[p].sharded.requires_grad)
            grad = held.grad[start:stop].view(shape)
            found.append(Piece(u, s, p, begin, end, tensor, grad, _states_of(parts, begin, end)))
        return found

    # ---- reading

    def cell_fragments(self, cells: Sequence[int]) -> list[Fragment]:
        """Return what these cells contain here; copies."""
        found = []
        here = _by_section(self.pieces)
        for index in cells:
            cell = self.units.table.cells[index]
            for piece in here.get((cell.unit, cell.section), ()):
                for begin, end in intersect([(piece.begin, piece.end)], [(cell.begin, cell.end)]):
                    values = piece.tensor.detach().reshape(-1)[begin - piece.begin : end - piece.begin].clone()
                    whole = Fragment(piece.key, piece.begin, piece.end, piece.tensor, piece.states)
                    found.append(Fragment(piece.key, begin, end, values, _states_of([whole], begin, end)))
        return found

    def held_weights(self) -> Iterator[tuple[int, Key, int, Tensor]]:
        """Yield what is held of each parameter in each cell, where it lies: cell, parameter, its first element in the
        section's flat vector, and the values."""
        here = _by_section(self.pieces)
        for index in self.held:
            cell = self.units.table.cells[index]
            for piece in here.get((cell.unit, cell.section), ()):
                for begin, end in intersect([(piece.begin, piece.end)], [(cell.begin, cell.end)]):
                    yield (
                        index,
                        piece.key,
                        begin,
                        piece.tensor.detach().reshape(-1)[begin - piece.begin :][: end - begin],
                    )

    def local_values(self, u: int, s: int, begin: int, end: int) -> Tensor:
        """Return held elements of a section's flat vector, where they lie."""
        held = self.sections[u, s]
        rank = self.units.units[u].group.rank
        start, stop = held.layout.local_span(rank, begin, end)
        return held.storage.buffer[HEADER + start : HEADER + stop]


def _by_section(parts: Iterable[P]) -> dict[tuple[int, int], list[P]]:
    found: dict[tuple[int, int], list[P]] = {}
    for part in parts:
        found.setdefault(part.key[:2], []).append(part)
    return found


def _fragment(piece: Piece) -> Fragment:
    """Return all of a piece; the tensors are the live ones."""
    return Fragment(piece.key, piece.begin, piece.end, piece.tensor.detach(), piece.states)


def _covering(fragments: Sequence[Fragment], begin: int, end: int) -> list[Fragment]:
    """Return fragments that together are the range, without overlaps, in order."""
    found: list[Fragment] = []
    at = begin
    for fragment in sorted(fragments, key=lambda f: (f.begin, -f.end)):
        if fragment.begin <= at < fragment.end and at < end:
            found.append(replace_begin(fragment, at))
            at = fragment.end
    return found


def replace_begin(fragment: Fragment, begin: int) -> Fragment:
    """Return the fragment from ``begin`` on."""
    if begin == fragment.begin:
        return fragment
    return Fragment(
        fragment.key,
        begin,
        fragment.end,
        fragment.values.reshape(-1)[begin - fragment.begin :],
        _states_of([fragment], begin, fragment.end),
    )


def _states_of(parts: Sequence[Fragment], begin: int, end: int) -> dict[str, State]:
    """Return the states of a range out of those of neighbouring parts of its parameter."""
    found: dict[str, State] = {}
    kinds = parts[0].states if parts else {}
    for kind in kinds:
        cut: list[tuple[State, int]] = []
        for part in parts:
            a, b = max(begin, part.begin), min(end, part.end)
            state = part.states[kind]
            if (a, b) != (part.begin, part.end):
                state = cut_state(state, (part.end - part.begin,), a - part.begin, b - part.begin)
            cut.append((state, b - a))
        found[kind] = dict(cut[0][0]) if len(cut) == 1 else join_states(cut)
    return found
