"""Who holds which cells: even, spread, few pairs, and no more moved than a loss or a join needs."""

from __future__ import annotations

import json
from collections import deque
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.elastic.reduce._norm_blocks import BLOCK
from phalanx.elastic.sharded._assignment import assign, trimmed, with_even_owners
from phalanx.elastic.sharded._cell_table import CellTable, SectionShape, cell_table
from phalanx.elastic.sharded._holdings import Holdings, LostCells, Transfer, after_loss, describe
from phalanx.elastic.sharded._slices import is_possible, next_slice
from phalanx.elastic.sharded._transfer_plan import MAX_PARTNERS, transfers
from phalanx.fsdp.layout._unit_layout import flat_starts

pytestmark = pytest.mark.fast


def table_of(num_units: int, sizes: tuple[int, ...] = (64 * BLOCK,), **options: bool) -> CellTable:
    return cell_table([[SectionShape(sizes)]] * num_units, **{"whole_matrices": False, **options})


def names(count: int) -> list[str]:
    return [f"w{number}" for number in range(count)]


def on_nodes(workers: list[str], size: int) -> dict[str, str]:
    return {worker: f"n{number // size}" for number, worker in enumerate(workers)}


def spread_of(table: CellTable, holdings: Holdings, workers: list[str]) -> int:
    held = holdings.bytes_held(table, workers).values()
    return max(held) - min(held)


def moved(table: CellTable, plan: tuple[Transfer, ...]) -> int:
    return sum(table.sizes[one.cell] for one in plan)


def pairs(holdings: Holdings) -> set[tuple[str, str]]:
    return {pair for each in holdings.holders for pair in combinations(sorted(each), 2)}


# -- cells ----------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.one_of(st.integers(0, 200), st.integers(0, 40 * BLOCK)), min_size=1, max_size=12),
    whole=st.booleans(),
    num_cells=st.integers(1, 80),
)
def test_cells_cover_a_section_and_cut_no_block(sizes: list[int], whole: bool, num_cells: int) -> None:
    table = cell_table([[SectionShape(tuple(sizes))]], whole_matrices=whole, num_cells=num_cells)
    starts = flat_starts(sizes)
    assert len(table) <= num_cells
    place = 0
    for cell in table.cells:
        assert cell.begin == place < cell.end, "they ascend, touch and are not empty"
        place = cell.end
        start = max(s for s, size in zip(starts, sizes, strict=False) if s <= cell.begin and size)
        assert (cell.begin - start) % BLOCK == 0 if not whole else cell.begin == start
    assert place == starts[-1]


def test_cells_of_one_large_parameter_are_even() -> None:
    assert {cell.size for cell in table_of(1).cells} == {4 * BLOCK}
    odd = cell_table([[SectionShape((1_000_003,))]], whole_matrices=False)
    assert len(odd) == 64
    assert max(odd.sizes) - min(odd.sizes) <= 8 * BLOCK


def test_cells_do_not_depend_on_other_units_and_the_fingerprint_tells_tables_apart() -> None:
    one, two = SectionShape((5000, 77)), SectionShape((300_000,), 2)
    both = cell_table([[one], [two, one]], whole_matrices=False)
    assert list(both.of_section) == [(0, 0), (1, 0), (1, 1)]
    ranges = [[(both.cells[i].begin, both.cells[i].end) for i in found] for found in both.of_section.values()]
    assert ranges[0] == ranges[2]
    assert both.fingerprint() == cell_table([[one], [two, one]], whole_matrices=False).fingerprint()
    assert both.fingerprint() != cell_table([[one], [two, one]], whole_matrices=True).fingerprint()


# -- at the start ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [1, 2, 3, 4, "all"])
def test_an_assignment_is_even_and_has_few_pairs(copies: int | str) -> None:
    table = table_of(24 if copies != "all" else 2)
    for size in (1, 2, 3, 5, 8, 12, 24, 63):
        workers = names(size)
        holdings = assign(table, workers, copies, {})  # type: ignore[arg-type]  # what a user gives
        wanted = size if copies == "all" else min(int(copies), size)
        assert {len(each) for each in holdings.holders} == {wanted}
        assert spread_of(table, holdings, workers) <= max(table.sizes)
        for section in table.of_section.values():
            owned = [sum(holdings.holders[cell][0] == worker for cell in section) for worker in workers]
            assert max(owned) - min(owned) <= 1, "each unit is reduced by all"
        if copies == 2:
            partners = [sum(worker in pair for pair in pairs(holdings)) for worker in workers]
            assert min(size - 1, 4) <= min(partners)
            assert max(partners) <= MAX_PARTNERS + 1
            assert transfers(table, holdings, workers, copies, {}) == ()


@settings(max_examples=30)
@given(num_nodes=st.integers(2, 6), size=st.integers(1, 5), copies=st.integers(2, 4), units=st.integers(1, 4))
def test_copies_lie_on_different_nodes(num_nodes: int, size: int, copies: int, units: int) -> None:
    workers = names(num_nodes * size)
    nodes = on_nodes(workers, size)
    holdings = assign(table_of(units), workers, copies, nodes)
    for each in holdings.holders:
        assert len({nodes[worker] for worker in each}) == min(copies, num_nodes)


def test_memory_comes_before_nodes_when_nodes_are_uneven() -> None:
    table, workers = table_of(4), names(5)
    nodes = dict.fromkeys(workers, "big") | {"w4": "small"}
    holdings = assign(table, workers, 2, nodes)
    assert spread_of(table, holdings, workers) <= max(table.sizes)
    together = [each for each in holdings.holders if "w4" not in each]
    assert 0 < len(together) < len(table), "the small node holds one copy of all that it has room for"
    assert "The loss of node big goes back to the last save" in describe(table, holdings, workers, 2, nodes)


@settings(max_examples=30)
@given(
    sizes=st.lists(st.lists(st.integers(1, 20 * BLOCK), min_size=1, max_size=6), min_size=1, max_size=5),
    whole=st.booleans(),
    size=st.integers(1, 9),
    copies=st.integers(1, 4),
)
def test_uneven_cells_are_even_within_the_largest(sizes: list[list[int]], whole: bool, size: int, copies: int) -> None:
    table = cell_table([[SectionShape(tuple(each))] for each in sizes], whole_matrices=whole)
    holdings = assign(table, names(size), copies, {})
    assert spread_of(table, holdings, names(size)) <= max(table.sizes)


# -- a loss ---------------------------------------------------------------------------------------------------


def check_loss(table: CellTable, size: int, copies: int, dead: int) -> None:
    workers = names(size)
    holdings = assign(table, workers, copies, {})
    left = [worker for worker in workers if worker != workers[dead]]
    after = after_loss(holdings, left)
    if copies == 1:
        assert isinstance(after, LostCells)
        assert after.cells == holdings.held_by(workers[dead])
        return
    assert isinstance(after, Holdings)
    plan = transfers(table, after, left, copies, {})
    first = [one for one in plan if one.drop is None]
    lost = sum(table.sizes[cell] for cell in holdings.held_by(workers[dead]))
    assert sum(table.sizes[one.cell] for one in first) == (lost if len(left) >= copies else 0)
    assert list(plan[: len(first)]) == first, "copies that are missing come first"
    assert moved(table, plan) <= 1.05 * copies / size * sum(table.sizes)
    done = after.after(plan)
    assert spread_of(table, done, left) <= max(table.sizes)
    assert transfers(table, done, left, copies, {}) == (), "it converges"


@pytest.mark.parametrize("copies", [1, 2, 3, 4])
def test_re_protection_moves_no_more_than_was_lost(copies: int) -> None:
    for size, dead in [(4, 0), (5, 4), (8, 3), (23, 11), (64, 63)]:
        check_loss(table_of(24), size, copies, dead)
    if copies < 4:
        check_loss(table_of(24), 3, copies, 1)


@pytest.mark.soak
@pytest.mark.parametrize("copies", [1, 2, 3, 4])
def test_re_protection_moves_no_more_than_was_lost_for_every_size(copies: int) -> None:
    for size in range(max(2, copies), 65):
        for dead in {0, size // 2, size - 1}:
            check_loss(table_of(24), size, copies, dead)


def test_re_protection_is_done_in_parallel() -> None:
    table, workers = table_of(24), names(16)
    left = workers[1:]
    after = after_loss(assign(table, workers, 2, {}), left)
    assert isinstance(after, Holdings)
    plan = transfers(table, after, left, 2, {})
    sources = {one.source for one in plan[:8]}
    assert len(sources) >= 4
    assert len({one.target for one in plan}) >= 4


@pytest.mark.parametrize("copies", [2, 3, 4])
@pytest.mark.parametrize("num_left", [1, 2])
def test_all_cells_get_a_second_copy_before_any_gets_a_third(copies: int, num_left: int) -> None:
    """Then a slice has many cells, and what it sends is there: else it would have one cell at a time."""
    table, workers = table_of(3), names(5)
    before = after_loss(assign(table, workers[:num_left], num_left, {}), workers[:num_left])
    assert isinstance(before, Holdings)
    plan = deque(transfers(table, before, workers, copies, {}))
    counts, holdings, num_slices = [], before, 0
    protect = sum(max(0, copies - num_left) for _ in table.cells)
    for move in list(plan)[:protect]:
        counts.append(len(holdings.holders[move.cell]))
        assert is_possible(holdings, move)
        holdings = holdings.after([move])
    assert counts == sorted(counts)
    while plan:
        next_slice(plan, table.sizes, range(len(table)), 1e9)
        num_slices += 1
    assert num_slices <= copies + 2


@settings(max_examples=10)
@given(data=st.data())
def test_losses_and_joins_in_any_order_converge(data: st.DataObject) -> None:
    size, copies = data.draw(st.integers(2, 10)), data.draw(st.integers(2, 3))
    node_size, next_name = data.draw(st.integers(1, 3)), size
    table, workers = table_of(data.draw(st.integers(1, 4))), names(size)
    nodes = on_nodes(names(40), node_size)
    holdings = assign(table, workers, copies, nodes)
    for _ in range(6):
        if len(workers) > copies and data.draw(st.booleans()):
            lost = data.draw(st.sampled_from(workers))
            workers = [worker for worker in workers if worker != lost]
        else:
            workers = [*workers, f"w{next_name}"]
            next_name += 1
        after = after_loss(holdings, workers)
        assert isinstance(after, Holdings)
        plan = transfers(table, after, workers, copies, nodes)
        part = after.after(plan[: len(plan) // 2])
        rest = transfers(table, part, workers, copies, nodes)
        assert moved(table, rest) <= moved(table, plan[len(plan) // 2 :]) + 2 * max(table.sizes), (
            "it goes on from there"
        )
        holdings = part.after(rest)
        assert {len(each) for each in holdings.holders} == {min(copies, len(workers))}
        assert spread_of(table, holdings, workers) <= max(table.sizes)
        assert transfers(table, holdings, workers, copies, nodes) == ()


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_a_join_moves_the_newcomers_share_and_no_more(copies: int) -> None:
    table = table_of(8)
    for size in (1, 2, 5, 15):
        before, workers = names(size), names(size + 1)
        holdings = assign(table, before, copies, {})
        plan = transfers(table, holdings, workers, copies, {})
        done = holdings.after(plan)
        assert spread_of(table, done, workers) <= max(table.sizes)
        assert {one.target for one in plan} == {workers[-1]}, "nothing goes from old to old"
        assert moved(table, plan) == done.bytes_held(table, workers)[workers[-1]]


def test_a_new_node_gets_a_copy_of_everything_it_has_room_for() -> None:
    table = table_of(6)
    workers = names(4)
    nodes = {"w0": "a", "w1": "a", "w2": "b", "w3": "b"}
    holdings = assign(table, workers[:2], 2, nodes)
    done = holdings.after(transfers(table, holdings, workers, 2, nodes))
    together = sum(len({nodes[worker] for worker in each}) == 1 for each in done.holders)
    assert together <= 1


@settings(max_examples=20)
@given(size=st.integers(2, 12), copies=st.integers(2, 3), dead=st.integers(0, 11))
def test_owners_are_even_without_moving_anything(size: int, copies: int, dead: int) -> None:
    table, workers = table_of(3), names(size)
    left = [worker for number, worker in enumerate(workers) if number != dead % size]
    after = after_loss(assign(table, workers, copies, {}), left)
    assert isinstance(after, Holdings)
    even = with_even_owners(table, after, left)
    assert [set(each) for each in even.holders] == [set(each) for each in after.holders]
    for section in table.of_section.values():
        owned = [sum(even.holders[cell][0] == worker for cell in section) for worker in left]
        assert max(owned) - min(owned) <= 2


def test_the_plan_depends_on_nothing_but_its_arguments() -> None:
    table, workers = table_of(3), names(7)
    nodes = on_nodes(workers, 2)
    assert assign(table, workers, 2, nodes) == assign(table, list(workers), 2, dict(reversed(nodes.items())))
    left = after_loss(assign(table, workers, 2, nodes), workers[2:])
    if isinstance(left, Holdings):
        again = Holdings.from_json(json.loads(json.dumps(left.to_json())))
        assert again == left
        assert transfers(table, left, workers[2:], 2, nodes) == transfers(table, again, workers[2:], 2, nodes)


def test_left_over_copies_are_dropped_where_most_is_held() -> None:
    table, workers = table_of(1), names(4)
    holdings = assign(table, workers, 2, {})
    more = holdings.after(transfers(table, holdings, workers, 3, {})[:20])
    assert {len(each) for each in trimmed(table, more, workers, 2).holders} == {2}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({}, "no field 'workers'"),
        ({"workers": ["a"], "cells": [[1]]}, "expected numbers of 1 workers"),
        ({"workers": ["a"], "cells": [[]]}, "at least one"),
        ({"workers": ["a"], "cells": [[0, 0]]}, "each named once"),
        ([], "expected an object"),
    ],
)
def test_holdings_from_a_stranger_are_refused(value: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Holdings.from_json(value)


def test_a_transfer_from_no_holder_and_copies_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="does not go from a holder"):
        Holdings((("a",),)).after([Transfer(0, "b", "c")])
    with pytest.raises(ValueError, match="copies is 0"):
        assign(table_of(1), ["a"], 0, {})
    with pytest.raises(ValueError, match="expected some of"):
        transfers(table_of(1), assign(table_of(1), ["a", "b"], 2, {}), ["a"], 2, {})


def test_words_of_what_is_held_and_what_a_loss_costs() -> None:
    table, workers = table_of(4), names(4)

    def told(copies: int | str, nodes: dict[str, str]) -> str:
        return describe(table, assign(table, workers, copies, nodes), workers, copies, nodes)  # type: ignore[arg-type]

    assert told(1, {}) == "copies=1: 4 workers hold 25% of the state each. The loss of any goes back to the last save"
    two = told(2, on_nodes(workers, 2))
    assert (
        "hold 50% of the state each. Any 1 loss costs nothing. The loss of 2 goes back to the last save in 4 of 6"
        in two
    )
    assert two.endswith("The loss of any node costs nothing")
    assert "hold 75% of the state each. Any 2 losses cost nothing" in told(3, {})
    assert "hold 100% of the state each. Any 3 losses cost nothing" in told("all", {})
    alone = describe(table, assign(table, ["a"], 2, {}), ["a"], 2, {})
    assert alone.startswith("copies=2: 1 worker holds 100%")
    assert alone.endswith("Some cells have 1 of 2 copies")
