"""``make files``: writes docs/files.md, every file in one line, from the first paragraph of its docstring.

python -m tools.files
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "files.md"
FOLDERS = ("src/phalanx", "benchmarks", "examples", "tools")
HEAD = """# Files

**Which file does what?** Every file in one line, by folder; [ARCHITECTURE.md](../ARCHITECTURE.md) is the tour.

Written by `make files` from the docstrings: change those, never this page.
"""


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line and fit for a cell of a table.

    >>> summary(Path(__file__))
    '`make files`: writes docs/files.md, every file in one line, from the first paragraph of its docstring'
    """
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = " ".join(text.split("\n\n")[0].split()).removesuffix(".")
    return line.replace("``", "`").replace("|", "\\|")


def page() -> str:
    """The whole of docs/files.md."""
    parts = [HEAD]
    for top in FOLDERS:
        for folder in sorted({path.parent for path in (ROOT / top).rglob("*.py")}):
            start = folder / "__init__.py"
            parts.append(f"\n## {folder.relative_to(ROOT)}\n")
            if start.exists():
                parts.append(f"{summary(start)}.\n")
            rest = [path for path in sorted(folder.glob("*.py")) if path != start]
            if rest:
                parts.append("\n| file | what it is |\n|---|---|\n")
                parts += [f"| `{path.name}` | {summary(path)} |\n" for path in rest]
    return "".join(parts)


if __name__ == "__main__":
    TARGET.write_text(page())
