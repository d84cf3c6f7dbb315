"""Finds the first module or parameter that is not finite while a slot is computed, by hooks on the model.

Owns the hooks: there only while a step that was found wanting is computed again, so that a sound step pays nothing.
They look and change nothing. What was found travels to the other workers as a small number in the slot's note; all
workers have the same model, so each can tell the name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phalanx._nested_values import find_tensors
from phalanx.elastic._guard import GRADIENT

FIRST_BIT = 3
"""Bits of a note below this one say what is wrong with a slot; those above it where it began."""


class FirstNonFinite:
    """Watches a model. ``is_finite`` looks at one tensor."""

    def __init__(self, model: nn.Module, is_finite: Callable[[Tensor], bool]) -> None:
        self._model = model
        self._is_finite = is_finite
        self._handles: list[RemovableHandle] = []
        self._found: int | None = None

    def install(self, *, with_grads: bool = True) -> None:
        """Look from now on; without ``with_grads`` at modules only (see ``note_gradient``)."""
        modules = list(self._model.modules())
        for i, module in enumerate(modules):
            self._handles.append(module.register_forward_hook(self._forward_hook(2 * i)))
        for j, param in enumerate(self._trained() if with_grads else ()):
            self._handles.append(param.register_post_accumulate_grad_hook(self._grad_hook(2 * len(modules) + j)))

    def note_gradient(self, name: str) -> None:
        """Take note of a gradient that is not finite, where no hook finds it at its parameter."""
        names = [name for name, param in self._model.named_parameters() if param.requires_grad]
        if self._found is None and name in names:
            self._found = 2 * len(list(self._model.modules())) + names.index(name)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._found = None

    def take_code(self) -> int:
        """Return where it began in the slot that is done, for its note; 0: nowhere. The next slot begins."""
        found, self._found = self._found, None
        return 0 if found is None else (found + 1) << FIRST_BIT

    def name(self, note: int) -> str:
        """Return the name behind the code in a note; empty if there is none."""
        index = (note >> FIRST_BIT) - 1
        if index < 0:
            return ""
        modules = [f"module {name}" if name else "the model" for name, _ in self._model.named_modules()]
        places = [text for name in modules for text in (f"the output of {name}", f"the input of {name}")]
        trained = [name for name, param in self._model.named_parameters() if param.requires_grad]
        places += [f"{GRADIENT}{name}" for name in trained]
        return places[index] if index < len(places) else ""

    def _trained(self) -> list[nn.Parameter]:
        return [param for param in self._model.parameters() if param.requires_grad]

    def _forward_hook(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if self._found is None and not all(map(self._is_finite, find_tensors(output))):
                # What came in like that was made between modules, or is in the samples.
                self._found = index + (not all(map(self._is_finite, find_tensors(args))))

        return look

    def _grad_hook(self, index: int) -> Callable[[Tensor], None]:
        def look(param: Tensor) -> None:
            if self._found is None and param.grad is not None and not self._is_finite(param.grad):
                self._found = index

        return look
