"""Seeds random numbers that belong to (seed, step, slot), whatever process draws them.

Owns the derivation of seeds and the seeding of the global generators (torch, ``random``, numpy's legacy one) and of the
random numbers of DTensors: workers that compute a slot together derive the same seed. Does not keep state: nothing has
to be saved or sent, a replay draws the same numbers again.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np

from phalanx._devices import seed_all
from phalanx.tensor.random._state import seed_alike


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed from a path of names and numbers.

    >>> derive_seed(0, "compute", 7, 3) == derive_seed(0, "compute", 7, 3) != derive_seed(0, "compute", 7, 4)
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed the generators that models, datasets and augmentations commonly draw from."""
    seed_all(seed)
    seed_alike(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
