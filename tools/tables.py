"""``make tables``: writes the tables of measurements in the documents from the stored runs of the benchmarks.

A table stands between ``<!-- measured: name -->`` and ``<!-- end -->``; what is between them is written here, from the
newest file of ``benchmarks/results`` that has figures of its benchmark. No figure is typed by hand.

python -m tools.tables
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks._results import Figure, Stored, newest_with

ROOT = Path(__file__).parent.parent
SPOT = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Figures = Mapping[str, Figure]


class Table(NamedTuple):
    """What a table is made of: the benchmark whose figures it shows, and how."""

    benchmark: str
    rows: Callable[[Figures], Iterable[Sequence[str]]]
    prefix: str = ""
    """What names of figures that the table needs begin with: a run may have left them out."""


def short(value: float) -> str:
    """Three digits, without an exponent.

    >>> short(0.04567), short(3.14159), short(5995.4), short(7.0)
    ('0.046', '3.1', '5,995', '7.0')
    """
    digits = max(0, 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{digits}f}"


def amount(figure: Figure | None, side: str = "ours") -> str:
    """A time or an amount, in a unit that fits; nothing where a run kept ratios only.

    >>> amount(Figure(name="x", unit="us", ours=5995.0)), amount(None)
    ('6.0 ms', '')
    """
    value = getattr(figure, side) if figure else None
    if value is None or figure is None:
        return ""
    if figure.unit.startswith("of "):
        return ""  # only the ratio was kept
    units = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
    if figure.unit not in units:
        return f"{short(value)} {figure.unit}"
    seconds = value * units[figure.unit]
    name, scale = next(((n, s) for n, s in reversed(units.items()) if seconds >= s), ("ns", 1e-9))
    return f"{short(seconds / scale)} {name.replace('us', 'µs')}"


def times(figure: Figure | None) -> str:
    """How many times quicker than theirs: ``3.2x``."""
    return f"{short(figure.ratio)}x" if figure and figure.ratio else ""


def part(figure: Figure | None) -> str:
    """Ours over theirs: ``0.78``."""
    return f"{1 / figure.ratio:.2f}" if figure and figure.ratio else ""


def mean(figures: Sequence[Figure]) -> float:
    """The geometric mean of ratios."""
    return math.exp(sum(math.log(figure.ratio or 1.0) for figure in figures) / len(figures))


def span(figures: Sequence[Figure], side: str) -> str:
    least, most = (pick(figures, key=lambda figure: getattr(figure, side)) for pick in (min, max))
    return f"{amount(least, side)} to {amount(most, side)}"


def dtensor(found: Figures) -> Iterable[Sequence[str]]:
    yield "", "torch", "here", "torch's time over ours", "goal"
    groups = (
        ("14 operations, forward", "forward/", 2.8),
        ("the same, forward and backward", "forward+backward/", 3.5),
        ("redistribute S(0)->R, S(0)->S(1), R->S(0)", "redistribute/", 8),
        ("tensor-parallel transformer block, forward and backward", "block", 5),
        ("AdamW foreach", "AdamW/foreach", 1),
        ("AdamW for-loop", "AdamW/for-loop", 2.5),
        ("AdamW fused", "AdamW/fused", 1),
    )
    for title, start, goal in groups:
        these = [figure for name, figure in found.items() if name.startswith(f"dtensor/{start}")]
        sides = [span(these, side) if len(these) > 1 else amount(these[0], side) for side in ("theirs", "ours")]
        yield title, *sides, f"{mean(these):.2f}x", f"{goal:g}x"


def compiled(found: Figures) -> Iterable[Sequence[str]]:
    yield "the block, forward and backward", "phalanx", "the other", "ratio", "goal"
    eager, torchs, by_hand = (found[f"compile/{name}"] for name in ("eager", "compiled", "by hand"))
    over_eager = Figure(name="", unit="us", ours=torchs.ours, theirs=eager.ours)
    yield "compiled, against our own eager", amount(over_eager), amount(over_eager, "theirs"), times(over_eager), "2.5x"
    limit = Figure(name="", unit="us", ours=by_hand.theirs, theirs=eager.ours)
    yield "the limit of that: by hand compiled, against our own eager", "", amount(limit), times(limit), ""
    yield "compiled, against torch's DTensor compiled", amount(torchs), amount(torchs, "theirs"), times(torchs), "1.5x"
    part_of = part(by_hand)
    yield "compiled, against the same by hand compiled", amount(by_hand), amount(by_hand, "theirs"), part_of, "1.30"
    yield "eager, against torch's DTensor eager", amount(eager), amount(eager, "theirs"), times(eager), "5x"


DDP_MODELS = {"small": "2,000 small parameters", "transformer": "25M transformer", "bound": "communication-bound"}


def ddp(found: Figures, start: str = "ddp") -> Iterable[Sequence[str]]:
    variants = ("torch again", "alone", "by hand", "gloo", "same host", "gloo fp16", "same host fp16")
    goals = {"small": 0.80, "transformer": 0.75, "bound": 0.55}
    carriers = "gloo (0.95)", "same host", "gloo, fp16 hook (0.95)", "same host, fp16 hook"
    yield "model", "torch again", "no DDP", "by hand on gloo", *carriers
    for name, goal in goals.items():
        cells = []
        for variant in variants:
            values = [part(found.get(f"{start}/{name}/{view}/{variant}")) for view in ("plain", "views")]
            limit = {"gloo": 0.95, "same": goal}.get(variant.split()[0], math.inf)
            marked = [f"**{value}**" if value and float(value) > limit else value for value in values]
            said = " / ".join(marked) if any(values) else "not measured"
            cells.append(said + (f" ({goal:.2f})" if variant.startswith("same host") else ""))
        yield DDP_MODELS[name], *cells


def ddp_processor(found: Figures) -> Iterable[Sequence[str]]:
    return ddp(found, "ddp/processor")


def ddp_views(found: Figures) -> Iterable[Sequence[str]]:
    variants = {"torch": "torch", "gloo": "gloo (1.00)", "same host": "same host (1.00)"}
    variants |= {f"{name} fp16": f"{title.partition(' (')[0]}, fp16 hook" for name, title in variants.items()}
    variants = {"torch again": "torch again"} | variants
    yield "model", *variants.values()
    for name, title in DDP_MODELS.items():
        for kind, start in (("", "ddp"), (", processor", "ddp/processor")):
            values = {variant: part(found.get(f"{start}/views over plain/{name}/{variant}")) for variant in variants}
            marked = (
                f"**{value}**" if value and float(value) > 1 and not variant.startswith("torch") else value
                for variant, value in values.items()
            )
            yield title + kind, *marked


def ddp_memory(found: Figures) -> Iterable[Sequence[str]]:
    yield "model", "gradients", "counted as", "torch", "gloo", "same host"
    for name, title in DDP_MODELS.items():
        for view in ("plain", "views"):
            for how in ("peak", "proportional"):
                ours = [found.get(f"ddp/memory/{view}/{name}/{carrier}/{how}") for carrier in ("gloo", "same host")]
                if ours[0]:
                    cells = [f"**{amount(one)}**" if one and (one.ratio or 1) < 1 else amount(one) for one in ours]
                    yield title, view, how, amount(ours[0], "theirs"), *cells


FSDP_MODELS = {"transformer": "25M transformer", "bound": "communication-bound"}


def fsdp(found: Figures) -> Iterable[Sequence[str]]:
    goals = {"gloo": 1.0, "same host": 0.8, "ddp": None}
    yield "model", "ranks", "counted", '`backend="gloo"` (1.00)', "one host (0.80)", "our DDP, whole everywhere"
    for name, title in FSDP_MODELS.items():
        for size in ("2", "4"):
            for what, how in (("step", "step time"), ("cpu", "processor time")):
                cells = []
                for variant, goal in goals.items():
                    value = part(found.get(f"fsdp/{name}/{size} ranks/{variant}/{what}"))
                    cells.append(f"**{value}**" if value and goal and float(value) > goal else value)
                if any(cells):
                    yield title, size, how, *cells


def fsdp_memory(found: Figures) -> Iterable[Sequence[str]]:
    yield "model", "ranks", "counted", '`backend="gloo"`', "one host", "our DDP, whole everywhere"
    for name, title in FSDP_MODELS.items():
        for size in ("2", "4"):
            for what, how in (
                ("peak", "peak memory (0.70 on 4)"),
                ("proportional", "the same, shared pages by share"),
                ("over computed", "the latter over what arithmetic says"),
            ):
                cells = []
                for variant in ("gloo", "same host", "ddp"):
                    value = part(found.get(f"fsdp/memory/{name}/{size} ranks/{variant}/{what}"))
                    has_goal = what != "over computed" and size == "4" and variant != "ddp"
                    cells.append(f"**{value}**" if value and has_goal and float(value) > 0.7 else value)
                if any(cells):
                    yield title, size, how, *cells


def came_back(figure: Figure | None) -> list[str]:
    """Theirs and ours, of the note that benchmarks of kills leave."""
    counts = re.findall(r"\d+ of \d+", figure.note if figure else "")
    return [f" ({count} came back)" for count in reversed(counts)] or ["", ""]


def worst(figure: Figure | None) -> str:
    if figure is None or figure.high is None:
        return ""
    return f" (worst {amount(Figure(name='', unit=figure.unit, ours=figure.high))})"


def elastic(found: Figures) -> Iterable[Sequence[str]]:
    yield "", "phalanx", "torchrun + torch DDP", "ours over theirs"
    for title, name in (
        ("SIGKILL to the next committed step, median", "kill/next step"),
        ("SIGKILL to full size again, median", "kill/full size"),
    ):
        figure = found.get(f"elastic/{name}")
        torchs, ours = came_back(figure)
        yield title, amount(figure) + worst(figure) + ours, amount(figure, "theirs") + torchs, part(figure)
    for title, name in (
        ("step, the same micro-batches as DDP", "step/micro-batches"),
        ("step, the same work in one batch", "step/one batch"),
    ):
        figure = found.get(f"elastic/{name}")
        yield title, amount(figure), amount(figure, "theirs"), part(figure)
    for title, name in (
        ("the same micro-batches and nobody to sum with", "micro-batches/alone"),
        ("the same one batch and nobody to sum with", "one batch/alone"),
    ):
        if figure := found.get(f"elastic/step/{name}"):
            yield title, amount(figure), amount(figure, "theirs"), part(figure)


def elastic_sharded(found: Figures) -> Iterable[Sequence[str]]:
    yield "", "sharded", "compared with", "ours over theirs", "goal"
    step, memory = "4 workers, 25M parameters", "peak memory of a worker"
    sizes = ("10 MB", "100 MB", "1 GB")
    share, usual = "2/3 of the parameters", "steps of as many workers with nothing to move"
    rows = [
        (f"step, {step}, copies=1; torch's `fully_shard` on gloo", "step/copies=1", "1.00"),
        (f"step, {step}, copies=2; torch's `fully_shard` on gloo", "step/copies=2", "1.00"),
        ("step, copies=2; copies=1", "copies 2 over 1", "1.10"),
        (f"{memory}, copies=1; the formula", "memory/copies=1/formula", "1.15"),
        (f"{memory}, copies=2; the formula", "memory/copies=2/formula", "1.15"),
        (f"{memory}, copies=2; the unsharded job", "memory/copies=2/unsharded", "0.55"),
        *(
            (f"{title}, {one} of state{other and '; '}{other}", f"{name}/{one}", goal)
            for title, other, name, goal in (
                ("SIGKILL to the next step less a step", "the unsharded job", "kill", "1.20"),
                ("SIGKILL to the next step, nothing subtracted", "the unsharded job", "kill with its step", ""),
                ("kills after which the sharded job went on", "all", "recovered/sharded", "1.00"),
                ("kills after which all cells came where they belong", "all", "settled", "1.00"),
                ("SIGKILL until every cell has all its copies again", "", "unprotected", ""),
                ("moved between survivors", share, "moved between survivors", "1.05"),
                ("moved to the newcomer", share, "moved to the newcomer", "1.05"),
                ("steps from the kill until nothing moves, all", usual, "step while cells move", "1.10"),
                ("the median of them", usual, "median step while cells move", ""),
            )
            for one in sizes
        ),
    ]
    for title, name, goal in rows:
        if figure := found.get(f"elastic/sharded/{name}"):
            yield title, amount(figure), amount(figure, "theirs"), part(figure), goal


def goodput(found: Figures) -> Iterable[Sequence[str]]:
    others = sorted({name.split("/")[3] for name in found}, reverse=True)
    yield "a failure every", "phalanx", *others, "goal"
    goals = {"15 s": "above 97%, where torchrun has less than 50%"}
    for every in dict.fromkeys(name.split("/")[2] for name in found):
        rows = [found.get(f"goodput/lost/{every}/{other}") for other in others]
        kept = [f"{100 * (1 - figure.theirs):.1f}%" if figure and figure.theirs is not None else "" for figure in rows]
        first = next(figure for figure in rows if figure)
        ours = f"{100 * (1 - first.ours):.1f}%"
        if first.low is not None and first.high is not None:
            ours += f" ({100 * (1 - first.high):.1f} to {100 * (1 - first.low):.1f}%)"
        yield every, ours, *kept, goals.get(every, "")


def stragglers(found: Figures) -> Iterable[Sequence[str]]:
    yield "", "a step", "over", "goal"
    for title, name, goal in (
        ("four workers, one of half the speed, even slots", "even slots", ""),
        ("the same, slots by speed", "slots by speed", "1.25"),
        ("the four compute, one with half the others' share of a core, even slots", "by cgroup, even slots", ""),
        ("the same, slots by speed", "by cgroup, slots by speed", "1.25"),
        ("sharded: one of half the speed, even waves", "sharded, even slots", ""),
        ("sharded: it skips waves", "sharded, slots by speed", ""),
        ("sharded, slots no longer than gathers: even waves", "sharded, short even slots", ""),
        ("the same, free to skip", "sharded, short slots by speed", ""),
        ("on by default, over none of it: 450 parameters", "on by default/0.00044M", ""),
        ("the same, 1.1 million", "on by default/1.1M", "1.01"),
        ("the same, 9.5 million", "on by default/9.5M", "1.01"),
        ("the same, 1.1 million, sharded", "sharded on by default/1.1M", "1.01"),
        ("a slot of 8 computed twice in every 4 steps: processor time", "checked/work", "1.03"),
        ("the same: time of a step", "checked/step", ""),
        ("the same with slots of 512 rows: processor time", "checked, 512 rows/work", "1.03"),
    ):
        if figure := found.get(f"stragglers/{name}"):
            yield title, amount(figure), f"{1 / figure.ratio:.3f}" if figure.ratio else "", goal


def launch(found: Figures) -> Iterable[Sequence[str]]:
    yield "", "torchrun", "phalanx run", "ours over theirs"
    for title, name in (
        ("command to first all-reduce of 2 workers", "start/2"),
        ("the same, 8 workers", "start/8"),
        ("processor time of a job of 2 workers that does nothing else", "processor time/2"),
        ("the same, 8 workers", "processor time/8"),
        ("SIGKILL of a worker to all in a working group again, under `restart`", "kill"),
    ):
        if figure := found.get(f"launch/{name}"):
            torchs, ours = came_back(figure)
            yield title, amount(figure, "theirs") + torchs, amount(figure) + ours, part(figure)
    if figure := found.get("launch/kill drop-in"):
        title = "SIGKILL to the next step of a script with `DistributedDataParallel`, `--drop-in` (without it)"
        yield title, "", f"{amount(figure)} ({amount(figure, 'theirs')})", ""


def rendezvous(found: Figures) -> Iterable[Sequence[str]]:
    yield "nodes", "ours, memory store", "ours, TCP store", "torch, TCP store"
    for count in sorted({int(name.split("/")[2]) for name in found}):
        tcp = found.get(f"rendezvous/tcp/{count}")
        yield (
            f"{count:,}",
            amount(found.get(f"rendezvous/memory/{count}")),
            amount(tcp),
            amount(tcp, "theirs"),
        )


def scale_regroup(found: Figures) -> Iterable[Sequence[str]]:
    yield "regroup", "workers", "requests of each", "of the first", "bytes of each", "of the first", "time, threads"
    titles = {"loss": "after a loss, by the agents", "survivors": "after a loss, one host", "newcomer": "at a boundary"}
    for way, title in titles.items():
        for size in sorted({int(name.split("/")[3]) for name in found if name.startswith(f"scale/regroup/{way}/")}):
            requests, num_bytes, time = (
                found[f"scale/regroup/{way}/{size}/{what}"] for what in ("requests", "bytes", "time")
            )
            cells = [f"{value or 0:,.0f}" for one in (requests, num_bytes) for value in (one.ours, one.high)]
            yield title, f"{size}", *cells, amount(time)


def scale_model(found: Figures) -> Iterable[Sequence[str]]:
    yield "workers", "a host each, gloo", "over the store's wire", "one host, shared memory"
    sizes = {int(name.split("/")[3]) for name in found if name.startswith("scale/model/gloo/")}
    for size in sorted(sizes):
        gloo = found[f"scale/model/gloo/{size}"]
        yield f"{size:,}", amount(gloo), gloo.note, amount(found.get(f"scale/model/shm/{size}"))


def scale_rendezvous(found: Figures) -> Iterable[Sequence[str]]:
    yield "store", "nodes", "requests of each", "at most", "bytes of each", "time, threads"
    for name in found:
        _, kind, *rest = name.split("/")
        if kind == "rendezvous" and rest[-1] == "requests":
            requests, num_bytes, time = (
                found[f"{name.rpartition('/')[0]}/{what}"] for what in ("requests", "bytes", "time")
            )
            yield (
                rest[0],
                rest[1],
                short(requests.ours),
                f"{requests.high or 0:.0f}",
                f"{num_bytes.ours:,.0f}",
                amount(time),
            )


def sampler(found: Figures) -> Iterable[Sequence[str]]:
    yield (
        "samples", "replicas", "first index: ours", "torch", "per index: ours", "torch", "ratio",
        "memory for an epoch: ours", "torch",
    )  # fmt: skip
    for name, first in found.items():
        if not name.startswith("sampler/first/"):
            continue
        length, replicas = name.split("/")[2:]
        per_index, memory, seek = (
            found.get(f"sampler/{what}/{length}/{replicas}") for what in ("per_index", "memory", "seek")
        )
        number, power = length.split("e+")
        yield (
            f"10^{int(power)}" if number == "1" else f"{number}·10^{int(power)}",
            replicas,
            amount(first) + (f" (seek {amount(seek)})" if seek else ""),
            amount(first, "theirs"),
            amount(per_index),
            amount(per_index, "theirs"),
            times(per_index),
            amount(memory),
            amount(memory, "theirs"),
        )


def streaming(found: Figures) -> Iterable[Sequence[str]]:
    yield "what", "ours, tar", "litdata", "ours, MDS", "mosaicml-streaming"
    for title, name in (
        ("samples lost, resumed at 60 or 61% by 3 ranks instead of 2", "lost"),
        ("samples seen twice", "repeated"),
        ("first batch after the resume", "first"),
        ("memory until then", "memory"),
        ("files opened in an epoch", "opens"),
        ("a sample, one process", "sample"),
    ):
        tar, lit, mosaic = (found.get(f"streaming/{name}/{kind}") for kind in ("ours_tar", "litdata", "mosaic"))
        yield title, amount(tar), amount(lit, "theirs"), amount(mosaic), amount(mosaic, "theirs")


def shard(found: Figures) -> Iterable[Sequence[str]]:
    yield "case, our time over torch's", "gloo", "auto", "goal"
    for title, name, goal in (
        ("`shard_module`, 200 parameters", "shard_module", "0.5"),
        ("`gather`, 64 MB", "gather", "0.5"),
        ("`reshard` by rows to columns and back, 64 MB", "reshard and back", "0.5"),
        ("save, 64 MB, against `torch.distributed.checkpoint`", "save", "0.7"),
        ("load of the same, with every byte checked", "load", "0.7"),
    ):
        yield title, *(part(found.get(f"shard/{name}/{group}")) for group in ("gloo", "auto")), goal


def checkpoint(found: Figures) -> Iterable[Sequence[str]]:
    yield "4 ranks, local disk", "ours", "DCP", "ours over DCP's", "goal", "safetensors, a file per rank"
    for title, kind, goal in (
        ("save", "save", "0.6"),
        ("load", "load", "0.6"),
        ("stall of a step, saved in the background", "stall", "0.5"),
    ):
        for name, figure in found.items():
            if match := re.fullmatch(rf"checkpoint/{kind}/(\d+)MB", name):
                bare = amount(found.get(f"{name}/safetensors"), "theirs")
                row = amount(figure), amount(figure, "theirs"), part(figure), goal, bare
                yield f"{title}, {int(match[1]):,} MB", *row


def trainers(found: Figures) -> Iterable[Sequence[str]]:
    yield "processor time of a step", "plain loop over the job's steps", "the trainer", "over the plain loop", "goal"
    for title, way in (("Lightning", "lightning"), ("Hugging Face", "hf")):
        for where, suffix in (("alone", "one process"), ("2workers", "two workers")):
            if figure := found.get(f"trainers/{way}/{where}"):
                yield f"{title}, {suffix}", amount(figure, "theirs"), amount(figure), part(figure), "1.30"


def same_host(found: Figures) -> Iterable[Sequence[str]]:
    sizes = ("4 KB", "256 KB", "4 MB", "32 MB", "128 MB")
    yield "2 ranks / 4 ranks", *sizes
    for kind in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"):
        for way, suffix in (("shm", ""), ("shared", ", shared")):
            cells = []
            for size in sizes:
                both = [times(found.get(f"comm/same host/{ranks}/{kind}/{size}/{way}")) for ranks in (2, 4)]
                cells.append(" / ".join(filter(None, both)))
            yield f"{kind}{suffix}", *cells


def as_backend(found: Figures) -> Iterable[Sequence[str]]:
    yield "", "gloo", "phalanx", "gloo's time over ours"
    for name, figure in found.items():
        if name.startswith("comm/as backend/"):
            yield name.split("/")[2], amount(figure, "theirs"), amount(figure), times(figure)


def kills(found: Figures) -> Iterable[Sequence[str]]:
    yield "ranks", "others are", "noticed", "next group works"
    doing = {"busy": "reducing", "blocked": "blocked in a collective", "between": "between collectives"}
    for name, noticed in found.items():
        match = re.fullmatch(r"comm/kill/(\w+)/(\d)/(\w+)/noticed", name)
        if match:
            works = found.get(name.replace("noticed", "next group works"))
            ranks = match[2] if match[1] == "shm" else f"{match[2]}, {match[1]}"
            yield ranks, doing[match[3]], amount(noticed) + worst(noticed), amount(works) + worst(works)


def watch(found: Figures) -> Iterable[Sequence[str]]:
    yield "CPU time", "measured", "from, to"
    for title, name in (
        ("a step of the first worker, more with events", "a step of the first worker, more"),
        (
            "the agent's threads for the page, with two workers and 50 steps a second",
            "page threads, while nobody looks",
        ),
        ("the whole agent, more than one without a page", "agent, while nobody looks"),
        ("the same, while somebody looks at the page", "agent, while somebody looks"),
        ("the agent, more while somebody looks at the page", "agent, more while somebody looks"),
        (
            "first worker and page threads together, of a step of 20 ms on busy cores",
            "share of a step of 20 ms, while nobody looks",
        ),
        ("first worker and agent together, while somebody looks", "share of a step of 20 ms, while somebody looks"),
        ("256 workers, 100,000 steps: the agent, for a step of a worker", "agent, a step of a worker"),
        ("the same: making the page", "page of 256 workers"),
        ("the same: its size", "size of the page"),
        ("the same: a scrape", "scrape of 256 workers"),
        ("the same: until Chromium has drawn it", "Chromium, page of 256 workers"),
    ):
        if figure := found.get(name):
            yield title, amount(figure), extremes(figure)


def extremes(figure: Figure) -> str:
    """The least and the largest of ours, where they were kept."""
    if figure.low is None or figure.high is None:
        return ""
    return ", ".join(amount(Figure(name="", unit=figure.unit, ours=value)) for value in (figure.low, figure.high))


TABLES = {
    "as_backend": Table("comm", as_backend),
    "checkpoint": Table("checkpoint", checkpoint),
    "compiled": Table("compile", compiled),
    "ddp": Table("ddp", ddp),
    "ddp_memory": Table("ddp", ddp_memory, "ddp/memory/plain/"),
    "ddp_processor": Table("ddp", ddp_processor, "ddp/processor/"),
    "ddp_views": Table("ddp", ddp_views, "ddp/views over plain/"),
    "dtensor": Table("dtensor", dtensor),
    "elastic": Table("elastic", elastic, "elastic/kill/"),
    "elastic_sharded": Table("elastic", elastic_sharded, "elastic/sharded/"),
    "fsdp": Table("fsdp", fsdp, "fsdp/transformer/"),
    "fsdp_memory": Table("fsdp", fsdp_memory, "fsdp/memory/"),
    "goodput": Table("goodput", goodput),
    "kills": Table("comm", kills),
    "launch": Table("launch", launch),
    "rendezvous": Table("rendezvous", rendezvous),
    "same_host": Table("comm", same_host),
    "sampler": Table("sampler", sampler),
    "scale_model": Table("scale", scale_model),
    "scale_regroup": Table("scale", scale_regroup),
    "scale_rendezvous": Table("scale", scale_rendezvous),
    "shard": Table("shard", shard),
    "stragglers": Table("stragglers", stragglers),
    "streaming": Table("streaming", streaming),
    "trainers": Table("trainers", trainers),
    "watch": Table("watch", watch),
}


def source(stored: Stored, benchmark: str) -> str:
    """One line on where figures come from."""
    content, machine = stored.content, stored.content["machine"]
    others = content["others"].get(benchmark)
    said = "" if others is None else f"; other processes used {others:g} cores meanwhile"
    return (
        f"`python -m benchmarks {benchmark}` at {content['commit']}, {content['date'][:10]}: {machine['cpu']}, "
        f"{machine['cores']} cores, torch {machine['torch']}{said}."
    )


def render(name: str) -> str:
    """What stands between the marks of a table."""
    table = TABLES[name]
    try:
        stored = newest_with(table.benchmark, table.prefix)
    except FileNotFoundError:
        return f"Not measured yet: no stored run of `python -m benchmarks {table.benchmark}` has these figures.\n"
    head, *rows = table.rows(stored.figures(table.benchmark))
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    return f"{source(stored, table.benchmark)}\n\n" + "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """A document with its tables written anew."""
    return SPOT.sub(lambda match: f"{match[1]}{render(match[2])}{match[3]}", text)


def documents() -> list[Path]:
    return [path for path in sorted((ROOT / "docs").rglob("*.md")) if SPOT.search(path.read_text())]


if __name__ == "__main__":
    for document in documents():
        document.write_text(filled(document.read_text()))
