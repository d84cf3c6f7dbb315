"""What users may do with a sharded module between and around steps, and what is refused."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from fsdp.models import MLP, batch, build
from fsdp.ranks import on_ranks, shard
from phalanx.comm import init_device_mesh
from phalanx.errors import RankFailed
from phalanx.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    layout_summary,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from phalanx.fsdp._policies import AllGather, ReduceScatter
from phalanx.tensor import DTensor, Shard


def refused(body, *shape, kind=RuntimeError, match):
    with pytest.raises(RankFailed) as caught:
        on_ranks(body, *shape)
    error = caught.value.__cause__
    assert isinstance(error, kind), error
    assert match in str(error), error


def assert_gradients(model, expected):
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, msg=lambda text, name=name: f"{name} {text}")


def stepped(model):
    model(batch(0)).pow(2).mean().backward()
    return model


# ---- gathered and sharded


def test_unshard_and_reshard():
    def body(mesh):
        model = shard(build("mlp"), mesh)
        expected = build("mlp").first.weight
        for wait in (lambda: model.first.unshard(), lambda: model.first.unshard(async_op=True).wait()):
            wait()
            assert torch.equal(model.first.weight, expected)
            assert not isinstance(model.first.weight, DTensor)
            assert isinstance(model.second[0].weight, DTensor)
            assert dict(model.named_parameters())["first.weight"] is model.first.weight
            model.first.reshard()
            assert isinstance(model.first.weight, DTensor)
            assert model.first.weight.placements == (Shard(0),)

    on_ranks(body, 2)


def test_parameters_are_whole_inside_forward_and_shards_outside():
    def body(mesh):
        model, seen = shard(build("mlp"), mesh), []
        model.second[0].register_forward_hook(lambda m, args, out: seen.append(type(m.weight)))
        optimizer_before = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(batch(0)).pow(2).mean()
        # the root stays gathered for backward, but nobody is handed its whole parameters
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
        model.zero_grad()
        loss.backward()
        assert_gradients(model, stepped(build("mlp")))
        assert optimizer_before.param_groups[0]["params"] == list(model.parameters())
        assert seen == [nn.Parameter]

    on_ranks(body, 2)


def test_state_dicts_hold_shards_also_while_gathered():
    def body(mesh):
        model = shard(build("tied"), mesh, reshard_after_forward=False)
        model(batch(0))
        state = model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        other = shard(build("tied"), mesh)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other(batch(0))
        other.load_state_dict(loaded)
        torch.testing.assert_close(other(batch(1)), model(batch(1)))

    on_ranks(body, 2)


def test_writes_to_shards_are_seen_by_the_next_forward():
    def body(mesh):
        model = shard(build("mlp"), mesh)
        before = model(batch(0)).detach()  # with grad: the root stays gathered
        with torch.no_grad():
            for state in (model.state_dict(),):
                state["scale"].mul_(2)
        torch.testing.assert_close(model(batch(0)) - 0.5, 2 * (before - 0.5))

    on_ranks(body, 2)


def test_writes_to_whole_parameters_are_an_error():
    def body(mesh):
        model = shard(build("mlp"), mesh)
        model.first.register_forward_pre_hook(lambda module, args: [None, module.bias.detach().mul_(2)][0])
        model(batch(0))

    refused(body, 2, match="unit 'first' was written to in place while it was gathered (bias)")


# ---- building


def test_meta_device_then_empty_or_load():
    def body(mesh):
        source = shard(build("tied"), mesh)
        for kind in ("empty", "load"):
            with torch.device("meta"):
                model = shard(build("tied"), mesh)
            with pytest.raises(RuntimeError, match=r"rank \d: unit 'root' has parameters without data \(embed.weight"):
                model(batch(0))
            if kind == "empty":
                model.to_empty(device="cpu")
                for module in model.modules():
                    if hasattr(module, "reset_parameters"):
                        module.reset_parameters()
                assert stepped(model).embed.weight.grad is not None
                model.load_state_dict(source.state_dict())
            else:
                model.load_state_dict(source.state_dict(), assign=True)
            torch.testing.assert_close(model(batch(0)), source(batch(0)))

    on_ranks(body, 2)


def test_dtypes_may_change_and_be_mixed():
    def body(mesh):
        model, one = build("mlp"), build("mlp")
        for each in (model, one):
            each.second.double()
        shard(model, mesh)
        for each in (model, one):
            each.first.register_forward_hook(lambda m, args, out: out.double())
        assert_gradients(stepped(model), stepped(one))
        for each in (model, one):
            each.double().zero_grad()
        model(batch(0).double()).pow(2).mean().backward()
        one(batch(0).double()).pow(2).mean().backward()
        assert_gradients(model, one)

    on_ranks(body, 2)


def test_buffers_ignored_and_tied_parameters():
    def body(mesh):
        model = build("mlp")
        kept = model.first.bias
        fully_shard(model.first, mesh=mesh, ignored_params={kept})
        assert model.first.bias is kept
        fully_shard(model, mesh=mesh, ignored_params={kept})
        assert not isinstance(model.shift, DTensor)
        tied = build("tied")
        assert shard(tied, mesh).embed.weight is tied.predict.weight
        apart = build("tied")
        fully_shard(apart.embed, mesh=mesh)
        with pytest.raises(ValueError, match=r"'predict.weight' is shared with Embedding.weight"):
            fully_shard(apart, mesh=mesh)

    on_ranks(body, 2)


def test_recurrent_layers_and_parametrizations():
    def body(mesh):
        x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1))
        for layer in (nn.LSTM(4, 5), torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))):
            for parameter in layer.parameters():
                nn.init.constant_(parameter, 0.3)
            one = copy.deepcopy(layer)
            fully_shard(layer, mesh=mesh)
            for each in (layer, one):
                out = each(x)
                (out[0] if isinstance(out, tuple) else out).pow(2).sum().backward()
            assert_gradients(layer, one)

    on_ranks(body, 2)


# ---- settings


def test_settings_after_the_fact():
    def body(mesh):
        expected = stepped(build("transformer"))
        model = shard(build("transformer"), mesh)
        model.set_reshard_after_forward(False)
        model(batch(0))
        assert not isinstance(model.layers[0].up.weight, DTensor)
        model.set_reshard_after_forward(True)
        model.set_reshard_after_backward(False)
        assert_gradients_in_turn(model, expected)
        assert not isinstance(model.layers[0].up.weight, DTensor)
        model.set_reshard_after_backward(True)
        for one, other in zip(model.layers, model.layers[1:], strict=False):
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])
        model.set_reduce_scatter_max_input_buffers(2)
        assert_gradients_in_turn(model, expected)
        assert isinstance(model.layers[0].up.weight, DTensor)
        embedding = fully_shard(nn.Embedding(5, 3), mesh=mesh, reshard_after_forward=True)
        embedding.set_unshard_in_backward(False)
        embedding(torch.tensor([1, 1])).sum().backward()
        assert embedding.weight.grad.full_tensor()[1].tolist() == [2.0] * 3

    def assert_gradients_in_turn(model, expected):
        model.zero_grad()
        model(batch(0)).pow(2).mean().backward()
        found = {n: p for s in states(model) for n, p in s}
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(found[name].grad.full_tensor(), parameter.grad)

    def states(model):
        for path, module in model.named_modules():
            if isinstance(module, FSDPModule):
                unit = module._get_fsdp_state().unit
                yield [(f"{path}.{p.name}".lstrip("."), p.sharded) for p in unit.parameters]

    on_ranks(body, 2)


def test_collectives_of_the_user():
    class Gather(AllGather):
        def allocate(self, size, *, dtype, device):
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            used.append("gather")
            return group.all_gather_into_tensor(output_tensor, input_tensor, async_op=async_op)

    class Scatter(ReduceScatter):
        def allocate(self, size, *, dtype, device):
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            used.append(f"reduce {op}")
            group.reduce_scatter_tensor(output_tensor, input_tensor, op)

    used = []

    def body(mesh):
        model = shard(build("mlp"), mesh)
        model.first.set_custom_all_gather(Gather())
        model.first.set_custom_reduce_scatter(Scatter())
        model.first.set_all_reduce_hook(lambda piece: piece.mul_(3))
        with pytest.raises(ValueError, match="stream"):
            model.first.set_all_reduce_hook(print, stream=object())
        stepped(model)
        expected = stepped(build("mlp"))
        for parameter in expected.first.parameters():
            parameter.grad.mul_(3)
        assert_gradients(model, expected)

    on_ranks(body, 2)
    assert sorted(used) == ["gather"] * 4 + ["reduce sum"] * 2


def test_what_only_makes_sense_with_nccl():
    def body(mesh):
        model = shard(build("mlp"), mesh)
        model.set_force_sum_reduction_for_comms(True)
        model.set_separate_reduce_scatter_group(True)
        model.set_allocate_memory_from_process_group_for_comm(True)
        model.set_post_optim_event(object())
        model.set_reduce_scatter_unused_params(True)
        with pytest.raises(NotImplementedError, match="symmetric memory"):
            model.set_symm_mem_for_comm()
        with pytest.warns(FutureWarning, match="set_gradient_divide_factor"):
            model.set_reduce_scatter_divide_factor(2.0)
        assert_gradients(stepped(model), stepped(build("mlp")))

    on_ranks(body, 2)


def test_methods_that_run_as_forward():
    class Twice(MLP):
        def generate(self, x):
            return self.forward(x) * 2

    def body(mesh):
        torch.manual_seed(0)
        model, plain = shard(Twice(), mesh), build("mlp")
        register_fsdp_forward_method(model, "generate")
        register_fsdp_forward_method(plain, "generate")  # nothing happens
        out = model.generate(batch(0))
        torch.testing.assert_close(out, plain(batch(0)) * 2)
        out.pow(2).mean().backward()
        (plain(batch(0)) * 2).pow(2).mean().backward()
        assert_gradients(model, plain)
        share_comm_ctx([model, shard(build("mlp"), mesh)])
        with pytest.raises(ValueError, match="got a MLP"):
            share_comm_ctx([plain])

    on_ranks(body, 2)


def test_what_each_rank_holds_in_words():
    def body(mesh):
        return layout_summary(shard(build("mlp"), mesh))

    assert on_ranks(body, 2)[1].splitlines() == [
        "scale            float32[1, 5] [shard:S(0)]    20 B, 0 B of 20 B        unit 'root'",
        "first.weight     float32[11, 6] [shard:S(0)]   144 B, 120 B of 264 B    unit 'first'",
        "first.bias       float32[11] [shard:S(0)]      24 B, 20 B of 44 B       unit 'first'",
        "second.0.weight  float32[13, 11] [shard:S(0)]  308 B, 264 B of 572 B    unit 'second'",
        "second.0.bias    float32[13] [shard:S(0)]      28 B, 24 B of 52 B       unit 'second'",
        "second.2.weight  float32[5, 13] [shard:S(0)]   156 B, 104 B of 260 B    unit 'second'",
        "second.2.bias    float32[5] [shard:S(0)]       12 B, 8 B of 20 B        unit 'second'",
        "total                                          692 B, 540 B of 1.23 kB",
    ]
    assert "  0 B to 24 B on 16 ranks of 264 B  " in on_ranks(body, 16)[0].splitlines()[1]


# ---- hooks, errors


def test_hooks_on_parameters_see_the_reduced_gradient():
    def body(mesh):
        model, seen = shard(build("mlp"), mesh), []
        model.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.full_tensor()))
        stepped(model)
        torch.testing.assert_close(seen, [stepped(build("mlp")).first.weight.grad])

    on_ranks(body, 2)


def test_a_step_after_an_error():
    def body(mesh):
        model = shard(build("mlp"), mesh)

        def fail(*unused):
            raise ZeroDivisionError

        handle = model.second[0].register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(batch(0))
        handle.remove()
        assert_gradients(stepped(model), stepped(build("mlp")))
        model.zero_grad()
        out = model.second(model.first(batch(0)))
        out.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        out = model(batch(0))
        out.grad_fn.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        model.reset_iter_state()
        assert_gradients(stepped(model), stepped(build("mlp")))
        with pytest.raises(RuntimeError, match="call it on the root"):
            model.first.reset_iter_state()

    on_ranks(body, 2)


def test_copies_and_pickles_are_refused():
    def body(mesh):
        model = shard(build("transformer"), mesh)
        with pytest.raises(TypeError, match="load_state_dict"):
            copy.deepcopy(model)
        with pytest.raises(TypeError, match="state_dict"):
            torch.save(model, io.BytesIO())
        assert type(model.layers[:2]) is nn.ModuleList
        sequence = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), mesh=mesh)
        assert type(sequence[:1]) is nn.Sequential

    on_ranks(body, 2)


def test_mistakes_are_named():
    def body(mesh):
        model, by = build("mlp"), f"^rank {mesh.get_rank()}: .*"
        with pytest.raises(ValueError, match=by + "ModuleList, which has no forward"):
            fully_shard(nn.ModuleList([model]), mesh=mesh)
        with pytest.raises(TypeError, match=by + "got a str"):
            fully_shard("model", mesh=mesh)
        with pytest.raises(ValueError, match=by + "empty list"):
            fully_shard([], mesh=mesh)
        with pytest.raises(ValueError, match=by + "divides 2"):
            fully_shard(model, mesh=mesh, reshard_after_forward=2)
        with pytest.raises(TypeError, match=by + "expected phalanx"):
            fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: 1)
        with pytest.raises(ValueError, match="float"):
            MixedPrecisionPolicy(param_dtype=torch.int32)
        with pytest.raises(NotImplementedError, match=by + "CPUOffloadPolicy on a mesh of 'meta' devices"):
            fully_shard(model, mesh=init_device_mesh("meta", (2,)), offload_policy=CPUOffloadPolicy())
        model.scalar = nn.Parameter(torch.tensor(1.0))
        with pytest.raises(ValueError, match=by + "'scalar' is a 0-d tensor"):
            fully_shard(model, mesh=mesh)
        with pytest.raises(ValueError, match="already"):
            fully_shard(fully_shard(nn.Linear(2, 2), mesh=mesh), mesh=mesh)
        sparse = fully_shard(nn.Embedding(4, 2, sparse=True), mesh=mesh)
        with pytest.raises(RuntimeError, match=r"gradient of 'weight' in unit 'root' has layout"):
            sparse(torch.tensor([1])).sum().backward()
        tied = shard(build("mlp"), mesh)
        tied.second[0].bias = tied.first.bias
        with pytest.raises(RuntimeError, match=r"parameter '0.bias' of unit 'second' was replaced"):
            tied(batch(0))
        layer = fully_shard(nn.Linear(4, 4), mesh=mesh)
        with pytest.raises(RuntimeError, match=r"parameter 'weight' of unit '\w+' was replaced by a plain Tensor"):
            torch.func.functional_call(layer, {"weight": torch.zeros(4, 4)}, (torch.ones(1, 4),))

    on_ranks(body, 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler asks every tensor for it
def test_compiled_modules_are_right():
    """The compiler leaves the hooks out of its graphs; what is inside computes with whole parameters."""

    def body(mesh):
        model, one = shard(build("mlp"), mesh), build("mlp")
        torch.compile(model, backend="eager")(batch(0)).pow(2).mean().backward()
        assert_gradients(model, stepped(one))

    on_ranks(body, 1)


def test_weights_tied_after_sharding():
    def body(mesh):
        models = []
        for sharded in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
            if sharded:
                for layer in (model[0], model[2], model):
                    fully_shard(layer, mesh=mesh)
            model[2].weight = model[0].weight
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                model(batch(step)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            models.append(model(batch(5)))
        torch.testing.assert_close(*models)

    on_ranks(body, 2)
