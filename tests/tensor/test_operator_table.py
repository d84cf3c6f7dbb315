"""One table says of each operator how it runs, its forms and what it promises; nobody else lists operators."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import phalanx
from phalanx.shard.ops import _dispatch as shard_ops
from phalanx.tensor.ops._registry import OPERATORS, op_name
from phalanx.tensor.patches._handlers import find_handler, handler_called

pytestmark = pytest.mark.fast

_SOURCE = Path(phalanx.__file__).parent
_TABLE = [_SOURCE / "tensor" / "ops" / name for name in ("_registry.py", "_elementwise_rows.py")]
# The reductions of ``Partial`` have names of operators.
_OTHER_MEANINGS = {
    "layout/_placement.py": {"sum", "min", "max"},
    "redistribute/_search.py": {"slice", "split", "pad"},
}


def _names() -> set[str]:
    return {name.removesuffix(suffix) for name in OPERATORS for suffix in ("", ".get", ".set")} | {
        f"{name}_" for name in OPERATORS
    }


def _collections(tree: ast.Module) -> Iterator[tuple[int, list[str]]]:
    """The strings of every literal list, tuple, set and dict (its keys), and the words of every long text."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            items: list[Any] = list(node.elts)
        elif isinstance(node, ast.Dict):
            items = list(node.keys)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            items = [ast.Constant(word) for word in str(node.value.value).split()]
        else:
            continue
        yield (
            node.lineno,
            [i.value for i in items if isinstance(i, ast.Constant) and isinstance(i.value, str)],
        )


def test_nobody_else_lists_operators() -> None:
    known, wrong = _names(), []
    for package in ("tensor", "shard"):
        for path in sorted((_SOURCE / package).rglob("*.py")):
            relative = path.relative_to(_SOURCE / package).as_posix()
            if path in _TABLE or path.name == "__init__.py":  # public names
                continue
            meant = _OTHER_MEANINGS.get(relative, set())
            for line, strings in _collections(ast.parse(path.read_text())):
                found = [word for word in strings if word in known and word not in meant]
                if len(found) >= 3 and len(found) > len(strings) / 2:
                    wrong.append(f"{package}/{relative}:{line}: {found}")
    assert not wrong, "put it into tensor/ops/_registry.py:\n" + "\n".join(wrong)


def test_every_handler_of_the_table_exists() -> None:
    for operator in OPERATORS.values():
        for key in (operator.handler, operator.functional, operator.in_place):
            if key:
                assert callable(handler_called(key)[0]), f"{operator.name}: {key}"
        if operator.sharded not in ("", "metadata", "shards", "no_memory"):
            assert callable(getattr(shard_ops._Handlers, operator.sharded)), operator


def test_every_form_of_the_table_exists_in_torch() -> None:
    for operator in OPERATORS.values():
        for name in operator.quick.split():
            assert hasattr(torch.Tensor, name), operator
        for name in operator.dunders.split():
            # ``/`` of Python 2 is still a method of tensors; ``rlshift`` and ``rrshift`` are written in Python
            assert hasattr(torch.Tensor, f"__{name}__"), f"{operator.name}: {name}"
        if operator.foreach:
            assert hasattr(torch, f"_foreach_{operator.name}") or hasattr(torch, f"_foreach_{operator.name}_")
        if operator.functional:
            assert hasattr(F, operator.name), operator


def test_a_handler_may_come_before_a_rule() -> None:
    """The table says both; the handler leaves some calls to the rule."""
    both = [
        o.name for o in OPERATORS.values() if o.rule is not None and o.handler.startswith(("composite", "extremes"))
    ]
    assert len(both) == 26
    assert {"batch_norm", "topk", "__setitem__", "mse_loss"} <= set(both)
    for name in ("batch_norm", "topk"):
        assert find_handler(getattr(torch, name)) is handler_called(OPERATORS[name].handler)[0]


def test_names_are_one_for_all_forms() -> None:
    assert {op_name(f).base for f in (torch.add, torch.Tensor.add, torch.Tensor.add_, torch.Tensor.__radd__)} == {"add"}
    assert op_name(torch.Tensor.__iadd__).in_place
    assert op_name(torch.Tensor.__setitem__).in_place
    assert not op_name(torch.Tensor.__invert__).in_place
    assert OPERATORS["no such operator"].rule is None
    assert "no such operator" not in OPERATORS
