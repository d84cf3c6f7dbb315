"""Each part of torch's compilers that DTensors rely on, one by one: another version of torch says here what moved."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch._dynamo
from meshes import on_mesh
from torch import Tensor

from phalanx._torch_private import FakeTensorMode
from phalanx.comm import DeviceMesh
from phalanx.comm.torch_interop._dynamo import RUNNERS, run_as_it_is
from phalanx.tensor import Partial, Replicate, Shard, distribute_tensor
from phalanx.tensor.compile import _compilers, _recorded
from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.layout._placement import MaskPartial, StridedShard
from phalanx.tensor.redistribute import _traced

pytestmark = pytest.mark.timeout(280)


def test_entry_points_of_the_compilers_are_wrapped() -> None:
    found = {name: importlib.import_module(name) for name in _compilers._ACTIONS if "inductor" not in name}
    assert hasattr(found["torch._functorch.aot_autograd"].aot_module_simplified, "_phalanx")
    assert hasattr(found["torch._dynamo.backends.common"].aot_module_simplified, "_phalanx")
    assert hasattr(found["torch._dynamo.variables.builder"]._automatic_dynamic, "_phalanx")


def test_importing_phalanx_imports_no_compiler() -> None:
    told = "import sys, phalanx.tensor; print([m for m in ('torch._dynamo', 'torch._inductor') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=250, check=True)
    assert ran.stdout.strip() == "[]"


def test_dynamo_reads_styles_and_leaves_the_rest_to_us() -> None:
    from torch._dynamo import trace_rules

    for module in _compilers.INLINED:
        assert not trace_rules.check_file(module.__file__).skipped
    assert trace_rules.check_file(_traced.__file__).skipped
    for function in _compilers.IN_GRAPH:
        assert id(function) in trace_rules._allowed_callable_ids


def test_values_may_stand_in_graphs() -> None:
    from torch._library.opaque_object import is_opaque_value_type

    assert is_opaque_value_type(type(Shard(0)))
    assert is_opaque_value_type(type(Replicate()))
    assert is_opaque_value_type(DeviceMesh)


def test_operators_that_send_are_ordered() -> None:
    from torch._higher_order_ops.effects import _get_effect
    from torch._library.effects import EffectType

    assert _get_effect(torch.ops.phalanx.run_step.default) == EffectType.ORDERED
    assert _get_effect(torch.ops.phalanx.all_reduce.default) == EffectType.ORDERED
    assert _get_effect(torch.ops.phalanx.draw.default) is None


def test_a_dtensor_is_a_tensor_that_holds_one() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        assert torch.utils._python_dispatch.is_traceable_wrapper_subclass(x)
        names, facts = x.__tensor_flatten__()
        assert names == ["_local"]
        again = DTensor.__tensor_unflatten__({"_local": x._local}, facts, x.shape, x.stride())
        assert again._spec is x._spec
        assert DTensor.__metadata_guard__(facts, again.__tensor_flatten__()[1])
        assert not DTensor.__metadata_guard__(facts, x.detach().__tensor_flatten__()[1])

    on_mesh(body, 1)


def test_what_is_traced_is_known_by_its_type() -> None:
    seen: list[type] = []

    def body(mesh: Any) -> None:
        def watched(self: Tensor, *args: Any) -> Any:
            seen.append(type(self))
            return plain(self, *args)

        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        plain = _traced.run_traced_plan
        execute = importlib.import_module("phalanx.tensor.redistribute._execute")
        execute.run_traced_plan = watched  # type: ignore[attr-defined]  # put back below
        try:
            torch.compile(lambda x: x.full_tensor() * 2, backend="aot_eager", fullgraph=True)(x)
        finally:
            execute.run_traced_plan = plain  # type: ignore[attr-defined]  # as above

    torch._dynamo.reset()
    on_mesh(body, 1)
    torch._dynamo.reset()
    assert set(seen) == _traced.TRACED


def test_what_dynamo_tells_of_a_graph() -> None:
    seen: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x * 2, backend=keep)(torch.ones(3))
    torch._dynamo.reset()
    (graph,) = seen
    assert "_param_name_to_source" in vars(graph)
    (given,) = [node for node in graph.graph.nodes if node.op == "placeholder"]
    assert given._dynamo_source is not None
    assert {"example_value", "tensor_dict"} <= set(given.meta)
    output = importlib.import_module("torch._dynamo.output_graph")
    assert "gm._backend_id = " in inspect.getsource(output), "for caches of whole programs only"


def test_where_inputs_come_from() -> None:
    from torch._dynamo.source import AttrSource, LocalSource

    source = AttrSource(AttrSource(LocalSource("model"), "weight"), "grad")
    assert list(_recorded.attributes_of(source)) == ["grad", "weight"]
    local = _recorded.local_source(source)
    assert local.name.endswith(f".grad.{_recorded.LOCAL}"), local.name


def test_what_dynamo_asks_before_it_makes_a_dim_a_symbol() -> None:
    from torch._dynamo.variables import builder

    wanted = ["e", "tx", "source", "static_shapes"]
    assert list(inspect.signature(builder._automatic_dynamic).parameters)[:4] == wanted
    taken = inspect.signature(FakeTensorMode.from_tensor).parameters
    assert {"static_shapes", "source"} <= set(taken)


def test_the_list_of_files_to_read_is_made_anew_with_ours_on_it() -> None:
    from torch._dynamo import trace_rules

    trace_rules.get_legacy_mod_inlinelist.cache_clear()
    found = trace_rules.get_legacy_mod_inlinelist()
    assert {str(module.__file__) for module in _compilers.INLINED} < found


def test_frames_are_left_alone_and_what_they_call() -> None:
    made: list[Any] = []

    def called(x: Any) -> Any:
        return x * 2

    def left_alone(x: Any) -> Any:
        return called(x) + 1

    def keep(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(called, backend=keep)(torch.ones(3))
    assert len(made) == 1
    run_as_it_is(left_alone.__code__)
    torch.compile(left_alone, backend=keep)(torch.ones(4))
    torch._dynamo.reset()
    assert len(made) == 1, "neither it nor what it calls"
    assert RUNNERS in importlib.import_module("torch._dynamo.trace_rules").SKIP_DIRS


def test_each_member_that_is_listed_is_read_in_a_graph() -> None:
    values: list[Any] = [
        Shard(1),
        StridedShard(1, split_factor=2),
        Replicate(),
        Partial("max"),
        MaskPartial(),
    ]
    kinds = {type(value) for value in values}
    assert kinds == set(_compilers.READ) - {DeviceMesh}  # whose attributes are read as any object's

    def told(value: Any, names: tuple[str, ...]) -> list[Any]:
        return [getattr(value, name)() if name.startswith("is_") else getattr(value, name) for name in names]

    torch._dynamo.reset()
    for value in values:
        names = _compilers.READ[type(value)]
        compiled = torch.compile(
            lambda x, value=value, names=names: (x * 2, told(value, names)), backend="eager", fullgraph=True
        )
        assert compiled(torch.ones(2))[1] == told(value, names), value
    torch._dynamo.reset()
