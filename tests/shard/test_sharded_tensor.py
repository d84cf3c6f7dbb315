"""Sharded tensors on simulated ranks: making, describing, gathering, copying, pickling, and their errors."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from phalanx import shard
from phalanx.comm import observe, simulate
from phalanx.errors import RankFailed
from phalanx.shard import Shard, ShardedTensor, ShardMetadata
from shard.layouts import chunk, gathered, grid, values

pytestmark = pytest.mark.fast


def run(num_ranks, function, *args):
    """Results of all ranks; an error of a rank is raised as it was."""
    try:
        return simulate(num_ranks).run(function, *args)
    except RankFailed as failed:
        raise failed.__cause__ from None


def test_factories_fill_every_shard() -> None:
    def main(group):
        spec = chunk(3)
        for made, value in (
            (shard.zeros(spec, 7, 4), 0),
            (shard.ones(spec, [7, 4], dtype=torch.float64), 1),
            (shard.full(spec, (7, 4), 2.5), 2.5),
        ):
            assert made.shape == (7, 4)
            assert all(part.tensor.eq(value).all() for part in made.local_shards())
        assert shard.full(spec, (7,), 3).dtype is torch.int64
        torch.manual_seed(group.rank)
        drawn = shard.rand(spec, 7, 4, requires_grad=True)
        torch.manual_seed(group.rank)
        assert torch.equal(drawn.local_tensor(), torch.empty(drawn.local_tensor().shape).uniform_())
        assert drawn.requires_grad
        assert drawn.local_tensor().requires_grad
        assert shard.randn(spec, 7, 4).local_tensor().std() > 0
        return shard.empty(spec, 7, 4).local_tensor().shape[0]

    assert run(3, main) == [3, 3, 1]


def test_a_tensor_describes_itself() -> None:
    def main(group):
        made = shard.ones(chunk(2, -1), 3, 6, dtype=torch.float16)
        assert (made.size(), made.shape, made.dim(), made.ndim) == ((3, 6), (3, 6), 2, 2)
        assert made.size(1) == 6
        assert (made.dtype, made.device, made.layout) == (torch.float16, torch.device("cpu"), torch.strided)
        assert made.numel() == 18
        assert len(made) == 3
        assert not made.requires_grad
        assert not made.is_pinned()
        assert made.is_contiguous()
        assert made.is_floating_point()
        assert made.sharding_spec() == chunk(2, -1)
        assert made.metadata().shards_metadata[1] == ShardMetadata([0, 3], [3, 3], "rank:1/cpu")
        assert "ShardMetadata" in repr(made)
        assert len({made, made}) == 1
        return made.local_tensor().shape

    assert run(2, main) == [(3, 3), (3, 3)]


@pytest.mark.parametrize("cap", [None, 1, 40, 10_000])
def test_gather_brings_the_whole_tensor_in_rounds_under_the_cap(cap) -> None:
    whole = values(9, 5)

    def main(group):
        tensor = shard._shard_tensor(whole, chunk(4, 0, [2, 0, 3, 0, 1]), 1)
        out = torch.empty(9, 5) if group.rank == 2 else None
        events = []
        with observe(events.append):
            tensor.gather(2, out, max_bytes=cap)
        assert group.rank != 2 or torch.equal(out, whole)
        return [event.nbytes for event in events]

    sent = run(4, main)
    moved = sum(sent[2])
    assert moved == (9 - 2) * 5 * 4, "what rank 2 holds itself does not travel"
    assert cap is None or max(sent[2]) <= max(cap, 4)


def test_gather_to_a_file_and_in_another_dtype(tmp_path) -> None:
    from safetensors.torch import load_file

    whole = values(6, 4)

    def main(group):
        tensor = shard._shard_tensor(whole, grid((6, 4)))
        tensor.gather(0, tmp_path / "whole.safetensors" if group.rank == 0 else None, max_bytes=16)
        out = torch.empty(6, 4, dtype=torch.float16) if group.rank == 0 else None
        tensor.gather(0, out, dtype=torch.float16)
        return out

    assert torch.equal(run(4, main)[0], whole.half())
    assert torch.equal(load_file(tmp_path / "whole.safetensors")["tensor"], whole)


def test_gather_to_a_file_in_another_dtype(tmp_path) -> None:
    from safetensors.torch import load_file

    whole = values(6, 4)

    def main(group):
        out = str(tmp_path / "half.safetensors") if group.rank == 1 else None
        shard._shard_tensor(whole, grid((6, 4))).gather(1, out, dtype=torch.bfloat16)

    run(4, main)
    assert torch.equal(load_file(tmp_path / "half.safetensors")["tensor"], whole.bfloat16())


def test_a_file_that_cannot_be_made_is_an_error_of_its_rank_and_keeps_nobody_waiting(tmp_path) -> None:
    whole = values(6, 4)

    def main(group):
        tensor = shard._shard_tensor(whole, grid((6, 4)))
        error = None
        try:
            tensor.gather(0, tmp_path / "missing" / "whole.safetensors" if group.rank == 0 else None, max_bytes=16)
        except FileNotFoundError as raised:
            error = raised
        out = torch.empty(6, 4) if group.rank == 0 else None
        tensor.gather(0, out)  # the group is as good as before
        return error, out

    results = run(4, main)
    assert [error is not None for error, _ in results] == [True, False, False, False]
    assert torch.equal(results[0][1], whole)
    assert list(tmp_path.iterdir()) == []


def test_gather_refuses_wrong_outputs() -> None:
    def main(group, case):
        tensor = shard.ones(chunk(2), 4, 2)
        out = {"none": None, "size": torch.empty(4, 3), "everywhere": torch.empty(4, 2)}[case]
        tensor.gather(0 if case != "rank" else 5, out if group.rank == 0 or case == "everywhere" else None)

    for case, message in (("none", "must be specified"), ("size", "should be"), ("everywhere", "must NOT")):
        with pytest.raises(ValueError, match=message):
            run(2, main, case)


def test_local_shards_of_all_ranks_become_one_tensor() -> None:
    def main(group):
        mine = (
            []
            if group.rank == 1
            else [Shard.from_tensor_and_offsets(torch.full((2, 3), float(group.rank)), [group.rank, 0], group.rank)]
        )
        made = shard.init_from_local_shards(mine, [4, 3])
        assert len(made.local_shards()) == (group.rank != 1)
        assert made.metadata().shards_metadata[1] == ShardMetadata([2, 0], [2, 3], "rank:2/cpu")
        assert made.sharding_spec() == shard.ChunkShardingSpec(0, ["rank:0/cpu", "rank:2/cpu"])
        if group.rank == 1:
            with pytest.raises(NotImplementedError, match="exactly one local shard"):
                made.local_tensor()
        return gathered(made)

    assert run(3, main)[0].tolist() == [[0.0] * 3] * 2 + [[2.0] * 3] * 2


def case_shards(group, case):
    """What rank 1 does wrong."""
    rank, bad = group.rank, group.rank == 1
    dtype = torch.float64 if bad and case == "dtype" else torch.float32
    tensor = torch.zeros(2, 3, dtype=dtype, requires_grad=bad and case == "requires_grad")
    if bad and case == "contiguous":
        tensor = torch.zeros(3, 2).t()
    offset = 1 if bad and case == "overlap" else 2 * rank
    size = [4, 4] if case == "gap" else [5, 3] if bad and case == "size" else [4, 3]
    placed = 0 if bad and case == "placement" else 7 if bad and case == "stranger" else rank
    return [Shard.from_tensor_and_offsets(tensor, [offset, 0], placed)], size


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("dtype", "dtype property does not match from different ranks"),
        ("requires_grad", "requires_grad property does not match"),
        ("size", "global_size property does not match"),
        ("overlap", "overlap"),
        ("gap", "does not match tensor volume"),
        ("contiguous", "contiguous_format"),
        ("placement", "rank does not match"),
        ("stranger", "does not exist in input process group"),
    ],
)
def test_local_shards_that_do_not_fit_are_refused(case, message) -> None:
    def main(group):
        shards, size = case_shards(group, case)
        shard.init_from_local_shards(shards, size)

    with pytest.raises(ValueError, match=message):
        run(2, main)


def test_no_shards_anywhere_is_refused() -> None:
    with pytest.raises(ValueError, match="no local shards on all ranks"):
        run(2, lambda group: shard.init_from_local_shards([], [4]))


def test_mixed_local_shards_of_one_rank_are_refused() -> None:
    def main(group):
        parts = [torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64)]
        shard.init_from_local_shards(
            [Shard.from_tensor_and_offsets(part, [2 * i, 0], 0) for i, part in enumerate(parts)], [4, 3]
        )

    with pytest.raises(ValueError, match="need to be the same on rank:0"):
        run(1, main)


def test_from_a_local_tensor_and_from_global_metadata() -> None:
    def main(group):
        local = torch.full((2, 3), float(group.rank))
        made = ShardedTensor._init_from_local_tensor(local, chunk(2), [4, 3])
        assert made.local_tensor() is local
        again = ShardedTensor._init_from_local_shards_and_global_metadata(made.local_shards(), made.metadata())
        assert again.sharding_spec() == chunk(2)
        with pytest.raises(ValueError, match="contiguous"):
            ShardedTensor._init_from_local_tensor(torch.zeros(3, 2).t(), chunk(2), [4, 3])
        with pytest.raises(RuntimeError, match="Number of local shards"):
            ShardedTensor._init_from_local_shards_and_global_metadata([], made.metadata())
        wrong = copy.deepcopy(made.metadata())
        wrong.tensor_properties.dtype = torch.int32
        with pytest.raises(ValueError, match="incompatible with tensor property"):
            ShardedTensor._init_from_local_shards_and_global_metadata(made.local_shards(), wrong)

    run(2, main)


def test_wrong_arguments_are_refused() -> None:
    def main(group):
        with pytest.raises(ValueError, match="Expecting ShardingSpec"):
            shard.empty("rows", 4)
        with pytest.raises(ValueError, match="strided"):
            shard.empty(chunk(1), 4, layout=torch.sparse_coo)
        with pytest.raises(ValueError, match="contiguous_format"):
            shard.empty(chunk(1), 4, memory_format=torch.channels_last)
        with pytest.raises(TypeError, match="sequence of ints"):
            shard.empty(chunk(1), "four")
        with pytest.raises(RuntimeError, match="RPC"):
            shard.empty(chunk(1), 4, init_rrefs=True)
        with pytest.raises(RuntimeError, match="RPC"):
            shard.empty(chunk(1), 4).remote_shards()
        with pytest.raises(ValueError, match="does not exist"):
            shard.empty(chunk(2), 4)
        with pytest.raises(RuntimeError, match="worker 'trainer0'"):
            shard.empty(shard.ChunkShardingSpec(0, ["trainer0/cpu"]), 4)
        with pytest.raises(ValueError, match="no rank"):
            shard.empty(shard.ChunkShardingSpec(0, ["cpu"]), 4)
        with pytest.raises(TypeError, match="process_group"):
            shard.empty(chunk(1), 4, process_group=3)

    run(1, main)


def test_copies_casts_and_moves() -> None:
    def main(group):
        tensor = shard._shard_tensor(values(5, 3), chunk(2, 0, [1]))  # rank 0 holds nothing
        assert tensor.cpu() is tensor
        assert tensor.to(torch.float32) is tensor
        double = tensor.to(torch.float64)
        assert double.dtype is torch.float64
        assert tensor.double().dtype is torch.float64
        assert tensor.int().metadata().tensor_properties.dtype is torch.int32
        clone = tensor.clone()
        clone.fill_(0)
        assert torch.equal(double.float(), tensor)
        clone.copy_(tensor)
        assert torch.equal(clone, tensor)
        clone.copy_(values(5, 3) * 2)
        moved = shard.empty(chunk(2, 1), 5, 3)
        moved.copy_(clone)
        assert torch.allclose(moved, tensor * 2)
        assert not torch.equal(moved, tensor)
        assert tensor.contiguous() is tensor
        tensor.requires_grad_()
        assert tensor.requires_grad
        assert not tensor.detach().requires_grad
        deep = copy.deepcopy(tensor)
        assert deep.requires_grad
        assert torch.equal(deep, tensor)
        with pytest.raises(RuntimeError, match="contiguous_format"):
            tensor.cpu(memory_format=torch.channels_last)
        with pytest.raises(TypeError, match="ShardedTensor"):
            torch.equal(tensor, torch.zeros(5, 3))
        with pytest.raises(TypeError, match="gather"):
            torch.zeros(5, 3).copy_(tensor)
        return gathered(moved)

    assert torch.equal(run(2, main)[0], values(5, 3) * 2)


def test_in_place_initialisers_reach_the_shards() -> None:
    def main(group):
        tensor = shard.zeros(chunk(2), 8, 6, requires_grad=True)
        for fill, low, high in (
            (lambda t: torch.nn.init.constant_(t, 3), 3, 3),
            (lambda t: torch.nn.init.uniform_(t, 1, 2), 1, 2),
            (lambda t: torch.nn.init.normal_(t, 5, 0.01), 4, 6),
            (lambda t: torch.nn.init.kaiming_uniform_(t, a=5**0.5), -1, 1),
            (torch.nn.init.xavier_uniform_, -1, 1),
            (torch.nn.init.ones_, 1, 1),
            (torch.nn.init.zeros_, 0, 0),
        ):
            assert fill(tensor) is tensor
            local = tensor.local_tensor().detach()
            assert low <= float(local.min()) <= float(local.max()) <= high
        torch.manual_seed(3)
        torch.nn.init.kaiming_uniform_(tensor)
        torch.manual_seed(3)
        bound = (6.0 / 6) ** 0.5
        assert torch.allclose(tensor.local_tensor(), torch.empty(4, 6).uniform_(-bound, bound))

    run(2, main)


def test_pickling_returns_to_the_same_rank_only() -> None:
    def save(group):
        tensor = shard._shard_tensor(values(4, 2).requires_grad_(), chunk(2))
        file = io.BytesIO()
        torch.save({"weight": tensor}, file)
        return file.getvalue(), pickle.dumps(tensor)

    def load(group, files):
        with shard.load_with_process_group(group):
            assert shard._get_current_process_group() is group
            saved = torch.load(io.BytesIO(files[group.rank][0]), weights_only=False)["weight"]
            with pytest.raises(RuntimeError, match="already set"), shard.load_with_process_group(group):
                pass
        again = pickle.loads(files[group.rank][1])
        assert torch.equal(saved, again)
        assert saved.requires_grad
        assert saved.sharding_spec() == chunk(2)
        with pytest.raises(RuntimeError, match="Local rank at save time was"):
            pickle.loads(files[1 - group.rank][1])
        return gathered(saved)

    files = run(2, save)
    assert torch.equal(run(2, load, files)[0], values(4, 2))
    with pytest.raises(RuntimeError, match="world size at save time was 2, but at load time was 3"):
        run(3, lambda group: group.rank or pickle.loads(files[0][1]))
    with pytest.raises(RuntimeError, match="default process group"):
        pickle.loads(files[0][1])


def test_grad_is_the_shards_gradients() -> None:
    def main(group):
        tensor = shard.ones(chunk(2), 4, 2, requires_grad=True)
        assert tensor.grad is None
        (tensor * 3).local_tensor().sum().backward()
        assert tensor.grad.local_tensor().eq(3).all()
        assert tensor.grad.local_tensor() is tensor.local_tensor().grad
        with pytest.raises(RuntimeError, match="gradients"):
            tensor.reshard(chunk(2, 1))
        with pytest.raises(TypeError, match="same layout"):
            tensor.grad = torch.zeros(4, 2)
        tensor.grad = None
        assert tensor.local_tensor().grad is None

    run(2, main)
