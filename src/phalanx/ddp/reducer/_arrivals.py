"""Notes which gradients have arrived, at the least cost per parameter.

Every followed parameter has one hook that runs after its gradient was accumulated. For most it is ``list.append``
itself, which costs a fraction of a microsecond; for the *watched* ones it is the owner's, which appends to ``inbox``
itself. ``drain`` returns the arrivals since the last call, in order.

Rejected: no hooks on small parameters, but looking at ``.grad`` of a bucket's members when its last one arrives, with
version counters to find a second gradient. On 2,000 parameters no gain could be seen in the noise of two comparisons:
what the hooks had cost, reading the gradients cost then (why is not known).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import nn

from phalanx._torch_private import post_accumulate_grad_hooks


class ArrivalWatch:
    """Follows parameters; see the module's text."""

    def __init__(self, on_watched: Callable[[nn.Parameter], None]) -> None:
        self.inbox: list[nn.Parameter] = []
        self._on_watched = on_watched
        self._index_of: dict[int, int] = {}
        self._hooks: dict[int, tuple[nn.Parameter, Any, bool]] = {}
        self._neighbours: list[Any] = []  # each parameter's dict of hooks, ours among them

    def follow(self, params: Sequence[nn.Parameter], watched: Collection[int]) -> None:
        """Follow exactly these parameters; those at the ``watched`` indices call back."""
        self._index_of = {id(param): index for index, param in enumerate(params)}
        for key in self._hooks.keys() - self._index_of.keys():
            self._hooks.pop(key)[1].remove()
        for index, param in enumerate(params):
            self._hook(param, index in watched)
        self._look_around()

    def also(self, params: Iterable[nn.Parameter]) -> None:
        """Follow these too, as unknown ones (index -1)."""
        for param in params:
            self._hook(param, False)
        self._look_around()

    def promote(self, param: nn.Parameter) -> None:
        """Let this one call back from now on."""
        self._hook(param, True)

    def indices(self, params: Iterable[nn.Parameter]) -> list[int]:
        # Runs once per parameter and step: map keeps the loop out of Python.
        found = list(map(self._index_of.get, map(id, params)))
        return [-1 if index is None else index for index in found]

    def drain(self) -> list[int]:
        arrivals = self.indices(self.inbox)
        self.inbox.clear()
        return arrivals

    def stop(self) -> None:
        for _, handle, _ in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._neighbours.clear()

    def _look_around(self) -> None:
        hooked: list[Any] = [param for param, _, _ in self._hooks.values()]
        self._neighbours = list(map(post_accumulate_grad_hooks, hooked))

    def run_last(self) -> None:
        """Put our hooks behind those that users registered since: they must see the gradient before it is sent."""
        if max(map(len, self._neighbours), default=0) <= 1:
            return
        for param, handle, _ in self._hooks.values():
            hooks = post_accumulate_grad_hooks(param)
            if len(hooks) > 1:
                # Not move_to_end: autograd walks the plain dict underneath, whose order that leaves as it is.
                hooks[handle.id] = hooks.pop(handle.id)

    def _hook(self, param: nn.Parameter, watched: bool) -> None:
        present = self._hooks.get(id(param))
        if present is not None:
            if present[2] == watched:
                return
            present[1].remove()
        if not param.requires_grad:  # frozen since: nothing arrives until a scan finds it trainable again
            self._hooks.pop(id(param), None)
            return
        hook = self._on_watched if watched else self.inbox.append
        self._hooks[id(param)] = (param, self._register(param, hook), watched)

    @staticmethod
    def _register(param: Any, hook: Callable[[nn.Parameter], None]) -> Any:
        return param.register_post_accumulate_grad_hook(hook)  # param is Any: torch has no types for it
