"""Captures and applies the state of a job: one nested dict of everything that decides what the next step computes.

Owns capture, apply and digest over the job's parts (model, optimizer, scheduler, scaler, the user's own objects).
Does not move or store anything: see ``_stream`` and ``_saves``. ``capture`` returns live tensors, ``apply`` copies
into the live objects; the digest depends on values only, not on the order in which dicts were filled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from phalanx.elastic.checkpoint._digest_tree import TensorDigest

State = dict[str, Any]


@runtime_checkable
class Stateful(Protocol):
    """Anything that can tell and take its state: optimizers, schedulers, scalers, averages, counters."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class StatefulObjects:
    """The objects whose state is the job's, by name."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, others: Mapping[str, Stateful]) -> None:
        for name, part in others.items():
            if not isinstance(part, Stateful):
                raise TypeError(
                    f"state[{name!r}] is a {type(part).__name__} without state_dict and load_state_dict; give it both"
                )
        self.model = model
        self.optimizer = optimizer
        self.others = dict(others)

    def capture(self) -> State:
        """Return the state now; its tensors are the live ones."""
        model = dict(self.model.state_dict())
        return {
            "model": model,
            "buffers": {name: b for name, b in self.model.named_buffers() if name not in model},
            "optimizer": self.optimizer.state_dict(),
            "others": {name: part.state_dict() for name, part in self.others.items()},
        }

    def apply(self, state: State, *, but: Collection[str] = (), keep_options: bool = False) -> None:
        """Become ``state``, apart from the objects named in ``but`` and, if they are to be kept, the optimizer's
        options (``param_groups``). The tensors in it may be taken over."""
        self.check_names(state)
        with torch.no_grad():
            self.model.load_state_dict(state["model"], strict=True)
            live = dict(self.model.named_buffers())
            for name, value in state["buffers"].items():
                live[name].copy_(value)
        own = {"param_groups": self.optimizer.state_dict()["param_groups"]} if keep_options else {}
        self.optimizer.load_state_dict({**state["optimizer"], **own})
        _restore_dtypes(self.optimizer, state["optimizer"])
        self.apply_objects({name: value for name, value in state["others"].items() if name not in but})

    def check_names(self, state: State) -> None:
        """Raise unless the state is of the same objects."""
        missing = set(self.others) ^ set(state["others"])
        if missing:
            raise ValueError(
                f"the state and this job differ in the objects {sorted(missing)}; "
                "construct the job with the same state=... as the one that made it"
            )

    def apply_objects(self, states: Mapping[str, Any]) -> None:
        """Give some of the other objects their states."""
        for name, value in states.items():
            self.others[name].load_state_dict(value)


def _restore_dtypes(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """``Optimizer.load_state_dict`` casts state to the parameter's dtype; put back what it rounded."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = [i for group in state["param_groups"] for i in group["params"]]
    for name, param in zip(names, params, strict=True):
        for key, value in state["state"].get(name, {}).items():
            loaded = optimizer.state[param].get(key)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[param][key] = value.to(loaded.device)


def digest(value: Any) -> str:
    """sha256 over names, shapes, dtypes and bits of a nested value; tensors as trees of their blocks.

    A ``TensorDigest`` may stand for a tensor that nobody has in one place.

    >>> digest({"a": 1, "b": torch.zeros(2)}) == digest({"b": torch.zeros(2), "a": 1})
    True
    """
    sha = hashlib.sha256()

    def feed(item: Any, path: str) -> None:
        if isinstance(item, Tensor):
            item = TensorDigest.of(item)
        if isinstance(item, TensorDigest):
            sha.update(f"{path}:{item.dtype}{item.shape};".encode())
            sha.update(item.root)
        elif isinstance(item, Mapping):
            for key in sorted(item, key=repr):
                feed(item[key], f"{path}.{key!r}")
        elif isinstance(item, (list, tuple)):
            sha.update(f"{path}:{len(item)};".encode())
            for i, entry in enumerate(item):
                feed(entry, f"{path}[{i}]")
        else:
            sha.update(f"{path}={item!r};".encode())

    feed(value, "")
    return sha.hexdigest()
