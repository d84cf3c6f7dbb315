"""Puts the site in order: which page stands in which section. Pages of ``docs`` by hand, the rest from the source."""

from __future__ import annotations

from pathlib import Path

from tools.site._reference import page_of
from tools.site._tree import ROOT, public_modules

# Section -> pages, by their paths below docs; the title of a page is its first heading.
SECTIONS: dict[str, list[str]] = {
    "Start": ["start.md"],
    "Tutorials": [
        "tutorials/survive.md",
        "tutorials/shard-a-model.md",
        "tutorials/debug-a-hang.md",
        "tutorials/layouts-on-a-laptop.md",
    ],
    "How to": [
        "howto/spot.md",
        "howto/checkpoints.md",
        "howto/cloud.md",
        "howto/etcd.md",
        "howto/slurm.md",
        "howto/kubernetes.md",
        "howto/ray.md",
        "howto/huggingface.md",
        "howto/lightning.md",
        "howto/accelerate.md",
        "howto/streaming.md",
    ],
    "Coming from": [
        "coming/torchrun.md",
        "coming/ddp.md",
        "coming/dtensor.md",
        "coming/fsdp2.md",
        "coming/torchft.md",
        "coming/accelerate.md",
    ],
    "Concepts": [
        "concepts/slots.md",
        "concepts/tree.md",
        "concepts/commit.md",
        "concepts/generations.md",
        "concepts/cells.md",
        "words.md",
    ],
    "Guides": [
        "elastic.md",
        "elastic-failures.md",
        "elastic-sharded.md",
        "elastic-saves.md",
        "elastic-guard.md",
        "elastic-trainers.md",
        "elastic-proof.md",
        "elastic-measured.md",
        "slots.md",
        "launch.md",
        "launch-torchrun.md",
        "rendezvous.md",
        "notices.md",
        "clusters.md",
        "scale.md",
        "watch.md",
        "watch-commands.md",
        "watch-metrics.md",
        "watch-trackers.md",
        "data.md",
        "ddp.md",
        "fsdp.md",
        "parallel.md",
        "context.md",
        "tensor.md",
        "tensor-parallel.md",
        "tensor-random.md",
        "tensor-debug.md",
        "tensor-measured.md",
        "compile.md",
        "shard.md",
        "contracts.md",
        "comm.md",
        "transport.md",
        "stores.md",
    ],
    "Project": [
        "parity.md",
        "project/architecture.md",
        "files.md",
        "adr/index.md",
        "dependencies.md",
        "release.md",
        "project/changelog.md",
        "project/contributing.md",
    ],
}
# Pages that are not below docs, or are made: where they stand on the site.
OUTSIDE = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "README.md": "index.md",
    "docs/adr": "adr/index.md",
}
FACTS = ("commands", "environment", "events", "metrics", "errors")


def decisions() -> list[str]:
    """The pages of decisions, oldest first."""
    return [f"adr/{path.name}" for path in sorted((ROOT / "docs" / "adr").glob("*.md"))]


def nav() -> list[dict[str, object]]:
    """The tree of sections and pages, as mkdocs takes it."""
    tree: list[dict[str, object]] = [{"Phalanx": "index.md"}]
    for section, pages in SECTIONS.items():
        listed: list[object] = list(pages)
        if section == "Project":
            listed.insert(listed.index("adr/index.md") + 1, {"Decisions": decisions()})
        tree.append({section: listed})
    facts = [f"reference/{name}.md" for name in FACTS]
    modules = [{module: page_of(module)} for module in public_modules()]
    tree.insert(-1, {"Reference": ["reference/index.md", *facts, {"Modules": modules}]})
    tree.insert(-1, {"Keywords": "keywords.md"})
    return tree


def pages_of(tree: object) -> list[str]:
    """All pages that a tree names, in its order.

    >>> pages_of([{"A": ["a.md", {"B": "b.md"}]}])
    ['a.md', 'b.md']
    """
    if isinstance(tree, str):
        return [tree]
    inner = tree if isinstance(tree, list) else list(tree.values())  # type: ignore[attr-defined]
    return [page for each in inner for page in pages_of(each)]


def documents() -> dict[str, Path]:
    """Pages that people write: their paths on the site, and their files."""
    found = {path.relative_to(ROOT / "docs").as_posix(): path for path in sorted((ROOT / "docs").rglob("*.md"))}
    return found | {page: ROOT / file for file, page in OUTSIDE.items() if (ROOT / file).is_file()}
