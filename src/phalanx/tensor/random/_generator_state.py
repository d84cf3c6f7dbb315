"""Where torch's saved generator state has room for ours, so that copies and files of it carry both.

Owns ``put`` and ``taken``; knows nothing of what is carried. torch saves the 624 words of its CPU generator, of 32 bits
each, in cells of 64 bits, and reads back the lower halves alone (a test holds torch to that). The upper halves are
zero; we write into them. Such a state has torch's size and restores torch's generator as before, also in a program
that has never heard of us. A table of saved states beside them would lose clones and files, and a saved state cannot
be found by its plain content: draws on DTensors do not change torch's generator.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx._devices import is_host

STATE_BYTES = 5056
_FIRST_WORD, _NUM_WORDS = 24, 624  # after the seed, two counters and the position
ROOM = _NUM_WORDS * 4 - 4  # the first upper half holds the length


def _upper_halves(saved: Tensor) -> npt.NDArray[np.uint32]:
    cells = saved.numpy()[_FIRST_WORD : _FIRST_WORD + 8 * _NUM_WORDS].view(np.uint32)
    return cells[1::2] if sys.byteorder == "little" else cells[::2]


def put(saved: Tensor, payload: bytes) -> None:
    """Write ``payload`` (at most ``ROOM`` bytes) into a state that torch has just saved."""
    assert saved.numel() == STATE_BYTES, f"torch saved {saved.numel()} bytes of generator state, not {STATE_BYTES}"
    assert 0 < len(payload) <= ROOM, f"{len(payload)} bytes do not fit into {ROOM}"
    halves = _upper_halves(saved)
    padded = np.frombuffer(payload + bytes(-len(payload) % 4), dtype=np.uint32)
    halves[0] = len(payload)
    halves[1 : 1 + len(padded)] = padded


def taken(saved: Tensor) -> bytes | None:
    """Say what ``put`` wrote; None if nothing."""
    if saved.dtype is not torch.uint8 or not is_host(saved) or saved.numel() != STATE_BYTES:
        return None
    halves = _upper_halves(saved.detach().contiguous())
    length = int(halves[0])
    return halves[1:].tobytes()[:length] if 0 < length <= ROOM else None
