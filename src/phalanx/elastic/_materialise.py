"""Gives models that were built on the meta device their initial values, the same on every worker.

Owns the rule: each module that has parameters or buffers of its own on the meta device gets memory for them, the global
generators are seeded from (seed, path of the module), and its ``reset_parameters()`` is called. So the values of a
module depend on the seed and its name alone: not on the order of modules, nor on who computes them. A sharded job does
the same unit by unit and keeps its cells of each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from phalanx._torch_private import module_buffers, module_parameters
from phalanx.elastic._rng import derive_seed, seed_everything

M = TypeVar("M", bound=nn.Module)


def materialise(model: M, *, seed: int = 0) -> M:
    """Give a model on the meta device memory and initial values: those that a sharded job with this seed begins with.

    Every module that has parameters of its own needs a ``reset_parameters()``, as torch's have.

    >>> with torch.device("meta"):
    ...     model = nn.Linear(2, 2)
    >>> torch.equal(materialise(model, seed=3).weight, materialise(nn.Linear(2, 2, device="meta"), seed=3).weight)
    True
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in meta_modules(model):
        fresh = {}
        for key, parameter in module_parameters(module).items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    values = torch.empty_like(parameter, device="cpu", requires_grad=False)
                    made[parameter] = nn.Parameter(values, parameter.requires_grad)
                fresh[key] = made[parameter]
            elif parameter in made.values():
                fresh[key] = parameter
        module_parameters(module).update(fresh)
        fill_buffers(module)
        initialise(module, path, seed, fresh)
    return model


def meta_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that have something of their own on the meta device, in the model's order."""
    return [(path, module) for path, module in model.named_modules() if any(_is_meta(t) for t in _own(module))]


def fill_buffers(module: nn.Module) -> None:
    """Give a module's own buffers memory where they have none."""
    for key, buffer in module_buffers(module).items():
        if buffer is not None and buffer.is_meta:
            module_buffers(module)[key] = torch.zeros_like(buffer, device="cpu")


def initialise(module: nn.Module, path: str, seed: int, fresh: Mapping[str, nn.Parameter]) -> None:
    """Have a module set its ``fresh`` parameters and its buffers, from random numbers that belong to it."""
    name = f"module {path or 'root'!r} ({type(module).__name__})"
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ValueError(
            f"{name} was built on the meta device and has no reset_parameters() that could give its parameters values: "
            "define one, or build the model in real memory"
        )
    with _own_numbers(), torch.no_grad():
        for parameter in fresh.values():
            parameter.fill_(float("nan") if parameter.dtype.is_floating_point else 0)
        seed_everything(derive_seed(seed, "initial", path))
        reset()
    for key, parameter in fresh.items():
        if module_parameters(module)[key] is not parameter or bool(parameter.isnan().any()):
            raise ValueError(
                f"reset_parameters() of {name} has not written all values of {key!r}, which was built on the meta "
                "device: it has to set every parameter of the module in place"
            )


@contextmanager
def _own_numbers() -> Iterator[None]:
    """Leave the global generators as they were: they belong to the script."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _own(module: nn.Module) -> list[Tensor]:
    found = [*module_parameters(module).values(), *module_buffers(module).values()]
    return [tensor for tensor in found if tensor is not None]


def _is_meta(tensor: Tensor) -> bool:
    return bool(getattr(tensor, "_local", tensor).is_meta)
