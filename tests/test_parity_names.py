"""Every public name of the torch that is installed has a row in docs/parity.md, in the section of its part.

``LISTED`` says which modules and classes of torch each section answers for; a part adds its line there. A row's second
cell is the answer: a name of ours (``phalanx...``), or ``yes``, ``differs`` or ``no`` (``-``) with how or why.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.fast

PARITY = Path(__file__).parent.parent / "docs" / "parity.md"
ANSWER = re.compile(r"`phalanx\.|(yes|differs|no)[:,] [\w`]|- *\w")


class Listed(NamedTuple):
    """A module or class of torch, and the section that has a row for each of its public names."""

    torch: str
    section: str
    prefix: str = ""
    """What rows write before the name, such as ``DeviceMesh.``."""
    beyond: str = "builtins.object"
    """A base class whose own names are no news."""


GROUPS = "Device mesh and groups"
LISTED = [
    Listed("torch.distributed.device_mesh", GROUPS),
    Listed("torch.distributed.device_mesh.DeviceMesh", GROUPS, prefix="DeviceMesh."),
    Listed("torch.distributed.distributed_c10d", GROUPS),
    Listed("torch.distributed.distributed_c10d.ProcessGroup", GROUPS, prefix="ProcessGroup."),
]


def find(dotted: str) -> Any:
    """The module, or the attribute of one, of that name."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        module, _, name = dotted.rpartition(".")
        return getattr(find(module), name)


def public_names(listed: Listed) -> set[str]:
    """What torch shows: a module's ``__all__`` (or what it defines itself), a class's members, own and inherited."""
    found, base = find(listed.torch), find(listed.beyond)
    if isinstance(found, ModuleType):
        names = getattr(found, "__all__", None)
        if names is None:
            names = [
                name for name, value in vars(found).items() if getattr(value, "__module__", None) == found.__name__
            ]
        return {name for name in names if not name.startswith("_")}
    assert inspect.isclass(found), f"{listed.torch} is neither a module nor a class"
    members = {*dir(found)} - {*dir(base)} | {*vars(found)}
    return {name for name in members if not name.startswith("_")}


def sections(text: str) -> dict[str, list[tuple[str, str, str]]]:
    """The rows below each heading."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            rows = found.setdefault(line[3:].strip(), [])
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3 and cells[1] != "ours":
            rows.append((cells[0], cells[1], cells[2]))
    return found


def named(cell: str) -> set[str]:
    """The names that a row's first cell is about.

    >>> sorted(named("`DeviceMesh.size`, `shape` (of the mesh)"))
    ['DeviceMesh.size', 'shape']
    """
    return set(re.findall(r"`([\w.]+)`", cell))


@pytest.mark.parametrize("listed", LISTED, ids=lambda listed: listed.torch)
def test_each_public_name_of_torch_has_a_row(listed: Listed) -> None:
    rows = sections(PARITY.read_text()).get(listed.section)
    assert rows, f"docs/parity.md has no section {listed.section!r} with rows"
    known = {name for row in rows for name in named(row[0])}
    missing = sorted(name for name in public_names(listed) if listed.prefix + name not in known)
    assert not missing, f"no row under {listed.section!r} for {listed.torch}: {missing}"


@pytest.mark.parametrize("section", sorted({listed.section for listed in LISTED}))
def test_each_row_answers_yes_differs_or_no(section: str) -> None:
    rows = sections(PARITY.read_text())[section]
    wrong = [row for row in rows if not (ANSWER.match(row[1]) or (row[1] == "-" and len(row[2]) > 8))]
    assert not wrong, f"expected a name of ours, or yes / differs / no and how or why: {wrong}"


def test_a_name_without_a_row_is_found() -> None:
    rows = sections("## A\n| PyTorch's name | ours | test |\n|---|---|---|\n| `DeviceMesh.size` | `phalanx.x` | |\n")
    assert {name for row in rows["A"] for name in named(row[0])} == {"DeviceMesh.size"}
    assert "get_group" in public_names(Listed("torch.distributed.device_mesh.DeviceMesh", "A"))
    assert "all_reduce" in public_names(Listed("torch.distributed.distributed_c10d", "A"))
    own = public_names(Listed("torch.nn.Linear", "A", beyond="torch.nn.Module"))
    assert own == {"forward", "extra_repr", "reset_parameters"}
