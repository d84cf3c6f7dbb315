"""Computes where everything lies in the segment that the ranks of one group share. Touches no memory.

::

    header        magic, layout, nonce, BROKEN, FORMED
    rank block 0  READY TAKEN | BELL ASLEEP | STATE MAPPED | calls[slots] | sizes[slots][size] | regions[REGIONS]
    ...
    channel words for every ordered pair (src, dst): HEAD | TAIL, messages taken
    --- page ---
    slots         for every rank, `slots` slots of `slot_bytes`
    rings         for every ordered pair, `ring_bytes`

Sequence numbers: all collectives of a group are cut into *steps*, numbered 1, 2, 3 ... alike on every rank.

- READY[r] = n: what rank r contributes to step n lies in its slot ``n % slots``.
- TAKEN[r] = n: rank r has read all it needs of steps <= n.
- A rank may write its slot for step n when TAKEN of every peer is >= n - slots. That one rule protects every slot,
  every call record and every row of sizes.
- HEAD and TAIL of a channel count bytes ever written and ever read; at most ``ring_bytes`` apart.

All of them only grow and have exactly one writer, so no atomic read-modify-write is needed anywhere. BELL (futex word)
and ASLEEP are written by several ranks; only "the bell has changed" matters, so lost updates do no harm.

Words written by different ranks lie 128 bytes apart (two cache lines: the neighbour is prefetched).
"""

from __future__ import annotations

from dataclasses import dataclass

MAGIC = 0x50484C585F53484D
VERSION = 2
PAGE = 4096
LINE = 16
"""Words (8 bytes each) between flags of different writers."""

# words of the header
H_MAGIC, H_VERSION, H_SIZE, H_NONCE, H_BROKEN, H_FORMED = 0, 1, 2, 3, LINE, 2 * LINE
HEADER_WORDS = PAGE // 8

# words of a rank block
READY, TAKEN, BELL, ASLEEP, STATE, MAPPED, CALLS = 0, 1, LINE, LINE + 1, 2 * LINE, 2 * LINE + 1, 3 * LINE
CALL_WORDS = 8
HISTORY = 7
"""The last word of a call record: a digest of all calls so far, which tells of an earlier difference."""
REGIONS = 1024

# values of STATE
OPEN, CLOSED, FAILED = 0, 1, 2

TOKEN_SHIFT = 24
TOKEN_MASK = (1 << TOKEN_SHIFT) - 1


def token(index: int, target: int) -> int:
    """ "Word ``index`` must reach ``target``", as one number: what a collective yields when it cannot go on."""
    return (target << TOKEN_SHIFT) | index


_SLOT_BYTES = 512 * 1024
_MAX_SLOT_BYTES = 2 * 1024 * 1024
_SEGMENT_BYTES = 30 * 1024 * 1024


def slot_bytes_for(size: int, slots: int, ring_bytes: int) -> int:
    """Return the size of a slot: two ranks take turns best in small ones, which stay in a core's cache.

    More ranks are kept from running at each step, by one another above all, so they do more in each (ADR 8), as far as
    the whole segment stays at some 30 MB.

    >>> [slot_bytes_for(size, 4, 128 * 1024) // 1024 for size in (2, 3, 4, 8, 16)]
    [512, 2048, 1792, 704, 512]
    """
    if size <= 2:
        return _SLOT_BYTES
    room = (_SEGMENT_BYTES - size * size * ring_bytes) // (size * slots)
    return max(_SLOT_BYTES, min(_MAX_SLOT_BYTES, room // 65536 * 65536))


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True, kw_only=True)
class SegmentLayout:
    """Offsets of one segment for ``size`` ranks."""

    size: int
    slots: int = 4
    slot_bytes: int = 0
    """0: what suits this many ranks."""
    ring_bytes: int = 128 * 1024

    def __post_init__(self) -> None:
        if not self.slot_bytes:
            object.__setattr__(self, "slot_bytes", slot_bytes_for(self.size, self.slots, self.ring_bytes))
        if self.slots < 4:
            raise ValueError(f"{self.slots} slots; an all_reduce in shares has steps of two pieces under way: 4")

    @property
    def sizes_word(self) -> int:
        return CALLS + self.slots * CALL_WORDS

    @property
    def regions_word(self) -> int:
        return _up(self.sizes_word + self.slots * self.size, LINE)

    @property
    def block_words(self) -> int:
        return _up(self.regions_word + REGIONS, PAGE // 8)

    @property
    def channels_word(self) -> int:
        return HEADER_WORDS + self.size * self.block_words

    @property
    def control_words(self) -> int:
        words = _up(self.channels_word + self.size * self.size * 2 * LINE, PAGE // 8)
        assert words <= TOKEN_MASK, f"{self.size} ranks are too many for one segment"
        return words

    @property
    def rings_byte(self) -> int:
        return self.control_words * 8 + self.size * self.slots * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        return self.rings_byte + self.size * self.size * self.ring_bytes

    def block(self, rank: int) -> int:
        """First word of a rank's block."""
        return HEADER_WORDS + rank * self.block_words

    def slot(self, rank: int, slot: int) -> int:
        """First byte of a slot."""
        return self.control_words * 8 + (rank * self.slots + slot) * self.slot_bytes

    def channel(self, src: int, dst: int) -> tuple[int, int, int]:
        """HEAD word, TAIL word and first byte of the ring from ``src`` to ``dst``."""
        number = src * self.size + dst
        head = self.channels_word + number * 2 * LINE
        return head, head + LINE, self.rings_byte + number * self.ring_bytes

    def taken_word(self, src: int, dst: int) -> int:
        """Return the word in which ``dst`` counts the messages from ``src`` that it has taken out; nobody else reads
        it."""
        return self.channel(src, dst)[1] + 1

    def writer(self, index: int) -> int:
        """Return which rank writes word ``index`` (READY, TAKEN, HEAD or TAIL)."""
        if index < self.channels_word:
            return (index - HEADER_WORDS) // self.block_words
        number, tail = divmod((index - self.channels_word) // LINE, 2)
        src, dst = divmod(number, self.size)
        return dst if tail else src
