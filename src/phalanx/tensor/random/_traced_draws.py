"""Random numbers in what torch.compile traces: drawing is an operator, and its stream is an input of the program.

Owns ``draw_like`` and ``Draws``. A graph that kept the seed and the number of the draw of its trace would give one mask
for ever. So the program gets a tensor with the seed and the next draw number of each mesh that it draws on; its k-th
draw on a mesh uses that number plus k, as the k-th one of eager would. Whoever calls the program reserves the numbers
before. The operator is a function of its inputs: recomputed in backward, it gives the same values.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx._torch_private import TracingContext
from phalanx.comm import DeviceMesh
from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.random import _philox
from phalanx.tensor.random._state import MASK, next_stream, reserve_draws, would_ask
from phalanx.tensor.redistribute._traced import TRACED, NumberTable, define

_fillings = NumberTable()  # layout, values of words, device: what a drawing operator is told by number
_KEPT = "_phalanx_draws"  # attribute of Dynamo's context: the meshes on which it saw a draw
_now = threading.local()  # ``draws``: of the program that this thread traces


def draw_like(tensor: DTensor, spec: Spec, make: _philox.Make) -> Tensor:
    """Return a local tensor laid out as ``spec`` and filled with the next draw, on the device of ``tensor``."""
    device = tensor._local.device
    if type(tensor._local) not in TRACED:
        return _philox.filled(spec, next_stream(spec.mesh), make, device)
    draws: Draws | None = getattr(_now, "draws", None)
    if draws is not None:
        return draws.next_of(spec, make, device)
    vars(TracingContext.get()).setdefault(_KEPT, {})[spec.mesh] = None
    return torch.empty(spec.local_shape, dtype=spec.dtype, device=device)


class Draws:
    """The draws of one program: on which meshes, and how many on each."""

    def __init__(self) -> None:
        self._meshes: list[DeviceMesh] = list(getattr(TracingContext.get(), _KEPT, ()))
        self._made: Counter[DeviceMesh] = Counter()
        self._streams: Sequence[Tensor] = ()

    def example_inputs(self) -> list[Tensor]:
        return [torch.zeros(2, dtype=torch.int64) for _ in self._meshes]

    @contextmanager
    def traced(self, streams: Sequence[Tensor]) -> Iterator[None]:
        """Take the draws of operations inside the block from ``streams``, one for each mesh."""
        self._streams, self._made = streams, Counter()
        previous, _now.draws = getattr(_now, "draws", None), self
        try:
            yield
        finally:
            _now.draws, self._streams = previous, ()

    def next_of(self, spec: Spec, make: _philox.Make, device: torch.device) -> Tensor:
        mesh = spec.mesh
        number = _fillings.number_of((spec, make, device), object())
        stream = self._streams[self._meshes.index(mesh)]
        draw, self._made[mesh] = self._made[mesh], self._made[mesh] + 1
        result: Tensor = torch.ops.phalanx.draw(stream, draw, number)
        return result

    def would_ask(self) -> bool:
        """Return whether a draw would ask the other ranks for the seed, which they are asked where eager asks."""
        return any(map(would_ask, self._meshes))

    def reserve(self) -> list[Tensor]:
        """Return the streams for one call of the program, whose draws nobody else gets."""
        streams = []
        for mesh in self._meshes:
            seed, first = reserve_draws(mesh, self._made[mesh])
            streams.append(torch.tensor([seed - (1 << 64) if seed >> 63 else seed, first]))
        return streams


def _draw(stream: Tensor, draw: int, number: int) -> Tensor:
    spec, make, device = _fillings[number]
    seed, first = stream.tolist()
    return _philox.filled(spec, (seed & MASK, first + draw), make, device)


def _draw_shape(stream: Tensor, draw: int, number: int) -> Tensor:
    spec, _, device = _fillings[number]
    return torch.empty(spec.local_shape, dtype=spec.dtype, device=device)


def define_operator() -> None:
    """Define ``torch.ops.phalanx.draw``, once."""
    if not hasattr(torch.ops.phalanx, "draw"):
        define("draw(Tensor stream, int draw, int number) -> Tensor", _draw, _draw_shape)
