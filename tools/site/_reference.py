"""Makes the reference: a page per public module with signatures, docstrings, files, dependencies and tests.

A definition is described once, on the page of its home (``_tree.homes``); modules that offer it too point there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping

from tools.site._docstrings import inline, markdown
from tools.site._tree import (
    FUNCTIONS,
    Definition,
    fields,
    homes,
    methods,
    modules,
    offered,
    public_modules,
    resolve,
    statements,
)
from tools.site._usage import importers, imports_of, last_changes, size_of, tests_of

WIDTH = 100
MANY_TESTS = 8


def page_of(module: str) -> str:
    """Where the page of a public module stands, below the root of the site's pages.

    >>> page_of("phalanx.comm.stores")
    'reference/phalanx.comm.stores.md'
    """
    return f"reference/{module}.md"


def anchor_of(name: str) -> str:
    """The anchor of a name on its page; double underscores would be taken for markup.

    >>> anchor_of("DeviceMesh.__getitem__")
    'DeviceMesh.getitem'
    """
    return name.replace("__", "")


def listing_of(file: str, line: int = 1) -> str:
    """The listing of a file of the repository, from a page of the reference."""
    return f"../source/{file}.html" + (f"#L{line}" if line > 1 else "")


def pages() -> Mapping[str, str]:
    """All pages of the reference of modules, by their paths."""
    return {page_of(module): page(module) for module in public_modules()}


def page(module: str) -> str:
    """The page of one public module."""
    described = [name for name in offered(module) if _is_home(module, name)]
    elsewhere = [name for name in offered(module) if name not in described]
    parts = [f"# {module}\n", markdown(modules()[module].docstring) + "\n", _about_module(module)]
    if described:
        parts.append(_summary(module, described))
    if elsewhere:
        parts.append(_pointers(module, elsewhere))
    parts += [_describe(resolve(module, name), name, module) for name in described]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))


def _is_home(module: str, name: str) -> bool:
    found = resolve(module, name)
    return found.node is not None and homes()[found.module, found.name] == (module, name)


def _about_module(module: str) -> str:
    rows = [("file", _file(module))]
    ours, others = imports_of(module)
    rows.append(("imports", _modules(ours, others)))
    if users := importers().get(module, ()):
        rows.append(("imported by", _modules(users)))
    tests = {test for name in offered(module) for test in tests_of().get(_key(module, name), ())}
    tests |= set(tests_of().get((module, ""), ()))
    rows.append(("tests that name it", _tests(sorted(tests))))
    return _table(("", ""), rows)


def _summary(module: str, names: Iterable[str]) -> str:
    rows = [(f"[`{name}`](#{anchor_of(name)})", _first_sentence(resolve(module, name))) for name in names]
    return "\n" + _table(("name", "what it is"), rows)


def _pointers(module: str, names: Iterable[str]) -> str:
    rows = []
    for name in names:
        found = resolve(module, name)
        if found.node is None:
            target = found.module if found.module in public_modules() else ""
            rows.append((f"`{name}`", f"[`{target}`]({target}.md)" if target else f"the module `{found.module}`"))
        else:
            home, there = homes()[found.module, found.name]
            rows.append((f"`{name}`", f"[`{home}.{there}`]({home}.md#{anchor_of(there)})"))
    return "\nOffered here, described elsewhere:\n\n" + _table(("name", "described as"), rows)


def _describe(found: Definition, name: str, module: str) -> str:
    node = found.node
    assert node is not None, f"{found.module}.{found.name} is a module, which has a page of its own"
    parts = [f"\n## `{name}` {{ #{anchor_of(name)} }}\n", _about(found, module)]
    if isinstance(node, ast.ClassDef):
        parts.append(_class(found.module, node))
    elif isinstance(node, FUNCTIONS):
        for each in _overloads(found.module, node):
            parts.append(_code(signature(each)))
        parts.append(markdown(ast.get_docstring(node) or ""))
    else:
        parts.append(_code(_shortened(ast.unparse(node))))
        parts.append(markdown(_text_below(found)))
    return "\n\n".join(parts) + "\n"


def _class(module: str, node: ast.ClassDef) -> str:
    decorators = [f"@{ast.unparse(each)}\n" for each in node.decorator_list]
    bases = ", ".join(ast.unparse(base) for base in [*node.bases, *(word.value for word in node.keywords)])
    head = f"{''.join(decorators)}class {node.name}" + (f"({bases})" if bases else "")
    first = next((each for each in statements(node.body) if getattr(each, "name", "") == "__init__"), None)
    if isinstance(first, FUNCTIONS):
        head += "\n\n" + signature(first)
    parts = [_code(head), markdown(ast.get_docstring(node) or "")]
    if shown := fields(node):
        rows = [(f"`{_one_line(text)}`", inline(about)) for _, text, about in shown]
        parts.append(_table(("field", ""), rows))
    for name, versions in methods(node).items():
        parts.append(f"\n### `{node.name}.{name}` {{ #{anchor_of(f'{node.name}.{name}')} }}\n")
        is_property = any("property" in ast.unparse(decorator) for decorator in versions[-1].decorator_list)
        shown_versions = versions[:-1] if len(versions) > 1 else versions
        parts += [_code(signature(each, is_property=is_property)) for each in shown_versions]
        parts.append(markdown(ast.get_docstring(versions[-1]) or ast.get_docstring(versions[0]) or ""))
        parts.append(f"\n[source]({listing_of(modules()[module].file, versions[0].lineno)})\n")
    return "\n\n".join(parts)


def _overloads(module: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.FunctionDef]:
    """The overloads of a function that has some, else the function."""
    same = [
        each
        for each in statements(modules()[module].tree.body)
        if isinstance(each, FUNCTIONS) and each.name == node.name
    ]
    return same[:-1] if len(same) > 1 else [node]  # type: ignore[return-value,list-item]


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, *, is_property: bool = False) -> str:
    """A function's signature as it is written, over several lines where it is long.

    >>> signature(ast.parse("def f(a: int, *, b=1) -> str: ...").body[0])
    'def f(a: int, *, b=1) -> str'
    """
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    listed = arguments(node.args)
    decorators = [ast.unparse(each) for each in node.decorator_list]
    kept = "".join(f"@{each}\n" for each in decorators if each in ("classmethod", "staticmethod", "contextmanager"))
    if is_property:
        return f"{node.name}{returns.replace(' -> ', ': ')}"
    line = f"{word} {node.name}({', '.join(listed)}){returns}"
    if len(line) > WIDTH:
        inner = "".join(f"    {argument},\n" for argument in listed)
        line = f"{word} {node.name}(\n{inner}){returns}"
    return kept + line


def arguments(node: ast.arguments) -> list[str]:
    """The parameters of a function, each as it is written, with the marks between kinds.

    >>> arguments(ast.parse("def f(a, /, b: int = 1, *, c=None, **d): ...").body[0].args)
    ['a', '/', 'b: int = 1', '*', 'c=None', '**d']
    """
    plain = [*node.posonlyargs, *node.args]
    defaults: list[ast.expr | None] = [*([None] * (len(plain) - len(node.defaults))), *node.defaults]
    out = [_argument(each, default) for each, default in zip(plain, defaults, strict=True)]
    if node.posonlyargs:
        out.insert(len(node.posonlyargs), "/")
    if node.vararg or node.kwonlyargs:
        out.append(f"*{_argument(node.vararg)}" if node.vararg else "*")
    out += [_argument(each, default) for each, default in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
    return [*out, *([f"**{_argument(node.kwarg)}"] if node.kwarg else [])]


def _argument(node: ast.arg, default: ast.expr | None = None) -> str:
    kind = f": {ast.unparse(node.annotation)}" if node.annotation else ""
    equals = " = " if kind else "="
    return f"{node.arg}{kind}" + (f"{equals}{ast.unparse(default)}" if default is not None else "")


def _first_sentence(found: Definition) -> str:
    node = found.node
    text = ast.get_docstring(node) if isinstance(node, (ast.ClassDef, *FUNCTIONS)) else _text_below(found)
    paragraph = " ".join((text or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0] if not paragraph.startswith(">>>") else ""
    return inline(sentence)


def _text_below(found: Definition) -> str:
    """The text that follows an assignment, which is what tools take for its docstring."""
    body = list(statements(modules()[found.module].tree.body))
    after = body[body.index(found.node) + 1 :][:1] if found.node in body else []
    if after and isinstance(after[0], ast.Expr) and isinstance(after[0].value, ast.Constant):
        return str(after[0].value.value)
    return ""


def _about(found: Definition, module: str) -> str:
    rows = [("source", _file(found.module, found.line))]
    if found.module != module:
        rows.append(("that file imports", _modules(*imports_of(found.module))))
    rows.append(("tests that name it", _tests(tests_of().get((found.module, found.name), ()))))
    return _table(("", ""), rows)


def _file(module: str, line: int = 1) -> str:
    found = modules()[module]
    changed = last_changes().get(found.file)
    where = f"[`{found.file}`]({listing_of(found.file, line)})" + (f", line {line}" if line > 1 else "")
    return f"{where}; {size_of(found.path)}" + (f"; last changed {changed}" if changed else "")


def _modules(names: Iterable[str], others: Iterable[str] = ()) -> str:
    shown = []
    for name in names:
        target = f"{name}.md" if name in public_modules() else listing_of(modules()[name].file)
        shown.append(f"[`{name.removeprefix('phalanx.')}`]({target})")
    shown += [f"`{name}`" for name in others]
    return ", ".join(shown) or "the standard library only"


def _tests(files: Iterable[str]) -> str:
    files = list(files)
    shown = [f"[`{file.removeprefix('tests/')}`]({listing_of(file)})" for file in files[:MANY_TESTS]]
    more = f" and {len(files) - MANY_TESTS} more" if len(files) > MANY_TESTS else ""
    return ", ".join(shown) + more if files else "no file of tests names it"


def _key(module: str, name: str) -> tuple[str, str]:
    found = resolve(module, name)
    return found.module, found.name


def _code(text: str) -> str:
    return f"\n```python\n{text}\n```\n"


def _one_line(text: str) -> str:
    return _shortened(" ".join(text.split())).replace("|", "\\|").replace("`", "'")


def _shortened(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    lines += [f"| {left} | {_cell(right)} |" for left, right in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", "\\|", text).replace("\n", " ")


def anchors_of(module: str) -> list[str]:
    """The names that a module's page describes, and their methods as ``Class.method``: each has an anchor there."""
    found = []
    for name in offered(module):
        if _is_home(module, name):
            found.append(name)
            node = resolve(module, name).node
            if isinstance(node, ast.ClassDef):
                found += [f"{node.name}.{method}" for method in methods(node)]
    return found


def first_line(module: str) -> str:
    """What a module does, in the words of its docstring's first paragraph."""
    return _cell(inline(" ".join(modules()[module].docstring.split("\n\n")[0].split())))
