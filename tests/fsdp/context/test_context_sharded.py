"""Context parallel with fully sharded units and tensor parallel heads, on three axes: the numbers of one device."""

from __future__ import annotations

import pytest
import torch

from fsdp.context import models
from phalanx.comm import DeviceMesh, Group, init_device_mesh, simulate
from phalanx.fsdp import DataParallelMeshDims, fully_shard
from phalanx.fsdp.context import context_parallel
from phalanx.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LENGTH = 12
HEADS = {**dict.fromkeys(["query", "key", "value"], ColwiseParallel()), "out": RowwiseParallel()}


def expected(num_batches: int) -> dict[str, torch.Tensor]:
    model = models.Decoder(LENGTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        for seed in range(num_batches):
            ids, labels = models.batch(LENGTH, seed=10 * step + seed)
            models.loss_of(model(ids), labels, num_batches * labels.numel()).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def sharded(mesh: DeviceMesh) -> models.Decoder:
    """Units over data and context ranks together: a rank of either has gradients of its own."""
    model = models.Decoder(LENGTH)
    dims = DataParallelMeshDims(shard=("dp", "cp"))
    for layer in model.layers:
        if "tp" in mesh.mesh_dim_names:
            parallelize_module(layer.attention, mesh["tp"], HEADS)
        fully_shard(layer, mesh=mesh, dp_mesh_dims=dims)
    return fully_shard(model, mesh=mesh, dp_mesh_dims=dims)


@pytest.mark.parametrize("shape", [{"dp": 2, "cp": 2}, {"dp": 2, "cp": 2, "tp": 2}], ids=["2-d", "3-d"])
def test_training_on_data_context_and_tensor_axes_equals_one_device(shape: dict[str, int]) -> None:
    wanted = expected(num_batches=2)

    def main(group: Group) -> None:
        mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        model = sharded(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            optimizer.zero_grad()
            ids, labels = models.batch(LENGTH, seed=10 * step + mesh.get_local_rank("dp"))
            num_tokens = labels.numel()
            with context_parallel(mesh["cp"], buffers=[ids, labels, model.table], buffer_seq_dims=[1, 1, 1]):
                # a mean over four ranks of what is to be summed over the two of a context
                (2 * models.loss_of(model(ids), labels, num_tokens)).backward()
            optimizer.step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.full_tensor(),
                wanted[name],
                rtol=1e-4,
                atol=1e-5,
                msg=lambda text, name=name: f"{name}: {text}",
            )

    simulate(torch.Size(tuple(shape.values())).numel()).run(main)
