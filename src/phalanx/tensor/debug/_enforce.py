"""Contracts at work: ``comm_contract`` around a step of a real run, ``check_contract`` on simulated ranks before it.

Owns both, and ``ContractBreach``. A collective too many is stopped before it starts, on every rank that is about to
start it; one too few is told at the end of the block. A breach names module, operation and the user's line.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from torch import nn

from phalanx.comm import CommEvent, DeviceMesh, Group, init_device_mesh, observe, simulate
from phalanx.errors import PhalanxError, RankFailed
from phalanx.tensor.debug._attribution import Attribution
from phalanx.tensor.debug._contract import CommContract, ContractCheck
from phalanx.tensor.debug._report import origin
from phalanx.tensor.debug._trace import PHASES, Record, Traffic, readable


class ContractBreach(PhalanxError, RuntimeError):
    """A model communicated more, less, or elsewhere than its contract says."""


class ContractWarning(UserWarning):
    """A model broke its contract where the user asked to be warned only."""


@contextmanager
def comm_contract(
    model: nn.Module, contract: CommContract, *, on_breach: Literal["raise", "warn"] = "raise"
) -> Iterator[ContractCheck]:
    """Hold what ``model`` communicates inside the block, a step as a rule, against ``contract``.

    >>> with comm_contract(model, contracts.column_row_pair("layers.*.mlp", nbytes=4096)):    # doctest: +SKIP
    ...     model(x).sum().backward()

    Raises ``ContractBreach`` before a collective starts that the contract does not allow, and at the end of the block
    for those that it promises and that did not run; with ``on_breach="warn"`` a ``ContractWarning`` is given instead.
    Every operation in the block is followed, which costs some microseconds for each: use it for some steps, or all
    steps of a job that does not mind. The block gives what was charged to whom (``spent``).
    """
    if on_breach not in ("raise", "warn"):
        raise ValueError(f"comm_contract(on_breach={on_breach!r}): expected raise or warn")
    names = {part: path for path, part in model.named_modules()}
    check = ContractCheck(contract, tuple(names.values()))
    known, rank = frozenset(check.modules), 0
    with ExitStack() as stack:
        following = stack.enter_context(Attribution(Record(), names))

        def note(event: CommEvent) -> None:
            nonlocal rank
            rank, place = event.group.ranks[event.group.rank], following.place()
            path = _path_of(place.module, known)
            broken = check.charge(path, place.phase, event.name, event.nbytes)
            if broken is not None:
                what = f"{event.name} of {readable(event.nbytes)} in {place.phase} of {path or 'the model'}"
                _tell(f"rank {rank}: {what}, by {origin(place) or 'an unknown line'}: {broken}", on_breach)

        stack.enter_context(observe(note))
        yield check
    missing = [f"rank {rank}: {text}" for text in check.missing()]
    if missing:
        _tell("\n".join(missing), on_breach)


def _path_of(name: str, known: Set[str]) -> str:
    """Return the path of the model's module that ran, also for one made on the way; the model's own for one outside."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def _tell(text: str, on_breach: str) -> None:
    if on_breach == "raise":
        raise ContractBreach(text)
    warnings.warn(text, ContractWarning, stacklevel=3)


Built = tuple[nn.Module, Callable[[], Any]]


class ContractReport(dict[tuple[str, str, str], Traffic]):
    """What rank 0 was charged: (module, phase, kind of collective) -> how much; printed as a table."""

    def __str__(self) -> str:
        lines = [
            f"{module or 'the model'}, {phase}: {traffic} {kind}"
            for (module, phase, kind), traffic in sorted(
                self.items(), key=lambda one: (PHASES.index(one[0][1]), one[0])
            )
        ]
        return "\n".join(lines) or "no communication"


def check_contract(
    build: Callable[[DeviceMesh], Built],
    contract: CommContract | Callable[[nn.Module, DeviceMesh], CommContract],
    *,
    world_size: int | None = None,
    mesh: Mapping[str, int] | None = None,
    steps: int = 1,
    warmup: int = 0,
) -> ContractReport:
    """Run steps of a model on simulated ranks of this process and hold each against ``contract``.

    ``build(mesh)`` is called on every rank and returns the model and a function that runs one step; a small batch and
    narrow layers do, since counts do not depend on sizes, and bytes are known functions of them. ``mesh``: sizes of the
    axes by name; without, one axis of ``world_size``. ``contract`` may be a function of the model and the mesh.
    ``warmup`` steps run first and are not looked at.

    >>> check_contract(build, contracts.column_row_pair("mlp", nbytes=512), mesh={"tp": 2})    # doctest: +SKIP

    Raises ``ContractBreach`` as ``comm_contract`` does, and what ``build`` and the step raise as ``RankFailed``.
    """
    sizes = dict(mesh) if mesh is not None else {"ranks": world_size or 0}
    num_ranks = math.prod(sizes.values())
    if num_ranks < 1 or (world_size is not None and world_size != num_ranks):
        raise ValueError(
            f"check_contract with world_size={world_size} and mesh={mesh}; expected one that fits the other"
        )

    def main(group: Group) -> ContractReport:
        device_mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        model, step = build(device_mesh)
        wanted = contract if isinstance(contract, CommContract) else contract(model, device_mesh)
        report = ContractReport()
        for _ in range(warmup):
            step()
        for _ in range(steps):
            with comm_contract(model, wanted) as check:
                step()
            report = ContractReport(check.spent)
        return report

    try:
        return simulate(num_ranks).run(main)[0]
    except RankFailed as failed:
        if isinstance(failed.__cause__, ContractBreach):
            raise failed.__cause__ from None
        raise
