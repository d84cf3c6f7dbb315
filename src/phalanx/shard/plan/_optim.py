"""Runs optimizers over sharded parameters: each rank updates its own shards; the state is sharded like them.

Element-wise optimizers of torch also take sharded parameters directly. ``ShardedOptimizer`` hands the local tensors to
any optimizer, and its state dict speaks of parameters by name, with sharded tensors in it, so that it can be saved and
loaded under another layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from phalanx._torch_faults import check_fused
from phalanx.shard.tensor._tensor import ShardedTensor, same_layout


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters, and sharded tensors that are plain attributes, each once, with their names.

    >>> named = dict(named_params_with_sharded_tensor(model))           # doctest: +SKIP
    >>> optimizer = ShardedOptimizer(named, torch.optim.SGD, lr=0.1)    # doctest: +SKIP
    """
    seen: set[int] = set()
    for path, part in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        for name, value in vars(part).items():
            if isinstance(value, ShardedTensor) and id(value) not in seen:
                seen.add(id(value))
                yield (f"{path}.{name}" if path else name), value
    yield from module.named_parameters(prefix=prefix, recurse=recurse)


class ShardedOptimizer(optim.Optimizer):
    """Runs ``optimizer_class`` on plain parameters and on the local shards of sharded ones."""

    def __init__(
        self,
        named_params: Mapping[str, Tensor],
        optimizer_class: type[optim.Optimizer],
        *optimizer_args: Any,
        **optimizer_kwargs: Any,
    ) -> None:
        self.named_params = dict(named_params)
        local = [tensor for value in self.named_params.values() for tensor in _local(value)]
        # A rank may hold no shard at all; an optimizer refuses an empty list.
        self._optim = optimizer_class(local or [torch.empty(0)], *optimizer_args, **optimizer_kwargs)
        check_fused(self._optim, "ShardedOptimizer")
        self.param_groups = self._optim.param_groups
        self.state = self._optim.state
        self.defaults = self._optim.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        check_fused(self._optim, "ShardedOptimizer")
        return self._optim.step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """``params`` maps names to tensors."""
        named = dict(param_group["params"])
        taken = sorted(set(named) & set(self.named_params))
        if taken:
            raise ValueError(f"parameters {taken} are in the optimizer already")
        self.named_params.update(named)
        local = [tensor for value in named.values() for tensor in _local(value)]
        self._optim.add_param_group({**param_group, "params": local or [torch.empty(0)]})

    def state_dict(self) -> dict[str, Any]:
        """``state``: parameter name -> entry -> tensor, sharded where the parameter is; ``param_groups`` with names."""
        return {
            "state": {name: _gathered_state(value, self.state) for name, value in self.named_params.items()},
            "param_groups": [{**group, "params": self._names(group["params"])} for group in self._optim.param_groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """From a state dict of any layout; what is sharded otherwise is resharded."""
        saved = state_dict["state"]
        missing = sorted(set(self.named_params) - set(saved))
        if missing:
            raise KeyError(f"the state dict has no state for {missing[:5]}; it has {sorted(saved)[:5]}")
        for name, value in self.named_params.items():
            for index, tensor in enumerate(_local(value)):
                self.state[tensor] = {key: _part(entry, value, index) for key, entry in saved[name].items()}
            if not _local(value):  # take part in the resharding of others
                for entry in saved[name].values():
                    _aligned(entry, value)
        for group, other in zip(self._optim.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: entry for key, entry in other.items() if key != "params"})

    def _names(self, tensors: list[Tensor]) -> list[str]:
        ids = {id(tensor) for tensor in tensors}
        return [name for name, value in self.named_params.items() if any(id(t) in ids for t in _local(value))]


def _local(value: Tensor) -> list[Tensor]:
    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]


def _gathered_state(value: Tensor, state: Mapping[Tensor, Any]) -> dict[str, Any]:
    if not isinstance(value, ShardedTensor):
        return dict(state.get(value, {}))
    parts = [state.get(shard.tensor, {}) for shard in value.local_shards()]
    entries: dict[str, Any] = {}
    for key in parts[0] if parts else ():
        values = [part[key] for part in parts]
        shaped = all(
            isinstance(entry, Tensor) and list(entry.shape) == shard.metadata.shard_sizes
            for entry, shard in zip(values, value.local_shards(), strict=True)
        )
        entries[key] = value._with_tensors(values) if shaped else values[0]
    return entries


def _aligned(entry: Any, value: Tensor) -> Any:
    """Return the entry, in the layout of the parameter."""
    if isinstance(entry, ShardedTensor) and isinstance(value, ShardedTensor) and not same_layout(entry, value):
        copied: ShardedTensor = entry._with_tensors([shard.tensor.detach() for shard in entry.local_shards()])
        return copied.reshard(value.sharding_spec())
    return entry


def _part(entry: Any, value: Tensor, index: int) -> Any:
    aligned = _aligned(entry, value)
    if isinstance(aligned, ShardedTensor):
        return aligned.local_shards()[index].tensor.clone()
    return aligned.clone() if isinstance(aligned, Tensor) else aligned
