"""Has a slot of a sharded job computed twice now and then: what ``_verifying`` does for jobs of whole replicas.

Nobody has a slot's whole gradient there. But each of its gradients passes by when autograd delivers it, on its way to
the parts for the owners: there digests of it are taken, in blocks, by the worker that computes the slot and, in a wave
of its own at the end of the step, by a second one, whose gradients go nowhere. The parts themselves are digested where
they are sent and where they arrive, and so are the gradients that owners send to mirrors.

Before the worker is prepared all tell each other their digests and judge alike (``judge``); what follows is as in the
job of whole replicas. Weights are compared where several hold them: of each cell that of all its holders, of buffers
that of all workers. What only one worker holds nobody can check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.elastic._bit_digests import MessageDigests, digest_of, digests_of, joined
from phalanx.elastic._verify_slots import StepDigests, VerifySlots, WrongKind, WrongWorker, judge, plan_check
from phalanx.elastic._verifying import Verifying, first_difference

if TYPE_CHECKING:
    from phalanx.comm import Group
    from phalanx.elastic._job import Job
    from phalanx.elastic._step import Step
    from phalanx.elastic.sharded._sharding import JobSharding

BLOCK = 4096
"""Elements of a gradient under one digest."""

LOSS = "the loss"


class ShardedVerifying(Verifying):
    """The checks of a sharded job."""

    def __init__(self, job: Job, options: VerifySlots | None, sharding: JobSharding) -> None:
        if options is not None and sharding.tensor_groups is not None:
            raise ValueError(
                f"verify_slots is {options} on a tensor parallel model; expected None: a slot is computed by a whole "
                "group there, and no second group computes it. job.fingerprint() compares the weights of all holders"
            )
        super().__init__(job, options)
        self._sharding = sharding
        self._found: dict[str, list[str]] | None = None
        """Digests of what this worker computed for the slot that is checked, by parameter, in blocks."""

    def begin_step(self) -> None:
        if self.options is None:
            return
        if self._trial != self._place:
            self._trial = self._found = None
        job, waves, size = self._job, self._sharding.waves, self._sharding.live_group.size
        self._check = plan_check(self.options, job.seed, job.step, [waves.slots_of(rank) for rank in range(size)])
        self._messages = None if self._check is None else MessageDigests(size)

    # -- while slots are computed -----------------------------------------------------------------------------

    @property
    def messages(self) -> MessageDigests | None:
        """Where what is sent and received in this step is noted; None: nowhere."""
        return self._messages

    @property
    def extra(self) -> tuple[int, int] | None:
        """The slot that is computed once more in this step, and the rank that does it."""
        if self._check is None:
            return None
        return self._check.slot, self._check.second if self._trial is None else self._check.third

    def watch(self, slot: int) -> None:
        """Take digests of the gradients that come now, if it is the slot that is checked; what is known stays."""
        if self._check is None or slot != self._check.slot or self._found is not None:
            return
        self._found = {}
        for names, reduction in self._sharding.reductions():
            reduction.watch = partial(self._note, names)

    def _note(self, names: Sequence[str], index: int, grad: Tensor) -> None:
        assert self._found is not None, "a slot is watched"
        self._found.setdefault(names[index], []).extend(digests_of(grad, BLOCK))

    def computed_slot(self, sums: dict[str, float]) -> None:
        """The slot is over: watch no more, and note its numbers if it was watched."""
        if self._check is None:
            return
        is_watched = False
        for _, reduction in self._sharding.reductions():
            is_watched = is_watched or reduction.watch is not None
            reduction.watch = None
        if is_watched and self._found is not None:
            numbers = torch.tensor([sums[name] for name in ("loss", "weight", "samples")], dtype=torch.float64)
            self._found[LOSS] = [digest_of(numbers)]

    # -- before the worker is prepared ------------------------------------------------------------------------

    def compare(self, step: Step, group: Group) -> bool:
        """Compare the step on all workers; True: it has to come again, for a third worker to decide.

        Raises ``WrongBits`` on who is wrong, ``PeerLost`` on the others, ``NobodyDecides`` on all.
        """
        check = self._check
        if check is None:
            return False
        assert self._messages is not None, "a step that is checked"
        mine = StepDigests(
            weights=joined([digest_of(buffer) for _, buffer in self._job.buffers.at_start()]),
            slot=_joined(self._found),
            sent=self._messages.of_sent,
            received=self._messages.of_received,
            cells=self._cells(),
        )
        found = [StepDigests.of(one) for one in group.all_gather_values(asdict(mine))]
        wrong = judge(check, found, is_trial=self._trial is not None)
        if wrong is None:
            self._found = self._trial = None
            return False
        if wrong.kind is WrongKind.SLOT and self._trial is None and check.third >= 0:
            self._trial = self._place
            return True
        parameter, element, values = self._first_difference(group, wrong)
        self._found = None
        raise self._part(step, check, wrong, group, parameter, element, values)

    def _cells(self) -> dict[str, str]:
        """Digest the weights of each cell that is held here, as the step begins with them."""
        found: dict[str, list[str]] = {}
        for cell, _, _, values in self._sharding.store.held_weights():
            found.setdefault(str(cell), []).append(digest_of(values))
        return {cell: joined(digests) for cell, digests in found.items()}

    def _first_difference(self, group: Group, wrong: WrongWorker) -> tuple[str, int, tuple[str, ...]]:
        """Return the parameter in which two workers differ, the element at which the block begins, and the values if
        they are of a buffer. All workers call it."""
        if wrong.kind is WrongKind.MESSAGE:
            assert self._messages is not None, "a step that is checked"
            told = group.all_gather_values(self._messages.kinds[wrong.right] if group.rank == wrong.odd else [])
            return told[wrong.odd][wrong.block], -1, ()
        if wrong.kind is WrongKind.WEIGHTS and wrong.cell < 0:
            return first_difference(group, list(self._job.buffers.at_start()), wrong.odd, wrong.right)
        mine, begins = self._blocks_of(wrong.cell) if wrong.cell >= 0 else (self._found or {}, {})
        told = group.all_gather_values([mine, begins])
        (one, places), (other, _) = told[wrong.odd], told[wrong.right]
        for name in {**other, **one}:
            if one.get(name) == other.get(name):
                continue
            pairs = zip(one.get(name, ()), other.get(name, ()), strict=False)
            block = next((at for at, (a, b) in enumerate(pairs) if a != b), -1)
            return name, places.get(name, 0) + block * BLOCK if block >= 0 and name != LOSS else -1, ()
        raise AssertionError("the joined digests differ")

    def _blocks_of(self, number: int) -> tuple[dict[str, list[str]], dict[str, int]]:
        """Return the digests of the parameters' parts in a cell, by blocks, and where each part begins."""
        found: dict[str, list[str]] = {}
        begins: dict[str, int] = {}
        first = {parameter.key: parameter.extent[0] for parameter in self._sharding.units.parameters}
        for cell, key, begin, values in self._sharding.store.held_weights():
            if cell == number:
                name = self._sharding.name_of(key)
                found[name], begins[name] = digests_of(values, BLOCK), begin - first[key]
        return found, begins


def _joined(found: dict[str, list[str]] | None) -> str:
    if found is None:
        return ""
    return joined([word for name in sorted(found) for word in (name, *found[name])])
