"""Context parallel in real processes, over gloo and shared memory, beside torch's own.

torch 2.13 has no causal context-parallel attention on CPU (its handlers are for kernels of CUDA), which is shown here;
so that is compared with attention on one device, and with torch's what does run there: attention without a mask, the
cutting of buffers and putting them together again.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdp.context import models
from phalanx.comm import init_device_mesh, use_group
from phalanx.errors import CommError
from phalanx.fsdp.context import context_parallel, context_parallel_unshard, set_rotate_method
from processes import run_processes

pytestmark = pytest.mark.timeout(240)
LENGTH = 47  # divides by nothing that follows


def _join_torch(worker):
    host, port = worker.store_url.removeprefix("tcp://").rsplit(":", 1)
    store = dist.TCPStore(host, int(port), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("torch", store), rank=worker.rank, world_size=worker.size)


def _same_as_torch(worker):
    # start-up: here, since these imports take torch several seconds
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh
    from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard as torch_unshard

    _join_torch(worker)
    ours, theirs = init_device_mesh("cpu", (worker.size,)), torch_mesh("cpu", (worker.size,))
    x = torch.randn(2, 3, 16, 4, generator=torch.Generator().manual_seed(0))
    mine, other = x.clone(), x.clone()
    with context_parallel(ours, buffers=[mine], buffer_seq_dims=[2]):
        part, attention = mine.clone(), F.scaled_dot_product_attention(mine, mine, mine)
        whole = context_parallel_unshard(ours, [mine, attention], [2, 2])
    with torch_context_parallel(theirs, buffers=[other], buffer_seq_dims=[2]):
        assert torch.equal(part, other)
        expected = torch_unshard(theirs, [other, F.scaled_dot_product_attention(other, other, other)], [2, 2])
        with pytest.raises(NotImplementedError, match="flash_attention_for_cpu"):
            F.scaled_dot_product_attention(other, other, other, is_causal=True)
    assert torch.equal(mine, other)
    assert torch.equal(whole[0], expected[0])
    torch.testing.assert_close(whole[1], expected[1])
    dist.destroy_process_group()


def _equals_one_device(worker, backend):
    logits, grads = models.on_one_device(LENGTH)
    group = worker.group(backend=backend)
    with use_group(group):
        mesh = init_device_mesh("cpu", (worker.size,), mesh_dim_names=("cp",))
        for method in ("alltoall", "allgather"):
            set_rotate_method(method)
            model, (ids, labels) = models.Decoder(LENGTH), models.batch(LENGTH)
            with context_parallel(mesh, buffers=[ids, labels, model.table], buffer_seq_dims=[1, 1, 1]):
                out = model(ids)
                models.loss_of(out, labels, 2 * LENGTH).backward()
                torch.testing.assert_close(context_parallel_unshard(mesh, [out], [1])[0], logits)
            for name, parameter in model.named_parameters():
                group.all_reduce(parameter.grad)
                torch.testing.assert_close(parameter.grad, grads[name])


def _nobody_waits_for_one_that_raised(worker):
    """The rank that raised ends, as a script does; its peer is told."""
    group = worker.group(backend="auto", timeout=60.0)
    with use_group(group):
        mesh, x = init_device_mesh("cpu", (worker.size,)), torch.ones(1, 1, 8, 4)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
            if worker.rank == 1:
                F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
            with pytest.raises(CommError):
                F.scaled_dot_product_attention(x, x, x)
        assert x.shape[2] == 8


@pytest.mark.soak  # torch's own takes a minute of CPU on its first call
@pytest.mark.timeout(900)
def test_two_processes_hold_and_compute_what_torch_gives_them():
    run_processes(2, _same_as_torch, timeout=800.0)


@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (3, "auto")])
def test_training_over_processes_equals_one_device(size, backend):
    run_processes(size, _equals_one_device, backend)


def test_a_process_that_raises_does_not_leave_the_other_waiting():
    first, second = run_processes(2, _nobody_waits_for_one_that_raised, check=False)
    assert not first.error, first.error
    assert "rank 1: scaled_dot_product_attention inside context_parallel got dropout_p=0.5" in second.error
