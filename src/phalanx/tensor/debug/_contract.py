"""What a model may communicate: a list of lines, and a step that is held against them.

Owns ``Allowance``, ``CommContract`` and ``ContractCheck``: pure bookkeeping. Who communicates is ``_attribution.py``'s
to say, what happens at a breach ``_enforce.py``'s; contracts of the known schemes are in ``contracts.py``.

Rules: what a module communicates is charged to the nearest module, itself or above, that has a line for the phase and
the kind of collective. What finds no line is a breach: a contract says all that is allowed. Each module that a line
names has an amount of its own, for itself and all below that is not charged to a nearer one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from phalanx.tensor.debug._trace import PHASES, Traffic, readable

Limit = int | range
"""Exactly so much, or anything in a range: ``range(3)`` is two at most."""

# Methods of ``Group`` that are one kind of collective.
KINDS = {
    "all_gather_into_tensor": "all_gather",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_tensor": "reduce_scatter",
}


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """How much of one kind of collective modules may use, and must, in one forward or one backward.

    ``module``: a dotted path below the model, in which ``*`` stands for one name (``layers.*.attention``); empty: the
    model, with all that communicates outside of it. ``collective``: a kind, by the shortest name that ``Group`` has for
    it (``all_gather`` is ``all_gather_into_tensor`` too). ``nbytes`` is counted as in ``CommEvent``: of each collective
    the larger of what goes in and what comes out on a rank; None: any.
    """

    module: str = ""
    phase: Literal["forward", "backward"]
    collective: str
    count: Limit
    nbytes: Limit | None = None

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"a line for phase {self.phase!r}; expected forward or backward")
        if self.collective in KINDS:
            raise ValueError(f"a line for {self.collective!r}; expected its kind, {KINDS[self.collective]!r}")
        for name, limit in (("count", self.count), ("nbytes", self.nbytes)):
            if isinstance(limit, range) and (limit.step != 1 or not limit):
                raise ValueError(f"{name} is {limit}; expected a range of step 1 that is not empty")

    def covers(self, path: str) -> bool:
        """Return whether a module of this path is one that the line names."""
        if not path:  # the model itself, which no star stands for
            return not self.module
        wanted, found = self.module.split("."), path.split(".")
        return len(wanted) == len(found) and all(map(fnmatchcase, found, wanted))

    def times(self, number: int) -> Allowance:
        nbytes = None if self.nbytes is None else _times(self.nbytes, number)
        return replace(self, count=_times(self.count, number), nbytes=nbytes)

    def __str__(self) -> str:
        nbytes = "" if self.nbytes is None else f" of {_words(self.nbytes, readable)}"
        return f"{self.module or 'the model'}, {self.phase}: {_words(self.count, str)} {self.collective}{nbytes}"


@dataclass(frozen=True)
class CommContract:
    """All that a step may communicate. ``+`` puts the lines of two contracts together.

    >>> print(CommContract(Allowance(module="mlp", phase="forward", collective="all_reduce", count=1, nbytes=512)))
    mlp, forward: 1 all_reduce of 512 B
    """

    lines: tuple[Allowance, ...]

    def __init__(self, *lines: Allowance) -> None:
        object.__setattr__(self, "lines", lines)

    def __add__(self, other: CommContract) -> CommContract:
        return CommContract(*self.lines, *other.lines)

    def times(self, number: int) -> CommContract:
        """Return the contract of ``number`` steps, or of as many forwards and backwards before one update."""
        return CommContract(*(line.times(number) for line in self.lines))

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines)) or "no communication"


@dataclass
class ContractCheck:
    """A step, held against a contract. ``modules`` are the paths below the model, which itself has the empty one."""

    contract: CommContract
    modules: tuple[str, ...]
    spent: dict[tuple[str, str, str], Traffic] = field(default_factory=dict)
    """(module that is charged, phase, kind of collective) -> how much."""

    def __post_init__(self) -> None:
        for line in self.contract.lines:
            if not any(map(line.covers, self.modules)):
                known = ", ".join(sorted({path for path in self.modules if path})[:12])
                raise ValueError(f"the contract has a line for {line.module!r}, but no module has such a path: {known}")

    def charge(self, module: str, phase: str, collective: str, nbytes: int) -> str | None:
        """Add a collective; says what is broken by it."""
        kind = KINDS.get(collective, collective)
        payer = next((path for path in _upwards(module) if self._lines(path, phase, kind)), "")
        spent = self.spent.setdefault((payer, phase, kind), Traffic())
        spent.add(Traffic(1, nbytes))
        lines = self._lines(payer, phase, kind)
        allowed = " and ".join(map(str, lines)) or f"no {kind} in {phase}"
        if spent.count > sum(_most(line.count) for line in lines):
            return f"it is number {spent.count}, the contract says: {allowed}"
        if all(line.nbytes is not None for line in lines):
            most = sum(_most(line.nbytes) for line in lines if line.nbytes is not None)
            if spent.nbytes > most:
                return f"with it there are {readable(spent.nbytes)}, the contract says: {allowed}"
        return None

    def missing(self) -> Iterator[str]:
        """Say what was promised and did not happen."""
        for path in dict.fromkeys(("", *self.modules)):
            for phase, kind in dict.fromkeys((line.phase, line.collective) for line in self.contract.lines):
                lines = self._lines(path, phase, kind)
                spent = self.spent.get((path, phase, kind), Traffic())
                count = sum(_least(line.count) for line in lines)
                nbytes = sum(_least(line.nbytes) for line in lines if line.nbytes is not None)
                if spent.count < count or spent.nbytes < nbytes:
                    said = " and ".join(map(str, lines))
                    yield f"{path or 'the model'}: only {spent} {kind} in {phase}, the contract says: {said}"

    def _lines(self, path: str, phase: str, kind: str) -> list[Allowance]:
        return [
            line
            for line in self.contract.lines
            if line.phase == phase and line.collective == kind and line.covers(path)
        ]


def _upwards(path: str) -> Iterable[str]:
    """
    >>> list(_upwards("layers.0.mlp"))
    ['layers.0.mlp', 'layers.0', 'layers', '']
    """
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _most(limit: Limit) -> int:
    return limit if isinstance(limit, int) else limit[-1]


def _least(limit: Limit) -> int:
    return limit if isinstance(limit, int) else limit[0]


def _times(limit: Limit, number: int) -> Limit:
    if isinstance(limit, int):
        return limit * number
    return range(limit[0] * number, limit[-1] * number + 1)


def _words(limit: Limit, say: object) -> str:
    assert callable(say), "a function that writes a number"
    if isinstance(limit, int):
        return str(say(limit))
    return f"at most {say(limit[-1])}" if not limit[0] else f"{say(limit[0])} to {say(limit[-1])}"
