"""Has a slot computed twice now and then, and finds out who is wrong: carries out what ``_verify_slots`` decides.

In a step that is checked the second worker gets one micro-batch more, whose gradient is compared and not added. After
the reduction all workers tell each other digests of what they computed, sent, received, summed and began with (one
small gather, in these steps only) and judge alike. If two computed a slot differently, they keep what they have, the
step comes again, and a third worker computes the slot.

Invariant: nothing is applied before all digests are equal. Who is wrong ends with ``WrongBits``; for the others it is
lost, and they repeat the step as after any loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.elastic._bit_digests import BLOCK, MessageDigests, digest_of, joined
from phalanx.elastic._verify_slots import (
    NobodyDecides,
    SlotCheck,
    StepDigests,
    VerifySlots,
    WrongKind,
    WrongWorker,
    judge,
    plan_check,
)
from phalanx.elastic.reduce._flat_layout import Bucket, Flat, FlatLayout
from phalanx.errors import PeerLost, WrongBits
from phalanx.events._event_types import WrongBitsFound
from phalanx.events._troubles import say

if TYPE_CHECKING:
    from phalanx.comm import Group
    from phalanx.elastic._job import Job
    from phalanx.elastic._step import Step

Named = list[tuple[str, Tensor | None]]


class Verifying:
    def __init__(self, job: Job, options: VerifySlots | None) -> None:
        self.options = options
        self._job = job
        self._check: SlotCheck | None = None
        self._messages: MessageDigests | None = None
        self._kept: Named | None = None
        """What this worker computed for the slot that is checked."""
        self._trial: tuple[int, int, int] | None = None
        """Step, generation and round of the attempt in which two workers differed."""

    # -- while slots are computed -----------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Plan what is checked in the step that begins."""
        if self.options is None:
            return
        if self._trial != self._place:
            self._trial = self._kept = None
        job, reduction = self._job, self._job.regrouping.reduction
        self._check = plan_check(self.options, job.seed, job.step, reduction.ranges)
        self._messages = reduction.watch = None if self._check is None else MessageDigests(reduction.size)

    @property
    def attempt(self) -> int:
        """Return how often the step was dropped before, in this round, because of what was found."""
        return int(self._trial is not None)

    def extra_slots(self) -> tuple[int, ...]:
        """Return the slots that this worker computes to compare them."""
        if self._check is None:
            return ()
        by = self._check.second if self._trial is None else self._check.third
        return (self._check.slot,) if self._job.rank == by else ()

    def computed(self, slot: int, grads: Sequence[Tensor | None], sums: dict[str, float]) -> None:
        """Keep the gradient of a slot if it is the one that is checked; in a trial the first two keep what they had."""
        if self._check is None or slot != self._check.slot or self._kept is not None:
            return
        numbers = torch.tensor([sums[name] for name in ("loss", "weight", "samples")], dtype=torch.float64)
        named = zip(self._job.param_names, grads, strict=True)
        self._kept = [("the loss", numbers), *((n, None if g is None else g.detach().clone()) for n, g in named)]

    # -- after the reduction ----------------------------------------------------------------------------------

    def finds_fault(self, step: Step, root: Flat) -> bool:
        """Compare the step on all workers; True: it has to come again, for a third worker to decide.

        Raises ``WrongBits`` on who is wrong, ``PeerLost`` on the others, ``NobodyDecides`` on all.
        """
        check, group = self._check, self._job.regrouping.membership.group
        if check is None or group is None:
            return False
        found = [StepDigests.of(one) for one in group.all_gather_values(asdict(self._digests(root)))]
        wrong = judge(check, found, is_trial=self._trial is not None)
        if wrong is None:
            self._kept = self._trial = None
            return False
        if wrong.kind is WrongKind.SLOT and self._trial is None and check.third >= 0:
            self._trial = self._place
            return True
        raise self._parting(step, root, check, wrong, group)

    @property
    def _place(self) -> tuple[int, int, int]:
        membership = self._job.regrouping.membership
        return self._job.step, membership.generation, membership.round

    def _digests(self, root: Flat) -> StepDigests:
        assert self._messages is not None, "a step that is checked"
        return StepDigests(
            weights=_joined(self._weights()),
            total=_joined(self._sums(root)),
            slot="" if self._kept is None else _joined(self._kept),
            sent=self._messages.of_sent,
            received=self._messages.of_received,
        )

    def _weights(self) -> Named:
        return [*self._job.model.named_parameters(), *self._job.buffers.at_start()]

    def _sums(self, root: Flat) -> Named:
        return list(zip(self._job.param_names, root.grads, strict=True))

    def _of_kind(self, kind: WrongKind, root: Flat) -> Named:
        if kind is WrongKind.WEIGHTS:
            return self._weights()
        return self._sums(root) if kind is WrongKind.SUM else self._kept or []

    # -- who is wrong -----------------------------------------------------------------------------------------

    def _parting(
        self, step: Step, root: Flat, check: SlotCheck, wrong: WrongWorker, group: Group
    ) -> WrongBits | PeerLost | NobodyDecides:
        """Name what differs, on all workers, and return by which error this one parts with who is wrong."""
        if wrong.kind is WrongKind.MESSAGE:
            num_pieces = len(self._job.regrouping.reduction.nodes[wrong.right])
            parameter, element = self._locate(root.layout, group.size, wrong, num_pieces)
            values: tuple[str, ...] = ()
        else:
            named = self._of_kind(wrong.kind, root)
            parameter, element, values = first_difference(group, named, wrong.odd, wrong.right)
        return self._part(step, check, wrong, group, parameter, element, values)

    def _part(
        self,
        step: Step,
        check: SlotCheck,
        wrong: WrongWorker,
        group: Group,
        parameter: str,
        element: int,
        values: tuple[str, ...],
    ) -> WrongBits | PeerLost | NobodyDecides:
        workers, me = self._job.regrouping.membership.workers, group.rank
        self._job.buffers.restore()
        slot = check.slot if wrong.kind is WrongKind.SLOT else None
        culprit = workers[wrong.odd] if wrong.is_known else ""
        self._kept = self._trial = None
        text = explain(step.number, wrong, workers[wrong.odd], workers[wrong.right], slot, parameter, element, values)
        if me == (1 if wrong.odd == 0 else 0):
            self._job.events.write(
                WrongBitsFound(
                    step=step.number,
                    what=wrong.kind.value,
                    culprit=culprit,
                    slot=slot,
                    parameter=parameter,
                    element=element,
                    values=values,
                )
            )
            say(text)
        if not wrong.is_known:
            return NobodyDecides(text)
        if me == wrong.odd:
            return WrongBits(text)
        return PeerLost(text, generation=self._job.generation, ranks=(wrong.odd,))

    def _locate(self, layout: FlatLayout, size: int, wrong: WrongWorker, num_pieces: int) -> tuple[str, int]:
        """Return the parameter, and the element of it, at which the block of a message begins that is wrong."""
        bucket, at = locate_block(layout, size, wrong.odd, wrong.block, num_pieces)
        held = [(o, i) for o, i in zip(bucket.offsets, bucket.params, strict=True) if o <= at]
        return (self._job.param_names[held[-1][1]], at - held[-1][0]) if held else ("what rides along", at)


def explain(
    step: int,
    wrong: WrongWorker,
    odd: str,
    right: str,
    slot: int | None,
    parameter: str,
    element: int,
    values: Sequence[str],
) -> str:
    """Return it in words.

    >>> wrong = WrongWorker(kind=WrongKind.SLOT, odd=2, right=0)
    >>> explain(7, wrong, "c", "a", 5, "fc.weight", 3, ("0.5", "0.25"))
    'step 7: worker c computed slot 5 wrongly: fc.weight differs at element 3 (0.5, and 0.25 on worker a). The step is \
repeated without it, and its node is left out if the job can do without'
    """
    where = f"{parameter} differs" + (f" at element {element}" if element >= 0 else "")
    seen = f" ({values[0]}, and {values[1]} on worker {right})" if len(values) == 2 else ""
    did = {
        WrongKind.SLOT: f"computed slot {slot} wrongly",
        WrongKind.WEIGHTS: "has other weights than most",
        WrongKind.MESSAGE: f"received something other than what {right} sent",
        WrongKind.SUM: "has another sum of gradients than most",
    }[wrong.kind]
    if wrong.is_known:
        return (
            f"step {step}: worker {odd} {did}: {where}{seen}. "
            "The step is repeated without it, and its node is left out if the job can do without"
        )
    most = (
        "of three copies or more (Job(copies=3)) most decide"
        if wrong.cell >= 0
        else "with three or more workers most of them decide, unless the computation itself is not deterministic "
        "(docs/elastic.md, Conditions)"
    )
    return (
        f"step {step}: workers {odd} and {right} differ in the {wrong.kind.value}{'' if slot is None else f' {slot}'}: "
        f"{where}{seen}, and it cannot be said who is wrong: {most}. Nothing of the step was applied"
    )


def first_difference(group: Group, named: Named, one: int, other: int) -> tuple[str, int, tuple[str, ...]]:
    """Return in which tensor two ranks differ first, at which element (-1: one of them has none), and the two values.

    All ranks of the group call it; each compares for itself.
    """
    mine = [
        (digest_of(tensor), name, None if tensor is None else [str(tensor.dtype), list(tensor.shape)])
        for name, tensor in (named if group.rank in (one, other) else ())
    ]
    told: list[Any] = group.all_gather_values(mine)
    a, names, kinds = zip(*told[one], strict=True)
    b, _, other_kinds = zip(*told[other], strict=True)
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
    if at is None:
        return "what is no tensor", -1, ()
    if kinds[at] is None or kinds[at] != other_kinds[at]:
        return names[at], -1, ()
    dtype = getattr(torch, kinds[at][0].removeprefix("torch."))
    flats = []
    for rank in (one, other):
        flat = torch.empty(kinds[at][1], dtype=dtype)
        if group.rank == rank:
            held = named[at][1]
            assert held is not None, "it has a shape"
            flat.copy_(held.detach())
        group.broadcast(flat, rank)
        flats.append(flat.reshape(-1))
    width = flats[0].element_size()
    differ = (flats[0].view(torch.uint8) != flats[1].view(torch.uint8)).view(-1, width).any(1)
    element = int(differ.nonzero()[0])
    return names[at], element, tuple(str(flat[element].item()) for flat in flats)


def locate_block(layout: FlatLayout, size: int, owner: int, block: int, num_pieces: int) -> tuple[Bucket, int]:
    """Return the bucket, and the element of it, at which a block of a message of so many pieces to a rank begins."""
    for i in layout.send_order:
        bucket = layout.buckets[i]
        chunk = layout.chunk(bucket, size)
        num_blocks = -(-num_pieces * chunk // BLOCK)
        if block < num_blocks:
            return bucket, owner * chunk + block * BLOCK % chunk
        block -= num_blocks
    raise AssertionError(f"block {block} is behind the last bucket")


def _joined(named: Named) -> str:
    return joined([digest_of(tensor) for _, tensor in named])
