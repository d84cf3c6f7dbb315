"""Seeds random numbers that belong to (seed, step, slot), whatever process draws them.

Owns the derivation of seeds and the seeding of the global generators (torch, ``random``, numpy's legacy one). Does
not keep state: nothing has to be saved or sent, a replay draws the same numbers again.
"""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed from a path of names and numbers.

    >>> derive_seed(0, "compute", 7, 3) == derive_seed(0, "compute", 7, 3) != derive_seed(0, "compute", 7, 4)
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed the generators that models, datasets and augmentations commonly draw from."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:  # the same for the one generator there is; the call above takes a fifth of a millisecond to find no others
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@lru_cache(maxsize=1)
def _has_accelerator() -> bool:
    return torch.accelerator.current_accelerator() is not None
