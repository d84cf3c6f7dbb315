"""Turns docstrings into Markdown: double backticks, doctests and indented blocks become what a page shows.

Prose keeps its words. What Markdown would take for markup of its own (angle brackets, underscores and stars outside of
code) is escaped.
"""

from __future__ import annotations

import re
import textwrap

CODE = re.compile(r"(``.+?``|`[^`\n]+`)", re.DOTALL)


def inline(text: str) -> str:
    """Prose of a docstring as Markdown.

    >>> inline("``a`` and *args of <this>, __init__")
    '`a` and \\\\*args of &lt;this&gt;, \\\\_\\\\_init\\\\_\\\\_'
    """
    parts = CODE.split(text)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = f"`{' '.join(part.strip('`').split())}`"
        else:
            part = part.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            parts[index] = re.sub(r"(?<![\w*])\*(?=\w)|__|(?<!\w)_(?=\w)|[\[\]]", _escaped, part)
    return "".join(parts)


def _escaped(match: re.Match[str]) -> str:
    return "".join(f"\\{character}" for character in match[0])


def markdown(docstring: str) -> str:
    """A docstring as Markdown.

    >>> markdown("Adds.\\n\\n>>> 1 + 1\\n2").splitlines()
    ['Adds.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    out, is_literal = [], False
    for block in re.split(r"\n\s*\n", docstring.strip("\n")):
        is_indented = all(line.startswith("    ") for line in block.splitlines())
        if block.lstrip().startswith(">>> ") or "\n>>> " in block:
            before, _, code = block.partition(">>> ")
            if before.strip():
                out.append(inline(before.strip()))
            out.append(_fence("pycon", f">>> {code}"))
        elif is_indented and (is_literal or _is_table_like(block)):
            out.append(_fence("text", block))
        elif block.strip() == "::":
            is_literal = True
            continue
        else:
            out.append(_list_or_prose(block))
        is_literal = block.rstrip().endswith("::") or (is_literal and is_indented)
    return "\n\n".join(out)


def _fence(language: str, block: str) -> str:
    cleaned = re.sub(r" *# doctest: \+\w+", "", textwrap.dedent(block).rstrip())
    return f"```{language}\n{cleaned}\n```"


def _is_table_like(block: str) -> bool:
    """Columns, trees and formulas are kept as they are set."""
    return bool(re.search(r"\S {2,}\S|[├└│]", block))


def _list_or_prose(block: str) -> str:
    text = textwrap.dedent(block).strip()
    if re.match(r"[-*] ", text) or re.search(r"\n\s*[-*] ", text):
        first, *items = re.split(r"(?:^|\n)\s*[-*] ", text)
        lines = [f"- {inline(' '.join(item.split()))}" for item in items]
        return "\n\n".join(filter(None, [inline(" ".join(first.split())), "\n".join(lines)]))
    return inline(" ".join(text.split())).replace("::", ":")
