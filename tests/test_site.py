"""The documentation site: links, reference and index are complete; mkdocs, where it is installed, finds no fault.

The pages are laid out once, by reading the source. What must be in them is found here in another way: by importing, by
asking commands for help, by looking at the text of the source.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest
from tools import pictures
from tools.site import __main__ as site
from tools.site import _facts, _index, _markdown, _nav, _reference, _tree, _variables

import phalanx
from documents import ROOT, paragraphs
from phalanx.__main__ import COMMANDS
from phalanx.events._event_types import EVENT_TYPES
from test_documents import flags_of

pytestmark = pytest.mark.fast

PATHS = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}


@pytest.fixture(scope="module")
def laid_out() -> tuple[dict[str, str], set[str]]:
    """The pages of the site and its other files."""
    layout = site.lay_out()
    return layout.pages, layout.files()


@pytest.fixture(scope="module")
def pages(laid_out: tuple[dict[str, str], set[str]]) -> dict[str, str]:
    return laid_out[0]


@pytest.fixture(scope="module")
def keywords(pages: dict[str, str]) -> dict[str, set[str]]:
    """The keywords of the index, by the heading they stand under."""
    found = {}
    for _, heading, text in _index.sections(pages["keywords.md"]):
        found[heading] = set(re.findall(r"^\| `?([^`|]+?)`? \| \[", text, re.MULTILINE))
    return found


def test_every_page_has_its_place_and_every_place_its_page(pages: dict[str, str]) -> None:
    placed = _nav.pages_of(_nav.nav())
    assert len(placed) == len(set(placed))
    assert set(placed) == set(pages)


PAGES = {page: path for page, path in _nav.documents().items() if path.is_relative_to(ROOT / "docs")}
EXPLAINING = {page: path for page, path in PAGES.items() if not page.startswith("adr/")}
"""Pages for who wants to know or do something; a decision is told from its beginning to its end."""
MOST_WORDS = 90
"""Of a paragraph, an item of a list, or a cell of a table."""
SOON = 85
"""Words, before a page shows a call, a table or a picture."""


def test_pages_begin_with_the_question_that_they_answer() -> None:
    assert len(EXPLAINING) > 60
    for page, path in EXPLAINING.items():
        first = path.read_text().split("\n\n")[1]
        assert "?" in first, f"{page} begins with: {first}"
        assert not first.startswith(("#", "|", "`")), f"{page} begins with: {first}"


def test_pages_show_soon_what_they_are_about() -> None:
    for page, path in EXPLAINING.items():
        before = re.split(r"^(?:```|\||!\[)", path.read_text(), maxsplit=1, flags=re.MULTILINE)
        assert len(before) == 2, f"{page} has no call, table or picture"
        assert len(before[0].split()) <= SOON, f"{page} has {len(before[0].split())} words before its first one"


def test_no_page_is_a_wall_of_prose() -> None:
    long = [
        f"{page}: {len(words)} words from {' '.join(words[:8])!r}; cut it, or make it a table or a list"
        for page, path in EXPLAINING.items()
        for words in map(str.split, paragraphs(path.read_text()))
        if len(words) > MOST_WORDS
    ]
    assert not long, "\n".join(long)


def test_a_wall_of_prose_is_seen() -> None:
    wall = "word " * (MOST_WORDS + 1)
    for text in (wall, f"- {wall}", f"1. {wall}", f"| a | {wall} |", f"# A\n{wall}\n- item"):
        assert max(len(each.split()) for each in paragraphs(text)) == MOST_WORDS + 1
    assert not list(paragraphs(f"# {wall}\n```python\n{wall}\n```\n<!-- {wall} -->"))
    assert list(paragraphs("one\ntwo\n\n- three\n- four\n  five\n| six | seven |")) == [
        "one two", "three", "four five", "six", "seven",
    ]  # fmt: skip


def test_pages_are_made_without_torch() -> None:
    """As ``make docs`` does it: what is asked at run time, flags and events, needs the standard library only."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = sys.modules['mkdocs'] = None; "
        "from tools.site import __main__, _facts; print(len(_facts.flags()), len(_facts.events()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=PATHS, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert min(map(int, done.stdout.split())) > 20


def test_no_link_and_no_anchor_is_broken(laid_out: tuple[dict[str, str], set[str]]) -> None:
    assert not _markdown.broken_links(*laid_out)


def test_broken_links_are_found() -> None:
    pages = {"a.md": "# A\n[b](b.md#some-heading) [c](c.md) `[d](d.md)`", "b.md": "# B\n## Some heading\n[](a.md#x)"}
    assert _markdown.broken_links(pages, set()) == ["a.md: no c.md", "b.md: a.md has no #x"]


def test_listings_have_the_lines_that_pages_point_at(pages: dict[str, str]) -> None:
    wrong = []
    for page, text in pages.items():
        for target, line in re.findall(r"source/([\w/.]+)\.html#L(\d+)", text):
            if int(line) > len((ROOT / target).read_text().splitlines()):
                wrong.append(f"{page}: {target} has no line {line}")
    assert not wrong, "\n".join(wrong)


def public_modules() -> dict[str, set[str]]:
    """Importable modules without an underscore in their names, and what they offer at run time."""
    found = {}
    for module in ["phalanx", *(each.name for each in pkgutil.walk_packages(phalanx.__path__, "phalanx."))]:
        if any(part.startswith("_") for part in module.split(".")):
            continue
        loaded = importlib.import_module(module)
        own = {
            name
            for name, value in vars(loaded).items()
            if getattr(value, "__module__", "") == module and not isinstance(value, TypeVar | ParamSpec)
        }
        names = set(getattr(loaded, "__all__", {name for name in own if not name.startswith("_")}))
        if names:
            found[module] = names
    return found


def test_the_reference_describes_every_public_name(pages: dict[str, str], keywords: dict[str, set[str]]) -> None:
    for module, names in public_modules().items():
        page = pages[_reference.page_of(module)]
        missing = {name for name in names if f"`{name}`" not in page}
        assert not missing, f"the page of {module} lacks {missing}"
        assert {module, *names} <= keywords["Python names"], module
        for part in ("| file |", "| imports |", "| tests that name it |"):
            assert part in page, f"{module}: no {part}"


def test_signatures_are_those_of_the_objects() -> None:
    """The reference is read from the text of the source; decorators or tables that change a name would show here."""
    compared = 0
    for (module, name), (home, there) in _tree.homes().items():
        node, value = _tree.defined(module)[name], getattr(importlib.import_module(home), there)
        if isinstance(node, _tree.FUNCTIONS) and not isinstance(value, type):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            actual = inspect.signature(value).parameters.values()
            kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            assert [each.arg for each in arguments] == [each.name for each in actual if each.kind not in kinds], name
            compared += 1
        elif isinstance(node, ast.ClassDef):
            assert value.__name__ == name, f"{home}.{there}"
    assert compared > 100


def test_the_index_has_every_command_flag_and_variable(keywords: dict[str, set[str]]) -> None:
    assert {f"phalanx {command}" for command in COMMANDS} == keywords["Commands"]
    flags = set().union(*(flags_of(command) for command in COMMANDS)) - {"--help"}
    assert flags == keywords["Flags"]
    text = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r'"((?:PHALANX|TORCHELASTIC|TORCH_ELASTIC)_[A-Z_]+[A-Z])"', text))
    of_run = {f"PET_{flag[2:].upper().replace('-', '_')}" for flag in flags_of("run") - {"--help"}}
    assert named | of_run | {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= keywords["Environment variables"]
    unsaid = [fact.name for fact in _facts.variables() if not fact.text]
    assert not unsaid, f"say what {unsaid} mean: below the constant, or in tools/site/_variables.py"
    assert set(_variables.ABOUT) <= keywords["Environment variables"], "no longer there"


def test_the_index_has_every_event_metric_and_word(keywords: dict[str, set[str]]) -> None:
    assert set(EVENT_TYPES) == keywords["Events"]
    text = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    counted = set(re.findall(r'\bmetrics\.(?:put|count)\(\s*"([\w.]+)"', text))
    assert len(counted) > 5
    assert counted <= keywords["Metrics"]
    assert {"slot", "generation", "axis", "dim", "simulated rank", "heal"} <= keywords["Words"]
    rows = (ROOT / "docs" / "words.md").read_text().split("## Names of")[0].count("\n| ")
    assert len(keywords["Words"]) >= rows - 4, "three heads, and a word that is explained twice"


def errors_of(kind: type) -> set[type]:
    return {kind, *(deeper for each in kind.__subclasses__() for deeper in errors_of(each))}


def test_the_index_has_every_error(keywords: dict[str, set[str]]) -> None:
    public_modules()  # imports them
    ours = {each.__name__ for each in errors_of(BaseException) if each.__module__.startswith("phalanx")}
    assert len(ours) > 40
    assert {name for name in ours if not name.startswith("_")} <= keywords["Errors and warnings"]


def test_keywords_lead_to_sections(pages: dict[str, str]) -> None:
    rows = re.findall(r"^\| .*$", pages["keywords.md"], re.MULTILINE)
    without = [row for row in rows if "](" in row and not re.search(r"\]\([^)#]+#[^)]+\)", row)]
    assert len(rows) > 1000
    assert not without, without[:5]


def test_pictures_are_as_drawn() -> None:
    for name, draw in pictures.PICTURES.items():
        assert (pictures.FOLDER / f"{name}.svg").read_text() == draw(), "run `python -m tools.pictures`"


def test_versions_are_listed_newest_first(tmp_path: Path) -> None:
    for number in ("0.2.0", "0.10.0", "0.9.1"):
        (tmp_path / number).mkdir()
        (tmp_path / number / "index.html").touch()
    site.write_versions(tmp_path)
    assert [row["version"] for row in json.loads((tmp_path / "versions.json").read_text())] == [
        "0.10.0",
        "0.9.1",
        "0.2.0",
    ]
    assert "url=0.10.0/" in (tmp_path / "index.html").read_text()


def with_mkdocs() -> str:
    """An interpreter that has mkdocs: this one, or that of ``make docs``. Skips where there is none."""
    beside = ROOT / ".venv-docs" / "bin" / "python"
    if importlib.util.find_spec("mkdocs"):
        return sys.executable
    if (ROOT / ".venv-docs" / ".ready").exists():
        return str(beside)
    pytest.skip("mkdocs is not installed; `make docs` sets it up in .venv-docs, and builds the site by itself")


def run_site(code: str, *words: Any) -> subprocess.CompletedProcess[str]:
    program = f"import sys; from pathlib import Path; from tools.site import __main__ as site; {code}"
    command = [with_mkdocs(), "-c", program, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=PATHS, capture_output=True, text=True, timeout=280)


def test_continuous_integration_builds_the_site() -> None:
    """``make docs``: a broken link, a name that is missing in the reference or a warning fails it."""
    jobs = (ROOT / ".github" / "workflows" / "ci.yml").read_text().split("\n  docs:\n")[1]
    assert "      - run: make docs\n" in jobs.split("\n\n")[0]
    assert "\ndocs: $(DOCS)/.ready\n\t$(DOCS)/bin/python -m tools.site\n" in (ROOT / "Makefile").read_text()


def test_a_warning_of_mkdocs_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text("# A\n[there](#no-such-place)\n")
    (tmp_path / "pages" / "site.css").touch()
    config = tmp_path / "mkdocs.yml"
    config.write_text(site.settings(tmp_path / "pages", tmp_path / "site", [{"A": "index.md"}]))
    done = run_site("site.run_mkdocs(Path(sys.argv[1]))", config)
    assert done.returncode == 1
    assert "no-such-place" in done.stderr
    (tmp_path / "pages" / "index.md").write_text("# A\n## No such place\n[there](#no-such-place)\n")
    assert run_site("site.run_mkdocs(Path(sys.argv[1]))", config).returncode == 0


@pytest.mark.soak  # 20 s of processor time; `make docs`, which CI runs, is the same
def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = run_site("site.build(Path(sys.argv[1]), Path(sys.argv[2]))", tmp_path / "pages", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    built = tmp_path / "site" / phalanx.__version__
    texts = {path: path.read_text() for path in built.rglob("*.html")}
    assert len(texts) > 500
    loaded = {url for text in texts.values() for url in re.findall(r'(?:src|href)="(https?:[^"]+)"', text)}
    assert not loaded
    search = json.loads((built / "search" / "search_index.json").read_text())
    assert any(entry["location"] == "keywords.html" for entry in search["docs"])
    raw = [
        path for path, text in texts.items() if re.search(r"<p>\s*\|", re.sub("<pre.*?</pre>", "", text, flags=re.S))
    ]
    assert not raw, "tables that were not taken for tables"
