"""The state of random numbers on a mesh: a seed and how many draws were made; the same on all its ranks.

Owns ``manual_seed``, ``get_rng_state``, ``set_rng_state`` and ``next_stream``. The seed is torch's own, agreed on
by one broadcast per mesh; ``torch.manual_seed`` starts anew. torch's ``get_rng_state`` / ``set_rng_state`` (which
activation checkpointing uses) carry this state along: ``install`` wraps them.

Invariant: all ranks of a mesh make the same draws on it, in the same order.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import DeviceMesh
from phalanx.comm._context import rank_token

MASK = (1 << 64) - 1


class _RankState:
    """Of one rank: draws per mesh, and how often torch was seeded."""

    def __init__(self) -> None:
        self.epoch = 0
        self.meshes: dict[DeviceMesh, tuple[int, int, int]] = {}  # mesh -> (epoch, seed, draws)


_process_state = _RankState()
_simulated: weakref.WeakKeyDictionary[Any, _RankState] = weakref.WeakKeyDictionary()
_snapshots: dict[int, tuple[weakref.ref[Tensor], dict[DeviceMesh, tuple[int, int, int]]]] = {}


def _rank_state() -> _RankState:
    token = rank_token()
    if token is None:
        return _process_state
    state = _simulated.get(token)
    if state is None:
        state = _simulated[token] = _RankState()
    return state


def _agreed_seed(mesh: DeviceMesh) -> int:
    """torch's seed on the rank at the mesh's origin."""
    seed = torch.initial_seed() & MASK
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        if group.size > 1:
            seed = int(group.broadcast_value(seed, 0))
    return seed


def next_stream(mesh: DeviceMesh) -> tuple[int, int]:
    """The (seed, draw number) of the next random operation on ``mesh``."""
    state = _rank_state()
    known = state.meshes.get(mesh)
    if known is None or known[0] != state.epoch:
        known = (state.epoch, _agreed_seed(mesh), 0)
    epoch, seed, draws = known
    state.meshes[mesh] = (epoch, seed, draws + 1)
    return (seed ^ _place(mesh)) & MASK, draws


def _place(mesh: DeviceMesh) -> int:
    """Zero for a whole mesh; else differs between the copies of a sub-mesh (stages of a pipeline draw different
    values).
    """
    position = mesh._root.position or 0
    return (mesh._layout.base(position) * 0x9E3779B97F4A7C15) & MASK


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Start the random numbers of DTensors on ``device_mesh`` from ``seed``; call it on every rank with the same seed.

    >>> manual_seed(7, mesh)   # doctest: +SKIP
    """
    state = _rank_state()
    state.meshes[device_mesh] = (state.epoch, int(seed) & MASK, 0)


def get_rng_state(device_mesh: DeviceMesh) -> Tensor:
    """Seed and number of draws of ``device_mesh``, as a tensor that can be saved."""
    next_stream(device_mesh)
    state = _rank_state()
    epoch, seed, draws = state.meshes[device_mesh]
    state.meshes[device_mesh] = (epoch, seed, draws - 1)
    return torch.tensor([seed >> 32, seed & 0xFFFFFFFF, draws - 1], dtype=torch.int64)


def set_rng_state(saved: Tensor, device_mesh: DeviceMesh) -> None:
    """Go on from a state that ``get_rng_state`` gave."""
    high, low, draws = (int(v) for v in saved.tolist())
    state = _rank_state()
    state.meshes[device_mesh] = (state.epoch, high << 32 | low, draws)


def install() -> None:
    """Let torch's seeding and its saving and restoring of random state include ours. Does it once."""
    if hasattr(torch.manual_seed, "_phalanx"):
        return
    plain_seed, plain_get, plain_set = torch.manual_seed, torch.get_rng_state, torch.set_rng_state

    @functools.wraps(plain_seed)
    def seed(value: Any) -> Any:
        _rank_state().epoch += 1
        return plain_seed(value)

    @functools.wraps(plain_get)
    def get_state() -> Tensor:
        saved = plain_get()
        number = id(saved)
        gone = weakref.ref(saved, lambda _, pop=_snapshots.pop: pop(number, None))  # type: ignore[misc]  # a default
        _snapshots[number] = (gone, dict(_rank_state().meshes))
        return saved

    @functools.wraps(plain_set)
    def set_state(new_state: Tensor) -> None:
        plain_set(new_state)
        snapshot = _snapshots.get(id(new_state))
        if snapshot is not None and snapshot[0]() is new_state:
            state = _rank_state()
            unused = {mesh: (epoch, seed, 0) for mesh, (epoch, seed, _) in state.meshes.items()}
            state.meshes = {**unused, **snapshot[1]}  # a mesh first used since then had made no draws

    seed._phalanx = True  # type: ignore[attr-defined]  # a mark that this was done
    for module in (torch, torch.random):
        patched: Any = module
        patched.manual_seed = seed
        patched.get_rng_state = get_state
        patched.set_rng_state = set_state
