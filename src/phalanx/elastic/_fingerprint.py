"""Compares the weights of all workers at a step that the loop chooses, without gathering them.

Each worker digests what it holds, mirrored cells too, as trees over blocks (``checkpoint._digest_tree``); what travels
are 32 bytes for each subtree. So a sharded job, an unsharded one and one process have the same fingerprint, and two
holders of one range that differ are found.

Owns the value that users see and the comparison. A loss meanwhile is no business of it: the next step finds out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from phalanx.elastic.checkpoint._digest_tree import TensorDigest, range_nodes, root_of
from phalanx.elastic.checkpoint._state import digest
from phalanx.elastic.membership._sync import WorkersDiffer
from phalanx.elastic.reduce._slots import Node

if TYPE_CHECKING:
    from phalanx.comm import Group
    from phalanx.elastic._job_state import JobState
    from phalanx.elastic.sharded._sharding import JobSharding

MAX_NAMED = 3
Nodes = Mapping[str, Sequence[tuple[int, int, str]]]
"""Of each parameter, subtrees and their digests, as JSON has them."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The weights of a job after ``step`` steps: one sha256, and one for each parameter and buffer.

    It depends on values only: not on the number of workers, nor on whether the model is sharded.

    >>> old = Fingerprint(step=9, digest="ab", tensors={"weight": "12", "bias": "34"})
    >>> Fingerprint(step=9, digest="cd", tensors={"weight": "12", "bias": "56"}).differs_in(old)
    ['bias']
    """

    step: int
    digest: str
    tensors: Mapping[str, str] = field(repr=False)
    num_workers: int = 1
    """Whose weights were compared."""

    def differs_in(self, other: Fingerprint) -> list[str]:
        """Return the names of the tensors that another one has otherwise, or not at all."""
        names = dict.fromkeys([*self.tensors, *other.tensors])
        return [name for name in names if self.tensors.get(name) != other.tensors.get(name)]


def take_fingerprint(job: JobState, group: Group | None, workers: Sequence[str]) -> Fingerprint:
    """Digest the weights, and compare them with all other workers of the group, which call it too.

    Raises ``WorkersDiffer`` on all of them; as collectives do when a worker is lost.
    """
    sharding = job.sharding
    model = {} if sharding is not None else {n: TensorDigest.of(p) for n, p in job.model.named_parameters()}
    everywhere = model | {name: TensorDigest.of(buffer) for name, buffer in job.model.named_buffers()}
    roots = {name: one.root.hex() for name, one in everywhere.items()}
    if group is not None:
        compare_roots(job.step, workers, group.all_gather_values(roots))
    if sharding is not None:
        everywhere = {**sharded_roots(sharding), **everywhere}
        roots = {name: one.root.hex() for name, one in everywhere.items()}
    return Fingerprint(step=job.step, digest=digest(everywhere), tensors=roots, num_workers=len(workers))


def compare_roots(step: int, workers: Sequence[str], told: Sequence[Mapping[str, str]]) -> None:
    """Raise if workers differ in what each of them has as a whole.

    >>> compare_roots(7, ["a", "b", "c"], [{"w": "1"}, {"w": "1"}, {"w": "2"}])
    Traceback (most recent call last):
    ...
    phalanx.elastic.membership._sync.WorkersDiffer: after step 7, worker c has other bits than a, b in w
    """
    votes: dict[tuple[str, ...], list[int]] = {}
    for rank, roots in enumerate(told):
        votes.setdefault(tuple(roots.values()), []).append(rank)
    if len(votes) == 1:
        return
    most, *others = sorted(votes.values(), key=len, reverse=True)
    right, odd = told[most[0]], [rank for ranks in others for rank in ranks]
    names = [name for name in right if any(told[rank].get(name) != right[name] for rank in odd)]
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    those = f"worker{'s' if len(odd) > 1 else ''} {', '.join(workers[rank] for rank in odd)}"
    raise WorkersDiffer(
        f"after step {step}, {those} {'have' if len(odd) > 1 else 'has'} other bits than "
        f"{', '.join(workers[rank] for rank in most)} in {', '.join(names[:MAX_NAMED])}{more}"
    )


def sharded_roots(sharding: JobSharding) -> dict[str, TensorDigest]:
    """Return the digests of all parameters, from what all workers tell of the cells that they hold."""
    parameters = {parameter.key: parameter for parameter in sharding.units.parameters}
    mine: dict[str, list[tuple[int, int, str]]] = {}
    for cell in sharding.store.held:
        for part in sharding.store.cell_fragments([cell]):
            parameter = parameters[part.key]
            size = torch.Size(parameter.shape).numel()
            nodes = range_nodes(part.values, part.begin - parameter.extent[0], size)
            mine.setdefault(parameter.name, []).extend((*node, value.hex()) for node, value in nodes.items())
    told = sharding.live_group.all_gather_values(mine)
    known = agreed_nodes(sharding.job.step, sharding.workers, told)
    return {
        parameter.name: TensorDigest(
            sharding.dtype_of(parameter.key),
            tuple(parameter.shape),
            root_of(torch.Size(parameter.shape).numel(), known.get(parameter.name, {})),
        )
        for parameter in sharding.units.parameters
    }


def agreed_nodes(step: int, workers: Sequence[str], told: Sequence[Nodes]) -> dict[str, dict[Node, bytes]]:
    """Return the subtrees of all workers by parameter; raise if two holders of one differ.

    >>> agreed_nodes(7, ["a", "b"], [{"w": [(0, 2, "01")]}, {"w": [(2, 3, "02")]}])
    {'w': {(0, 2): b'\\x01', (2, 3): b'\\x02'}}
    """
    known: dict[str, dict[Node, bytes]] = {}
    holders: dict[tuple[str, Node], str] = {}
    for worker, each in zip(workers, told, strict=True):
        for name, nodes in each.items():
            for low, high, text in nodes:
                value, node = bytes.fromhex(text), (low, high)
                other = holders.setdefault((name, node), worker)
                if known.setdefault(name, {}).setdefault(node, value) != value:
                    raise WorkersDiffer(
                        f"after step {step}, workers {other} and {worker}, which both hold blocks {low} to {high} "
                        f"of {name}, have different bits of them"
                    )
    return known
