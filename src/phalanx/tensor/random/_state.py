"""The state of random numbers on a mesh: a seed and how many draws were made; the same on all its ranks.

Owns ``manual_seed``, ``seed_alike``, ``get_rng_state``, ``set_rng_state`` and ``next_stream``. The seed is torch's own,
agreed on at the first draw on a mesh; ``torch.manual_seed`` starts anew. Meshes are numbered in the order of their
first draws and the number is mixed into the seed: a program with one mesh draws the same whatever the mesh, one with
two does not draw the same numbers twice. torch's ``get_rng_state`` / ``set_rng_state`` (which ``fork_rng`` and
activation checkpointing use) carry this state along: ``patches/_install.py`` wraps them.

Invariant: all ranks of a mesh make the same draws on it, in the same order.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx._torch_private import TracingContext
from phalanx.comm import DeviceMesh
from phalanx.comm.group._context import rank_token
from phalanx.tensor.random import _generator_state

MASK = (1 << 64) - 1
Stream = tuple[int, int]  # seed, draws made so far

_HEADER = struct.Struct("<8sII")  # mark, number of the next mesh, how many streams follow
_ENTRY = struct.Struct("<16sQQ")  # key of the mesh, seed, draws
_MARK = b"phalanx1"
_ALIKE = bytes(16)  # in place of a mesh's key: the seed that all ranks were given, with 0 draws
_MOST_STREAMS = (_generator_state.ROOM - _HEADER.size) // _ENTRY.size


class _RandomStates:
    """Of one rank, since torch was last seeded."""

    def __init__(self) -> None:
        self.keys: dict[DeviceMesh, bytes] = {}
        self.streams: dict[bytes, Stream] = {}  # by the key of the mesh
        self.num_meshes = 0  # on which was drawn; no mesh that this rank used has this number or a higher one

    def key(self, mesh: DeviceMesh) -> bytes:
        """Say what stands for ``mesh`` in saved states: the same on all its ranks, and in a later run."""
        known = self.keys.get(mesh)
        if known is None:
            root, layout = mesh._root, mesh._layout
            text = repr((root.ranks.tolist(), layout.axes, mesh.mesh_dim_names, mesh.device_type))
            used = set(self.keys.values())  # by meshes of the same ranks over other groups
            digests = (hashlib.blake2b(f"{n} {text}".encode(), digest_size=16).digest() for n in itertools.count())
            known = self.keys[mesh] = next(d for d in digests if d not in used)
        return known

    def start(self, mesh: DeviceMesh, stream: Stream) -> None:
        """Draw from ``stream`` on ``mesh`` from now on."""
        key = self.key(mesh)
        self.num_meshes += key not in self.streams
        self.streams[key] = stream

    def forget(self) -> None:
        """torch was seeded."""
        self.streams, self.num_meshes = {}, 0

    def packed(self) -> bytes:
        if len(self.streams) > _MOST_STREAMS:
            raise RuntimeError(
                f"random numbers were drawn on {len(self.streams)} meshes since torch was seeded; torch's saved state "
                f"has room for {_MOST_STREAMS}: use meshes again instead of making new ones, or call torch.manual_seed"
            )
        entries = (_ENTRY.pack(key, *stream) for key, stream in self.streams.items())
        return b"".join((_HEADER.pack(_MARK, self.num_meshes, len(self.streams)), *entries))

    def unpack(self, payload: bytes) -> None:
        mark, num_meshes, num_streams = _HEADER.unpack_from(payload)
        if mark != _MARK or len(payload) != _HEADER.size + num_streams * _ENTRY.size:
            raise ValueError("torch.set_rng_state: the state of DTensors in it is not one that this version saved")
        self.num_meshes = num_meshes
        self.streams = {key: (seed, draws) for key, seed, draws in _ENTRY.iter_unpack(payload[_HEADER.size :])}


_process_state = _RandomStates()
_simulated: weakref.WeakKeyDictionary[Any, _RandomStates] = weakref.WeakKeyDictionary()


def _rank_state() -> _RandomStates:
    token = rank_token()
    if token is None:
        return _process_state
    state = _simulated.get(token)
    if state is None:
        state = _simulated[token] = _RandomStates()
    return state


def _agree(mesh: DeviceMesh, number: int) -> tuple[int, int]:
    """torch's seed on the rank at the mesh's origin, and the highest of the ranks' ``number``."""
    seed = torch.initial_seed() & MASK
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        if group.size > 1:
            told = group.all_gather_values([seed, number])
            seed, number = int(told[0][0]), max(int(each) for _, each in told)
    return seed, number


def _mixed(seed: int, number: int) -> int:
    """Return a seed for the mesh with this number: the first one's is torch's own."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little")


def _stream(state: _RandomStates, mesh: DeviceMesh) -> Stream:
    known = state.streams.get(state.key(mesh))
    if known is None:
        alike = state.streams.get(_ALIKE)
        seed, number = (alike[0], state.num_meshes) if alike else _agree(mesh, state.num_meshes)
        state.num_meshes = number
        known = (_mixed(seed, number), 0)
        state.start(mesh, known)
    return known


def would_ask(mesh: DeviceMesh) -> bool:
    """Return whether the next draw on ``mesh`` asks the other ranks for the seed, as the first one does."""
    state = _rank_state()
    return mesh.size() > 1 and _ALIKE not in state.streams and state.key(mesh) not in state.streams


def check_not_traced(mesh: DeviceMesh) -> None:
    """Raise while torch.compile traces, for what draws numbers in Python or looks at values first."""
    if TracingContext.try_get() is not None:
        raise NotImplementedError(
            f"rank {mesh.get_rank()}: this random operation cannot be traced: the graph would keep its numbers. "
            f"torch.compile runs it outside of its graphs, which fullgraph=True forbids"
        )


def next_stream(mesh: DeviceMesh) -> Stream:
    """Return the (seed, draw number) of the next random operation on ``mesh``."""
    check_not_traced(mesh)
    return reserve_draws(mesh, 1)


def reserve_draws(mesh: DeviceMesh, count: int) -> Stream:
    """Return the (seed, draw number) of the first of ``count`` random operations on ``mesh``."""
    state = _rank_state()
    seed, draws = _stream(state, mesh)
    state.streams[state.key(mesh)] = (seed, draws + count)
    return seed, draws


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Start the random numbers of DTensors on ``device_mesh`` from ``seed``; call it on every rank with the same seed.

    >>> manual_seed(7, mesh)   # doctest: +SKIP
    """
    if not -(1 << 63) <= seed <= MASK:
        raise ValueError(f"manual_seed takes -2**63 <= seed < 2**64, got {seed}")
    _rank_state().start(device_mesh, (int(seed) & MASK, 0))


def seed_alike(seed: int) -> None:
    """Start anew on every mesh from ``seed``, which all ranks that draw with this one are given too: none is asked."""
    state = _rank_state()
    state.forget()
    state.streams[_ALIKE] = (seed & MASK, 0)


def get_rng_state(device_mesh: DeviceMesh) -> Tensor:
    """Seed and number of draws of ``device_mesh``, as a tensor that can be saved; it suits a mesh of any other size.

    Call it on every rank of the mesh: before the first draw they agree on the seed.
    """
    seed, draws = _stream(_rank_state(), device_mesh)
    return torch.tensor([seed >> 32, seed & 0xFFFFFFFF, draws], dtype=torch.int64)


def set_rng_state(saved: Tensor, device_mesh: DeviceMesh) -> None:
    """Go on from a state that ``get_rng_state`` gave. Call it on every rank of the mesh."""
    good = type(saved) is Tensor and saved.dtype is torch.int64 and saved.shape == (3,)
    high, low, draws = saved.tolist() if good else (-1, -1, -1)
    if not (0 <= high < 1 << 32 and 0 <= low < 1 << 32 and draws >= 0):
        given = f"{saved.dtype}{list(saved.shape)}" if isinstance(saved, Tensor) else type(saved).__name__
        raise ValueError(
            f"set_rng_state takes what phalanx.tensor.get_rng_state(mesh) gave, int64[3], and got {given} "
            f"(the state that torch.get_rng_state() gave goes to torch.set_rng_state)"
        )
    _rank_state().start(device_mesh, (high << 32 | low, draws))


def seeder(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Start anew on every mesh when torch is seeded."""

    def seed(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        _rank_state().forget()
        return result

    return seed


def state_saver(plain: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Put this state into the one that torch saves."""

    def get_state() -> Tensor:
        saved = plain()
        _generator_state.put(saved, _rank_state().packed())
        return saved

    return get_state


def state_restorer(plain: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Go on from the state that is in one that torch saved."""

    def set_state(new_state: Tensor) -> None:
        plain(new_state)
        payload = _generator_state.taken(new_state)
        if payload is not None:  # else torch saved it before it was wrapped, or one of its generators did
            _rank_state().unpack(payload)

    return set_state
