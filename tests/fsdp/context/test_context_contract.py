"""Context parallel keeps its contract, alone and with tensor parallel heads."""

from __future__ import annotations

from functools import partial

import pytest

from fsdp.context import models
from phalanx.comm import DeviceMesh
from phalanx.fsdp import DataParallelMeshDims, fully_shard
from phalanx.fsdp.context import context_parallel, set_rotate_method
from phalanx.tensor.debug import ContractBreach, check_contract, contracts
from phalanx.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LENGTH = 16


def build(mesh: DeviceMesh, *, units: bool = False):
    model, (ids, labels) = models.Decoder(LENGTH), models.batch(LENGTH)
    cp = mesh["cp"]
    if "tp" in mesh.mesh_dim_names:
        plan = {**dict.fromkeys(["query", "key", "value"], ColwiseParallel()), "out": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer.attention, mesh["tp"], plan)
    if units:
        for unit in (*model.layers, model):
            fully_shard(unit, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")))

    def step() -> None:
        with context_parallel(cp, buffers=[ids, labels, model.table], buffer_seq_dims=[1, 1, 1]):
            models.loss_of(model(ids), labels, 2 * LENGTH).backward()

    return model, step


@pytest.mark.parametrize("method", ["alltoall", "allgather"])
def test_attention_over_ranks_keeps_its_contract(method: str) -> None:
    set_rotate_method(method)
    for size in (2, 4):
        block = 2 * (2 * models.KEY_HEADS * LENGTH // size * models.WIDTH // models.HEADS) * 4
        wanted = contracts.context_parallel("layers.*.attention", num_ranks=size, block_nbytes=block, method=method)
        check_contract(build, wanted, mesh={"cp": size})
    both = wanted + contracts.column_row_pair("layers.*.attention")
    with pytest.raises(ContractBreach, match=r"only 0 .* all_reduce in forward"):
        check_contract(build, both, mesh={"cp": 4})


def test_units_over_data_and_context_ranks_keep_both_contracts() -> None:
    """Layers are gathered and reduced over all ranks; attention stays among those of a context."""
    model = models.Decoder(LENGTH)
    layer = sum(p.nbytes for p in model.layers[0].parameters())
    rest = sum(p.nbytes for p in model.parameters()) - len(model.layers) * layer
    block = 2 * (2 * models.KEY_HEADS * LENGTH // 2 * models.WIDTH // models.HEADS) * 4
    padding = 4 * 4 * 64 * 12
    wanted = (
        contracts.fully_shard({"layers.*": layer}, padding=padding)
        + contracts.fully_shard({"": rest}, reshard_after_forward=False, padding=padding)
        + contracts.context_parallel("layers.*.attention", num_ranks=2, block_nbytes=block)
    )
    check_contract(partial(build, units=True), wanted, mesh={"dp": 2, "cp": 2})
