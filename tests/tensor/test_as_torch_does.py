"""What users of torch's DTensor do in passing, and expect to go as it goes there."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
from meshes import on_mesh
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._foreach_utils import _has_foreach_support

from phalanx.comm import simulate
from phalanx.comm.group._init import has_current_group
from phalanx.errors import RankFailed
from phalanx.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    fallback_counts,
    init_device_mesh,
)
from phalanx.tensor.debug import CommDebugMode
from phalanx.tensor.experimental import register_sharding

aten = torch.ops.aten


# ---- overloads


def test_overloads_are_their_functions() -> None:
    def body(mesh: Any) -> None:
        x = DTensor.from_local(torch.ones(1, 4), mesh, [Partial(), Shard(1)])
        assert aten.squeeze_.dim(x, 0) is x
        assert tuple(x.shape) == (8,)
        assert x.placements == (Partial(), Shard(0))
        assert x.to_local().tolist() == [1, 1, 1, 1]
        y = distribute_tensor(torch.arange(8.0).reshape(1, 8), mesh, [Replicate(), Shard(1)])
        aten.squeeze_.dims(y, [0])
        before = dict(fallback_counts())
        assert aten.add.Tensor(y, y).placements == y.placements
        assert aten.sum.dim_IntList(y, [0]).full_tensor().item() == 28
        aten.mul_.Tensor(y, y)
        assert y.full_tensor().tolist() == [float(i * i) for i in range(8)]
        assert fallback_counts() == before, "an overload has the rule of its function"

    on_mesh(body, 2, 2)


def test_in_place_overloads_draw_in_place() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(64), mesh, [Shard(0)])
        aten.uniform_.default(x)
        assert x.full_tensor().std() > 0
        dropped = torch.ops.aten.dropout_.default(x.fill_(1), 0.5, True)
        assert dropped is x
        assert sorted(set(x.full_tensor().tolist())) == [0, 2]

    on_mesh(body, 2)


def test_rules_reach_every_name_of_an_operation() -> None:
    library = torch.library.Library("phalanx_names", "FRAGMENT")
    for name in "abc":
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x * 2, "CompositeExplicitAutograd")
    ours = torch.ops.phalanx_names
    airy = torch.special.airy_ai
    calls = {  # (called before, registered, called then, the layout that the new rule brings)
        "a": (ours.a, ours.a.default, ours.a, Shard(0)),
        "b": (ours.b.default, ours.b, ours.b.default, Shard(0)),
        "c": (ours.c, ours.c, ours.c.default, Shard(0)),
        "aten": (airy, aten.special_airy_ai.default, airy, Replicate()),  # it has a rule, by which it stays sharded
    }

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        for first, registered, then, wanted in calls.values():
            assert first(x).placements != (wanted,)
            mesh.get_group().barrier()
            register_sharding(registered)(lambda x, wanted=wanted: [([wanted], [wanted])])
            mesh.get_group().barrier()
            assert then(x).placements == (wanted,)
            torch.testing.assert_close(then(x).full_tensor(), then(torch.arange(4.0)))

    on_mesh(body, 2)


def test_a_rule_of_an_overload_leaves_other_forms_alone() -> None:
    register_sharding(aten.nanquantile.scalar)(lambda x, q, dim: [([Shard(0)], [Shard(0), None, None])])

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
        assert torch.nanquantile(x, 0.5, 1).placements == (Shard(0),)
        assert torch.nanquantile(x, 0.5).full_tensor().item() == 3.5  # not the rule's form: as before

    on_mesh(body, 2)


# ---- making DTensors


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_the_order_in_memory_is_kept(shape: tuple[int, ...]) -> None:
    """Of the rank whose data counts, whatever the others hold."""
    image = torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last)
    turned = torch.arange(24.0).reshape(4, 6).t()

    def body(mesh: Any) -> None:
        rest = [Replicate()] * (mesh.ndim - 1)
        for whole in (image, turned):
            for dim in (None, *range(whole.dim())):
                placements = [Replicate() if dim is None else Shard(dim), *rest]
                for src in (0, None):
                    own = whole if src is None or mesh.get_rank() == 0 else torch.zeros(whole.shape)
                    x = distribute_tensor(own, mesh, placements, src_data_rank=src)
                    assert x.stride() == whole.stride()
                    assert torch.equal(x.full_tensor(), whole)
        x = distribute_tensor(image, mesh, [Shard(0), *rest])
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert x.to_local().is_contiguous(memory_format=torch.channels_last) or not x.to_local().numel()
        meta = distribute_tensor(image.to("meta"), mesh, [Shard(1), *rest])
        assert meta.stride() == image.stride()

    on_mesh(body, *shape)


def test_contributions_of_a_tensor() -> None:
    whole = torch.arange(1.0, 9.0).reshape(4, 2)

    def body(mesh: Any) -> None:
        for op in Partial.ALL_REDUCE_OPS:
            for placements in ([Partial(op), Shard(0)], [Shard(0), Partial(op)], [Partial(op), Partial(op)]):
                for src in (0, None):
                    own = whole if src is None or mesh.get_rank() == 0 else torch.zeros(4, 2)
                    x = distribute_tensor(own, mesh, placements, src_data_rank=src)
                    assert x.placements == tuple(placements)
                    assert torch.equal(x.full_tensor(), whole), (op, placements)
        assert torch.equal(
            distribute_tensor(torch.arange(3), mesh, [Partial(), Partial()]).full_tensor(), torch.arange(3)
        )

    on_mesh(body, 2, 2)


def test_what_came_from_a_leaf_may_be_written() -> None:
    def body(mesh: Any) -> None:
        for run_check in (False, True):
            leaf = torch.ones(2, 3, requires_grad=True)
            x = DTensor.from_local(leaf, mesh, [Replicate()], run_check=run_check)
            x.add_(1).mul_(2)
            x.sum().backward()
            assert torch.equal(leaf.grad, torch.full((2, 3), 2.0))
            assert leaf[0, 0].item() == (1 if run_check else 4), "replicas that were checked are the first rank's"
        for write in (Tensor.zero_, lambda t: t.fill_(0)):
            leaf = torch.ones(2, 3, requires_grad=True)
            x = DTensor.from_local(leaf, mesh, [Shard(0)])
            write(x)
            (x * 5).sum().backward()
            assert not leaf.grad.any()
            assert not leaf.any()
        used = torch.ones(3, requires_grad=True)
        squared = used * used
        DTensor.from_local(used, mesh, [Shard(0)]).fill_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squared.sum().backward()
        twice = torch.ones(3, requires_grad=True)
        (first,) = torch.autograd.grad(
            DTensor.from_local(twice, mesh, [Shard(0)]).pow(3).sum(), twice, create_graph=True
        )
        (second,) = torch.autograd.grad(first.sum(), twice)
        assert second.tolist() == [6, 6, 6]

    on_mesh(body, 2)


def test_the_local_tensor_of_a_parameter_is_one() -> None:
    def body(mesh: Any) -> None:
        tensor = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        for requires_grad in (True, False):
            parameter = nn.Parameter(tensor.clone(), requires_grad=requires_grad)
            local = parameter.to_local()
            with torch.no_grad():
                quiet = parameter.to_local()
            assert isinstance(local, nn.Parameter)
            assert isinstance(quiet, nn.Parameter)
            assert (local.requires_grad, quiet.requires_grad) == (requires_grad, False)
            assert quiet is not parameter._local_tensor
            quiet.fill_(3)
            assert parameter.full_tensor().sum() == 24
        assert not isinstance(tensor.to_local(), nn.Parameter)
        assert not isinstance(nn.Parameter(tensor).full_tensor(), nn.Parameter)

    on_mesh(body, 2)


def test_the_old_forms_of_input_and_output_functions() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    batch = torch.randn(2, 4)
    expected = layer(batch)

    def body(mesh: Any) -> None:
        model = copy.deepcopy(layer)
        with pytest.warns(FutureWarning, match="old form") as warned:
            distribute_module(
                model,
                mesh,
                input_fn=lambda inputs, mesh: tuple(distribute_tensor(one, mesh, [Shard(0)]) for one in inputs),
                output_fn=lambda outputs, mesh: outputs.full_tensor(),
            )
        assert len(warned) == 2
        assert all(Path(one.filename) == Path(__file__) for one in warned)
        torch.testing.assert_close(model(batch), expected)
        with pytest.raises(RuntimeError, match="was called on this Linear before"):
            distribute_module(model, mesh)
        for wrong in (lambda inputs: inputs, lambda a, b, c, d: a):
            with pytest.raises(ValueError, match=r"expected \(module, inputs, device_mesh\)"):
                distribute_module(nn.Linear(2, 2), mesh, input_fn=wrong)
        anything = distribute_module(nn.Linear(4, 3), mesh, output_fn=lambda *given: given[1].to_local())
        assert type(anything(distribute_tensor(batch, mesh))) is Tensor

    on_mesh(body, 1)  # warnings are caught for the whole process


# ---- files


def test_a_file_opens_without_a_group(tmp_path: Path) -> None:
    def write(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        state = {
            "cut": distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)]),
            "weight": nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh["tp"], [Replicate()])),
        }
        torch.save(state, tmp_path / f"{group.rank}.pt")

    simulate(4).run(write)
    assert not has_current_group(), "of this thread, which is no rank"
    state = torch.load(tmp_path / "3.pt")
    cut = state["cut"]
    assert tuple(cut.shape) == (8,)
    assert cut.to_local().tolist() == [4, 5, 6, 7]
    assert cut.device_mesh.get_rank() == 3
    assert cut.device_mesh["tp"].size() == 2
    assert (cut * 2).to_local().tolist() == [8, 10, 12, 14]
    assert isinstance(state["weight"], nn.Parameter)
    with pytest.raises(RuntimeError, match=r"rank 3 wrote.*Join a group"):
        cut.full_tensor()
    again = io.BytesIO()
    torch.save(state, again)
    again.seek(0)
    assert torch.load(again)["cut"].to_local().tolist() == [4, 5, 6, 7]

    def read(group: Any, file: str) -> list[Any]:
        init_device_mesh("cpu", (2, 2))
        state = torch.load(tmp_path / f"{group.rank if file == 'own' else file}.pt")
        return state["cut"].full_tensor().tolist()

    assert simulate(4).run(read, "own") == [[float(i) for i in range(8)]] * 4
    with pytest.raises(RankFailed, match="each rank loads what it wrote"):
        simulate(4).run(read, "0")


# ---- modules of torch


def test_packed_sequences() -> None:
    torch.manual_seed(0)
    layer, batch = nn.LSTM(2, 4, batch_first=True), torch.randn(4, 3, 2)

    def both(module: nn.Module, x: Tensor, lengths: Any, is_sorted: bool) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=is_sorted)
        return pad_packed_sequence(module(packed)[0], batch_first=True)

    def body(mesh: Any) -> None:
        model = distribute_module(copy.deepcopy(layer), mesh)
        x = distribute_tensor(batch, mesh, [Shard(0)])
        for lengths, is_sorted in (([3, 3, 2, 1], True), (torch.tensor([3, 3, 2, 1]), True), ([1, 3, 2, 3], False)):
            padded, found = both(model, x, lengths, is_sorted)
            expected, counted = both(layer, batch, lengths, is_sorted)
            torch.testing.assert_close(padded.full_tensor(), expected)
            assert found.tolist() == counted.tolist()
        with pytest.raises(RuntimeError, match="plain tensor"):
            x.index_select(0, torch.tensor([1, 0]))  # not from lengths: as ever

    on_mesh(body, 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("training", [False, True])
def test_transformer_encoder_with_masks(training: bool) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
    encoder.train(training)
    batch, hidden = torch.randn(4, 5, 8), torch.tensor([[False] * 3 + [True] * 2] * 4)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        padded, masked = encoder(batch, src_key_padding_mask=hidden), encoder(batch, mask=causal)

    def body(mesh: Any) -> None:
        model = distribute_module(copy.deepcopy(encoder), mesh)
        x = distribute_tensor(batch, mesh, [Shard(0)])
        with torch.no_grad():
            found = model(x, src_key_padding_mask=distribute_tensor(hidden, mesh, [Shard(0)])).full_tensor()
            torch.testing.assert_close(found[:, :3], padded[:, :3])  # what the mask hides is nobody's business
            torch.testing.assert_close(model(x, mask=distribute_tensor(causal, mesh)).full_tensor(), masked)

    on_mesh(body, 2)


def test_lists_are_the_default() -> None:
    assert DTensor in _foreach_supported_types

    def body(mesh: Any) -> None:
        layers = [distribute_tensor(torch.full((4, 2), float(i)), mesh, [Shard(0)]) for i in (1, 2)]
        assert _has_foreach_support(layers, layers[0].device)
        parameters = [nn.Parameter(layer) for layer in layers]
        for parameter in parameters:
            (parameter * parameter).sum().backward()
        with CommDebugMode() as seen:
            norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        assert norm.full_tensor().item() == pytest.approx((8 * 4 + 8 * 16) ** 0.5)
        assert seen.get_total_counts() <= 2
        clipped = torch.stack([p.grad.full_tensor().norm() for p in parameters]).norm()
        assert clipped.item() == pytest.approx(1.0, abs=1e-4)

    on_mesh(body, 2)


def test_placements_tell_what_torchs_do() -> None:
    assert Partial.ALL_REDUCE_OPS == theirs.Partial.ALL_REDUCE_OPS
    assert Partial.LINEAR_REDUCE_OPS == theirs.Partial.LINEAR_REDUCE_OPS
    for size in range(9):
        for chunks in range(1, 5):
            for rank in range(chunks):
                found = Shard.local_shard_size_and_offset(size, chunks, rank)
                assert found == theirs.Shard.local_shard_size_and_offset(size, chunks, rank)
    assert Shard(1).dim == 1
    assert Partial("max").reduce_op == "max"


def test_a_pickle_of_before_has_no_coordinate() -> None:
    """Files of the release before name no rank; on the ranks of a group they are read as they were."""

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        rebuild, args = x.__reduce_ex__(2)
        assert torch.equal(rebuild(*args[:4]).full_tensor(), torch.arange(4.0))
        rebuild_mesh, mesh_args = mesh.__reduce__()
        assert rebuild_mesh(*mesh_args[:-1]) == mesh
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        assert torch.equal(torch.load(file).full_tensor(), torch.arange(4.0))

    on_mesh(body, 2)


def test_overloads_of_batch_norm_write_running_statistics() -> None:
    torch.manual_seed(0)
    batch, expected = torch.randn(4, 3), [torch.zeros(3), torch.ones(3)]
    aten._native_batch_norm_legit.default(batch, None, None, *expected, True, 0.5, 1e-5)

    def body(mesh: Any) -> None:
        found = [distribute_tensor(t, mesh, [Shard(0)]) for t in (torch.zeros(3), torch.ones(3))]
        x = distribute_tensor(batch, mesh, [Shard(0)])
        aten._native_batch_norm_legit.default(x, None, None, *found, True, 0.5, 1e-5)
        for ours, theirs_ in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs_)

    on_mesh(body, 2)
