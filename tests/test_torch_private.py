"""What is private in torch and used here: said in one module, and looked for in the torch that is installed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx
from phalanx import _torch_private as private

pytestmark = pytest.mark.fast

SOURCE = Path(phalanx.__file__).parent
HOME = SOURCE / "_torch_private.py"
# Objects to ask, where the class itself does not say what they have.
SAMPLES: dict[str, Callable[[], Any]] = {
    "torch.nn.Module": torch.nn.Module,
    "torch.nn.RNNBase": lambda: torch.nn.LSTM(1, 1),
    "torch._ops.OpOverload": lambda: torch.ops.aten.add.Tensor,
    "torch._library.custom_ops.CustomOpDef": lambda: torch.library.custom_op(
        "phalanx_tests::nothing", lambda x: None, mutates_args=(), schema="(Tensor x) -> ()"
    ),
    "torch.Tensor": lambda: torch.zeros(1),
    "torch.autograd.graph.Node": lambda: torch.zeros(1, requires_grad=True).exp().grad_fn,
}
MARKS = {"_is_param"}  # set by us and read by torch


def test_this_torch_has_every_name() -> None:
    gone = []
    for path, breaks in private.NAMES.values():
        try:
            private.find(path)
        except AttributeError:
            gone.append(f"{path}: {breaks}")
    held = [*private.ATTRIBUTES.values(), *((*key, breaks) for key, breaks in private.IN_PLACE.items())]
    for owner, attribute, breaks in held:
        try:
            if attribute not in MARKS and not (owner in SAMPLES and hasattr(SAMPLES[owner](), attribute)):
                private.find(f"{owner}.{attribute}")
        except AttributeError:
            gone.append(f"{owner}.{attribute}: {breaks}")
    assert not gone, f"torch {torch.__version__} has not:\n" + "\n".join(gone)


def test_a_name_that_is_gone_says_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(private.NAMES, "odd", ("torch._never_there", "nothing works"))
    with pytest.raises(ImportError, match=r"no torch\._never_there; without it: nothing works"):
        getattr(private, "odd")  # noqa: B009  # the name is no attribute that a reader should look for


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(path: Path) -> Iterator[str]:
    """Private names of torch in a file: imported, reached from an imported one, or attributes that are listed."""
    tree = ast.parse(path.read_text())
    bound: dict[str, str] = {}

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return bound.get(node.id)
        if isinstance(node, ast.Attribute):
            base = dotted(node.value)
            return None if base is None else f"{base}.{node.attr}"
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for local, name in bound.items():
        if any(map(is_private, name.split("."))):
            yield f"{name} (imported as {local})"
    listed = {attribute for _, attribute, _ in private.ATTRIBUTES.values()}
    listed |= {path.rpartition(".")[2] for path, _ in private.NAMES.values()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            name = dotted(node)
            if name is not None or (node.attr in listed and not own):
                yield f"{path.relative_to(SOURCE)}:{node.lineno} {name or ast.unparse(node)}"


def test_private_names_of_torch_are_said_in_one_module_only() -> None:
    files = [path for path in sorted(SOURCE.rglob("*.py")) if path != HOME]
    wrong = [use for path in files for use in private_uses(path)]
    assert not wrong, "list them in phalanx._torch_private and import them from there:\n" + "\n".join(wrong)


def test_every_listed_name_is_used() -> None:
    used: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "phalanx._torch_private":
                used |= {alias.name for alias in node.names}
    assert used == {*private.NAMES, *private.ATTRIBUTES}
