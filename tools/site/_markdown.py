"""Reads and adapts pages: headings and their anchors, links, and what differs between readers of Markdown.

Pages of ``docs`` are also read on code-hosting sites. Their links point at files of the repository; on the site those
are pages, listings or copies. Lists and tables may follow a line of text there; the site's reader needs an empty line
between.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# A code span, which is skipped, or a link: its text (never over the end of a row or paragraph), and its target.
LINK = re.compile(r"`[^`\n]+`|(!?\[(?:`[^`\n]*`|[^\[\]`\n]|\n(?![|\n])|\[[^\]\n]*\])*\])\(([^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#{1,6}) (.+?)(?: \{ #(\S+) \})?$", re.MULTILINE)
ANCHOR = re.compile(r"\{ #(\S+) \}")
ITEM = re.compile(r"(?:[-*]|\d+\.) ")


class Heading(NamedTuple):
    """A heading of a page: its depth, its text, and the anchor that leads to it."""

    depth: int
    text: str
    anchor: str


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """A text with ``change`` made to all but its fenced blocks."""
    parts = FENCE.split(text)
    return "".join(part if index % 2 else change(part) for index, part in enumerate(parts))


def prose(text: str) -> str:
    """A text without its fenced blocks."""
    return FENCE.sub("", text)


def slug(heading: str) -> str:
    """The anchor of a heading, as code-hosting sites and our site's settings make it.

    >>> slug("`x + y` on DTensors, remembered")
    'x--y-on-dtensors-remembered'
    """
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def headings(text: str) -> list[Heading]:
    """The headings of a page; a slug that returns gets a number."""
    found: list[Heading] = []
    seen: dict[str, int] = {}
    for marks, title, given in HEADING.findall(prose(text)):
        anchor = given or slug(title)
        count = seen.get(anchor, 0)
        seen[anchor] = count + 1
        found.append(Heading(len(marks), title, f"{anchor}_{count}" if count else anchor))
    return found


def anchors(text: str) -> set[str]:
    """Every anchor of a page: of headings, and those given to other things."""
    return {heading.anchor for heading in headings(text)} | set(ANCHOR.findall(prose(text)))


def links(text: str) -> Iterator[str]:
    """The targets of a page's links and pictures."""
    for _, target in LINK.findall(prose(text)):
        if target:
            yield target


def title_of(text: str) -> str:
    """The first heading of a page, without markup."""
    return headings(text)[0].text.replace("`", "")


def spaced(text: str) -> str:
    """A page whose lists and tables stand apart from the text before them.

    >>> spaced("Two:\\n- a\\n- b")
    'Two:\\n\\n- a\\n- b'
    """
    lines = text.split("\n")
    out: list[str] = []
    for line in lines:
        before = out[-1] if out else ""
        starts_list = ITEM.match(line) and before.strip() and not ITEM.match(before) and not before.startswith(" ")
        starts_table = line.startswith("|") and before.strip() and not before.startswith("|")
        ends_list = re.match(r"\S", line) and not ITEM.match(line) and _in_list(out)
        ends_list = ends_list and line.startswith(("#", "|", "<"))
        if (starts_list and not _in_list(out)) or starts_table or ends_list:
            out.append("")
        out.append(line)
    return "\n".join(out)


def plain_pipes(text: str) -> str:
    """A page whose tables have bars in code unescaped: the site's reader knows that they are code.

    >>> plain_pipes("| `a \\\\| b` | c \\\\| d |")
    '| `a | b` | c \\\\| d |'
    """
    rows = re.compile(r"^\|.*$", re.MULTILINE)
    code = re.compile(r"`[^`\n]+`")
    return rows.sub(lambda row: code.sub(lambda span: span[0].replace("\\|", "|"), row[0]), text)


def _in_list(lines: list[str]) -> bool:
    """Whether the last paragraph is an item of a list."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if ITEM.match(line):
            return True
    return False


def relinked(text: str, place: Callable[[str], str]) -> str:
    """A page whose links to files are led through ``place``; addresses and anchors of the page itself stay."""

    def change(match: re.Match[str]) -> str:
        target, mark, anchor = (match[2] or "").partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        return f"{match[1]}({place(target)}{mark}{anchor})"

    return outside_fences(text, lambda part: LINK.sub(change, part))


def relative(target: str, page: str) -> str:
    """The way from a page to another one of the site.

    >>> relative("tensor.md", "concepts/slots.md")
    '../tensor.md'
    """
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def file_behind(target: str, document: Path, root: Path) -> str:
    """The file of the repository that a link of a document means, relative to its root."""
    return Path(os.path.normpath(document.parent / target)).relative_to(root).as_posix()


def broken_links(pages: dict[str, str], others: set[str]) -> list[str]:
    """Links that lead nowhere: to no page, no other file of the site, or no anchor of a page."""
    known = {page: anchors(text) for page, text in pages.items()}
    wrong = []
    for page, text in pages.items():
        for link in links(text):
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = link.partition("#")
            there = posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) if target else page
            if there not in known and there not in others:
                wrong.append(f"{page}: no {link}")
            elif anchor and there in known and anchor not in known[there]:
                wrong.append(f"{page}: {there} has no #{anchor}")
    return wrong
