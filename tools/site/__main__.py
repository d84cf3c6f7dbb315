"""``make docs``: lays out the pages of the site, checks them, and builds it with mkdocs, warnings as errors.

The site goes to ``build/site/VERSION``, with an index beside it that leads to the newest version and ``versions.json``
for the choice of a version in the header. ``--requirements`` prints what has to be installed.

python -m tools.site
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools.site import _facts, _index, _listing, _reference
from tools.site._markdown import (
    broken_links,
    file_behind,
    outside_fences,
    plain_pipes,
    relative,
    relinked,
    spaced,
    title_of,
)
from tools.site._nav import OUTSIDE, decisions, documents, nav
from tools.site._tree import ROOT, modules, public_modules

PAGES = ROOT / "build" / "pages"
SITE = ROOT / "build" / "site"
SETTINGS = ROOT / "mkdocs.yml"
REDIRECT = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={0}/index.html">'
    '<a href="{0}/index.html">{0}</a>\n'
)


def version() -> str:
    found = re.search(r'__version__ = "(.+)"', modules()["phalanx"].text)
    assert found, "src/phalanx/__init__.py has no __version__"
    return found[1]


def requirements() -> list[str]:
    """The packages of the extra ``docs``: all that a build needs, torch is not among them."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r"^docs = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert found, "pyproject.toml has no extra docs"
    return re.findall(r'"([^"]+)"', found[1])


def tracked() -> set[str]:
    """Source files that get a listing."""
    folders = ("src", "tests", "tools", "examples", "benchmarks")
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "__pycache__" not in path.parts
    }


class Layout:
    """The pages and files of the site before it is built."""

    def __init__(self) -> None:
        self.pages: dict[str, str] = {}
        self.copies: dict[str, Path] = {}
        self.listed = tracked()

    def place(self, target: str, document: Path, page: str) -> str:
        """Where a link of a document leads on the site; files that are no pages come along."""
        file = file_behind(target, document, ROOT)
        if file in OUTSIDE:
            return relative(OUTSIDE[file], page)
        if file in self.listed:
            return relative(f"source/{file}.html", page)
        there = file.removeprefix("docs/") if file.startswith("docs/") else f"files/{file}"
        if (ROOT / file).is_file() and not file.endswith(".md"):
            self.copies[there] = ROOT / file
        return relative(there, page)

    def write_documents(self) -> None:
        for page, document in documents().items():
            text = document.read_text()
            if page == "files.md":
                text = linked_files(text)
            text = relinked(text, lambda target, d=document, p=page: self.place(target, d, p))  # type: ignore[misc]
            self.pages[page] = outside_fences(text, spaced)
        rows = [f"- [{title_of(self.pages[page])}]({Path(page).name})" for page in decisions()]
        self.pages["adr/index.md"] = (
            "# Decisions\n\nOne page per decision that was measured.\n\n" + "\n".join(rows) + "\n"
        )

    def write_reference(self) -> None:
        written = dict(self.pages)
        facts = _facts.pages()
        self.pages |= {**_reference.pages(), **facts}
        rows = [f"| [`{module}`]({module}.md) | {_reference.first_line(module)} |" for module in public_modules()]
        named = ", ".join(f"[{title_of(text)}]({Path(page).name})" for page, text in facts.items())
        self.pages["reference/index.md"] = (
            f"# Reference\n\nMade from the source of version {version()}: every public module, name by name. "
            f"Beside Python: {named}. Look a word up in the [index of keywords](../keywords.md).\n\n"
            "| module | what it does |\n|---|---|\n" + "\n".join(rows) + "\n"
        )
        self.pages["keywords.md"] = _index.page(written)

    def files(self) -> set[str]:
        """Everything that is no page."""
        return {f"source/{file}.html" for file in self.listed} | set(self.copies)


def linked_files(text: str) -> str:
    """The list of files with a link to each listing."""
    folder, out = "", []
    for line in text.splitlines():
        if line.startswith("## "):
            folder = line[3:]
        found = re.match(r"\| `([\w.]+\.py)` \|", line)
        out.append(line.replace(f"`{found[1]}`", f"[`{found[1]}`](../{folder}/{found[1]})", 1) if found else line)
    return "\n".join(out) + "\n"


def lay_out() -> Layout:
    """All pages and files of the site; nothing is written to disk."""
    layout = Layout()
    layout.write_documents()
    layout.write_reference()
    layout.pages = {page: outside_fences(text, plain_pipes) for page, text in layout.pages.items()}
    return layout


def write(layout: Layout, folder: Path) -> None:
    """Write pages, listings and copies, and the settings with the order of pages."""
    shutil.rmtree(folder, ignore_errors=True)
    for page, text in layout.pages.items():
        path = folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for file in sorted(layout.listed):
        path = folder / "source" / f"{file}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        home = f"{'../' * (file.count('/') + 1)}index.html"
        path.write_text(_listing.page(file, (ROOT / file).read_text(), home))
    for there, source in layout.copies.items():
        (folder / there).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / there)
    style = folder / "site.css"
    shutil.copyfile(Path(__file__).parent / "site.css", style)


def settings(pages: Path, site: Path, order: list[dict[str, object]]) -> str:
    """What is added to mkdocs.yml: places and order. JSON, which YAML takes."""
    inherit = {"INHERIT": str(SETTINGS), "docs_dir": str(pages), "site_dir": str(site), "nav": order}
    return json.dumps(inherit, indent=1)


def build(folder: Path = PAGES, target: Path = SITE) -> None:
    """Build the site; raises ``SystemExit`` with the faults where there are any."""
    layout = lay_out()
    if wrong := broken_links(layout.pages, layout.files()):
        raise SystemExit("\n".join(["links that lead nowhere:", *wrong]))
    write(layout, folder)
    target.mkdir(parents=True, exist_ok=True)
    config = folder.parent / "mkdocs.yml"
    config.write_text(settings(folder, target / version(), nav()))
    run_mkdocs(config)
    write_versions(target)


def run_mkdocs(config: Path) -> None:
    """Let mkdocs build, with warnings as errors."""
    # not --quiet: mkdocs counts the warnings that it writes, and so would count none
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # on the future of the theme: docs/dependencies.md says what we do about it
    done = subprocess.run(command, env={**os.environ, **quiet}, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        faults = [line for line in done.stderr.splitlines() if not line.startswith("INFO")]
        raise SystemExit("\n".join(["mkdocs refuses:", *faults]))


def write_versions(target: Path) -> None:
    """Write the list of versions that are there, newest first, and the page that leads to the newest."""
    numbers = [path.parent.name for path in target.glob("*/index.html")]
    numbers.sort(key=lambda text: [int(part) for part in re.findall(r"\d+", text)], reverse=True)
    listed = [{"version": number, "title": number, "aliases": []} for number in numbers]
    (target / "versions.json").write_text(json.dumps(listed))
    (target / "index.html").write_text(REDIRECT.format(numbers[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--requirements", action="store_true", help="print what has to be installed, and stop")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    if args.requirements:
        print("\n".join(requirements()))
    else:
        build()
        print(f"{SITE / 'index.html'}; with search: {sys.executable} -m http.server -b 127.0.0.1 -d {SITE}")


if __name__ == "__main__":
    main()
