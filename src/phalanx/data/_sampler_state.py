"""Encodes what is saved of a sampler: a few numbers in a dict of JSON, the same for every rank and world size.

Owns the format and its checks. Version 1: version, seed, epoch, position (samples of the epoch that are
done), length (of the dataset), order (what a position refers to), and parameters, if the order has any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SamplerState:
    """A position in a training run.

    >>> SamplerState(seed=0, epoch=1, position=3, length=5, order="sequential").to_dict()["position"]
    3
    """

    seed: int
    epoch: int
    position: int
    length: int
    order: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        values = {"version": VERSION, **asdict(self)}
        return values if self.parameters else {name: values[name] for name in values if name != "parameters"}

    @classmethod
    def checked(cls, state: Mapping[str, Any], *, length: int, order: str, last: int) -> SamplerState:
        """Read a dict, and refuse what does not fit a dataset of ``length`` under ``order``."""
        if state.get("version") != VERSION:
            raise ValueError(
                f"sampler state has version {state.get('version')!r}; this Phalanx reads version {VERSION}"
            )
        numbers = {name: integer_of(state, name) for name in ("seed", "epoch", "position", "length")}
        if numbers["length"] != length:
            raise ValueError(
                f"sampler state is of a dataset of length {numbers['length']}, but this dataset's length is "
                f"{length}: positions would mean other samples. Load it with the dataset it was saved with"
            )
        if state.get("order") != order:
            raise ValueError(
                f"sampler state is of order {state.get('order')!r}, but this sampler's is {order!r}: "
                "positions would mean other samples. Use the same shuffle and order as when it was saved"
            )
        if not 0 <= numbers["position"] <= last:
            raise ValueError(f"sampler state has position {numbers['position']}; expected one in [0, {last}]")
        if numbers["epoch"] < 0:
            raise ValueError(f"sampler state has epoch {numbers['epoch']}; expected none below 0")
        return cls(order=order, **numbers, parameters=parameters_of(state))


def parameters_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the order's parameters in a state; none in most."""
    parameters = state.get("parameters", {})
    if not isinstance(parameters, Mapping):
        raise ValueError(f"sampler state has parameters of type {type(parameters).__name__}; expected a dict")
    return parameters


def integer_of(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"sampler state has {name}={value!r}; expected an integer")
    return value
