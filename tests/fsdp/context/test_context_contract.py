"""Context parallel keeps its contract, alone and with tensor parallel heads."""

from __future__ import annotations

import pytest

from fsdp.context import models
from phalanx.comm import DeviceMesh
from phalanx.fsdp.context import context_parallel, set_rotate_method
from phalanx.tensor.debug import ContractBreach, check_contract, contracts
from phalanx.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LENGTH = 16


def build(mesh: DeviceMesh):
    model, (ids, labels) = models.Decoder(LENGTH), models.batch(LENGTH)
    cp = mesh["cp"]
    if mesh.ndim > 1:
        plan = {**dict.fromkeys(["query", "key", "value"], ColwiseParallel()), "out": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer.attention, mesh["tp"], plan)

    def step() -> None:
        with context_parallel(cp, buffers=[ids, labels, model.table], buffer_seq_dims=[1, 1, 1]):
            models.loss_of(model(ids), labels, 2 * LENGTH).backward()

    return model, step


@pytest.mark.parametrize("method", ["alltoall", "allgather"])
def test_attention_over_ranks_keeps_its_contract(method: str) -> None:
    set_rotate_method(method)
    try:
        for size in (2, 4):
            block = 2 * (2 * models.KEY_HEADS * LENGTH // size * models.WIDTH // models.HEADS) * 4
            wanted = contracts.context_parallel("layers.*.attention", num_ranks=size, block_nbytes=block, method=method)
            check_contract(build, wanted, mesh={"cp": size})
        both = wanted + contracts.column_row_pair("layers.*.attention")
        with pytest.raises(ContractBreach, match=r"only 0 .* all_reduce in forward"):
            check_contract(build, both, mesh={"cp": 4})
    finally:
        set_rotate_method("allgather")
