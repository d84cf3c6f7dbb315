"""Reads the source tree without importing it: modules, what they define, and where a public name is defined.

A module is public if no part of its name begins with an underscore and it offers names: those of ``__all__``, or, where
there is none, those that it defines. Lazy tables (``_HOMES``) are read by the imports for type checkers beside them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "phalanx"

Statement = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    path: Path

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text()

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of its tree."""
        return tuple(ast.walk(self.tree))

    @property
    def file(self) -> str:
        """Its path below the root of the repository."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""


@dataclass(frozen=True)
class Definition:
    """Where a name is defined; ``node`` None: the name is a module."""

    module: str
    name: str
    node: Statement | None = None

    @property
    def line(self) -> int:
        if self.node is None:
            return 1
        decorators: list[ast.expr] = getattr(self.node, "decorator_list", [])
        return min([self.node.lineno, *(decorator.lineno for decorator in decorators)])


@functools.cache
def modules() -> Mapping[str, Module]:
    """All modules of the package, by their dotted names."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(["phalanx", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")
        found[name] = Module(name, path)
    return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What a body runs at import or shows to type checkers: also inside ``if``, ``try`` and ``with``."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from statements([*node.body, *getattr(node, "orelse", [])])
        else:
            yield node


def assigned(node: ast.stmt) -> list[str]:
    """The plain names that a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@functools.cache
def defined(module: str) -> Mapping[str, Statement]:
    """What a module defines itself, by name; of several overloads the last one."""
    found: dict[str, Statement] = {}
    for node in statements(modules()[module].tree.body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found.update(dict.fromkeys(assigned(node), node))
    return found


@functools.cache
def imported(module: str) -> Mapping[str, tuple[str, str]]:
    """What a module takes over from others of ours: its name for it, the module, and the name there."""
    found = {}
    for node in statements(modules()[module].tree.body):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "phalanx":
            found.update({alias.asname or alias.name: (str(node.module), alias.name) for alias in node.names})
    return found


@functools.cache
def offered(module: str) -> tuple[str, ...]:
    """The public names of a module, sorted."""
    names: list[str] = []
    constants = {}
    for node in statements(modules()[module].tree.body):
        if isinstance(node, ast.Assign) and assigned(node) == ["_HOMES"]:
            constants["_HOMES"] = ast.literal_eval(node.value)
        if isinstance(node, ast.Assign) and assigned(node) == ["__all__"]:
            names = eval(compile(ast.Expression(node.value), module, "eval"), constants)  # of our own source
            return tuple(sorted(names))
    return tuple(sorted(name for name, node in defined(module).items() if _is_public(name, node)))


def _is_public(name: str, node: Statement) -> bool:
    """Of a module without ``__all__``; loggers and type variables are nobody's business."""
    value = getattr(node, "value", None)
    made_by = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return not name.startswith("_") and made_by not in ("logging.getLogger", "TypeVar", "ParamSpec")


@functools.cache
def public_modules() -> tuple[str, ...]:
    """Modules that users import, or run: no underscore in the name, and something to offer."""
    return tuple(
        name
        for name in modules()
        if not any(part.startswith("_") for part in name.split(".")) and (offered(name) or _defines_main(name))
    )


def _defines_main(module: str) -> bool:
    return 'if __name__ == "__main__"' in modules()[module].text


@functools.cache
def resolve(module: str, name: str) -> Definition:
    """Follow a name through imports to the module that defines it. ``KeyError`` where the trail is lost."""
    if name in defined(module):
        return Definition(module, name, defined(module)[name])
    if name in imported(module):
        where, other = imported(module)[name]
        if f"{where}.{other}" in modules():
            return Definition(f"{where}.{other}", "")
        return resolve(where, other)
    if f"{module}.{name}" in modules():
        return Definition(f"{module}.{name}", "")
    raise KeyError(f"{module} offers {name}, but neither defines nor imports it")


@functools.cache
def homes() -> Mapping[tuple[str, str], tuple[str, str]]:
    """The public module whose page describes a definition, and its name there.

    Of all modules that offer it, one that it lies below, with the shortest name. The top package only gathers names of
    others, so it is nobody's home.
    """
    offers: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for module in public_modules():
        for name in offered(module):
            definition = resolve(module, name)
            if definition.node is not None:
                offers.setdefault((definition.module, definition.name), []).append((module, name))

    def distance(place: tuple[str, str], offer: tuple[str, str]) -> tuple[bool, bool, int, str]:
        module = offer[0]
        is_above = f"{place[0]}.".startswith(f"{module}.")
        return (module == "phalanx", not is_above, module.count("."), module)

    return {place: min(these, key=lambda offer, at=place: distance(at, offer)) for place, these in offers.items()}  # type: ignore[misc]


def methods(node: ast.ClassDef) -> dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The public methods that a class defines itself, with their overloads; setters are left out."""
    found: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
    for each in statements(node.body):
        if isinstance(each, FUNCTIONS) and (not each.name.startswith("_") or each.name in ("__call__", "__getitem__")):
            if any(ast.unparse(decorator).endswith((".setter", ".deleter")) for decorator in each.decorator_list):
                continue
            found.setdefault(each.name, []).append(each)
    return found


def fields(node: ast.ClassDef) -> list[tuple[str, str, str]]:
    """The public fields of a class: name, declaration, and the text below it."""
    found = []
    for each, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(each, ast.Assign | ast.AnnAssign):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = str(after.value.value)
            names = [name for name in assigned(each) if not name.startswith("_")]
            found += [(name, ast.unparse(each), text) for name in names]
    return found
