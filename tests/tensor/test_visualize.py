"""Pictures of layouts show what the layouts are."""

from __future__ import annotations

import struct
import zlib
from typing import Any
from xml.etree import ElementTree

import doc_pictures
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import MLP, on_mesh

from phalanx.errors import RankFailed
from phalanx.tensor import DTensor, Partial, Replicate, Shard, StridedShard, distribute_tensor
from phalanx.tensor.debug import layout_summary, sharding_png, sharding_svg, visualize_sharding
from phalanx.tensor.debug._tiles import tiles
from phalanx.tensor.parallel import ColwiseParallel, parallelize_module

pytestmark = pytest.mark.fast


def laid_out(mesh: Any, shape: tuple[int, ...], placements: list[Any]) -> DTensor:
    return distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None)


@pytest.mark.parametrize("picture", [visualize_sharding, sharding_svg, sharding_png])
@pytest.mark.parametrize(
    ("what", "text"),
    [(torch.ones(2, 3), r"a Tensor of shape \(2, 3\): distribute_tensor"), (None, "a NoneType:")],
)
def test_what_has_no_layout_is_named(picture: Any, what: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        picture(what)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
@pytest.mark.parametrize("use_rich", [False, True])
def test_a_tensor_without_elements_says_so(
    shape: tuple[int, ...], use_rich: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(mesh: Any) -> None:
        x = laid_out(mesh, shape, [Shard(0)])
        visualize_sharding(x, use_rich=use_rich)
        assert "no elements" in sharding_svg(x)
        assert sharding_png(x).startswith(b"\x89PNG")

    on_mesh(body, 2)
    expected = f"float32{list(shape)} [tp:S(0)]: no elements, so no rank holds any"
    assert capsys.readouterr().out.splitlines() == [expected]


def test_terminal_table(capsys: pytest.CaptureFixture[str]) -> None:
    on_mesh(lambda mesh: visualize_sharding(laid_out(mesh, (4, 6), [Shard(0), Shard(1)]), "weights"), 2, 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "weights",
        "          columns 0-2  columns 3-5",
        "rows 0-1  rank 0       rank 1",
        "rows 2-3  rank 2       rank 3",
    ]


def test_terminal_table_of_one_dim_and_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    on_mesh(lambda mesh: visualize_sharding(laid_out(mesh, (5,), [Replicate(), Shard(0)])), 2, 2)
    assert capsys.readouterr().out.splitlines() == ["  columns 0-2  columns 3-4", "  ranks 0, 2   ranks 1, 3"]


def test_rich_table(capsys: pytest.CaptureFixture[str]) -> None:
    on_mesh(lambda mesh: visualize_sharding(laid_out(mesh, (4, 6), [Shard(0)]), use_rich=True), 2)
    out = capsys.readouterr().out
    assert "rank 0" in out
    assert "rank 1" in out
    assert "[tp:S(0)]" in out


def test_partial_values_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    on_mesh(lambda mesh: visualize_sharding(DTensor.from_local(torch.ones(2), mesh, [Partial()])), 2)
    assert "ranks 0, 1 (partial)" in capsys.readouterr().out


def test_strided_shards_have_several_tiles() -> None:
    def body(mesh: Any) -> Any:
        return [(t.columns, t.ranks) for t in tiles(laid_out(mesh, (8,), [StridedShard(0, 2), Shard(0)])._spec)]

    found = on_mesh(body, 2, 2)[0]
    assert found == [((0, 2), (0,)), ((2, 4), (2,)), ((4, 6), (1,)), ((6, 8), (3,))]


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    kinds=st.tuples(*[st.sampled_from([Replicate(), Shard(0), Shard(1)])] * 2),
)
def test_tiles_are_what_ranks_hold(shape: tuple[int, int], kinds: Any) -> None:
    """Each rank's number of drawn elements is that of its local tensor, and its own elements are drawn for it."""

    def body(mesh: Any) -> None:
        numbers = torch.arange(shape[0] * shape[1]).view(shape)
        x = distribute_tensor(numbers, mesh, list(kinds), src_data_rank=None)
        drawn = [numbers[slice(*t.rows), slice(*t.columns)] for t in tiles(x._spec) if mesh.get_rank() in t.ranks]
        mine = torch.cat([part.flatten() for part in drawn]) if drawn else numbers.new_empty(0)
        assert sorted(mine.tolist()) == sorted(x.to_local().flatten().tolist())

    on_mesh(body, 2, 2)


def test_svg_has_a_rectangle_for_each_tile() -> None:
    text = on_mesh(lambda mesh: sharding_svg(laid_out(mesh, (4, 6), [Shard(0), Shard(1)]), width=240), 2, 2)[0]
    root = ElementTree.fromstring(text)
    boxes = [e.attrib for e in root.iter() if e.tag.endswith("rect")][1:]  # behind the background
    areas = sorted((float(b["x"]), float(b["y"]), float(b["width"]), float(b["height"])) for b in boxes)
    assert areas == [(x, y, 120.0, 80.0) for x in (0.0, 120.0) for y in (0.0, 80.0)]
    assert len({b["fill"] for b in boxes}) == 4
    assert "[dp:S(0), tp:S(1)]" in text


def test_png_is_whole_and_coloured_as_the_tiles() -> None:
    data = on_mesh(lambda mesh: sharding_png(laid_out(mesh, (4, 4), [Shard(0)]), width=64), 2)[0]
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + body),)
        chunks[kind] = body
        at += 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = zlib.decompress(chunks[b"IDAT"])
    assert (width, height, len(rows)) == (64, 64, 64 * (1 + 3 * 64))
    pixel = lambda x, y: rows[y * 193 + 1 + 3 * x : y * 193 + 4 + 3 * x].hex()  # noqa: E731
    assert pixel(0, 0) == "222222"  # the border
    assert (pixel(5, 5), pixel(5, 60)) == ("9ecae9", "ffbf79")


def test_three_dims_are_refused() -> None:
    with pytest.raises(RankFailed, match="one or two dims"):
        on_mesh(lambda mesh: visualize_sharding(laid_out(mesh, (2, 2, 2), [Shard(0)])), 2)


def test_summary_of_a_module() -> None:
    def body(mesh: Any) -> str:
        return layout_summary(parallelize_module(MLP(6, 10), mesh, {"up": ColwiseParallel()}))

    assert on_mesh(body, 2)[0].splitlines() == [
        "up.weight    float32[10, 6] [tp:S(0)]  120 B, 120 B of 240 B",
        "up.bias      float32[10] [tp:S(0)]     20 B, 20 B of 40 B",
        "down.weight  float32[6, 10]            240 B on each rank",
        "down.bias    float32[6]                24 B on each rank",
        "total                                  404 B, 404 B of 544 B",
    ]


@pytest.mark.parametrize("name", list(doc_pictures.LAYOUTS))
def test_the_pictures_of_the_guide_are_drawn_by_this_code(name: str) -> None:
    assert (doc_pictures.FOLDER / f"{name}.svg").read_text() == doc_pictures.draw(name)
