"""CommDebugMode counts every collective once, and says truly where it comes from."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import MLP, Block, on_mesh
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx.tensor import Replicate, Shard, distribute_module, distribute_tensor
from phalanx.tensor.debug import CommDebugMode
from phalanx.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.fast

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def run_mlp(mesh: Any) -> CommDebugMode:
    model = parallelize_module(MLP(6, 10), mesh, PLAN)
    x = torch.ones(4, 6, requires_grad=True)
    with CommDebugMode() as seen:
        model(x).sum().backward()
    return seen


def first(body: Any, *shape: int) -> Any:
    return on_mesh(body, *(shape or (2,)))[0]


def test_counts_and_bytes_by_collective() -> None:
    def body(mesh: Any) -> Any:
        x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
        with CommDebugMode() as seen:
            x.redistribute(placements=[Replicate()])
            x.redistribute(placements=[Replicate()])
            x.redistribute(placements=[Shard(1)])
        return seen

    for seen in on_mesh(body, 2):
        assert seen.get_total_counts() == 3
        assert sum(seen.get_comm_counts().values()) == 3
        assert seen.get_comm_bytes()["all_to_all_single"] == 48
        assert seen.get_total_bytes() == 48 + 2 * 96


def test_counts_by_module_and_phase() -> None:
    counts = first(run_mlp).get_module_counts()
    once = {"all_reduce": 1}
    assert counts == {
        "Global": {"forward": once, "backward": once},
        "MLP": {"forward": once, "backward": once},
        "MLP.up": {"forward": {}, "backward": once},
        "MLP.down": {"forward": once, "backward": {}},
    }


def test_lines_are_the_users_own() -> None:
    def body(mesh: Any) -> Any:
        a = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).requires_grad_()
        b = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]).requires_grad_()
        with CommDebugMode() as seen:
            c = a @ b  # product
            whole = c.full_tensor()  # gather
            whole.sum().backward()
        return seen.get_line_counts()

    lines = Path(__file__).read_text().splitlines()
    found = {}
    for line, counts in first(body).items():
        file, number = line.rsplit(":", 1)
        assert Path(file) == Path(__file__)
        found[lines[int(number) - 1].partition("# ")[2]] = counts
    assert found["product"] == {"all_reduce": 1}  # b's gradient, summed in backward on behalf of that line
    assert sum(found["gather"].values()) == 1


def test_modes_nest_and_each_sees_its_own_block() -> None:
    def body(mesh: Any) -> Any:
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with CommDebugMode() as outer:
            x.full_tensor()
            with CommDebugMode() as inner:
                x.full_tensor()
            x.full_tensor()
        x.full_tensor()
        return outer.get_total_counts(), inner.get_total_counts()

    assert on_mesh(body, 2) == [(3, 1)] * 2


def test_entering_again_starts_from_zero() -> None:
    def body(mesh: Any) -> Any:
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        mode, counts = CommDebugMode(), []
        for _ in range(2):
            with mode:
                x.full_tensor()
            counts.append(mode.get_total_counts())
        return counts

    assert on_mesh(body, 2) == [[1, 1]] * 2


def test_a_mode_cannot_be_entered_while_it_is_entered() -> None:
    def body(mesh: Any) -> Any:
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        mode = CommDebugMode()
        with mode:
            x.full_tensor()
            with pytest.raises(RuntimeError, match="make another"), mode:
                pass
            x.full_tensor()
        counts = [mode.get_total_counts()]
        with mode:
            x.full_tensor()
        return [*counts, mode.get_total_counts()]

    assert on_mesh(body, 2) == [[2, 1]] * 2


def test_models_of_one_class_are_told_apart() -> None:
    def body(mesh: Any) -> Any:
        one, other = (parallelize_module(MLP(6, width), mesh, PLAN) for width in (10, 12))
        with CommDebugMode() as seen:
            x = torch.ones(4, 6, requires_grad=True)
            one(x)
            other(x).sum().backward()
            other(x)
            other.up(x)
        return seen

    seen = first(body)
    counts = seen.get_module_counts()
    assert list(counts) == ["Global", "MLP", "MLP.up", "MLP.down", "MLP#2", "MLP#2.up", "MLP#2.down"]
    assert counts["MLP.down"] == {"forward": {"all_reduce": 1}, "backward": {}}
    assert counts["MLP#2.down"] == {"forward": {"all_reduce": 2}, "backward": {}}
    assert counts["MLP#2.up"]["backward"] == {"all_reduce": 1}
    layouts = {name: tuple(p.shape) for name, p in seen.get_parameter_info()["MLP#2.up"].items()}
    assert layouts == {"weight": (12, 6), "bias": (12,)}
    assert seen.get_sharding_info()["MLP.down.weight"] == seen.get_sharding_info()["MLP#2.down.weight"]


def test_modules_outside_of_the_tree_of_their_caller_are_told_apart_if_they_have_parameters() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = (nn.Linear(6, 6), nn.Linear(6, 6))  # a tuple: no submodules of it

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = nn.ReLU()(layer(x))
            return x

    def body(mesh: Any) -> Any:
        model = Hidden()
        for layer in model.layers:
            parallelize_module(layer, mesh, ColwiseParallel(output_layouts=Replicate()))
        with CommDebugMode() as seen:
            for _ in range(2):
                model(torch.ones(4, 6))
        return list(seen.get_module_counts())

    assert first(body) == ["Global", "Hidden", "Hidden.Linear", "Hidden.ReLU", "Hidden.Linear#2"]


def test_parts_of_a_model_without_parameters_go_by_their_paths() -> None:
    def body(mesh: Any) -> Any:
        x = torch.ones(4)
        with CommDebugMode() as seen:
            for _ in range(2):
                nn.Sequential(nn.ReLU(), nn.ReLU())(x)
        return list(seen.get_module_counts())

    assert first(body) == ["Global", "Sequential", "Sequential.0", "Sequential.1"]


def test_operations_on_dtensors_in_lists_and_keywords_are_shown_and_our_own_are_not() -> None:
    def body(mesh: Any) -> Any:
        x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
        plain = torch.ones(4, 6)
        with CommDebugMode() as outer, CommDebugMode() as inner:
            torch.cat([x, x], dim=1)
            torch.stack(tensors=(x, x))
            nn.functional.linear(input=x, weight=x)
            x.view(2, 2, 6) + 1
            x.full_tensor()
            x.redistribute(placements=[Shard(1)])
            distribute_tensor(plain, mesh, [Shard(0)])
            plain.numel()
        return [mode.generate_comm_debug_tracing_table(level) for mode in (outer, inner) for level in (2, 3)]

    def operations(table: str) -> list[str]:
        return [line.strip()[2:] for line in table.splitlines() if line.strip().startswith("- ")]

    on_dtensors = [f"{name} x1 on DTensors" for name in ("cat", "stack", "linear", "view", "add")]
    for tables in on_mesh(body, 2):
        for table in tables[::2]:
            assert operations(table) == on_dtensors
        for table in tables[1::2]:
            assert operations(table) == [*on_dtensors, "numel x1"]


def test_a_forward_that_backward_runs_again_is_backward_of_its_module() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(MLP(6, 10), MLP(6, 10))

        def forward(self, x: Any) -> Any:
            return checkpoint(self.parts, x, use_reentrant=False)

    def body(mesh: Any) -> Any:
        model = parallelize_module(Checkpointed(), mesh, {"parts.*.up": PLAN["up"], "parts.*.down": PLAN["down"]})
        with CommDebugMode() as seen:
            model(torch.ones(4, 6, requires_grad=True)).sum().backward()
        return seen.get_module_counts()

    counts = first(body)
    once: dict[str, int] = {"all_reduce": 1}
    assert counts["Checkpointed.parts.0.down"] == {"forward": once, "backward": once}
    assert counts["Checkpointed.parts.0.up"] == {"forward": {}, "backward": once}
    assert counts["Checkpointed.parts.1.down"] == {
        "forward": once,
        "backward": {},
    }  # the replay stops before it


def test_hooks_are_gone_after_the_block_even_after_an_error() -> None:
    def body(mesh: Any) -> Any:
        from torch.nn.modules import module

        hooks = lambda: (len(module._global_forward_pre_hooks), len(module._global_forward_hooks))  # noqa: E731
        before = hooks()
        with pytest.raises(RuntimeError, match="mat1 and mat2"), CommDebugMode():
            nn.Sequential(nn.Linear(2, 2))(torch.ones(3, 3))
        return before == hooks()

    assert on_mesh(body, 1) == [True]


def test_tables_show_more_at_each_level(tmp_path: Path) -> None:
    seen = first(run_mlp)
    tables = [seen.generate_comm_debug_tracing_table(noise_level=level) for level in range(4)]
    assert "MLP.down (Linear)" in tables[0]
    assert "forward: all_reduce 1 (96 B)" in tables[0]
    assert "parameter" not in tables[0]
    assert "parameter weight: float32[10, 6] [tp:S(0)]" in tables[1]
    assert re.search(r"\* forward all_reduce 1 \(96 B\): .*meshes.py:\d+", tables[1])
    assert "- linear x1 on DTensors" in tables[2]
    assert "- gelu x1" not in tables[2]
    assert "- gelu x1" in tables[3]
    file = tmp_path / "log.txt"
    seen.log_comm_debug_tracing_table_to_file(file, noise_level=1)
    assert file.read_text().strip() == tables[1]
    with pytest.raises(ValueError, match="noise_level"):
        seen.generate_comm_debug_tracing_table(noise_level=4)


def test_parameters_and_their_layouts() -> None:
    seen = first(run_mlp)
    assert seen.get_sharding_info()["MLP.up.weight"] == (Shard(0),)
    assert set(seen.get_parameter_info()) == {"MLP.up", "MLP.down"}
    assert set(seen.get_parameter_info()["MLP.up"]) == {"weight", "bias"}


def test_json_nests_as_the_modules_do(tmp_path: Path) -> None:
    file = tmp_path / "log.json"
    first(run_mlp).generate_json_dump(file)
    tree = json.loads(file.read_text())
    assert tree["name"] == "Global"
    (mlp,) = tree["children"]
    assert [child["name"] for child in mlp["children"]] == ["MLP.up", "MLP.down"]
    assert mlp["children"][1]["collectives"][0]["bytes"] == 96
    assert mlp["forward"] == {"all_reduce": {"count": 1, "bytes": 96}}


class _Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href"}, "the page must be self-contained"
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_page_is_whole_and_escaped(tmp_path: Path) -> None:
    def body(mesh: Any) -> Any:
        odd = type("<Odd&>", (nn.Sequential,), {})
        model = distribute_module(odd(nn.Linear(2, 2)), mesh)
        with CommDebugMode() as seen:
            model(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])).sum().backward()
        return seen

    seen = first(body)
    assert seen.get_total_counts() > 0
    file = tmp_path / "log.html"
    seen.generate_html(file)
    text = file.read_text()
    parser = _Checker()
    parser.feed(text)
    assert parser.open == []
    assert parser.tags.count("details") == 3  # Global, the model, its layer
    assert "<Odd" not in text
    assert "&lt;Odd&amp;&gt;" in text


def test_a_transformer_block_by_module() -> None:
    def body(mesh: Any) -> Any:
        plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {
            "attention.out": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        model = parallelize_module(Block(), mesh, plan)
        with CommDebugMode() as seen:
            model(torch.randn(2, 3, 8)).sum().backward()
        return seen.get_module_counts()

    counts = first(body)
    assert counts["Block"]["forward"] == {"all_reduce": 2}
    assert counts["Block.attention"]["forward"] == {"all_reduce": 1}
    assert counts["Block.attention"]["backward"]["all_reduce"] == 3  # the input of query, key and value
    assert counts["Block.mlp.up"]["backward"] == {"all_reduce": 1}
