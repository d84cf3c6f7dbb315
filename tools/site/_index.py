"""Makes the keyword index: every public name, flag, variable, event, metric, error and word, and where to read of it.

First comes what defines it (a place of the reference, or of the glossary), then the sections of written pages that use
it in code or name it in their heading; pages that explain before pages that list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tools.site._facts import all_facts
from tools.site._markdown import headings, slug, title_of
from tools.site._reference import anchor_of, anchors_of, page_of
from tools.site._tree import Definition, homes, offered, public_modules, resolve

KINDS = {
    "name": "Python names",
    "command": "Commands",
    "flag": "Flags",
    "variable": "Environment variables",
    "event": "Events",
    "metric": "Metrics",
    "error": "Errors and warnings",
    "word": "Words",
}
MOST = 5
LISTS = ("parity.md", "files.md", "project/", "adr/", "dependencies.md", "release.md")


class Place(NamedTuple):
    """A section of a page."""

    page: str
    anchor: str
    title: str


class Entry(NamedTuple):
    """One row of the index."""

    kind: str
    keyword: str
    places: tuple[Place, ...]


def entries(written: Mapping[str, str]) -> list[Entry]:
    """All rows; ``written`` are the pages that people wrote, by their paths on the site."""
    uses = used_in(written)
    found: dict[tuple[str, str], list[Place]] = {}
    for keyword, place in _names():
        found.setdefault(("name", keyword), []).append(place)
    for fact in all_facts():
        title = f"`{fact.name}`" if fact.page != "words.md" else "glossary"
        found.setdefault((fact.kind, fact.name), []).append(Place(fact.page, fact.anchor, title))
    rows = []
    for (kind, keyword), places in found.items():
        own = list(dict.fromkeys(places))
        rows.append(Entry(kind, keyword, (*own, *_more(kind, keyword, own, uses)[: max(0, MOST - len(own))])))
    return sorted(rows, key=lambda row: (list(KINDS).index(row.kind), row.keyword.lower().lstrip("-"), row.keyword))


def _names() -> Iterable[tuple[str, Place]]:
    """Public names as their modules call them, and methods as ``Class.method``."""
    for module in public_modules():
        yield module, Place(page_of(module), slug(module), f"`{module}`")
        for name in offered(module):
            yield name, _home_of(resolve(module, name))
        for name in anchors_of(module):
            if "." in name:
                yield name, Place(page_of(module), anchor_of(name), f"`{module}`")


def _home_of(found: Definition) -> Place:
    if found.node is None:
        page = found.module if found.module in public_modules() else "phalanx"
        return Place(page_of(page), slug(page), f"`{page}`")
    module, name = homes()[found.module, found.name]
    return Place(page_of(module), anchor_of(name), f"`{module}`")


def _more(kind: str, keyword: str, own: list[Place], uses: Mapping[str, list[Place]]) -> list[Place]:
    """Sections of written pages that use a keyword, those of its package's own page first."""
    more = [place for place in uses.get(_token(kind, keyword), ()) if place not in own]
    if kind == "name" and "." in keyword and not keyword.startswith("phalanx"):  # a method: where its class is named
        pages = {place.page for place in uses.get(keyword.split(".")[0], ())}
        more = [place for place in more if place.page in pages]
    packages = {f"{place.page.split('.')[1]}.md" for place in own if place.page.startswith("reference/phalanx.")}
    return sorted(more, key=lambda place: (place.page.startswith(LISTS), place.page not in packages))


def _token(kind: str, keyword: str) -> str:
    """What stands in a page's code for a keyword; words of the glossary are looked for in headings."""
    if kind == "word":
        return f"heading:{keyword}"
    if kind == "name" and keyword.startswith("phalanx."):
        return keyword
    return f".{keyword.split('.')[-1]}" if kind == "name" and "." in keyword else keyword


def used_in(written: Mapping[str, str]) -> Mapping[str, list[Place]]:
    """By token: the sections that have it in their code or, as ``heading:word``, in their heading."""
    found: dict[str, list[Place]] = {}
    order = sorted(written, key=lambda page: (page.startswith(LISTS), page))
    for page in order:
        title = title_of(written[page])
        for anchor, heading, text in sections(written[page]):
            place = Place(page, anchor, f"{title}: {heading}" if heading != title else title)
            tokens = {token for code in re.findall(r"`+([^`]+)`+", text) for token in tokens_of(code)}
            tokens |= {
                token for code in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S) for token in tokens_of(code)
            }
            tokens |= {f"heading:{word.lower().rstrip('s')}" for word in re.findall(r"[\w-]+", heading)}
            tokens |= {f"heading:{word.lower()}" for word in re.findall(r"[\w-]+", heading)}
            for token in tokens:
                if place not in found.setdefault(token, []):
                    found[token].append(place)
    return found


def sections(text: str) -> Iterable[tuple[str, str, str]]:
    """A page cut at its headings: anchor, heading, and what follows."""
    known = headings(text)
    at = 0
    starts = []
    for heading in known:
        at = text.index(f"{'#' * heading.depth} {heading.text}", at)
        starts.append(at)
        at += 1
    for heading, start, end in zip(known, starts, [*starts[1:], len(text)], strict=True):
        yield heading.anchor, heading.text.replace("`", ""), text[start:end]


def tokens_of(code: str) -> set[str]:
    """
    >>> sorted(tokens_of("phalanx run --nnodes 2"))
    ['--nnodes', '2', 'nnodes', 'phalanx', 'phalanx run', 'run']
    >>> sorted(tokens_of("job.save()"))
    ['.save', 'job', 'job.save', 'save']
    """
    dotted = set(re.findall(r"\w+(?:\.\w+)+", code)) | set(re.findall(r"\.[a-z_]\w*", code))
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", code))
    commands = set(re.findall(r"\bphalanx [a-z]+", code))
    return set(re.findall(r"\w+", code)) | dotted | flags | commands


def page(written: Mapping[str, str]) -> str:
    """The page of the index."""
    rows = entries(written)
    out = [
        f"# Keywords\n\n{len(rows)} names and words, each with the places where it is explained; made from the source. "
        "The search above looks in all text.\n"
    ]
    for kind, title in KINDS.items():
        out.append(f"\n## {title}\n\n| keyword | where |\n|---|---|")
        for row in rows:
            if row.kind == kind:
                where = ", ".join(_link(place) for place in row.places)
                out.append(f"| `{row.keyword}` | {where} |" if kind != "word" else f"| {row.keyword} | {where} |")
    return "\n".join(out) + "\n"


def _link(place: Place) -> str:
    title = re.sub(r"[\[\]|]", "", place.title)
    return f"[{title}]({place.page}{'#' if place.anchor else ''}{place.anchor})"
