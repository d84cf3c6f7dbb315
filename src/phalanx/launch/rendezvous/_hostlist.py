"""Reads how Slurm writes lists of hosts (``gpu[01-03,7],login0``) and of counts (``2(x3),1``): pure functions.

What is read: names separated by commas, each with any number of bracketed lists of numbers and ranges. A range keeps
the width of its first number (``[08-11]``: 08, 09, 10, 11). Brackets that follow one another vary as in a counter, the
last one fastest.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

MAX_HOSTS = 1 << 20
"""A list that stands for more is no list of hosts but a mistake, or an attack on memory."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list in their order. ``ValueError`` says where the text is no such list.

    >>> expand_hosts("gpu[01-03,7],login0")
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login0']
    >>> expand_hosts("rack[1-2]n[0-1]")
    ['rack1n0', 'rack1n1', 'rack2n0', 'rack2n1']
    """
    hosts: list[str] = []
    for name in _names(text):
        parts = [_choices(part, text) for part in re.split(r"(\[[^\[\]]*\])", name) if part]
        if len(hosts) + math.prod(map(len, parts)) > MAX_HOSTS:
            raise ValueError(f"the host list {_shown(text)} stands for more than {MAX_HOSTS} hosts")
        hosts += ["".join(chosen) for chosen in itertools.product(*parts)]
    return hosts


def expand_counts(text: str) -> list[int]:
    """Return the counts of a list in which ``2(x3)`` stands for three times two.

    >>> expand_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"the list of counts {_shown(text)} has {part!r}; expected such as 2(x3),1")
        times = int(found[2] or 1)
        if len(counts) + times > MAX_HOSTS:
            raise ValueError(f"the list of counts {_shown(text)} stands for more than {MAX_HOSTS} numbers")
        counts += [int(found[1])] * times
    return counts


def _names(text: str) -> Iterator[str]:
    """Split at the commas outside of brackets."""
    depth = begin = 0
    for place, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"the host list {_shown(text)} has a bracket too many at {place}")
        if letter == "," and depth == 0:
            yield _name(text[begin:place], text)
            begin = place + 1
    if depth:
        raise ValueError(f"the host list {_shown(text)} has a bracket that is not closed")
    yield _name(text[begin:], text)


def _name(part: str, text: str) -> str:
    if not part.strip() or any(letter.isspace() for letter in part.strip()):
        raise ValueError(f"the host list {_shown(text)} has {part!r}; expected the name of a host")
    return part.strip()


def _choices(part: str, text: str) -> list[str]:
    """Return what may stand at one place of a name: the text itself, or the numbers of a bracket."""
    if not part.startswith("["):
        return [part]
    choices: list[str] = []
    for piece in part[1:-1].split(","):
        found = _RANGE.fullmatch(piece.strip())
        if found is None:
            raise ValueError(f"the host list {_shown(text)} has {piece!r} in brackets; expected such as 3 or 01-12")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ValueError(f"the host list {_shown(text)} has {piece!r}, which ends before it begins")
        if last - first + 1 + len(choices) > MAX_HOSTS:
            raise ValueError(f"the host list {_shown(text)} stands for more than {MAX_HOSTS} hosts")
        choices += [f"{number:0{len(found[1])}d}" for number in range(first, last + 1)]
    return choices


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
