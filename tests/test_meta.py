"""The repository keeps its own rules: layers, forbidden imports, file table, parity table, dependencies."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.specifiers import SpecifierSet
from tools import files, tables

import phalanx

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "phalanx"

# What each package may import of phalanx, beside itself. Imports point down only.
VALUES = {
    "errors", "world", "protocol", "_devices", "_fields", "_nested_values", "_reach", "_signature",
    "_torch_faults",
    "_torch_private",
    "_without_modes",
}  # fmt: skip
LAYERS = {
    "errors": set(),
    "_fields": set(),
    "_nested_values": {"_torch_private"},
    "_reach": set(),
    "_signature": set(),
    "world": {"errors"},
    "protocol": {"errors", "_fields"},
    "membership": {"protocol"},
    "events": {"_fields"},
    "_after_import": set(),
    "_drop_in": {"_after_import"},
    "_devices": set(),
    "_torch_faults": {"_devices"},
    "_torch_private": set(),
    "_without_modes": {"_torch_private"},
    "preemption": set(),
    "storage": {"errors", "_fields"},
    "comm": VALUES | {"_after_import"},
    "data": VALUES | {"comm"},
    "watch": VALUES | {"events", "comm"},
    "launch": VALUES | {"events", "comm", "watch", "_drop_in", "preemption"},
    "tensor": VALUES | {"comm"},
    "shard": VALUES | {"comm", "tensor", "storage"},
    "ddp": VALUES | {"comm"},
    "fsdp": VALUES | {"comm", "tensor"},
    "elastic": VALUES | {"events", "comm", "data", "tensor", "fsdp", "watch", "storage"},
    "integrations": VALUES | {"events", "comm", "data", "launch", "tensor", "shard", "ddp", "fsdp", "elastic", "watch"},
    "lightning": VALUES | {"elastic", "integrations"},
    "transformers": VALUES | {"elastic", "integrations"},
    "checkpoint": VALUES | {"comm", "shard", "elastic", "storage"},
    "_torch_hook": {"_after_import", "_torch_private", "comm"},
    "__init__": VALUES
    | {
        "membership",
        "preemption",
        "_torch_hook",
        "comm",
        "data",
        "launch",
        "tensor",
        "shard",
        "ddp",
        "fsdp",
        "elastic",
        "checkpoint",
    },
    "__main__": VALUES | {"comm", "data", "launch", "tensor", "shard", "ddp", "fsdp", "elastic", "checkpoint"},
}
# The parts of each package, lowest first: sub-packages, and modules beside them. What is not named here stands
# above, the package's own `__init__` on top.
SUBLAYERS: dict[str, list[str]] = {
    "comm": [
        "_background", "_sockets", "stores", "failure", "transports", "group", "simulation", "mesh",
        "torch_interop", "faults",
    ],
    "data": [
        "_permutation", "_order", "_wrapped_orders", "shards", "_source", "_partition", "_padding", "_cursor",
        "_sampler_state", "_ranks", "_batches", "_sampler", "sources",
    ],
    "data.shards": [
        "_shard_table", "_shard_source", "_shard_order", "_mixed_order", "_open_shards", "_sharded_dataset",
        "_packed_documents", "_replayed",
    ],
    "data.sources": [
        "_node_cache", "_shard_files", "_tar_headers", "_tar_index", "_tar_source", "_mds_source", "_parquet_source",
        "_litdata_source", "_huggingface",
    ],
    "launch": [
        "system", "numa", "events", "metrics", "failures", "telemetry", "timer", "rendezvous", "config",
        "workers", "multiprocessing", "recovery", "hang", "agent", "cli",
    ],
    "launch.rendezvous": [
        "_hostlist", "_allocation", "_interface", "_torch_settings", "_backend_store", "_settings", "_store_records",
        "_runs", "_own_secret", "_rank_order", "_decide", "_waiting", "_etcd_founding", "_etcd_members",
        "_etcd_certificates", "_etcd_process", "_etcd_keeper", "_etcd_discovery", "_leader", "_participant", "_handler",
        "_backends", "_etcd_backend", "_adapted", "_registry",
    ],
    "tensor": [
        "layout", "redistribute", "ops", "core", "dispatch", "random", "_factories", "patches",
        "parallel", "compile", "debug", "experimental",
    ],
    "shard": ["layout", "files", "exchange", "tensor", "ops", "checkpoint", "plan"],
    "ddp": ["buckets", "hooks", "reducer", "wrapper"],
    "fsdp": ["context", "_policies", "layout", "unit", "schedule", "_digest", "_taken", "_module", "_fully_shard"],
    "fsdp.unit": [
        "_unit_driver", "_unit_memory", "_unit_order", "_mesh_axes", "_released", "_parameter", "_unit_gather",
        "_mapped_gather", "_gradient_sum", "_section", "_unit",
    ],
    "fsdp.context": [
        "_sequence_layout", "_partial_attention", "_block_exchange", "_attention", "_interception", "_sequence_buffers",
        "_context_parallel",
    ],
    "elastic": [
        "_options", "_rng", "_materialise", "_job_mesh", "_slot_logs", "tools", "reduce", "checkpoint", "_boundary",
        "membership", "_guard_record", "_guard", "_first_nonfinite", "_rollback", "_guarding", "_dealing",
        "_bit_digests", "_verify_slots", "_verifying", "_loader_processes", "_loading", "_step", "sharded",
        "_sharded_verifying",
    ],
    "protocol": [
        "_variables", "_timeouts", "_keys", "_codec", "_membership", "_recovery", "_reports", "_round_records",
        "_etcd_records",
    ],
    "preemption": ["_notice", "_metadata_request", "_local_notices", "_aws", "_gcp", "_azure", "_named_source"],
    "storage": [
        "_errors", "_object_bucket", "_remote_path", "_place", "_tensor_dtypes", "_open_tensors", "_transfer",
    ],
    "checkpoint": ["_open", "_inspect", "_export", "_commands"],
    "integrations": [
        "_wandb_files", "step_loader", "frameworks", "accelerate", "trackers", "kubeflow", "_ray_agents", "ray",
    ],
    "lightning": ["_refusals", "_logged_values", "_log_writer", "_checkpoint_files", "_trainer_state", "_strategy"],
    "transformers": ["_refusals", "_trainer_state", "_trainer"],
    "events": ["_troubles", "_free_event", "_agent_events", "_event_types", "_lines", "_writer"],
    "watch": [
        "_decimate", "_histogram", "_committed", "_goodput", "_incidents", "_in_words", "_lifelines", "_nodes",
        "_paces", "_copies", "_running_nodes", "_view", "_metrics", "_hub", "_files", "_log_files", "_audit", "_http",
        "_access", "_page_file", "_prometheus", "_otel", "_report", "_peer_agents", "_site",
    ],
}  # fmt: skip
# (importer, imported) that the rules below leave alone: five at most.
EXCEPTIONS: set[tuple[str, str]] = set()
WHY_LATE = re.compile("start-up|optional|platform")
FORBIDDEN = re.compile(
    r"torch\.(nn\.parallel(\.distributed)?(\.DistributedDataParallel)?$"
    r"|distributed\.(tensor|device_mesh|_shard|elastic|launcher|run|algorithms|checkpoint|fsdp)\b"
    r"|distributed\.(Reducer|Logger)$)"
)
# The one place each that speaks with a part of torch from outside, so that its tools work on our tensors and meshes.
ADAPTERS = {
    "comm/torch_interop/_dcp.py": re.compile(r"torch\.distributed\.checkpoint\."),
    "comm/torch_interop/_dcp_writer.py": re.compile(r"torch\.distributed\.checkpoint\b"),
    "comm/mesh/_torch_mesh.py": re.compile(r"torch\.distributed\.device_mesh\b"),
}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every imported dotted name, with its line; ``from a import b`` counts as ``a`` and ``a.b``."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:  # relative to the file's own package
                here = ("phalanx", *path.relative_to(SOURCE).parts[:-1])
                module = ".".join([*here[: len(here) - node.level + 1], module]).rstrip(".")
            yield module, node.lineno
            for alias in node.names:
                yield f"{module}.{alias.name}", node.lineno


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_imports_point_down_only() -> None:
    wrong = []
    for path in python_files(SOURCE):
        package = package_of(path)
        assert package in LAYERS, f"{path}: tell LAYERS what {package} may import"
        for name, line in imports(path):
            parts = name.split(".")
            other = parts[1] if parts[0] == "phalanx" and len(parts) > 1 and parts[1] in LAYERS else package
            if other != package and other not in LAYERS[package]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def module_name(path: Path) -> str:
    return ".".join(["phalanx", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")


class Import(NamedTuple):
    """One module of ours that another one names in an import statement."""

    importer: str
    imported: str
    where: str
    for_types: bool

    def __str__(self) -> str:
        return f"{self.where} imports {self.imported}"


@functools.cache
def imports_of_ours() -> list[Import]:
    """Every import of a module of ours: at the top of a file, inside functions, and for type checkers only."""
    modules = {module_name(path) for path in python_files(SOURCE)}
    found = []
    for path in python_files(SOURCE):
        tree = tree_of(path)
        for_types = {
            line
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for line in range(node.lineno, node.body[-1].end_lineno + 1)  # type: ignore[operator]
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}:{node.lineno}: imports are absolute"
                longer = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in modules else str(node.module) for name in longer]
            else:
                continue
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            found += [
                Import(module_name(path), name, where, node.lineno in for_types)
                for name in dict.fromkeys(names)
                if name in modules and name != module_name(path)
            ]
    return found


def folder_of(module: str) -> tuple[str, ...]:
    """The package or sub-package whose file a module is; the sub-packages of a sub-package belong to it.

    >>> folder_of("phalanx.comm.stores._tcp"), folder_of("phalanx.comm.faults")
    (('comm', 'stores'), ('comm',))
    """
    return tuple(module.split(".")[1:-1][:2])


def height(module: str, package: str, order: list[str]) -> int:
    """Where a module stands in its package's order; other packages are below.

    >>> [height(f"phalanx.{name}", "ddp", ["buckets"]) for name in ("comm", "ddp.buckets._x", "ddp._y", "ddp")]
    [-1, 0, 1, 2]
    """
    if module == f"phalanx.{package}":
        return len(order) + 1
    if not module.startswith(f"phalanx.{package}."):
        return -1
    part = module.removeprefix(f"phalanx.{package}.").split(".")[0]
    return order.index(part) if part in order else len(order)


def test_imports_inside_a_package_point_down_only() -> None:
    """Wherever they stand: at the top of a file, inside functions, or for type checkers."""
    wrong = []
    for package, order in SUBLAYERS.items():
        for found in imports_of_ours():
            if not found.importer.startswith(f"phalanx.{package}."):
                continue
            beside = found.for_types and folder_of(found.importer) == folder_of(found.imported)
            excused = beside or (found.importer, found.imported) in EXCEPTIONS
            if height(found.imported, package, order) > height(found.importer, package, order) and not excused:
                wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_the_orders_inside_packages_name_what_is_there() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages <= set(SUBLAYERS), f"what is the order inside {sorted(packages - set(SUBLAYERS))}?"
    for package, order in SUBLAYERS.items():
        home = SOURCE / package.replace(".", "/")
        folders = {path.parent.name for path in home.glob("*/__init__.py")}
        parts = folders | {path.stem for path in home.glob("*.py")}
        assert set(order) <= parts, f"{package}: no {sorted(set(order) - parts)}"
        assert folders <= set(order), f"{package}: where do {sorted(folders - set(order))} stand?"


def knots(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that reach each other (Tarjan), each in alphabetical order.

    >>> knots({"a": {"b"}, "b": {"c"}, "c": {"b"}})
    [['b', 'c']]
    """
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    out = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in number:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], number[other])
        if lowest[node] == number[node]:
            knot = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(knot) > 1:
                out.append(sorted(knot))

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return out


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also not through functions. For type checkers a circle may be closed, within one part of a package."""
    graph: dict[str, set[str]] = {}
    for found in imports_of_ours():
        within = found.for_types and folder_of(found.importer) == folder_of(found.imported)
        if not within and (found.importer, found.imported) not in EXCEPTIONS:
            graph.setdefault(found.importer, set()).add(found.imported)
    assert not knots(graph), "\n".join(map(str, knots(graph)))


def unexplained_imports(path: Path) -> Iterator[str]:
    """Imports inside functions without a word on why they wait: a comment on the first of a block, or above it."""
    lines = path.read_text().splitlines()
    for function in ast.walk(tree_of(path)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        explained_until = 0
        for node in ast.walk(function):
            for block in (getattr(node, "body", []), getattr(node, "orelse", [])):
                for statement in block if isinstance(block, list) else []:
                    if not isinstance(statement, ast.Import | ast.ImportFrom):
                        continue
                    first, last = statement.lineno, statement.end_lineno or statement.lineno
                    above = itertools.takewhile(lambda row: row.strip().startswith("#"), lines[first - 2 :: -1])
                    comment = " ".join([*above, *(row.partition("#")[2] for row in lines[first - 1 : last])])
                    if WHY_LATE.search(comment) or explained_until == first - 1:
                        explained_until = last
                    else:
                        yield f"{path.relative_to(ROOT)}:{first} {lines[first - 1].strip()}"


def test_an_import_inside_a_function_says_why() -> None:
    wrong = [line for path in python_files(SOURCE) for line in unexplained_imports(path)]
    assert not wrong, "say `start-up`, `optional` or `platform` in a comment:\n" + "\n".join(wrong)


def test_there_are_few_exceptions() -> None:
    assert len(EXCEPTIONS) <= 5
    stale = EXCEPTIONS - {(found.importer, found.imported) for found in imports_of_ours()}
    assert not stale, f"no longer needed: {stale}"


def test_only_comm_imports_torch_distributed() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in python_files(SOURCE)
        if package_of(path) != "comm"
        for name, line in imports(path)
        if re.match(r"torch\.(distributed|_C\._distributed)", name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_part_of_torch_that_is_ours_to_write_is_used() -> None:
    wrong = []
    for path in python_files(SOURCE):
        adapter = ADAPTERS.get(str(path.relative_to(SOURCE)))
        wrong += [
            f"{path}:{line} imports {name}"
            for name, line in imports(path)
            if FORBIDDEN.match(name) and not (adapter and adapter.match(name))
        ]
        text = path.read_text()
        wrong += [f"{path}: uses {name}" for name in re.findall(r"\bdist\.(?:Reducer|Logger)\b", text)]
        wrong += [f"{path}: uses {name}" for name in re.findall(r"nn\.parallel\.DistributedDataParallel", text)]
    assert not wrong, "\n".join(wrong)


ACCELERATORS = {"accelerator", "cuda", "hpu", "mps", "mtia", "npu", "xpu"}
KINDS = {"cpu", "cuda", "nccl", *ACCELERATORS}
# Names that users of torch know, and that say what is there without deciding by it.
KINDS_MAY_BE_ASKED = {
    "comm/transports/_creation.py": "makes the engine it was told to",
    "launch/cli/_run_command.py": "reads the words of --nproc-per-node",
    "comm/group/_torch_world.py": "tells torch's world what the group runs on, by torch's names",
}


def asks_about_devices(path: Path) -> Iterator[str]:
    """Yield where a module decides by the kind of a device, or asks a device module of torch, by itself."""
    tree = tree_of(path)
    docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    for node in ast.walk(tree):
        found = ""
        if isinstance(node, ast.Attribute):
            is_of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in ACCELERATORS
            found = ast.unparse(node) if is_of_torch or node.attr in ("is_cuda", "is_cpu") else ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            names = "|".join(sorted(ACCELERATORS))
            found = node.value if re.search(rf"\btorch\.({names})\.\w+\(\)", node.value) else ""
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            listed = [each for side in sides for each in getattr(side, "elts", [side])]
            found = ast.unparse(node) if any(isinstance(s, ast.Constant) and s.value in KINDS for s in listed) else ""
        if found:
            yield f"{path.relative_to(ROOT)}:{node.lineno} {found}"


def test_one_module_decides_by_the_kind_of_device() -> None:
    """``phalanx._devices``: what it decides was tried on a fake accelerator; what others decide would not be."""
    allowed = {SOURCE / "_devices.py", *(SOURCE / name for name in KINDS_MAY_BE_ASKED)}
    asked = {path: list(asks_about_devices(path)) for path in python_files(SOURCE)}
    wrong = [line for path, lines in asked.items() if path not in allowed for line in lines]
    assert not wrong, "ask phalanx._devices:\n" + "\n".join(wrong)
    assert all(asked[path] for path in allowed), "a name in KINDS_MAY_BE_ASKED is not needed any more"


def test_nothing_is_unpickled_from_the_network_or_from_disk() -> None:
    """Only the launcher pickles: what a function's worker returns, through a pipe of its own. Files of ``torch.save``
    are read as weights only, which runs nothing."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in python_files(SOURCE)
        if package_of(path) != "launch"
        for name, line in imports(path)
        if name.split(".")[0] in ("pickle", "marshal", "shelve", "dill", "cloudpickle")
    ]
    wrong += [
        f"{path.relative_to(ROOT)}:{node.lineno} calls torch.load without weights_only=True"
        for path in python_files(SOURCE)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
        if "weights_only=True" not in map(ast.unparse, node.keywords)
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_phalanx_does_not_import_torch() -> None:
    code = "import sys, phalanx; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


def test_public_names() -> None:
    assert sorted(phalanx.__all__) == [
        "DTensor", "DeviceMesh", "DistributedDataParallel", "DoNotRetry", "ElasticBatchSampler",
        "ElasticDistributedSampler", "Group", "Job", "__version__", "comm_contract", "init", "init_device_mesh",
        "simulate",
    ]  # fmt: skip
    for name in phalanx.__all__:
        assert getattr(phalanx, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'; it offers"):
        phalanx.nonsense  # noqa: B018


def test_every_package_imports_where_the_platform_calls_itself_darwin() -> None:
    """As far as Linux can tell: torch is imported before the platform's name changes."""
    found = [path.parent.name for path in sorted(SOURCE.glob("*/__init__.py"))]
    others = {"lightning", "transformers"}  # they import frameworks that load libraries of the platform
    names = ["phalanx", *(f"phalanx.{name}" for name in found if name not in others)]
    assert len(names) == 16, names
    code = f"import sys, torch; sys.platform = 'darwin'; import {', '.join(names)}"
    done = subprocess.run([sys.executable, "-c", code], timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_package_is_typed_and_documented() -> None:
    assert (SOURCE / "py.typed").exists()
    undocumented = [path for path in python_files(SOURCE) if not ast.get_docstring(tree_of(path))]
    assert not undocumented


def test_the_list_of_files_is_that_of_their_docstrings() -> None:
    assert files.TARGET.read_text() == files.page(), "run `make files`"


def test_the_tables_of_measurements_are_those_of_stored_runs() -> None:
    used = []
    for document in sorted((ROOT / "docs").rglob("*.md")):
        text = document.read_text()
        assert text == tables.filled(text), f"{document.name}: run `make tables`"
        used += re.findall(r"<!-- measured: (\w+) -->", text)
    assert sorted(used) == sorted(tables.TABLES)


def parity_rows() -> list[tuple[str, str, str]]:
    rows = []
    for line in (ROOT / "docs" / "parity.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and not set(cells[0]) <= set("-: ") and cells[1] != "ours":
            rows.append((cells[0], cells[1], cells[2]))
    return rows


def resolve(dotted: str) -> object:
    """Import the longest module prefix, then walk attributes."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(dotted)


def test_parity_names_exist_and_are_tested() -> None:
    rows = parity_rows()
    assert rows, "docs/parity.md has no table"
    wrong = []
    for name, ours, test in rows:
        for dotted in re.findall(r"`(phalanx[\w.]+)`", ours):
            try:
                resolve(dotted)
            except (ImportError, AttributeError) as error:
                wrong.append(f"{name}: {dotted}: {error}")
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", f"{ours} {test}")
        is_torchs_own = test == "no part of ours"  # and asks nothing of a group
        if not named and ours.startswith(("`phalanx", "yes", "differs")) and not is_torchs_own:
            wrong.append(f"{name}: no test is named")
        if len(ours) + len(test) < 12:
            wrong.append(f"{name}: neither a name of ours nor a reason")
        for file, function in named:
            path = ROOT / file
            if not path.exists() or (function and f"def {function}(" not in path.read_text()):
                wrong.append(f"{name}: no test {file}::{function}")
    assert not wrong, "\n".join(wrong)


def test_each_dependency_is_justified_and_pinned() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    names = {name.lower() for name in re.findall(r'^    "([A-Za-z0-9_-]+)>=', text, re.MULTILINE)}
    assert {"torch", "httpx", "pytest"} <= names
    reasons = (ROOT / "docs" / "dependencies.md").read_text()
    pins = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    for name in names:
        assert f"| `{name}` |" in reasons, f"{name} is not in docs/dependencies.md"
        assert re.search(rf"^{name}==", pins, re.MULTILINE), f"{name} is not in constraints.txt"
    assert "torch==2.13.0" in pins


def test_no_pin_keeps_the_oldest_python_from_installing() -> None:
    """A pin whose distribution has dropped Python 3.10 says so: without a marker pip finds nothing there."""
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest, "pyproject.toml says which Python is the oldest"
    pins = re.findall(r"^([\w.-]+)==([^;\s]+)(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    tried, wrong = 0, []
    for name, version, marker in pins:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of an extra that is not installed
        allowed = SpecifierSet(found.metadata["Requires-Python"] or "")
        tried += found.version == version
        if found.version == version and oldest[1] not in allowed and "python_version" not in marker:
            wrong.append(f"{name}=={version} needs Python {allowed}")
    assert tried > 50, f"only {tried} of {len(pins)} pins are what is installed"
    assert not wrong, "add a marker such as numpy's:\n" + "\n".join(wrong)


def test_files_are_read_in_one_sitting() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in python_files(SOURCE)
        if (count := len(path.read_text().splitlines())) > 500
    }
    assert not long, f"split by reason to change: {long}"


def test_nobody_draws_from_the_generators_of_the_training_script() -> None:
    """A background thread that did would change the augmentation of whatever sample is being made."""
    draws = "random|uniform|randint|randrange|getrandbits|choices?|shuffle|sample|gauss|rand|randn|permutation|normal"
    drawn = re.compile(rf"(?<![\w.])(?:np\.|numpy\.)?random\.(?:{draws})\(")
    allowed = {"_rng.py"}  # seeds them, which is its purpose
    wrong = [
        f"{path.relative_to(ROOT)}: {found}"
        for path in python_files(SOURCE)
        if path.name not in allowed
        for found in drawn.findall(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


def test_fixtures_are_typed() -> None:
    """What a fixture takes and gives is what the reader of a test wants to know."""
    wrong = []
    for path in python_files(ROOT / "tests"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
                "fixture" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                arguments = [*node.args.args, *node.args.kwonlyargs]
                if node.returns is None or any(a.annotation is None and a.arg != "self" for a in arguments):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not wrong, "\n".join(wrong)


def test_no_docstring_begins_with_the_same() -> None:
    """Who looks a name up sees one docstring, and not the one above it."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.value.value.splitlines()[0]}"
        for path in python_files(SOURCE)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if re.match(r"\s*(the )?same\b", node.value.value, re.IGNORECASE)
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_of_functions_say_what_they_do() -> None:
    """With a verb: those that return something do not begin as if they were it. Properties are what they return."""
    nouns = {
        "the",
        "a",
        "an",
        "what",
        "which",
        "who",
        "whose",
        "how",
        "whether",
        "where",
        "when",
        "all",
        "every",
        "each",
    }
    wrong = []
    for path in python_files(SOURCE):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.returns is None:
                continue
            decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
            words = (ast.get_docstring(node) or "").split()
            is_value = ast.unparse(node.returns) not in ("None", "NoReturn") and "contextmanager" not in decorators
            if is_value and "property" not in decorators and words and words[0].lower() in nouns:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {' '.join(words[:6])} ...")
    assert not wrong, "\n".join(wrong)
