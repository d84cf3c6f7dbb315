"""Permutes [0, n) by a key: any position is computed on its own, none is stored.

Owns how a key becomes an order. Knows nothing of datasets, epochs or ranks.

Construction: the numbers [0, n) are written as pairs (left, right) of Z_a x Z_b, with a, b close to
sqrt(n) and a*b >= n, and pass through a Feistel network: each round adds a keyed hash of one half to
the other, modulo the other's size, which is invertible whatever the hash. The few results that fall
into [n, a*b), fewer than one in sqrt(n), are passed through again until they land inside (cycle
walking). A Feistel network over a handful of numbers reaches only part of the n! permutations, so up
to ``TABLE_LIMIT`` the permutation is the sorting order of n random words: uniform over all n!.

Orders are saved by position, so they must never change: a test freezes sample values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

#: Largest n whose permutation is kept as a table (32 KB) rather than computed.
TABLE_LIMIT = 4096
#: Largest domain; positions are int64, and padding may go a little past the end.
MAX_LENGTH = 2**62
_ROUNDS = 8


def derive_key(*parts: int | str) -> bytes:
    """64 bytes that depend on every part; the same on every machine and every version of every library.

    >>> derive_key(0, 1) != derive_key(0, 2)
    True
    """
    # Types and lengths are part of the text, so that ("1",) and (1,), or (1, 23) and (12, 3) differ.
    text = "|".join(f"{type(part).__name__}{len(str(part))}:{part}" for part in parts)
    return hashlib.blake2b(text.encode(), digest_size=64, person=b"phalanx.order").digest()


def random_words(key: bytes, count: int) -> npt.NDArray[np.uint64]:
    """``count`` random 64-bit words: the Philox stream of ``key``."""
    stream = np.random.Philox(key=int.from_bytes(key[:16], "little"))
    return np.asarray(stream.random_raw(count), dtype=np.uint64)


def table_permutation(key: bytes, length: int) -> Indices:
    """Return a uniformly random permutation of [0, length) as an array; the reference for small lengths.

    Sorting random words makes each of the length! orders equally likely, but for ties of 64-bit words.
    """
    return np.argsort(random_words(key, length), kind="stable").astype(np.int64, copy=False)


class KeyedPermutation:
    """The permutation of [0, length) that belongs to ``key``.

    >>> permutation = KeyedPermutation(5, derive_key("example"))
    >>> sorted(permutation(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, length: int, key: bytes) -> None:
        if not 1 <= length <= MAX_LENGTH:
            raise ValueError(f"cannot permute {length} items; expected between 1 and {MAX_LENGTH}")
        self.length = length
        self._permute: Callable[[Indices], Indices]
        if length <= TABLE_LIMIT:
            self._permute = table_permutation(key, length).__getitem__
        else:
            self._permute = FeistelNetwork(length, key).walk

    def __call__(self, positions: Indices) -> Indices:
        """Return where each position of [0, length) is sent; ``positions`` is not changed."""
        return self._permute(positions)


class FeistelNetwork:
    """A keyed bijection of [0, a*b), a little larger than [0, length), and by walking one of [0, length).

    Domains below 2**32 use 32-bit words (halves of 16 bits), larger ones 64-bit words: the narrow
    multiplication has vector instructions and is twice as fast.
    """

    def __init__(self, length: int, key: bytes) -> None:
        self.length = length
        self.left_size = math.isqrt(length - 1) + 1
        self.right_size = -(-length // self.left_size)
        narrow = self.left_size <= 2**16
        self.word: type[np.uint32] | type[np.uint64] = np.uint32 if narrow else np.uint64
        word = self.word
        self._half = word(16 if narrow else 32)
        self._spread = word(15 if narrow else 31)
        # Odd multipliers from the golden ratio and from sqrt(3): no structure in common with the data.
        self._first = word(0x9E3779B1 if narrow else 0x9E3779B97F4A7C15)
        self._second = word(0xBB67AE85 if narrow else 0xBB67AE8584CAA73B)
        self._sizes = word(self.left_size), word(self.right_size)
        self._keys = np.frombuffer(key[: _ROUNDS * 8], dtype="<u8").astype(word)

    def walk(self, positions: Indices) -> Indices:
        """Send each position of [0, length) to its image in [0, length)."""
        words = self.rounds(positions.astype(self.word))
        outside = np.flatnonzero(words >= self.length)
        while outside.size:  # ends: the rounds are a bijection, so each walk comes back below length
            again = self.rounds(words[outside])
            words[outside] = again
            outside = outside[again >= self.length]
        return words.astype(np.int64)

    def rounds(self, words: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
        """Send each word of [0, a*b) to its image."""
        left_size, right_size = self._sizes
        left: npt.NDArray[np.unsignedinteger] = words // right_size
        right = words - left * right_size
        hashed, shifted = np.empty_like(left), np.empty_like(left)
        for number, round_key in enumerate(self._keys):
            if number % 2 == 0:
                source, target, size = right, left, left_size
            else:
                source, target, size = left, right, right_size
            np.add(source, round_key, out=hashed)
            np.multiply(hashed, self._first, out=hashed)
            np.right_shift(hashed, self._spread, out=shifted)
            np.bitwise_xor(hashed, shifted, out=hashed)
            np.multiply(hashed, self._second, out=hashed)
            np.right_shift(hashed, self._half, out=hashed)
            # The upper half of the hash, scaled to [0, size): a multiplication instead of a modulo.
            np.multiply(hashed, size, out=hashed)
            np.right_shift(hashed, self._half, out=hashed)
            np.add(target, hashed, out=target)
            # target < 2 * size: one conditional subtraction. Below size it wraps to a huge number.
            np.subtract(target, size, out=hashed)
            np.minimum(target, hashed, out=target)
        left *= right_size
        left += right
        return left
