"""Lists the parameters that take part: which ones, in which order, under which names; and whether that changed.

``ParameterScanner`` answers once per forward, in a fraction of a microsecond per parameter, whether the
module still has the parameters of the last answer: that is what makes freezing, unfreezing, adding and removing
parameters after wrapping work. Agreement between ranks is the reducer's business.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import nn

from phalanx._torch_private import module_children, module_parameters
from phalanx.comm.torch_interop._dcp import Spread
from phalanx.ddp.buckets._assignment import ParamInfo
from phalanx.ddp.buckets._local_tensors import described_part, local_part


@dataclass(frozen=True)
class NamedParameter:
    """One parameter that takes part. Tied parameters appear once, under their first name.

    ``param`` is the module's; ``part`` is what of it this rank trains: itself, or a distributed one's local tensor.
    """

    name: str
    param: nn.Parameter
    sparse: bool

    @property
    def part(self) -> nn.Parameter:
        part: nn.Parameter = local_part(self.param)  # type: ignore[assignment]  # a leaf, which is all that is asked of it
        return part

    @property
    def info(self) -> ParamInfo:
        part = self.part
        return ParamInfo(part.numel(), part.dtype, part.device, self.sparse)

    def describe(self) -> list[object]:
        """Return what must be equal on all ranks, as JSON."""
        part, where = self.part, described_part(self.param)
        return [self.name, list(part.shape), str(part.dtype), list(part.stride()), self.sparse, where]


def trained_parameters(module: nn.Module, ignored: Collection[str]) -> Iterator[NamedParameter]:
    """Trainable parameters in order of registration, without the ignored and without repeating tied ones."""
    seen: set[int] = set()
    for module_name, submodule in module.named_modules():
        sparse = isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse
        for own_name, param in submodule.named_parameters(recurse=False):
            # Torch writes a parameter of the root module as ".name"; trainers pass both spellings.
            plain = f"{module_name}.{own_name}" if module_name else own_name
            if not param.requires_grad or plain in ignored or f"{module_name}.{own_name}" in ignored:
                continue
            if id(param) not in seen:
                seen.add(id(param))
                yield NamedParameter(plain, param, sparse)


class ParameterScanner:
    """Notices that a module's set of trainable parameters changed, without rebuilding names each time."""

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._module = module
        self._ignored = ignored
        self._members: list[NamedParameter] = []
        self._modules: list[nn.Module] = []
        self._signature: list[int | bool] = []
        self._parameters: list[nn.Parameter] = []
        self.refresh()

    @property
    def members(self) -> list[NamedParameter]:
        return self._members

    def refresh(self) -> None:
        self._members = list(trained_parameters(self._module, self._ignored))
        self._modules = list(self._module.modules())
        self._any_parts = any(isinstance(member.param, Spread) for member in self._members)
        self._signature = self._current_signature()

    def changed(self) -> bool:
        """Return whether the trainable parameters differ from the last look; if so, ``members`` is the new list."""
        if self._current_signature() == self._signature:
            return False
        before = [id(member.part) for member in self._members]
        self.refresh()
        return before != [id(member.part) for member in self._members]

    def _current_signature(self) -> list[int | bool]:
        signature: list[int | bool] = []
        parameters: list[torch.Tensor] = []
        for module in self._modules:
            children, own = module_children(module), module_parameters(module)
            if children:
                signature.extend(map(id, children.values()))
            if own:
                parameters.extend(param for param in own.values() if param is not None)
        if self._any_parts:
            parameters = [local_part(param) for param in parameters]
        signature.extend(map(id, parameters))
        signature.extend(map(attrgetter("requires_grad"), parameters))
        return signature
