"""What the documents say holds: their code runs, their commands, flags, links and files exist."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from documents import DOCUMENTS, LANGUAGES, NOT_RUN, ROOT, blocks, commands, inline_code, prose, wrong_calls
from phalanx.__main__ import COMMANDS, main
from phalanx.comm import simulate
from phalanx.data import ShardedDataset
from phalanx.launch import timer
from phalanx.launch.cli._flags import USE_ENV, parse
from phalanx.launch.timer import FileTimerServer
from sharded_samples import Numbers, plain_pair, write_tars

pytestmark = pytest.mark.fast

Names = dict[str, Any]


# What the examples of each document take for granted. A function per document: it prepares the names for the next
# block, and is asked again before each one.


def readme(names: Names, group: Any) -> Iterator[None]:
    model = nn.Linear(3, 1)
    names |= {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "dataset": TensorDataset(torch.randn(200, 3), torch.randn(200, 1)),
        "loss_fn": nn.functional.mse_loss,
    }
    yield
    yield


def slots(names: Names, group: Any) -> Iterator[None]:
    next(readme(names, group))
    yield
    model, optimizer, dataset = names["model"], names["optimizer"], names["dataset"]
    names["job"] = type(names["job"])(model, optimizer, dataset, num_slots=1, slot_batch_size=200)
    yield


def comm(names: Names, group: Any) -> Iterator[None]:
    yield
    names |= {"group": group, "train": lambda group: group.barrier()}
    yield


def context(names: Names, group: Any) -> Iterator[None]:
    tokens = torch.arange(26).view(2, 13)
    model = nn.Sequential(nn.Embedding(26, 4), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Linear(4, 26))
    model.register_buffer("table", torch.zeros(1, 12))
    names |= {"F": nn.functional, "ids": tokens[:, :-1], "labels": tokens[:, 1:], "model": model.eval()}
    yield
    assert names["whole"].shape == (2, 12, 26)
    assert names["ids"].shape == (2, 12)


def contracts(names: Names, group: Any) -> Iterator[None]:
    yield
    assert str(names["report"]) in (ROOT / "docs" / "contracts.md").read_text()
    made = names["MLP"]()
    names |= {"model": made, "contract": names["contracts"].no_communication(), "x": torch.ones(4, 8)}
    yield


def data(names: Names, group: Any) -> Iterator[None]:
    from phalanx.data import ElasticBatchSampler, WithWeights

    names |= {"DataLoader": DataLoader, "num_epochs": 1, "dataset": range(20)}
    yield
    yield
    consumed = list(itertools.islice(names["sampler"], 2))
    names |= {"steps": 1, "batch_size": len(consumed)}
    yield
    names |= {
        "data": TensorDataset(torch.randn(20, 3), torch.randn(20, 1)),
        "WithWeights": WithWeights,
        "model": nn.Linear(3, 1),
        "loss": nn.MSELoss(reduction="none"),
        "total": 0,
        "count": 0,
    }
    yield
    assert names["count"] == 20 // group.size
    names |= {"ElasticBatchSampler": ElasticBatchSampler, "step": 0, "slot": 0}
    names["dataset"] = TensorDataset(torch.arange(256 * 4))
    names["DataLoader"] = lambda *args, **options: DataLoader(*args, batch_sampler=options["batch_sampler"])
    yield
    folder = Path(f"rank{group.rank}")
    paths = write_tars(folder, [40] * 8)
    names |= {"folder": folder, "decode": plain_pair}
    yield
    assert len(names["batch"]) == 32
    fetched = [f"far://{path.name}" for path in paths]
    names |= {"local_disk": folder / "cache", "urls": fetched, "index_folder": folder / "index"}
    names["download"] = lambda url, target: shutil.copy(folder / url.removeprefix("far://"), target)
    yield
    assert names["source"].sizes.sum() == 320
    names |= {"web": ShardedDataset(Numbers([9] * 8)), "books": ShardedDataset(Numbers([5] * 6))}
    names["documents"] = [[1] * (number % 7) for number in range(50)]
    yield
    assert len(names["sequences"]) > 0


def ddp(names: Names, group: Any) -> Iterator[None]:
    from phalanx.errors import PeerLost

    names |= {"module": nn.Linear(3, 1), "batch": torch.ones(2, 3)}
    yield
    yield  # with tensor parallelism
    names |= {"loss": names["model"](names["batch"]).sum(), "PeerLost": PeerLost}
    yield


def elastic(names: Names, group: Any) -> Iterator[None]:
    first = readme(names, group)
    next(first)
    yield
    job = type(names["job"])(names["model"], names["optimizer"], names["dataset"], num_slots=1, slot_batch_size=200)
    step = next(iter(job.steps(epochs=1)))
    for micro in step:
        micro.backward(names["loss_fn"](names["model"](micro.inputs), micro.targets))
    names |= {
        "job": job,
        "step": step,
        "ema": SimpleNamespace(update=lambda model: None),
        "test_set": names["dataset"],
        "score": lambda batch: {"loss": names["loss_fn"](names["model"](batch[0]), batch[1])},
    }
    yield
    job.close()


def elastic_failures(names: Names, group: Any) -> Iterator[None]:
    next(readme(names, group))
    yield
    assert names["job"].verifying.options.every == 100
    names["job"].close()


def elastic_guard(names: Names, group: Any) -> Iterator[None]:
    next(readme(names, group))
    yield
    assert names["job"].guarding.record.num_skipped == 0
    names["job"].close()


def elastic_saves(names: Names, group: Any) -> Iterator[None]:
    next(readme(names, group))
    yield
    [save] = Path("saves").glob("step-*")
    assert {"tensors.safetensors", "state.json"} <= {path.name for path in save.iterdir()}
    names["job"].close()


def elastic_sharded(names: Names, group: Any) -> Iterator[None]:
    next(readme(names, group))
    names |= {"phalanx": phalanx, "build": _Blocks}
    yield
    names |= {"build": lambda: _Blocks(_UpDown)}
    yield


class _Trainer:
    """Ends after three steps, and has a state."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def end_of_step(self, loss: float) -> None:
        self.losses.append(loss)

    @property
    def is_done(self) -> bool:
        return len(self.losses) == 3

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]


def elastic_trainers(names: Names, group: Any) -> Iterator[None]:
    next(readme(names, group))
    names["trainer"] = _Trainer()
    yield
    assert names["job"].step == len(names["trainer"].losses) == 3
    names["job"].close()


class _UpDown(nn.Module):
    """A block for tensor parallelism."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, out)


class _Blocks(nn.Sequential):
    """A model of blocks."""

    def __init__(self, block: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__(block(4, 4), block(4, 4))
        self.blocks = list(self)


def launch(names: Names, group: Any) -> Iterator[None]:
    names["train"] = abs
    yield
    assert names["values"] == dict.fromkeys(range(4), 0.1)


def launch_torchrun(names: Names, group: Any) -> Iterator[None]:
    served = FileTimerServer(os.path.abspath("timers"), "job", max_interval=0.01)
    served.start()
    names.update(os=os, timer=timer, exchange=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_TIMER_FILE", served.path)
        yield
    served.stop()


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.users(ids)
        return rows


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])


def shard(names: Names, group: Any) -> Iterator[None]:
    torch.manual_seed(0)
    names["model"] = Recommender()
    yield
    names |= {
        "criterion": nn.CrossEntropyLoss(),
        "my_batch": torch.arange(3 + group.rank),
        "my_labels": torch.zeros(3 + group.rank, dtype=torch.long),
    }
    yield
    names["other_model"] = Recommender()
    names["shard"].shard_module(names["other_model"], names["plan"])
    yield
    assert torch.equal(names["other_model"].users.weight.local_tensor(), names["table"].local_tensor())
    stored = Blocks()
    if group.rank == 0:
        Path("downloaded").mkdir()
        save_file(stored.state_dict(), "downloaded/checkpoint")
    group.barrier()
    names |= {"Model": Blocks, "fully_shard": phalanx.fsdp.fully_shard}
    yield
    loaded = names["model"].blocks[1].weight
    assert torch.equal(loaded.to_local(), stored.blocks[1].weight.chunk(group.size)[group.rank])


def fsdp(names: Names, group: Any) -> Iterator[None]:
    yield
    assert names["layout_summary"](names["model"]).count("unit '1'") == 6


def parallel(names: Names, group: Any) -> Iterator[None]:
    yield


def stores(names: Names, group: Any) -> Iterator[None]:
    yield
    names["store"].close()
    names["server"].close()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("query", "key", "value", "out")})
        self.mlp = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp["down"](self.mlp["up"](x).relu())
        return y


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers[0](x)
        return y


def tensor_names(names: Names) -> None:
    """What the pages of DTensors take for granted, on four ranks."""
    from phalanx.tensor import Partial, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
    from phalanx.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    names |= {"nn": nn, "F": nn.functional, "phalanx": phalanx, "loss_parallel": loss_parallel, "mesh": mesh}
    names |= {"Partial": Partial, "Replicate": Replicate, "Shard": Shard, "init_device_mesh": init_device_mesh}
    names |= {"distribute_module": distribute_module, "distribute_tensor": distribute_tensor}


def tensor(names: Names, group: Any) -> Iterator[None]:
    tensor_names(names)
    mesh = names["mesh"]
    names |= {"partition_fn": None, "Model": lambda: nn.Linear(4, 4)}
    names["x"] = names["distribute_tensor"](torch.randn(4, 8), mesh)
    yield
    names |= {"model": nn.Linear(4, 4), "mesh": mesh["tp"]}
    yield
    yield
    assert names["model"].weight.device_mesh == mesh["tp"]
    yield
    assert callable(names["row_parallel_product"])


def tensor_random(names: Names, group: Any) -> Iterator[None]:
    tensor_names(names)
    yield
    assert names["rows"].to_local().shape != names["columns"].to_local().shape
    yield


def tensor_parallel(names: Names, group: Any) -> Iterator[None]:
    tensor_names(names)
    mesh = names["mesh"]
    names["model"] = Transformer()
    yield
    logits = names["distribute_tensor"](torch.randn(4, 8), mesh["tp"], [names["Shard"](1)]).requires_grad_()
    names |= {"logits": logits, "target": torch.zeros(4, dtype=torch.long)}
    yield


def tensor_debug(names: Names, group: Any) -> Iterator[None]:
    from phalanx.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    tensor_names(names)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    names |= {"x": torch.ones(6, 4)}
    names["model"] = parallelize_module(model, names["mesh"]["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    yield
    assert names["seen"].get_comm_counts()["all_reduce"] > 0


def transport(names: Names, group: Any) -> Iterator[None]:
    names |= {"group": group, "gradient": torch.ones(1_000_000)}
    yield
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in alone.items():
            patch.setenv(name, value)
        yield
    names["dist"].destroy_process_group()


def watch(names: Names, group: Any) -> Iterator[None]:
    yield
    assert str(names["account"]) == "goodput 0.0%, no failures"


def trackers(names: Names, group: Any) -> Iterator[None]:
    next(readme(names, group))
    yield
    assert [type(one).__name__ for one in names["trackers"]] == ["TensorBoard", "WandB"]
    names["job"].close()


def compiled(names: Names, group: Any) -> Iterator[None]:
    from phalanx.tensor import init_device_mesh

    names |= {"mesh": init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), "Block": lambda: nn.Linear(3, 1)}
    yield
    next(readme(names, group))
    names["job"] = phalanx.Job(
        names["model"], names["optimizer"], names["dataset"], num_slots=1, slot_batch_size=4
    )  # fmt: skip
    yield
    names["job"].close()


# Folders of pages whose examples need nothing prepared; a block marked `text` behind one is what it prints.
SELF_CONTAINED = ("docs/start.md", "docs/tutorials/", "docs/howto/", "docs/coming/", "docs/concepts/")
READERS: dict[str, tuple[int, Callable[[Names, Any], Iterator[None]]]] = {
    "README.md": (1, readme),
    "docs/comm.md": (2, comm),
    "docs/compile.md": (1, compiled),
    "docs/context.md": (4, context),
    "docs/contracts.md": (1, contracts),
    "docs/data.md": (4, data),
    "docs/ddp.md": (2, ddp),
    "docs/elastic.md": (1, elastic),
    "docs/elastic-failures.md": (1, elastic_failures),
    "docs/elastic-guard.md": (1, elastic_guard),
    "docs/elastic-saves.md": (1, elastic_saves),
    "docs/elastic-sharded.md": (1, elastic_sharded),
    "docs/elastic-trainers.md": (1, elastic_trainers),
    "docs/fsdp.md": (2, fsdp),
    "docs/launch.md": (1, launch),
    "docs/launch-torchrun.md": (1, launch_torchrun),
    "docs/parallel.md": (1, parallel),
    "docs/shard.md": (2, shard),
    "docs/slots.md": (1, slots),
    "docs/stores.md": (1, stores),
    "docs/tensor.md": (4, tensor),
    "docs/tensor-debug.md": (4, tensor_debug),
    "docs/tensor-parallel.md": (4, tensor_parallel),
    "docs/tensor-random.md": (4, tensor_random),
    "docs/transport.md": (1, transport),
    "docs/watch-metrics.md": (1, watch),
    "docs/watch-trackers.md": (1, trackers),
}


WITH_EXAMPLES = [
    str(document.relative_to(ROOT))
    for document in DOCUMENTS
    if any(block.language == "python" for block in blocks(document))
]


def test_no_block_goes_unread() -> None:
    found = {(str(document.relative_to(ROOT)), block) for document in DOCUMENTS for block in blocks(document)}
    unknown = {(document, block.language, block.line) for document, block in found if block.language not in LANGUAGES}
    assert not unknown
    assert {document for document, block in found if block.language == "py"} == set(NOT_RUN)
    for document, block in found:
        if block.language == "py":
            assert not list(wrong_calls(block.text)), document
        elif block.language == "text":
            assert not re.search(r"^(import |from \w+ import |\w+ = \w+[.(])", block.text, re.MULTILINE), (
                f"{document}:{block.line} is marked text and looks like Python"
            )


def test_every_document_with_examples_has_a_reader() -> None:
    assert {document for document in WITH_EXAMPLES if not document.startswith(SELF_CONTAINED)} == set(READERS)


@pytest.mark.parametrize("document", [one for one in WITH_EXAMPLES if one.startswith(SELF_CONTAINED)])
def test_examples_that_need_nothing_run(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(ROOT / document)

    def read(group: Any) -> None:
        names: Names = {"__name__": "document"}
        for block, after in zip(found, [*found[1:], None], strict=True):
            if block.language == "python":
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    exec(compile("\n" * (block.line - 1) + block.text, document, "exec"), names)
                if after and after.language == "text":
                    assert said.getvalue() == after.text

    simulate(1).run(read)
    if "accelerate.state" in sys.modules:  # it keeps its choices for the rest of a process
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("document", READERS)
def test_examples_run(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ranks, reader = READERS[document]

    def read(group: Any) -> None:
        names: Names = {"__name__": "document", "torch": torch}
        ready = reader(names, group)
        for block in blocks(ROOT / document):
            if block.language == "python":
                next(ready)
                exec(compile("\n" * (block.line - 1) + block.text, document, "exec"), names)
        assert next(ready, "end") == "end", f"{document} has fewer examples than its reader expects"

    if document == "docs/launch.md":
        read(None)  # it starts processes, which only a main thread can; needs no group
    else:
        simulate(ranks).run(read)


def test_the_readme_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    [block] = [block for block in blocks(ROOT / "README.md") if "print(" in block.text]
    exec(compile(block.text, "README.md", "exec"), {"__name__": "document"})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^# (.*)$", block.text, re.MULTILINE)


def test_calls_in_text_and_docstrings_are_taken_by_what_they_name() -> None:
    """Also those of examples that cannot run in a docstring, since they need ranks."""
    wrong = [
        f"{document.relative_to(ROOT)}: {call}"
        for document in DOCUMENTS
        for code in [*inline_code(document), *(block.text for block in blocks(document))]
        for call in wrong_calls(code)
    ]
    wrong += [
        f"{path.relative_to(ROOT)}: {call}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for code in re.findall(r"^ *>>> (.*?) *# doctest: \+SKIP", path.read_text(), re.MULTILINE)
        for call in wrong_calls(f"{code} ..." if code.endswith(":") else code)
    ]
    assert not wrong, "\n".join(wrong)


def test_commands_are_understood() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen = 0
    for document in DOCUMENTS:
        for command in commands(document):
            program, *words = shlex.split(command)
            if program == "make":
                assert set(words) <= targets, f"{document}: {command}"
            if program == "phalanx":
                assert words[0] in COMMANDS, f"{document}: {command}"
                flags = {word for word in words if word.startswith("-")}
                if words[0] == "run":
                    parse(words[1:], {})
                else:
                    assert flags <= flags_of(words[0]), f"{document}: {command}"
                seen += 1
    assert seen > 5
    made = {name for document in DOCUMENTS for name in re.findall(r"`make ([a-z]+)`", document.read_text())}
    assert made <= targets, made - targets


@functools.cache
def flags_of(command: str) -> set[str]:
    """The flags that the help of one of our commands names."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main([command, "--help"])
    return set(re.findall(r"--[a-z][a-z0-9-]*(?!\w)", said.getvalue()))  # names with underscores are the same flags


# Flags of others, or of a script that stands for the user's own.
FOREIGN = {
    *("--bucket", "--client-cert-auth", "--kill-on-bad-exit", "--lifecycle-configuration", "--lr", "--ntasks-per-node"),
    *("--profile", "--requeue", "--signal"),
}


def test_flags_in_text_exist() -> None:
    known = set().union(*(flags_of(command) for command in COMMANDS)) | FOREIGN | {f"--{USE_ENV.name}"}
    for path in (ROOT / folder for folder in ("benchmarks", "examples", "tests", "tools", "src")):
        for file in path.rglob("*.py"):
            known |= set(re.findall(r"add_argument\(\s*\"(--[a-z][a-z-]*)\"", file.read_text()))
    wrong = [
        f"{document.relative_to(ROOT)}: {flag}"
        for document in DOCUMENTS
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", document.read_text())
        if flag not in known
    ]
    assert not wrong, "\n".join(wrong)


# Scripts that stand for the user's own, and a name that nobody should use.
USERS_FILES = {"train.py", "model.py", "profile.py", "utils.py"}


def test_links_and_files_in_text_exist() -> None:
    suffixes = ("*.py", "*.md", "*.toml", "*.yml", "*.yaml")
    folders = ("src", "tests", "benchmarks", "examples", "docs", "tools", ".github")
    tracked = [file.relative_to(ROOT) for suffix in suffixes for file in ROOT.glob(suffix)]
    tracked += [
        file.relative_to(ROOT) for folder in folders for suffix in suffixes for file in (ROOT / folder).rglob(suffix)
    ]
    wrong = []
    for document in DOCUMENTS:
        text = prose(document)
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            if not target.startswith(("http:", "https:", "mailto:")) and not (document.parent / target).exists():
                wrong.append(f"{document.relative_to(ROOT)}: no {target}")
        for anchor in re.findall(r"\]\(#([^)]+)\)", text):
            heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            if anchor not in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}:
                wrong.append(f"{document.relative_to(ROOT)}: no heading {anchor}")
        if document.name == "files.md":
            continue  # generated; its names are relative to their heading
        for name in re.findall(r"`([\w./-]+\.(?:py|md|toml|yml))(?:::\w+)?`", text):
            if not any(f"/{file}".endswith(f"/{name}") for file in tracked) and name not in USERS_FILES:
                wrong.append(f"{document.relative_to(ROOT)}: no {name}")
    assert not wrong, "\n".join(wrong)


TOUR = ROOT / "ARCHITECTURE.md"


@functools.cache
def names_in(path: Path) -> set[str]:
    """Functions, classes, methods as ``Class.method``, and names that a module or class assigns."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.update({f"{prefix}{node.name}", node.name})
                visit(node.body, f"{node.name}." if isinstance(node, ast.ClassDef) else prefix)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(f"{prefix}{target.id}" for target in targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
                visit([*node.body, *getattr(node, "orelse", [])], prefix)

    visit(ast.parse(path.read_text()).body, "")
    return found


def test_every_stop_of_the_tour_is_there() -> None:
    """A stop is a file and functions in it; ``name()`` is a function anywhere in the repository."""
    wrong = []
    for file, functions in re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", TOUR.read_text()):
        path = ROOT / "src" / "phalanx" / file
        known = names_in(path) if path.exists() else set()
        wrong += [f"{file} has no {name}" for name in re.findall(r"`([\w.]+)`", functions) if name not in known]
    code = [path for folder in ("src", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")]
    known = set().union(*map(names_in, code))
    wrong += [f"no function {name}" for name in re.findall(r"`([\w.]+)\(\)`", TOUR.read_text()) if name not in known]
    assert not wrong, "\n".join(wrong)


def test_the_layers_of_the_tour_are_those_that_the_tests_keep() -> None:
    from test_meta import LAYERS, SUBLAYERS, VALUES

    packages = {path.parent.name for path in (ROOT / "src" / "phalanx").glob("*/__init__.py")}
    for package in sorted(packages):
        row = re.search(rf"^{package} +(\S.*?)  +\((.*?)\)$", TOUR.read_text(), re.MULTILINE)
        assert row, f"ARCHITECTURE.md does not say what {package} is and imports"
        said = set(re.findall(r"\w+", row[2])) & set(LAYERS)
        assert said == LAYERS[package] & packages - VALUES, package
        folders = {name for name in SUBLAYERS[package] if (ROOT / "src" / "phalanx" / package / name).is_dir()}
        unsaid = {name for name in folders if f"`{package}/{name}`" not in TOUR.read_text()}
        assert not unsaid, f"ARCHITECTURE.md has no paragraph on {package}: {sorted(unsaid)}"
