"""How far a reader walks: which files run one after the other in ``x + y``, and how often a call comes in by torch.

A switch is a change of file between one function of ``phalanx`` that begins (or a generator that goes on) and the next;
a runner, which is made of text, is a file of its own.
ARCHITECTURE.md tells the same walk in words.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from meshes import on_mesh

import phalanx
from phalanx.tensor import DTensor, Replicate, Shard, distribute_tensor, implicit_replication

pytestmark = pytest.mark.fast

_SOURCE = str(Path(phalanx.__file__).parent)


def calls_in(function: Callable[[], Any]) -> list[tuple[str, str]]:
    """The file and the name of every function of phalanx that begins while ``function`` runs."""
    found: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith((_SOURCE, "<runner")):
            found.append((code.co_filename.removeprefix(_SOURCE).lstrip("/\\"), code.co_name))

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(previous)
    return found


def switches(calls: list[tuple[str, str]]) -> int:
    return sum(one[0] != other[0] for one, other in itertools.pairwise(calls))


def test_the_walk_of_x_plus_y() -> None:
    """First call: far below half of the 126 switches that it once took. Remembered: three functions in three files."""

    def body(mesh: Any) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        x, y = (distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]) for _ in range(2))
        x * y  # what is imported or found out once for all
        return calls_in(lambda: x + y), calls_in(lambda: x + y)

    for first, remembered in on_mesh(body, 1):
        assert switches(first) <= 40, "\n".join(map(str, first))
        assert switches(remembered) <= 3
        assert [name for _, name in remembered] == ["operator", "run", "wrap"]


def _entries(function: Callable[[], Any]) -> int:
    return sum(name == "__torch_function__" for _, name in calls_in(function))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_call_comes_in_once(num_ranks: int) -> None:
    """Whatever its arguments are turned into on the way: numbers, replicas, ``out``."""

    def body(mesh: Any) -> None:
        x, out = (distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]) for _ in range(2))
        plain, number = torch.full((8, 4), 3.0), distribute_tensor(torch.tensor(2), mesh, [Replicate()])
        square, result = (distribute_tensor(torch.eye(4), mesh, [Shard(0)]) for _ in range(2))
        for _ in range(2):  # found out, and remembered
            with implicit_replication():
                assert _entries(lambda: torch.add(x, plain)) == 1
                assert _entries(lambda: torch.add(x, plain, alpha=number, out=out)) == 1  # type: ignore[call-overload]  # a 0-d tensor for a number
            assert _entries(lambda: torch.add(x, x, out=out)) == 1
            assert _entries(lambda: torch.linalg.inv(square, out=result)) == 1  # has no rule
            assert _entries(lambda: torch.cummax(x, 0)) == 1
        assert out.full_tensor().eq(2).all()

    on_mesh(body, num_ranks)


def test_a_plain_tensor_takes_a_number_that_is_a_dtensor() -> None:
    def body(mesh: Any) -> None:
        number = distribute_tensor(torch.tensor(2.0), mesh, [Replicate()])
        plain = torch.ones(3)
        assert _entries(lambda: plain.mul_(number)) == 1
        assert type(plain) is torch.Tensor
        assert plain.tolist() == [2.0] * 3
        assert not isinstance(plain, DTensor)

    on_mesh(body, 2)
