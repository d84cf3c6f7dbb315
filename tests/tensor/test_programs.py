"""Whole programs: random lines of torch calls give on DTensors what they give on plain tensors, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
from programs import MESHES, Generator, check, failures, without

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about lines that nobody would write


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_random_programs_give_what_they_give_on_one_device(shape: Any) -> None:
    assert not failures(range(8), shape)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_many_random_programs_give_what_they_give_on_one_device(shape: Any) -> None:
    assert not failures(range(8, 1008), shape)


def test_programs_are_the_same_for_the_same_seed_and_long_enough() -> None:
    made = [Generator(seed, (2, 2)).lines for seed in range(20)]
    assert made == [Generator(seed, (2, 2)).lines for seed in range(20)]
    assert sum(map(len, made)) > 20 * 8
    assert sum("backward" in line for lines in made for line in lines) > 20


def test_a_difference_is_found() -> None:
    leaf = "v1 = leaf(3, (4, 4), torch.float64, False, 'S0')"
    ranks = "v2 = v1 + (0 if isinstance(v1, torch.Tensor) and type(v1) is torch.Tensor else 1)"
    assert check((2,), [leaf]) == ""
    assert "v2" in check((2,), [leaf, ranks])


def test_leaving_out_a_line_leaves_out_what_needs_it() -> None:
    lines = [
        "v1 = leaf(1)",
        "v2, v3 = v1.chunk(2)",
        "v3.add_(v1)",
        "v4 = v1 * 2",
        "with torch.no_grad(): v5 = v2",
    ]
    assert without(lines, 1) == ["v1 = leaf(1)", "v4 = v1 * 2"]
