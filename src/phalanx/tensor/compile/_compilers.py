"""The one list of what torch.compile is told about this package, and ``install``.

Owns the list. Nothing of the compilers is imported for it: each change is made when they are. Their private names
stand here, in ``_recorded.py`` (what Dynamo notes beside graphs) and in ``_torch_private.py``, nowhere else; each has a
test in ``tests/tensor/test_compile_internals.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from phalanx._torch_private import FakeTensorMode
from phalanx.comm import DeviceMesh
from phalanx.comm.mesh import _mesh
from phalanx.comm.torch_interop._dynamo import run_as_it_is, when_imported
from phalanx.tensor.compile._fakes import faker, static_shapes
from phalanx.tensor.compile._local_program import local_compiler
from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.layout._placement import MaskPartial, Partial, Replicate, Shard, StridedShard
from phalanx.tensor.parallel import _boundaries, _loss, _loss_block, _style, _weights
from phalanx.tensor.random import _traced_draws
from phalanx.tensor.redistribute import _traced

INLINED = (_weights, _boundaries, _style, _loss_block, _mesh)  # what Dynamo reads, as it reads users' code
_KIND = ("is_partial", "is_replicate", "is_shard")
# What Dynamo may ask of a value that its graph holds; the answer is a part of the graph.
READ: dict[type, tuple[str, ...]] = {
    Shard: (*_KIND, "dim"),
    StridedShard: (*_KIND, "dim", "split_factor"),
    Replicate: _KIND,
    Partial: (*_KIND, "reduce_op"),
    MaskPartial: (*_KIND, "reduce_op"),
    DeviceMesh: (),  # its own module is read
}
IN_GRAPH: tuple[Any, ...] = (
    _style.enter,
    _style.leave,
    DTensor.from_local,
    _loss.cross_entropy,
)  # what it leaves to us, as one node of its graph


def install() -> None:
    """Tell each part of torch's compilers now or when it is imported. Does it once."""
    _replace(FakeTensorMode, "from_tensor", faker)
    for module, action in _ACTIONS.items():
        when_imported(module, action)


def _replace(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    plain = getattr(owner, name)
    if not hasattr(plain, "_phalanx"):
        wrapped: Any = functools.wraps(plain)(wrapper(plain))
        wrapped._phalanx = True
        setattr(owner, name, wrapped)


def _prepare_dynamo(rules: Any) -> None:
    """Say which operators send, which values may stand in graphs, and which functions are read or left to us."""
    _traced.library()
    _traced_draws.define_operator()
    # start-up: these import the compiler
    from phalanx._torch_private import EffectType, OpaqueMember, register_effectful_op, register_opaque_type

    for name in _traced.ordered_names():
        register_effectful_op(name, EffectType.ORDERED)
    for kind, names in READ.items():
        if "__fx_repr__" not in vars(kind):
            kind.__fx_repr__ = _named  # type: ignore[attr-defined]  # torch asks for it
            members = dict.fromkeys(names, OpaqueMember.USE_REAL)
            register_opaque_type(kind, typ="value", members=members)
    for function in IN_GRAPH:
        run_as_it_is(function.__code__)  # outside of graphs
        rules._allowed_callable_ids.add(id(function))
    _replace(rules, "get_legacy_mod_inlinelist", _with_ours)


def _with_ours(plain: Any) -> Callable[[], set[str]]:
    """Return torch's list of files to read with ours on it, also after torch has made it anew."""
    ours = {str(module.__file__) for module in INLINED}

    def inlined() -> set[str]:
        found: set[str] = plain() | ours
        return found

    inlined.cache_clear = plain.cache_clear  # type: ignore[attr-defined]  # torch clears it with its other lists
    return inlined


def _named(value: Any) -> tuple[str, dict[str, Any]]:
    name = f"_phalanx_{id(value)}"
    return name, {name: value}


_ACTIONS: dict[str, Callable[[Any], None]] = {
    "torch._dynamo.trace_rules": _prepare_dynamo,
    "torch._dynamo.variables.builder": lambda module: _replace(module, "_automatic_dynamic", static_shapes),
    "torch._functorch.aot_autograd": lambda module: _replace(module, "aot_module_simplified", local_compiler),
    "torch._dynamo.backends.common": lambda module: _replace(module, "aot_module_simplified", local_compiler),
    "torch._inductor.compile_fx": lambda module: _replace(module, "compile_fx", local_compiler),
}
