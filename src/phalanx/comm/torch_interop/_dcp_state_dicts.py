"""Wraps torch's helpers around ``torch.distributed.checkpoint`` that gather, broadcast and stage state dicts.

Owns the wrappers around them. The helpers ask whether a value is torch's own DTensor or ShardedTensor, and take every
other one for a plain tensor that each rank has whole: ``get_model_state_dict(full_state_dict=True)`` would give back
parts, ``async_save`` would copy them as if they were of the global shape. The wrappers do for a ``Spread`` what the
helpers do for torch's own; calls without one pass straight on.

torch's modules are wrapped when they are imported, or at once if they are there; nothing here imports them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from phalanx._after_import import after_import
from phalanx.comm.torch_interop._dcp import Spread

_HELPERS = "torch.distributed._state_dict_utils"
_STAGER = "torch.distributed.checkpoint._state_dict_stager"
# Those that may have imported helpers by name before we came.
_USERS = ("torch.distributed.checkpoint.state_dict", "torch.distributed.checkpoint.staging")


def install() -> None:
    """Wrap now or later. Does it once."""
    for name, wrap in ((_HELPERS, _wrap_helpers), (_STAGER, _wrap_stager)):
        module = sys.modules.get(name)
        if module is None:
            after_import(name, wrap)
        else:
            wrap(module)


def _wrap_helpers(module: Any) -> None:
    for name, wrapper in _WRAPPERS.items():
        plain = getattr(module, name)
        if hasattr(plain, "_phalanx"):
            continue
        wrapped: Any = functools.wraps(plain)(wrapper(plain))
        wrapped._phalanx = True
        for place in (module, *(sys.modules.get(user) for user in _USERS)):
            if getattr(place, name, None) is plain:
                setattr(place, name, wrapped)


def _wrap_stager(module: Any) -> None:
    stager = module.StateDictStager
    plain = stager._offload_tensor
    if hasattr(plain, "_phalanx"):
        return

    @functools.wraps(plain)
    def offload_tensor(self: Any, x: Any, memo: dict[int, Any], non_blocking: bool = False) -> Any:
        if not isinstance(x, Spread):
            return plain(self, x, memo, non_blocking=non_blocking)
        staged = x._over(lambda local: plain(self, local.detach(), memo, non_blocking=non_blocking))
        memo[id(x)] = staged
        return staged

    offload_tensor._phalanx = True  # type: ignore[attr-defined]  # a mark that this was done
    stager._offload_tensor = offload_tensor


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for entry in value.values():
            yield from _leaves(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _leaves(entry)
    else:
        yield value


def _any_spread(value: Any) -> bool:
    return any(isinstance(leaf, Spread) for leaf in _leaves(value))


def _gatherer(plain: Any) -> Callable[..., Any]:
    """Return every Spread whole, one after the other: with ``cpu_offload`` no two of them are on the device
    together."""

    def gather_state_dict(state_dict: Any, **options: Any) -> Any:
        if isinstance(state_dict, Spread):
            return plain(state_dict._whole(), **options)
        if not _any_spread(state_dict):
            return plain(state_dict, **options)
        ranks = options.get("ranks_only") or ()
        kept = not ranks or dist.get_rank(options.get("pg")) in ranks
        if isinstance(state_dict, dict):
            whole = {key: gather_state_dict(value, **options) for key, value in state_dict.items()}
            return whole if kept else {}
        values = [gather_state_dict(value, **options) for value in state_dict]
        return type(state_dict)(values) if kept else None

    return gather_state_dict


def _allocator(plain: Any) -> Callable[..., Any]:
    """Room on the CPU for a copy: of each local tensor, in the layout of the whole."""

    def create_cpu_state_dict(state_dict: Any, *args: Any, **options: Any) -> Any:
        if isinstance(state_dict, Spread):
            return state_dict._over(lambda local: plain(local.detach(), *args, **options))
        if not _any_spread(state_dict):
            return plain(state_dict, *args, **options)
        if isinstance(state_dict, dict):
            return {key: create_cpu_state_dict(value, *args, **options) for key, value in state_dict.items()}
        return type(state_dict)([create_cpu_state_dict(value, *args, **options) for value in state_dict])

    return create_cpu_state_dict


def _broadcaster(plain: Any) -> Callable[..., Any]:
    """Return each rank cuts its parts from what the first rank has sent to all."""

    def broadcast_tensors(full: Any, local: dict[str, Any], keys: list[str], *args: Any, **options: Any) -> None:
        ours = {key: local[key] for key in keys if isinstance(local.get(key), Spread)}
        plain(full, local, keys, *args, **options)
        for key, like in ours.items():
            local[key] = like._cut_from(local[key])

    return broadcast_tensors


def _number_broadcaster(plain: Any) -> Callable[..., Any]:
    """Tensors of one number travel beside the others, with what is no tensor."""

    def broadcast_state_dict(
        full_state_dict: Any, local_state_dict: dict[str, Any], *args: Any, **options: Any
    ) -> None:
        ours = {key: value for key, value in local_state_dict.items() if isinstance(value, Spread)}
        plain(full_state_dict, local_state_dict, *args, **options)
        for key, like in ours.items():
            given = local_state_dict.get(key)
            if isinstance(given, torch.Tensor) and not isinstance(given, Spread):
                local_state_dict[key] = like._cut_from(given)

    return broadcast_state_dict


def _distributor(plain: Any) -> Callable[..., Any]:
    """Return each rank has whole tensors; the first one's are spread."""

    def distribute_state_dict(
        full_state_dict: Any, local_state_dict: dict[str, Any], *args: Any, **options: Any
    ) -> None:
        ours = {
            key: local_state_dict[key]
            for key, value in full_state_dict.items()
            if isinstance(value, torch.Tensor) and isinstance(local_state_dict.get(key), Spread)
        }
        plain(full_state_dict, local_state_dict, *args, **options)
        for key, like in ours.items():
            given = local_state_dict[key]
            if not isinstance(given, Spread):  # else loading brings it into the layout
                local_state_dict[key] = like._distributed_from(given)

    return distribute_state_dict


_WRAPPERS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "_gather_state_dict": _gatherer,
    "_create_cpu_state_dict": _allocator,
    "_broadcast_state_dict": _number_broadcaster,
    "_broadcast_tensors": _broadcaster,
    "_distribute_state_dict": _distributor,
}
