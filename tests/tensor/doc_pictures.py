"""The pictures of docs/tensor.md. ``python tests/tensor/doc_pictures.py`` draws them anew; a test compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from phalanx.comm import init_device_mesh, simulate
from phalanx.tensor import DTensor, Replicate, Shard, StridedShard, distribute_tensor
from phalanx.tensor.debug import sharding_svg

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"

# name -> (mesh, shape, placements, width)
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[Any], int]] = {
    "shard-rows": ((4,), (8, 12), [Shard(0)], 340),
    "shard-columns": ((4,), (8, 12), [Shard(1)], 340),
    "replicate": ((4,), (8, 12), [Replicate()], 340),
    "rows-and-columns": ((2, 2), (8, 12), [Shard(0), Shard(1)], 340),
    "nested": ((2, 2), (8, 12), [Shard(0), Shard(0)], 340),
    "replicas-of-shards": ((2, 2), (8, 12), [Replicate(), Shard(0)], 340),
    "uneven": ((4,), (5, 12), [Shard(0)], 340),
    "strided": ((2, 2), (8, 12), [StridedShard(0, split_factor=2), Shard(0)], 340),
}


def draw(name: str) -> str:
    mesh_shape, shape, placements, width = LAYOUTS[name]
    names = ("dp", "tp")[-len(mesh_shape) :]

    def body(group: Any) -> str:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        made: DTensor = distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None)
        return sharding_svg(made, width)

    size = 1
    for n in mesh_shape:
        size *= n
    return simulate(size).run(body)[0] + "\n"


if __name__ == "__main__":
    for picture in LAYOUTS:
        (FOLDER / f"{picture}.svg").write_text(draw(picture))
