"""What the documents say in code: their blocks, their inline code, and the public names that these may mean."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PACKAGES = (
    "phalanx", "phalanx.comm", "phalanx.comm.faults", "phalanx.comm.stores", "phalanx.data", "phalanx.ddp",
    "phalanx.ddp.hooks", "phalanx.elastic", "phalanx.fsdp", "phalanx.fsdp.context", "phalanx.launch", "phalanx.shard",
    "phalanx.tensor", "phalanx.tensor.debug", "phalanx.tensor.debug.contracts", "phalanx.tensor.experimental",
    "phalanx.tensor.parallel",
)  # fmt: skip


LANGUAGES = {
    "": "commands, or something drawn",
    "sh": "commands",
    "bash": "commands",
    "console": "commands behind a prompt, and what they print",
    "python": "code that runs in the tests",
    "py": "code that does not run where it stands: see NOT_RUN",
    "text": "what a program prints",
    "toml": "a file of --config",
    "yaml": "a file of another program",
}
"""What a fenced block may be, so that none goes unread."""
NOT_RUN = {
    "docs/howto/lightning.md": "needs the extra [lightning]; tests/trainers runs examples/lightning_classifier.py",
    "docs/howto/kubernetes.md": "reports to a controller; tests/elastic/test_kubeflow.py has one that stands for it",
    "docs/howto/ray.md": "needs the extra [ray] and a cluster; tests/schedulers/test_ray.py has one",
    "docs/howto/huggingface.md": "needs the extra [transformers]; tests/trainers runs examples/hf_language_model.py",
}


class Block(NamedTuple):
    """One fenced block of a document, and the line on which its text begins."""

    language: str
    text: str
    line: int


def blocks(document: Path) -> list[Block]:
    text = document.read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(match[1], match[2], text.count("\n", 0, match.start(2)) + 1) for match in found]


def prose(document: Path) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def paragraphs(text: str) -> Iterator[str]:
    """What a reader takes in at once: paragraphs, items of lists, cells of tables; no headings, blocks or comments."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    lines: list[str] = []
    for line in [*map(str.strip, text.splitlines()), ""]:
        item = re.match(r"(?:[-*]|\d+\.) +", line)
        if lines and (not line or item or line.startswith(("#", "|"))):
            yield " ".join(lines)
            lines = []
        if line.startswith("|"):
            yield from map(str.strip, line.strip("|").split("|"))
        elif line and not line.startswith("#"):
            lines.append(line[item.end() :] if item else line)


def inline_code(document: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(document))


def commands(document: Path) -> list[str]:
    """The shell commands of a document's blocks, continued lines joined, comments taken off."""
    shell = []
    for block in blocks(document):
        if block.language in ("", "sh", "bash"):
            shell.append(block.text)
        elif block.language == "console":  # what follows a prompt; the rest is what is printed
            shell += [f"{line}\n" for line in re.findall(r"^\$ (.*)$", block.text, re.MULTILINE)]
    lines = "".join(shell).replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := line.partition(" #")[0].strip())]


@functools.cache
def public() -> dict[str, list[object]]:
    """Public functions, classes and the methods of these, by their last name."""
    found: dict[str, list[object]] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            found.setdefault(name, []).append(value)
            if inspect.isclass(value):
                for method in dir(value):
                    if not method.startswith("_"):
                        found.setdefault(method, []).append(getattr(value, method))
    return found


def takes(function: object, call: ast.Call) -> bool:
    """Whether a function can be called so: keywords that it has, and no more positions than there are.

    Three dots stand for arguments that the text leaves out.
    """
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return True
    names = [keyword.arg for keyword in call.keywords if keyword.arg]
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds and not set(names) <= set(signature.parameters):
        return False
    positions = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.name not in (*names, "self")
    ]
    given = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
    return inspect.Parameter.VAR_POSITIONAL in kinds or len(given) <= len(positions) + (
        bool(given) and isinstance(given[0], ast.Constant) and given[0].value is ...
    )


def wrong_calls(code: str) -> Iterator[str]:
    """Calls of our public names, in a piece of code, that no function or class of that name takes."""
    code = re.sub(r"=(?=[,)])", "=...", code)  # `save(..., secret=)`
    try:
        tree = ast.parse(code.strip())
    except SyntaxError:
        return
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            owner, _, name = ast.unparse(call.func).rpartition(".")
            if owner.split(".")[0] in ("torch", "dist", "nn"):
                continue
            known = public().get(name, [])
            if owner.isidentifier() and owner[0].isupper():  # a class
                known = [getattr(one, name) for one in public().get(owner, []) if hasattr(one, name)]
            if known and not any(takes(function, call) for function in known):
                yield ast.unparse(call)
