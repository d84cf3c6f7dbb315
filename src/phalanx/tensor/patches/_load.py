"""What ``torch.load`` may make of a file that holds DTensors, without unpickling anything else.

Owns the list of those names. Each makes a value of this package from numbers, names and tensors and does nothing
besides, so that a stranger's file can do no more with them than be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from phalanx.comm.mesh import _mesh
from phalanx.comm.mesh._layout import Axis, MeshLayout
from phalanx.tensor.core import _dtensor
from phalanx.tensor.layout import _spec
from phalanx.tensor.layout._placement import MaskPartial, Partial, Replicate, Shard, StridedShard

_HARMLESS: list[Callable[..., Any]] = [
    Axis, MeshLayout, MaskPartial, Partial, Replicate, Shard, StridedShard,
    _dtensor._rebuild, _spec._rebuild, _mesh._rebuild,
]  # fmt: skip


def install() -> None:
    torch.serialization.add_safe_globals(list(_HARMLESS))
