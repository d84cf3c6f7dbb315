"""The commit protocol keeps its promise in every interleaving with crashes anywhere; each mutant of it breaks it."""

from __future__ import annotations

import pytest

from elastic.sharded.commit_model import Broken, Model, Variant, search
from phalanx.elastic.sharded._recovery_choice import (
    NotPrepared,
    Repeat,
    Resume,
    RollForward,
    StateReport,
    choose_recovery,
)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(("size", "copies", "joining"), [(2, 2, 0), (3, 2, 0), (3, 2, 1), (3, 3, 0)])
def test_no_interleaving_loses_a_cell_or_a_step(size: int, copies: int, joining: int) -> None:
    found = search(Model(size, copies, joining=joining))
    assert found.num_recoveries > 50
    assert found.num_ends > 5


@pytest.mark.parametrize(("size", "copies"), [(2, 2), (3, 2), (3, 3)])
def test_a_collective_behind_the_commit_point_loses_nothing_either(size: int, copies: int) -> None:
    """That in which all tell which gradients are not finite."""
    plain, found = search(Model(size, copies)), search(Model(size, copies, has_findings=True))
    assert found.num_states > plain.num_states
    assert found.num_ends > 5


@pytest.mark.soak
@pytest.mark.parametrize(
    ("size", "copies", "joining"), [(4, 2, 0), (4, 2, 1), (4, 3, 0), (4, 3, 1), (5, 2, 0), (5, 2, 1), (5, 3, 0)]
)
def test_no_interleaving_of_more_workers_loses_a_cell_or_a_step(size: int, copies: int, joining: int) -> None:
    found = search(Model(size, copies, joining=joining))
    assert found.num_recoveries > 1000


@pytest.mark.soak
@pytest.mark.parametrize(("size", "copies"), [(3, 2), (3, 3), (4, 3)])
def test_no_interleaving_of_more_losses_and_steps_loses_a_cell_or_a_step(size: int, copies: int) -> None:
    assert search(Model(size, copies, max_deaths=3, num_steps=3)).num_recoveries > 1000


# The smallest job in which each breaks: two workers, three, three of which one has just joined.
MUTANTS = {
    Variant.NO_BARRIER: ((3, 2, 0), "prepared for none"),
    Variant.NO_GRADIENT_TO_MIRRORS: ((2, 2, 0), "its cell . has 0"),
    Variant.BARRIER_BEFORE_MIRRORS: ((3, 2, 0), "prepared for none"),
    Variant.GRADIENT_FREED_EARLY: ((2, 2, 0), "its cell . has 0"),
    Variant.GRADIENT_FREED_AT_LOSS: ((3, 2, 0), "prepared for none"),
    Variant.UNPREPARED_BEHIND_COMMIT: ((3, 2, 0), "prepared for none"),
    Variant.WRONG_VERSION: ((3, 2, 0), "its cell . has -1"),
    Variant.COUNTED_BEFORE_ARRIVAL: ((3, 2, 1), "which it has not"),
    Variant.DROPPED_BEFORE_ARRIVAL: ((3, 2, 1), "no survivor holds"),
    Variant.NOT_MIRRORED_AFTER_MOVE: ((3, 2, 0), "its cell . has 0"),
}


@pytest.mark.parametrize("variant", [variant for variant in Variant if variant is not Variant.RIGHT])
def test_every_mutant_is_caught(variant: Variant) -> None:
    (size, copies, joining), told = MUTANTS[variant]
    with pytest.raises(Broken, match=told):
        search(Model(size, copies, variant, joining=joining))


def report(worker: str, version: int | None, prepared: int | None = None, *held: int) -> StateReport:
    return StateReport(worker, version, prepared, held, held[:1])


def test_new_workers_have_no_say() -> None:
    choice = choose_recovery([report("new", None), report("a", 7, None, 0, 1), report("b", 7, 7, 1, 0)], 2)
    assert isinstance(choice, Repeat)
    assert (choice.version, choice.holdings.holders) == (7, (("a", "b"), ("b", "a")))
    assert choose_recovery([report("new", None)], 2) == Resume((0, 1), None)


def test_who_is_behind_follows_whatever_its_order() -> None:
    choice = choose_recovery([report("a", 6, 6, 0), report("b", 7, None, 1), report("c", 6, 6, 0, 1)], 2)
    assert isinstance(choice, RollForward)
    assert (choice.source, choice.behind, choice.version) == ("b", ("a", "c"), 7)


@pytest.mark.parametrize(("version", "prepared"), [(6, None), (6, 5), (5, 5), (5, 6)])
def test_a_worker_that_cannot_follow_is_named(version: int, prepared: int | None) -> None:
    with pytest.raises(NotPrepared, match=f"worker a has committed 7 steps, b {version} and is prepared for"):
        choose_recovery([report("a", 7, None, 0), report("b", version, prepared, 0)], 1)


def test_a_cell_that_only_the_lost_held_goes_back_to_the_save() -> None:
    assert choose_recovery([report("a", 7, None, 0), report("b", 6, 6, 0)], 2) == Resume((1,), 7)
