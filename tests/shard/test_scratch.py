"""Resharding on processes of one machine, through the shared memory that a group keeps."""

from __future__ import annotations

import gc

import pytest
import torch

from processes import run_processes


def reshard_back_and_forth(worker):
    from phalanx import shard
    from phalanx.comm import use_group
    from phalanx.shard.exchange import _exchange

    def chunk(dim, order):
        return shard.ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in order])

    ranks = range(worker.size)
    group = worker.group(backend="auto", timeout=120.0)
    assert group.backend == "shm"
    kept = []
    with use_group(group):
        for rows, columns in ((2048, 1024), (1024, 768), (3072, 1024), (1001, 999)):
            whole = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
            tensor = shard._shard_tensor(whole, chunk(0, ranks))
            for spec in (chunk(1, ranks), chunk(0, reversed(ranks)), chunk(1, [0, 1, 1, 0]), chunk(0, ranks)):
                tensor.reshard(spec)
                for part in tensor.local_shards():
                    wanted = whole
                    for dim, (begin, length) in enumerate(
                        zip(part.metadata.shard_offsets, part.metadata.shard_sizes, strict=True)
                    ):
                        wanted = wanted.narrow(dim, begin, length)
                    assert torch.equal(part.tensor, wanted), f"{rows}x{columns} to {spec}"
            buffer = _exchange._kept.get(group)
            kept.append((0, 0) if buffer is None else (buffer.numel(), buffer.data_ptr()))
        held = _exchange.take_buffer(group, 2 << 20)
        assert group not in _exchange._kept, "it has one user"
        other = _exchange.take_buffer(group, 2 << 20)
        assert other.data_ptr() != held.data_ptr()
        _exchange.give_buffer_back(group, other)
        assert _exchange.take_buffer(group, _exchange.MAX_BYTES + 1) is None
        assert _exchange.take_buffer(group, 16) is None
        _exchange.give_buffer_back(group, held)
        assert _exchange._kept[group] is held, "the larger one stays"
    group.close()
    del group, tensor, buffer, held, other
    gc.collect()
    return kept, len(_exchange._kept)


@pytest.mark.timeout(240)
def test_layouts_are_right_and_one_buffer_is_kept_as_long_as_its_group() -> None:
    for outcome in run_processes(2, reshard_back_and_forth, timeout=200.0):
        kept, left = outcome.value
        assert kept[0][0] >= 2048 * 1024 * 4 // 4, "half of what this rank holds goes to the other"
        assert kept[1] == kept[0], "used again for what is smaller"
        assert kept[2][0] > kept[0][0], "and replaced by a larger one"
        assert kept[3] == kept[2]
        assert left == 0
