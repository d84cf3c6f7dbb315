"""The wrapper as a module: arguments, inputs and outputs, copies, reports."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from ddp import cases
from ddp.naive import NaiveDataParallel
from phalanx.comm import CommEvent, init_device_mesh, observe, simulate, use_group
from phalanx.ddp import (
    DistributedDataParallel,
    ReplicaDrift,
    _dump_DDP_relevant_env_vars,
    _find_tensors,
    _MixedPrecision,
)
from phalanx.ddp.wrapper._replicas import fingerprint
from phalanx.errors import RankFailed

pytestmark = pytest.mark.fast


def alone(test):
    """Run a test function on one simulated rank."""

    def run():
        simulate(1).run(lambda group: test(group))

    run.__name__ = test.__name__
    return run


@alone
def test_wrong_arguments_are_refused(group):
    model = nn.Linear(2, 2)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(RuntimeError, match="no parameter that requires a gradient"):
        DistributedDataParallel(frozen)
    with pytest.raises(RuntimeError, match="lazy parameters"):
        DistributedDataParallel(nn.LazyLinear(2))
    with pytest.raises(ValueError, match="device_ids"):
        DistributedDataParallel(model, device_ids=[0, 1])
    with pytest.raises(ValueError, match="device_ids"):
        DistributedDataParallel(model, device_ids=[0])
    with pytest.raises(ValueError, match="output_device"):
        DistributedDataParallel(model, output_device=1)
    with pytest.raises(ValueError, match="go together"):
        DistributedDataParallel(model, delay_all_reduce_named_params=[("weight", model.weight)])
    with pytest.raises(ValueError, match="expected one of mean, sum, weighted"):
        DistributedDataParallel(model, reduce="median")
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    with pytest.raises(RuntimeError, match="not both"):
        DistributedDataParallel(model, process_group=group, device_mesh=object())
    with pytest.warns(FutureWarning):
        DistributedDataParallel(model, check_reduction=True)
    with pytest.raises(ValueError, match=">= 0"):
        DistributedDataParallel(model, reduce="weighted").set_step_weight(-1)


def test_delayed_parameters_are_reduced_too():
    def main(group):
        for everything in (False, True):
            module, twin = cases.make(cases.Mlp), cases.make(cases.Mlp)
            named = dict(module.named_parameters())
            chosen = list(named) if everything else ["layers.0.weight", "layers.4.bias"]
            model = DistributedDataParallel(
                module,
                delay_all_reduce_named_params=[(name, named[name]) for name in chosen],
                param_to_hook_all_reduce=named["layers.0.weight"],
            )
            reference = NaiveDataParallel(twin, group)
            for step in range(5):
                for one in (model, reference):
                    one.zero_grad()
                    cases.loss_of(one(cases.batch(step, group.rank))).backward()
                reference.reduce_gradients()
                cases.assert_same(module, twin, f"step {step}")

    simulate(2).run(main)


@alone
def test_only_delayed_parameters_leave_no_bucket_for_a_hook(group):
    module = nn.Linear(2, 2)
    model = DistributedDataParallel(
        module,
        delay_all_reduce_named_params=list(module.named_parameters()),
        param_to_hook_all_reduce=module.weight,
    )
    with pytest.raises(RuntimeError, match="all parameters are delayed"):
        model.register_comm_hook(None, lambda state, bucket: None)


@alone
def test_parameters_on_devices_of_two_kinds_are_refused(group):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"types \['cpu', 'meta'\]; expected one type"):
        DistributedDataParallel(module)


def test_without_init_sync_replicas_stay_as_they_are():
    def main(group):
        kept = DistributedDataParallel(cases.make(cases.Mlp, seed=group.rank), init_sync=False)
        synced = DistributedDataParallel(cases.make(cases.Mlp, seed=group.rank), dim=1)
        assert synced.dim == 1
        return kept.module.layers[0].weight.detach(), synced.module.layers[0].weight.detach()

    (kept, synced), (other_kept, other_synced) = simulate(2).run(main)
    assert not torch.equal(kept, other_kept)
    assert torch.equal(synced, other_synced)


def test_a_mesh_of_one_axis_gives_the_group():
    def main(group):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False), device_mesh=mesh["dp"])
        assert model.group.size == 2
        with pytest.raises(RuntimeError, match="2 axes; expected 1"):
            DistributedDataParallel(nn.Linear(1, 1), device_mesh=mesh)
        model(torch.full((1, 1), float(group.rank))).sum().backward()
        return model.module.weight.grad.item()

    assert simulate(4).run(main) == [1.0, 2.0, 1.0, 2.0]  # ranks 0 and 2 share an axis, 1 and 3 the other


@dataclass
class Box:
    value: torch.Tensor
    note: str


@dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


Pair = namedtuple("Pair", "left right")


class RemoteReference:
    """Looks like an RRef that this process owns."""

    def __init__(self, value) -> None:
        self._value = value

    def is_owner(self):
        return True

    def local_value(self):
        return self._value

    def to_here(self):
        return self._value


class Shapes(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kind = nn.Linear(8, 4), kind

    def forward(self, box, *, extra=None):
        value = self.layer(box["x"][0].value)
        return {
            "dict": {"a": [value, "text"], "b": None},
            "dataclass": Box(value, "kept"),
            "frozen": Frozen(value),
            "namedtuple": Pair(value, 3),
            "rref": RemoteReference(value),
            "nested": [({"deep": Box(value, "kept")},)],
        }[self.kind]


@pytest.mark.parametrize("kind", ["dict", "dataclass", "frozen", "namedtuple", "rref", "nested"])
def test_containers_dataclasses_and_references_pass_untouched_and_synchronise(kind):
    def main(group):
        model, reference = DistributedDataParallel(Shapes(kind)), NaiveDataParallel(Shapes(kind), group)
        for step in range(4):
            for one in (model, reference):
                one.zero_grad()
                box = {"x": [Box(cases.batch(step, group.rank), "in")]}
                output = one(box, extra=object())
                cases.loss_of(next(iter(_find_tensors(output)))).backward()
            reference.reduce_gradients()
            cases.assert_same(model.module, reference.module, f"step {step}")
        return type(output).__name__

    names = simulate(2).run(main)
    expected = {"dict": "dict", "dataclass": "Box", "frozen": "Frozen", "namedtuple": "Pair"}
    assert names[0] == expected.get(kind, names[0])


@alone
def test_inputs_move_and_cast_inside_nested_containers(group):
    from phalanx import _nested_values as values

    inputs = {"a": [torch.zeros(1), (torch.zeros(1, dtype=torch.int64), "text")], "b": Frozen(torch.zeros(1))}
    cast = values.cast_floating(torch.float16, inputs)
    assert cast["a"][0].dtype == torch.float16
    assert cast["a"][1][0].dtype == torch.int64
    assert cast["a"][1][1] == "text"
    assert cast["b"].value.dtype == torch.float16
    assert inputs["b"].value.dtype == torch.float32
    assert values.cast_floating(None, inputs) is inputs
    meta = values.move_to(torch.device("meta"), Pair(torch.zeros(1), [torch.zeros(2)]))
    assert meta.left.device.type == meta.right[0].device.type == "meta"


def test_a_deep_copy_trains_on_its_own():
    def main(group):
        model = DistributedDataParallel(cases.make(cases.Mlp))
        cases.loss_of(model(cases.batch(0, group.rank))).backward()
        twin = copy.deepcopy(model)
        assert twin.module is not model.module
        assert twin.group is model.group
        model.zero_grad()
        twin.zero_grad()
        cases.loss_of(twin(cases.batch(1, group.rank))).backward()
        assert all(param.grad is None for param in model.parameters())
        cases.loss_of(model(cases.batch(1, group.rank))).backward()
        cases.assert_same(twin.module, model.module, "copy")

    simulate(2).run(main)


class Picklable(DistributedDataParallel):
    """Named here, so that pickle finds it."""


def test_pickling_works_with_the_current_group_only():
    def main(group):
        model = Picklable(cases.make(cases.Mlp), gradient_as_bucket_view=True)
        revived = pickle.load(io.BytesIO(pickle.dumps(model)))
        assert revived.gradient_as_bucket_view
        for one in (model, revived):
            one.zero_grad()
            cases.loss_of(one(cases.batch(1, group.rank))).backward()
        cases.assert_same(revived.module, model.module, "pickled")
        other = DistributedDataParallel(cases.make(cases.Mlp), process_group=group.subgroup([0, 1]))
        with pytest.raises(RuntimeError, match="current"):
            pickle.dumps(other)
        with use_group(None), pytest.raises(RuntimeError, match="current"):
            pickle.dumps(model)

    simulate(2).run(main)


@alone
def test_state_dict_train_and_attributes_are_those_of_a_module(group):
    model = DistributedDataParallel(cases.make(cases.ConvNet))
    assert all(name.startswith("module.") for name in model.state_dict())
    model.load_state_dict(model.state_dict())
    assert model.train(False) is model
    assert not model.module.norm.training
    assert isinstance(model, nn.Module)
    assert model._get_active_ddp_module() is None
    assert list(model._get_parameters(model.module)) == list(model.module.parameters())
    params, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(params)
    assert names[0] == "conv.weight"
    assert not any(sparse)
    (moved,), (kwargs,) = model.to_kwargs((torch.zeros(1),), {"k": torch.ones(1)}, 0)
    assert moved[0].item() == 0.0
    assert kwargs["k"].item() == 1.0


def test_mixed_precision_computes_low_reduces_low_and_keeps_full_weights():
    def main(group):
        precision = _MixedPrecision(torch.bfloat16, torch.float16, torch.bfloat16)
        module = cases.make(cases.ConvNet)
        model = DistributedDataParallel(module, mixed_precision=precision)
        assert module.norm.running_mean.dtype == torch.bfloat16
        assert module.norm.num_batches_tracked.dtype == torch.int64
        seen = []
        module.conv.register_forward_hook(lambda m, i, o: seen.append((m.weight.dtype, i[0].dtype, o.dtype)))
        twin = cases.make(cases.ConvNet)
        twin.norm.to(torch.bfloat16)
        for name in ("running_mean", "running_var"):
            getattr(twin.norm, name).data = getattr(twin.norm, name).to(torch.bfloat16)
        for step in range(3):
            model.zero_grad()
            cases.loss_of(model(cases.batch(step, group.rank))).backward()
        assert set(seen) == {(torch.bfloat16,) * 3}
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        assert {param.grad.dtype for param in model.parameters()} == {torch.float32}
        # What was reduced in half precision has the values of half precision.
        for param in model.parameters():
            assert torch.equal(param.grad, param.grad.to(torch.float16).float())

    simulate(2).run(main)


def test_mixed_precision_of_parameters_equals_casting_by_hand():
    def main(group):
        model = DistributedDataParallel(cases.make(cases.Mlp), mixed_precision=_MixedPrecision(torch.bfloat16))
        twin = cases.make(cases.Mlp)
        for step in range(3):
            model.zero_grad()
            twin.zero_grad()
            x = cases.batch(step, group.rank)
            cases.loss_of(model(x)).backward()
            low = {name: param.to(torch.bfloat16) for name, param in twin.named_parameters()}
            cases.loss_of(torch.func.functional_call(twin, low, (x.bfloat16(),))).backward()
            for name, param in twin.named_parameters():
                summed = param.grad.bfloat16()
                group.all_reduce(summed)
                expected = (summed / group.size).float()
                assert torch.equal(dict(model.module.named_parameters())[name].grad, expected), name

    simulate(2).run(main)


def test_mixed_precision_reaches_recurrent_layers():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(8, 4, batch_first=True)

        def forward(self, x):
            return self.cell(x.unsqueeze(1))[0]

    def main(group):
        model = DistributedDataParallel(Recurrent(), mixed_precision=_MixedPrecision(torch.bfloat16))
        assert model(cases.batch(0, 0)).dtype == torch.bfloat16
        cases.loss_of(model(cases.batch(0, 0))).backward()
        assert {param.grad.dtype for param in model.parameters()} == {torch.float32}

    simulate(2).run(main)


def test_drift_is_found_and_named():
    def main(group):
        model = DistributedDataParallel(cases.make(cases.Mlp), fingerprint_every=3)
        for step in range(10):
            model.zero_grad()
            cases.loss_of(model(cases.batch(step, group.rank))).backward()
            if step == 4 and group.rank == 2:
                with torch.no_grad():
                    model.module.layers[2].bias[3] += 1e-6
        raise AssertionError("the drift went unnoticed")

    with pytest.raises(RankFailed, match=r"'layers.2.bias' on rank 2 differs") as caught:
        simulate(3).run(main)
    assert isinstance(caught.value.__cause__, ReplicaDrift)
    assert (caught.value.__cause__.parameter, caught.value.__cause__.ranks) == ("layers.2.bias", (2,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_fingerprint_changes_with_any_bit(dtype):
    tensor = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    other = tensor.clone()
    assert fingerprint(tensor) == fingerprint(other)
    real = torch.view_as_real(other) if other.is_complex() else other
    real.view(-1)[4] = torch.nextafter(real.view(-1)[4], torch.tensor(9.0, dtype=real.dtype))
    assert fingerprint(tensor) != fingerprint(other)


def test_the_desync_report_names_each_ranks_last_collectives():
    def main(group):
        model = DistributedDataParallel(cases.make(cases.ConvNet), keep_log=True)
        for step in range(2):
            model(cases.batch(step, group.rank))
        return model.desync_report()

    first, second = simulate(2).run(main)
    assert first == second
    assert "rank 0: #1 broadcast of" in first
    assert "rank 1: #1 broadcast of" in first

    def one_sends_more(group):
        model = DistributedDataParallel(cases.make(cases.Mlp), keep_log=True, bucket_cap_mb=0.02)
        for step in range(3):
            model(cases.batch(step, group.rank)).sum().backward()
        if group.rank:
            model._log(CommEvent("barrier", 0, group))
        return model.desync_report()

    report = simulate(2).run(one_sends_more)[0].splitlines()
    assert all(line.count("all_reduce of") >= 4 for line in report), report
    assert "barrier" not in report[0]
    assert report[1].endswith("barrier of 0 bytes (generation 0)")
    # Only the last five are told, numbered, so that ranks that are at different places can be told apart.
    assert [line.count("#") for line in report] == [5, 5]
    with pytest.raises(RankFailed, match="keep_log=True"):
        simulate(1).run(lambda group: DistributedDataParallel(nn.Linear(2, 2)).desync_report())


def test_logging_data_tells_buckets_times_and_unused_parameters():
    def main(group):
        model = DistributedDataParallel(cases.make(cases.Experts), bucket_cap_mb=0.0001)
        model._set_ddp_runtime_logging_sample_rate(2)
        for step in range(14):
            model.zero_grad()
            cases.loss_of(model(cases.batch(step, group.rank))).backward()
        data = model._get_ddp_logging_data()
        assert data == model.ddp_logging_data()
        assert data["iteration"] == 14
        assert data["num_sampled_iterations"] == 12  # the first ten, then the 11th and the 13th
        sizes = [int(size) for size in data["bucket_sizes"].split(", ")]
        assert sum(sizes) == data["total_parameter_size_bytes"] == 4 * (72 + 3 * 36)
        assert data["num_buckets_reduced"] == len(sizes) > 1
        assert data["has_rebuilt_buckets"]
        assert model._has_rebuilt_buckets
        assert model._rebuild_buckets()
        assert data["unused_parameter_size"] == 4 * 72
        assert data["can_set_static_graph"]
        for name in ("forward_compute_time", "backward_compute_time", "backward_comm_time"):
            assert data[name] > 0
            assert data[f"avg_{name}"] > 0
        for name in ("backward_compute_comm_overlap_time", "avg_backward_compute_comm_overlap_time"):
            assert isinstance(data[name], int)
            assert data[name] >= 0  # none, if backward was over before the first bucket went out
        with pytest.raises(ValueError, match="at least 1"):
            model._set_ddp_runtime_logging_sample_rate(0)
        assert "at least 1" in model.ddp_logging_data()["error"]

    simulate(2).run(main)


def test_bucket_sizes_are_tuned_unless_given():
    def main(group):
        tuned = DistributedDataParallel(cases.make(cases.Mlp))
        given = DistributedDataParallel(cases.make(cases.Mlp), bucket_cap_mb=0.02)
        for step in range(5):
            for model in (tuned, given):
                model.zero_grad()
                cases.loss_of(model(cases.batch(step, group.rank))).backward()
        assert tuned.ddp_logging_data()["num_bucket_rebuilds"] == 2
        assert given.ddp_logging_data()["num_bucket_rebuilds"] == 1
        return tuned.ddp_logging_data()["bucket_sizes"]

    first, second = simulate(2).run(main)
    assert first == second


def test_sparse_metadata_leaves_the_same_gradients_and_refuses_rows_it_does_not_list():
    def main(group):
        model = DistributedDataParallel(cases.make(cases.Table))
        reference = NaiveDataParallel(cases.make(cases.Table), group)
        model._set_sparse_metadata({"table.weight": torch.arange(20)})
        for step in range(3):
            for one in (model, reference):
                one.zero_grad()
                cases.loss_of(one(cases.batch(step, group.rank))).backward()
            reference.reduce_gradients()
            cases.assert_same(model.module, reference.module, f"step {step}", exact=False)
            assert model.module.table.weight.grad.is_sparse
        model._set_sparse_metadata({"table.weight": torch.tensor([0])})
        with pytest.raises(ValueError, match="metadata does not list"):
            cases.loss_of(model(cases.batch(0, group.rank))).backward()

    simulate(2).run(main)


def test_sparse_metadata_sends_only_the_listed_rows():
    def main(group):
        model = DistributedDataParallel(nn.Embedding(20, 8, sparse=True))
        touched = torch.tensor([2, 5]) if group.rank else torch.tensor([2, 2])
        sent = []
        for listed in (False, True):
            if listed:
                model._set_sparse_metadata({"weight": torch.tensor([11, 2, 5])})
            for _ in range(5):  # past the steps that agree on buckets
                model.zero_grad()
                events: list[CommEvent] = []
                with observe(events.append):
                    model(touched).sum().backward()
            sent.append([(event.name, event.nbytes) for event in events])
        unlisted, listed_only = sent
        assert [name for name, _ in unlisted] == ["all_reduce", "all_gather", "all_gather", "all_gather"]
        assert listed_only == [unlisted[0], ("all_reduce", 3 * 8 * 4)]  # three rows of eight floats
        grad = model.module.weight.grad
        assert grad.indices().tolist() == [[2, 5, 11]]
        assert grad.values().tolist() == [[1.5] * 8, [0.5] * 8, [0.0] * 8]  # means; no rank touched row 11

    simulate(2).run(main)


@alone
def test_flags_that_need_no_counterpart_are_accepted(group):
    model = DistributedDataParallel(
        cases.make(cases.Mlp),
        find_unused_parameters=True,
        static_graph=True,
        skip_all_reduce_unused_params=True,
        batched_grad_copy=True,
        bucket_cap_mb_list=[1, 2],
    )
    model._set_static_graph()
    model._set_ddp_sink_clone(False)
    model._match_unused_params_allreduce()
    model._assign_modules_buffers()
    cases.loss_of(model(cases.batch(0, 0))).backward()
    model._check_reducer_finalized()
    model._remove_autograd_hooks()
    model.zero_grad()
    cases.loss_of(model(cases.batch(0, 0))).backward()
    assert all(param.grad is not None for param in model.parameters())


def test_the_methods_of_torchs_class_exist():
    """Every method of PyTorch's class that trainers may call, except those that docs/parity.md explains away."""
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    replaced = {
        *(
            "_clear_grad_buffer",
            "_ddp_init_helper",
            "_delayed_all_reduce_hook",
            "_fire_reducer_autograd_hook",
        ),
        *("_module_wait_for_copy_hook", "_passing_sync_batchnorm_handle", "_register_accum_grad_hook"),
        *("_register_delay_all_reduce_hook", "_root_copy_hook"),
    }
    theirs = {name for name in vars(TorchDDP) if not name.startswith("__")}
    missing = theirs - set(dir(DistributedDataParallel)) - replaced
    assert not missing

    def main(group):
        model = DistributedDataParallel(nn.Linear(2, 2))
        model._update_process_group(group.subgroup([0]))
        assert model.group.size == 1
        with pytest.raises(AssertionError, match="CPU"):  # torch's own scatter and gather are for accelerators
            model.gather([torch.zeros(1, 2)], "cpu")

    simulate(1).run(main)


def test_the_constructor_takes_torchs_arguments_in_torchs_order_and_ours_by_keyword_only():
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    theirs = inspect.signature(TorchDDP).parameters
    ours = inspect.signature(DistributedDataParallel).parameters
    shared = [(name, ours[name].kind, ours[name].default) for name in [*ours][: len(theirs)]]
    assert shared == [(name, one.kind, one.default) for name, one in theirs.items()]
    added = {name: one.kind for name, one in ours.items() if name not in theirs}
    assert added == dict.fromkeys(("reduce", "fingerprint_every", "keep_log"), inspect.Parameter.KEYWORD_ONLY)


def test_the_environment_dump_lists_what_matters(monkeypatch, capsys):
    monkeypatch.setenv("MASTER_ADDR", "somewhere")
    text = _dump_DDP_relevant_env_vars()
    assert "env:MASTER_ADDR=somewhere" in text
    assert capsys.readouterr().out.strip() == text


def test_the_environment_is_logged_at_debug_level_when_wrapping(monkeypatch, caplog):
    monkeypatch.setenv("MASTER_ADDR", "somewhere")
    with caplog.at_level("INFO", logger="phalanx.ddp"):
        simulate(1).run(lambda group: DistributedDataParallel(nn.Linear(2, 2)))
    assert "env:MASTER_ADDR" not in caplog.text
    with caplog.at_level("DEBUG", logger="phalanx.ddp"):
        simulate(1).run(lambda group: DistributedDataParallel(nn.Linear(2, 2)))
    assert "env:MASTER_ADDR=somewhere" in caplog.text
