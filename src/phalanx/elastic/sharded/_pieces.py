"""Pieces: what this worker holds of each parameter, as the optimizer sees it.

Owns ``Piece`` and the exchange of an optimizer's parameters for pieces. A piece is the part of a parameter in one range
that this worker holds without a gap: a parameter of one dim (of the original shape if it is the whole parameter and the
optimizer works on matrices) on the memory of the section's storage. The groups of the optimizer stay the same
dicts, so schedulers go on with them; its state is kept per piece, and cut and joined anew when holdings change.

Invariant: the update of an element does not depend on where pieces end. Pieces end at cells, which end at multiples of
64 elements of the flat vector, and optimizers that look at more than the element get whole parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.fsdp.layout._unit_layout import Range, intersect

ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers that treat every element alike; all others are given whole parameters."""

State = dict[str, Any]


def works_on_matrices(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer must see whole parameters.

    Raises ``ValueError`` for those that look at all parameters together, or take no dense gradient.
    """
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise ValueError(
            f"a sharded job cannot use {type(optimizer).__name__}: it needs all parameters at once, or sparse "
            "gradients. Use an optimizer that updates each parameter by itself, or leave fully_shard out"
        )
    return type(optimizer) not in ELEMENTWISE


@dataclass(eq=False)
class Piece:
    """Elements ``begin`` to before ``end`` of one parameter's section, on this worker."""

    unit: int
    section: int
    parameter: int
    begin: int
    end: int
    tensor: nn.Parameter
    grad: Tensor
    """Where the gradient of it lies when it was reduced."""
    states: dict[str, State] = field(default_factory=dict)
    """By kind, what belongs to its elements: ``optimizer`` has the very dict that the optimizer uses."""

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.unit, self.section, self.parameter)


def piece_ranges(held: Sequence[Range], extents: Sequence[Range]) -> list[tuple[int, int, int]]:
    """Return (parameter, begin, end) for each range of a parameter that is held without a gap.

    >>> piece_ranges([(0, 64), (128, 256)], [(0, 100), (128, 192), (192, 200)])
    [(0, 0, 64), (1, 128, 192), (2, 192, 200)]
    """
    return [
        (index, begin, end)
        for index, extent in enumerate(extents)
        for begin, end in intersect(held, [extent])
        if begin < end
    ]


def is_by_element(value: Any, numel: int, shape: Sequence[int]) -> bool:
    """Return whether a value of an optimizer's state has one number for each element of its parameter."""
    return (
        isinstance(value, Tensor) and value.dim() > 0 and value.numel() == numel and tuple(value.shape) == tuple(shape)
    )


def cut_state(state: Mapping[str, Any], shape: Sequence[int], begin: int, end: int) -> State:
    """Return the state of elements ``begin`` to ``end`` (counted from the parameter's first) out of a whole one's.

    >>> cut_state({"step": torch.tensor(3.0), "sum": torch.arange(6.0).view(2, 3)}, (2, 3), 1, 3)
    {'step': tensor(3.), 'sum': tensor([1., 2.])}
    """
    numel = torch.Size(shape).numel()
    found: State = {}
    for key, value in state.items():
        if is_by_element(value, numel, shape):
            found[key] = value.reshape(-1)[begin:end].clone()
        else:
            found[key] = value.clone() if isinstance(value, Tensor) else value
    return found


def join_states(parts: Sequence[tuple[State, int]]) -> State:
    """Return one state for neighbouring ranges of so many elements each; numbers of all of them are alike.

    >>> join_states([({"step": 2, "sum": torch.ones(2)}, 2), ({"step": 2, "sum": torch.zeros(1)}, 1)])
    {'step': 2, 'sum': tensor([1., 1., 0.])}
    """
    first = parts[0][0]
    found: State = {}
    for key, value in first.items():
        if is_by_element(value, parts[0][1], (parts[0][1],)):
            found[key] = torch.cat([state[key] for state, _ in parts])
        else:
            found[key] = value
    return found


class PieceOptimizer:
    """An optimizer whose parameters are this worker's pieces of the model's."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, keys: Mapping[int, tuple[int, int, int]], *, matrices: bool
    ) -> None:
        """``keys`` says by ``id`` which (unit, section, parameter) each of the model's parameters is."""
        self.optimizer = optimizer
        self.matrices = matrices
        self.is_applying = False
        """Whether a step is being committed: the optimizer may step then only."""
        optimizer.register_step_pre_hook(self._check_applying)
        self._groups: list[list[tuple[int, int, int]]] = []
        for number, group in enumerate(optimizer.param_groups):
            self._groups.append([])
            for param in group["params"]:
                if id(param) not in keys:
                    raise ValueError(
                        f"the optimizer's group {number} holds a parameter of shape {tuple(param.shape)} that "
                        "fully_shard does not manage: make the optimizer after fully_shard, from model.parameters()"
                    )
                self._groups[-1].append(keys[id(param)])
        self.numbers = {key: number for number, key in enumerate(key for each in self._groups for key in each)}
        """The number that the optimizer's state dict would give each parameter, unsharded."""
        self.initial = {keys[id(p)]: dict(state) for p, state in optimizer.state.items()}
        """State that the optimizer had before the job began, of whole parameters."""

    def _check_applying(self, *unused: Any) -> None:
        if not self.is_applying:
            raise RuntimeError(
                "optimizer.step() outside of step.commit(): a sharded job steps its optimizer when all workers are "
                "prepared, neither in hooks of backward nor in the loop. Leave the call out"
            )

    def step(self) -> None:
        """Update this worker's pieces."""
        self.is_applying = True
        try:
            self.optimizer.step()
        finally:
            self.is_applying = False

    @property
    def group_sizes(self) -> list[int]:
        """How many of the model's parameters each group of the optimizer has."""
        return list(map(len, self._groups))

    def release(self) -> None:
        """Let go of the parameters that the optimizer was made with."""
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []

    def use(self, pieces: Iterable[Piece]) -> None:
        """Give the optimizer these pieces with their states, and no others."""
        by_key: dict[tuple[int, int, int], list[Piece]] = {}
        for piece in pieces:
            by_key.setdefault(piece.key, []).append(piece)
        state = self.optimizer.state
        state.clear()
        for group, keys in zip(self.optimizer.param_groups, self._groups, strict=True):
            mine = [piece for key in keys for piece in by_key.get(key, [])]
            group["params"] = [piece.tensor for piece in mine]
            for piece in mine:
                if piece.states.get("optimizer"):
                    state[piece.tensor] = piece.states["optimizer"]

    def collect(self, pieces: Iterable[Piece]) -> None:
        """Take the states that the optimizer has made since."""
        for piece in pieces:
            found = self.optimizer.state.get(piece.tensor)
            if found is not None:
                piece.states["optimizer"] = found
