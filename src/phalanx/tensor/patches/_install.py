"""The one list of what this package changes in torch from outside, and ``install``, which does it once.

Owns the list. Each function is replaced by a wrapper of it that knows DTensors; whoever imported it by name before
keeps the plain one. ``torch.load`` is told which names make values of this package from numbers, names and tensors and
do nothing besides, so that a stranger's file can do no more with them than be refused.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack
from torch import nn
from torch.utils import checkpoint

from phalanx._torch_private import (
    CheckpointFrame,
    foreach_types,
    jit_recursive,
    muon,
    optimizer_foreach_types,
)
from phalanx.comm.mesh import _mesh
from phalanx.comm.mesh._mesh_layout import Axis, MeshLayout
from phalanx.comm.torch_interop import _dcp_state_dicts, _dynamo
from phalanx.tensor.core import _dtensor
from phalanx.tensor.layout import _spec
from phalanx.tensor.layout._placement import MaskPartial, Partial, Replicate, Shard, StridedShard
from phalanx.tensor.patches import _operators
from phalanx.tensor.patches._autograd_function import function_apply
from phalanx.tensor.patches._torch_functions import (
    edge_maker,
    grouper,
    input_giver,
    input_saver,
    module_compiler,
    orthogonalizer,
    packer,
    reentrant_forward,
    tracer,
)
from phalanx.tensor.random._ops import sparse_init
from phalanx.tensor.random._state import seeder, state_restorer, state_saver

# (module or class, name, what wraps it)
_PATCHES: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (torch.autograd.Function, "apply", function_apply),
    # tracers and others that would look at the wrapper
    (torch.jit, "trace", tracer),
    (torch.jit, "trace_module", tracer),
    (torch.jit, "_get_trace_graph", tracer),  # torch.onnx
    (jit_recursive, "create_script_module", module_compiler),
    (torch.autograd.graph, "get_gradient_edge", edge_maker),
    (torch, "to_dlpack", packer),
    (torch.utils.dlpack, "to_dlpack", packer),
    # activation checkpoints
    (CheckpointFrame, "save_inputs", input_saver),
    (CheckpointFrame, "get_inputs", input_giver),
    (checkpoint.CheckpointFunction, "forward", reentrant_forward),
    # grouping of tensors by device and dtype; each of these modules has imported the function by name
    *(
        (importlib.import_module(module), "_group_tensors_by_device_and_dtype", grouper)
        for module in (
            "torch.utils._foreach_utils",
            "torch.optim.optimizer",
            "torch.optim.swa_utils",
            "torch.nn.utils.clip_grad",
        )
    ),
    (muon, "_zeropower_via_newtonschulz", orthogonalizer),
    # random numbers
    *(
        (module, name, wrapper)
        for module in (torch, torch.random)
        for name, wrapper in (
            ("manual_seed", seeder),
            ("seed", seeder),
            ("get_rng_state", state_saver),
            ("set_rng_state", state_restorer),
        )
    ),
    (nn.init, "sparse_", sparse_init),
)

# What ``torch.load`` may call.
_LOADABLE: list[Callable[..., Any]] = [
    Axis, MeshLayout, MaskPartial, Partial, Replicate, Shard, StridedShard,
    _dtensor._rebuild, _spec._rebuild, _mesh._rebuild,
]  # fmt: skip


def install() -> None:
    """Make every change of the list. Does it once, whoever asks again."""
    made: dict[Any, Any] = {}  # what stands under several names stays one function
    for owner, name, wrapper in _PATCHES:
        found = inspect.getattr_static(owner, name)
        kind = type(found) if isinstance(found, (classmethod, staticmethod)) else None
        plain = found.__func__ if kind else found
        if hasattr(plain, "_phalanx"):
            continue
        if plain not in made:
            made[plain] = functools.wraps(plain)(wrapper(plain))
            made[plain]._phalanx = True
        setattr(owner, name, kind(made[plain]) if kind else made[plain])
    for types in (optimizer_foreach_types, foreach_types):
        if _dtensor.DTensor not in types:
            types.append(_dtensor.DTensor)
    torch.serialization.add_safe_globals(list(_LOADABLE))
    _dcp_state_dicts.install()
    _dynamo.install()
    _operators.install()
