"""Parameters that several modules share, such as the weight of an embedding and of the layer that predicts its rows.

Owns ``keeping_shared_parameters``. Distributing a module makes a new parameter for each place that held one: two places
that shared a parameter would be trained apart from then on.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from phalanx._torch_private import module_parameters
from phalanx.tensor.core._dtensor import DTensor


@contextmanager
def keeping_shared_parameters(module: nn.Module) -> Iterator[None]:
    """Say what shares a parameter before the block shares one after it; warns where layouts make that impossible."""
    places: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for path, part in module.named_modules():
        for key, parameter in module_parameters(part).items():
            if parameter is not None:
                places.setdefault(parameter, []).append((f"{path}.{key}".lstrip("."), part, key))
    yield
    for found in places.values():
        made = [module_parameters(part).get(key) for _, part, key in found]
        if all(one is made[0] for one in made):
            continue
        specs = [one._spec if isinstance(one, DTensor) else None for one in made]
        if specs[0] is not None and all(spec is specs[0] for spec in specs):
            for _, part, key in found:
                module_parameters(part)[key] = made[0]
        else:
            laid_out = ", ".join(f"{name}: {spec!r}" for (name, _, _), spec in zip(found, specs, strict=True))
            warnings.warn(
                f"these shared one parameter and are now trained apart, because their layouts differ: {laid_out} "
                f"(None: a plain tensor). Lay them out alike, or assign one to the other",
                stacklevel=4,
            )
