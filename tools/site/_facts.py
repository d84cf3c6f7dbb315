"""Collects what users meet besides Python names: commands and flags, environment variables, events, metrics, errors.

Events are asked for at run time, of a module that needs the standard library only; the rest is read from the source.
Each kind has a page of the reference with an anchor per fact, which is where the index leads.
"""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from tools.site._commands import commands, flags_of
from tools.site._docstrings import inline, markdown
from tools.site._reference import listing_of, page_of
from tools.site._tree import ROOT, Definition, Module, defined, homes, modules
from tools.site._variables import ABOUT

VARIABLE = re.compile(r"(?:PHALANX|TORCHELASTIC|TORCH_ELASTIC)_[A-Z][A-Z0-9_]*[A-Z0-9]|OMP_NUM_THREADS|RES_OPTIONS")

LEVELS = ("INFO", "WARNING")  # defaults that stand beside the name of a variable


@dataclass(frozen=True)
class Fact:
    """One thing with a name, the page and anchor of the reference that describe it, and a sentence."""

    kind: str
    name: str
    page: str
    anchor: str
    text: str
    definition: Definition | None = None


@functools.cache
def flags() -> tuple[Fact, ...]:
    """Commands, and their flags."""
    found = []
    for command, about in commands().items():
        found.append(Fact("command", f"phalanx {command}", "reference/commands.md", command, about))
        for flag in flags_of(command):
            if flag.long:
                text = f"`phalanx {command}`: {inline(flag.help)}"
                found.append(Fact("flag", flag.long, "reference/commands.md", f"{command}{flag.long}", text))
    return tuple(found)


def commands_page() -> str:
    """The page of commands and flags."""
    out = [
        "# Commands and flags\n\nWhat `phalanx COMMAND --help` says, from the same places. Flags may be written with "
        "dashes or underscores; each flag of `phalanx run` has a variable `PET_NAME` that sets its default.\n"
    ]
    for command, about in commands().items():
        out.append(f"\n## `phalanx {command}` {{ #{command} }}\n\n{inline(about)}.\n")
        rows = ["| flag | takes | default | meaning |", "|---|---|---|---|"]
        for flag in flags_of(command):
            shown = ", ".join(f"`{name}`" for name in flag.names)
            shown += f"{{ #{command}{flag.long} }}" if flag.long else ""
            cells = (shown, flag.takes, f"`{flag.default}`" if flag.default else "", inline(flag.help))
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        out.append("\n".join(rows) + "\n")
    return "\n".join(out)


def constants(module: Module) -> Iterator[tuple[str, int]]:
    """The strings of a module that are no docstrings, with their lines."""
    texts = {id(node.value) for node in module.nodes if isinstance(node, ast.Expr)}
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value, node.lineno


@functools.cache
def variable_places() -> Mapping[str, tuple[tuple[str, int], ...]]:
    """Environment variables that the source names, with module and line: ours, torch's, and those that workers find."""
    found: dict[str, list[tuple[str, int]]] = {}
    for name, module in modules().items():
        reads = {line for line, text in enumerate(module.text.splitlines(), 1) if "environ" in text}
        is_contract = name.endswith(("._worker_environment", ".world"))
        for text, line in constants(module) if is_contract or reads or VARIABLE.search(module.text) else ():
            is_variable = VARIABLE.fullmatch(text) or (
                (is_contract or line in reads) and re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*", text)
            )
            if is_variable and text not in LEVELS and not text.startswith("PET_"):
                found.setdefault(text, []).append((name, line))
    return {name: tuple(places) for name, places in sorted(found.items())}


@functools.cache
def variables() -> tuple[Fact, ...]:
    """Environment variables; those that only stand for a flag are read from the flags."""
    found = [
        Fact("variable", name, "reference/environment.md", name, variable_text(name)) for name in variable_places()
    ]
    for fact in flags():
        if fact.kind == "flag" and fact.anchor.startswith("run--"):
            name = "PET_" + fact.name.lstrip("-").replace("-", "_").upper()
            found.append(Fact("variable", name, fact.page, fact.anchor, f"the default of `{fact.name}`"))
    return tuple(found)


def variable_text(name: str) -> str:
    """What a variable means: a line of the table, or the text below the constant that names it."""
    for module, _ in variable_places()[name] if name not in ABOUT else ():
        for node, after in itertools.pairwise(modules()[module].tree.body):
            is_it = isinstance(node, ast.Assign) and ast.unparse(node.value) == repr(name)
            if is_it and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                return inline(" ".join(str(after.value.value).split()))
    return ABOUT.get(name, "")


def environment_page() -> str:
    """The page of environment variables."""
    rows = ["| variable | meaning | where |", "|---|---|---|"]
    for fact in variables():
        if fact.page == "reference/environment.md":
            places = dict.fromkeys(variable_places()[fact.name])
            where = ", ".join(
                f"[`{module.removeprefix('phalanx.')}`]({listing_of(modules()[module].file, line)})"
                for module, line in list(places)[:4]
            )
            rows.append(f"| `{fact.name}`{{ #{fact.anchor} }} | {fact.text} | {where} |")
    return (
        "# Environment variables\n\nEvery variable that the source reads or sets. Beside these, each flag of "
        "`phalanx run` has one, `PET_` and its name: [commands and flags](commands.md).\n\n" + "\n".join(rows) + "\n"
    )


@functools.cache
def events() -> tuple[Fact, ...]:
    """The types of events, by the name that stands in their lines."""
    types = importlib.import_module("phalanx.events._event_types").EVENT_TYPES
    return tuple(
        Fact("event", kind, "reference/events.md", kind, _event_text(each), Definition(each.__module__, each.__name__))
        for kind, each in types.items()
    )


def _event_text(each: type) -> str:
    node = defined(each.__module__)[each.__name__]
    assert isinstance(node, ast.ClassDef)
    return inline(" ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()))


def events_page() -> str:
    """The page of events: who tells them and what they say."""
    module = "phalanx.events._event_types"
    types = importlib.import_module(module)
    out = ["# Events\n", "One line of JSON per change of state, in `events.jsonl` of a job's log directory; "
           "[`phalanx.launch.events`](phalanx.launch.events.md) reads them.\n",
           "| event | told by | says | class |", "|---|---|---|---|"]  # fmt: skip
    for fact in events():
        each = types.EVENT_TYPES[fact.name]
        teller = "agent" if issubclass(each, types.JobEvent) else "worker"
        teller = "either" if each is types.Event else teller
        own = [field.name for field in fields(each) if field.name not in ("time", "kind")]
        line = defined(each.__module__)[each.__name__].lineno
        says = ", ".join(f"`{name}`" for name in own)
        source = f"[`{each.__name__}`]({listing_of(modules()[each.__module__].file, line)})"
        out.append(f"| `{fact.name}`{{ #{fact.anchor} }} | {teller} | {fact.text} {says} | {source} |")
    return "\n".join([*out[:2], "\n".join(out[2:])]) + "\n"


@functools.cache
def metric_places() -> Mapping[str, tuple[str, int]]:
    """Metrics that the source counts, with the place; what stands for a part of a name is in angle brackets."""
    found: dict[str, tuple[str, int]] = {}
    for name, module in modules().items():
        for node in module.nodes if "metric" in module.text else ():
            if isinstance(node, ast.Call) and node.args and _counts(node.func):
                for metric in _texts(node.args[0]):
                    found.setdefault(metric, (name, node.lineno))
        for text, line in constants(module) if "prometheus" in module.text.lower() else ():
            if re.fullmatch(r"phalanx_[a-z0-9_]+", text):  # a name that is told to Prometheus as it stands
                found.setdefault(text, (name, line))
    return dict(sorted(found.items()))


def _counts(function: ast.expr) -> bool:
    text = ast.unparse(function)
    return text in ("put_metric", "metrics.put_metric") or bool(re.fullmatch(r"(self\.)?_?metrics\.(put|count)", text))


def _texts(node: ast.expr) -> Iterator[str]:
    """The texts that an expression may be."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)
    elif isinstance(node, ast.JoinedStr):
        yield "".join(
            str(part.value)
            if isinstance(part, ast.Constant)
            else f"<{re.findall(r'[a-z_]+', ast.unparse(part.value).removesuffix('.name.lower()'))[-1]}>"  # type: ignore[attr-defined]
            for part in node.values
        )


@functools.cache
def metrics() -> tuple[Fact, ...]:
    """Metrics, by the names that handlers get."""
    return tuple(
        Fact("metric", name, "reference/metrics.md", re.sub(r"[<>]", "", name), "") for name in metric_places()
    )


def metrics_page() -> str:
    """The page of metrics."""
    rows = ["| metric | kind | counted in |", "|---|---|---|"]
    for fact in metrics():
        module, line = metric_places()[fact.name]
        source = f"[`{module.removeprefix('phalanx.')}`]({listing_of(modules()[module].file, line)})"
        rows.append(f"| `{fact.name}`{{ #{fact.anchor} }} | {_metric_kind(module, line)} | {source} |")
    return (
        "# Metrics\n\nWhat agents count, under the names that a handler gets; Prometheus shows them with `_` in place "
        "of other characters, behind the name of their group. Angle brackets stand for a word that is filled in. "
        "Handlers: "
        f"[`phalanx.launch.metrics`]({Path(page_of('phalanx.launch.metrics')).name}).\n\n" + "\n".join(rows) + "\n"
    )


def _metric_kind(module: str, line: int) -> str:
    text = modules()[module].text.splitlines()[line - 1]
    if "histogram" in text.lower():
        return "histogram"
    if '_total"' in text:
        return "counter"
    return "counter" if ".count(" in text else "timer" if '"timer"' in text else "gauge"


@functools.cache
def error_definitions() -> tuple[Definition, ...]:
    """Errors and warnings that the source defines without an underscore, found by their bases."""
    known = {"Exception", "BaseException", "Warning"}
    classes = [
        (module, name, node)
        for module in modules()
        for name, node in defined(module).items()
        if isinstance(node, ast.ClassDef)
    ]
    found: dict[str, Definition] = {}
    while True:
        before = len(found)
        for module, name, node in classes:
            bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
            if any(base in known | set(found) or re.fullmatch(r"\w+(Error|Warning)", base) for base in bases):
                found.setdefault(name, Definition(module, name, node))
        if len(found) == before:
            return tuple(each for name, each in sorted(found.items()) if not name.startswith("_"))


@functools.cache
def errors() -> tuple[Fact, ...]:
    """Errors and warnings, each with a place on the page of errors."""
    return tuple(
        Fact("error", each.name, "reference/errors.md", each.name, _error_text(each), each)
        for each in error_definitions()
    )


def _error_text(each: Definition) -> str:
    assert isinstance(each.node, ast.ClassDef)
    return inline(" ".join((ast.get_docstring(each.node) or "").split("\n\n")[0].split()))


def errors_page() -> str:
    """The page of errors: the tree, and each one's bases and place."""
    rows = ["| error | is a | meaning | defined in |", "|---|---|---|---|"]
    for fact in errors():
        each = fact.definition
        assert each is not None
        assert isinstance(each.node, ast.ClassDef)
        bases = ", ".join(f"`{ast.unparse(base)}`" for base in each.node.bases)
        home = homes().get((each.module, each.name))
        where = f"[`{home[0]}`]({home[0]}.md#{home[1]})" if home else ""
        source = f"[source]({listing_of(modules()[each.module].file, each.line)})"
        places = ", ".join(filter(None, [where, source]))
        rows.append(f"| `{fact.name}`{{ #{fact.anchor} }} | {bases} | {fact.text} | {places} |")
    return (
        "# Errors and warnings\n\nEvery one that is raised on purpose. Messages name the rank, the value, what was "
        "expected and what to do.\n\n"
        + "\n".join(rows)
        + "\n\n## The tree\n\n"
        + markdown(modules()["phalanx.errors"].docstring)
        + "\n"
    )


@functools.cache
def words() -> tuple[Fact, ...]:
    """The words of the glossary, by their section in docs/words.md."""
    found, section = [], ""
    for line in (ROOT / "docs" / "words.md").read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if section.startswith("Of ") and line.startswith("| ") and cells[0] != "word":
            anchor = section.lower().replace(" ", "-")
            found += [Fact("word", word.strip(), "words.md", anchor, cells[1]) for word in re.split(r"[,/]", cells[0])]
    return tuple({fact.name: fact for fact in reversed(found)}.values())


def pages() -> Mapping[str, str]:
    """The pages of facts, by their paths."""
    return {
        "reference/commands.md": commands_page(),
        "reference/environment.md": environment_page(),
        "reference/events.md": events_page(),
        "reference/metrics.md": metrics_page(),
        "reference/errors.md": errors_page(),
    }


def all_facts() -> Sequence[Fact]:
    """Everything but Python names."""
    return [*flags(), *variables(), *events(), *metrics(), *errors(), *words()]
