"""Moves slots from slow workers to fast ones between steps, on all workers alike and without asking.

What each slot took, its data apart, rides along in every reduction, so all workers of a round see the same numbers in
the same steps and come to the same deal (``reduce._deal``). Owns what is remembered of them: the last steps of this
round, and each worker's pace, which outlives the round: the source of the state tells it to all who join.

Invariants: slots move at step boundaries only; what was measured never enters the state, so no bit depends on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from torch import Tensor

from phalanx.elastic.membership._rounds import Membership
from phalanx.elastic.reduce._deal import better_deal, even_deal, span
from phalanx.elastic.reduce._reduction import Reduction
from phalanx.elastic.reduce._waves import better_waves, expected, wave_cost
from phalanx.events._event_types import SlotsDealt

if TYPE_CHECKING:
    from phalanx.elastic._job import Job
    from phalanx.elastic._step import Step

WINDOW = 8
"""Steps whose median is a worker's pace: one that was slow in three of them is not slow."""
MAX_SETTLE = 128
"""Steps after a deal before the next, at most. It begins with ``WINDOW`` and doubles with every deal of a round, so
that a machine that is slow by turns does not move slots all the time."""


def pace_of(sizes: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Return what a slot took on each worker in one step, of what each slot took; 0 for a worker without slots.

    >>> pace_of((2, 1, 0), [1.0, 3.0, 5.0])
    [2.0, 5.0, 0.0]
    """
    found, start = [], 0
    for size in sizes:
        found.append(sum(seconds[start : start + size]) / size if size else 0.0)
        start += size
    return found


def known_pace(workers: Sequence[str], pace: Mapping[str, float]) -> list[float]:
    """Return what is known of these workers; of who is new, the median of the others; [] if nothing is.

    >>> known_pace(["a", "b", "new"], {"a": 1.0, "b": 3.0, "gone": 9.0})
    [1.0, 3.0, 2.0]
    """
    known = [pace[worker] for worker in workers if worker in pace]
    return [pace.get(worker, median(known)) for worker in workers] if known else []


class Dealing:
    def __init__(self, job: Job, *, is_on: bool) -> None:
        self.pace: dict[str, float] = {}
        """Seconds that a slot takes on each worker, as far as this one knows."""
        self._job = job
        self._is_on = is_on and (job.sharding is None or job.sharding.tensor_groups is None)
        self._steps: deque[Tensor | Sequence[float]] = deque(maxlen=WINDOW)
        """The seconds of the last steps: of each slot, of a sharded job of each worker."""
        self._waves: deque[float] = deque(maxlen=WINDOW)
        """What all waves of each of these steps took, of a sharded job."""
        self._wave_costs: dict[bool, float] = {}
        """What a wave costs beyond its slots in this round, if it is even and if not, as far as it was seen."""
        self._settle = WINDOW
        self._since = 0

    def begin_round(self, membership: Membership) -> None:
        """Take a place with as many slots as the pace of the round's workers, known to all of them, makes sense."""
        self._clear()
        self._wave_costs.clear()
        self._settle, self._since = WINDOW, 0
        if self._job.sharding is not None:
            return  # it begins with even waves, and is measured anew
        self.pace = {worker: one for worker, one in self.pace.items() if worker in membership.workers}
        seconds = known_pace(membership.workers, self.pace)
        if seconds and self._can_deal:
            sizes = better_deal(even_deal(self._job.num_slots, len(seconds)), seconds)
            if sizes is not None:
                self._use(sizes, seconds)

    def note(self, seconds: Tensor, step: Step) -> None:
        """Note what each slot of a reduced step took."""
        if self._counts(step):
            self._steps.append(seconds.clone())
            self._since += 1

    def note_pace(self, seconds: Sequence[float], step: Step, waves: float) -> None:
        """Note what a slot of a sharded step took on each worker, and what all its waves took."""
        if self._counts(step):
            self._steps.append(seconds)
            self._waves.append(waves)
            self._since += 1

    def _counts(self, step: Step) -> bool:
        """Return whether a step is one of those that are compared: its slots are all of one size."""
        return self._can_deal and step.num_samples == self._job.num_slots * self._job.slot_batch_size

    def cross_boundary(self) -> None:
        """Between two steps: deal anew if that pays. Looked at once in a window: each step need not pay for it."""
        if self._since < self._settle or self._since % WINDOW or len(self._steps) < WINDOW:
            return
        seconds = [median(column) for column in zip(*map(self._pace_in, self._steps), strict=True)]
        if min(seconds) <= 0:
            return  # a clock too coarse for these steps
        self.pace = dict(zip(self._job.regrouping.membership.workers, seconds, strict=True))
        if self._deal_anew(seconds):
            self._settle, self._since = min(2 * self._settle, MAX_SETTLE), 0
            self._clear()

    def _pace_in(self, step: Tensor | Sequence[float]) -> Sequence[float]:
        """Return what a slot took on each worker in a step that was noted; sizes are what they were then."""
        return pace_of(self._job.regrouping.reduction.sizes, step.tolist()) if isinstance(step, Tensor) else step

    def _clear(self) -> None:
        self._steps.clear()
        self._waves.clear()

    def _deal_anew(self, seconds: Sequence[float]) -> bool:
        """Move slots if that pays."""
        sharding, regrouping = self._job.sharding, self._job.regrouping
        if sharding is None:
            sizes = better_deal(regrouping.reduction.sizes, seconds)
            if sizes is not None:
                self._use(sizes, seconds)
            return sizes is not None
        costs = self._wave_costs
        costs[sharding.waves.is_even] = wave_cost(sharding.waves, seconds, median(self._waves))
        waves = better_waves(sharding.waves, seconds, costs)
        if waves is None:
            return False
        gain = expected(sharding.waves, seconds, costs) / expected(waves, seconds, costs)
        regrouping.use(sharding.deal(waves))  # type: ignore[arg-type]  # its step does not ask for sums
        self._tell(regrouping.reduction.sizes, seconds, gain)
        return True

    @property
    def _can_deal(self) -> bool:
        reduction = self._job.regrouping.reduction
        return self._is_on and not reduction.is_alone and self._job.num_slots > reduction.size

    def _use(self, sizes: tuple[int, ...], seconds: Sequence[float]) -> None:
        job, membership = self._job, self._job.regrouping.membership
        gain = span(job.regrouping.reduction.sizes, seconds) / span(sizes, seconds)
        job.regrouping.use(Reduction(membership.group, job.num_slots, job.pool, sizes))
        self._tell(sizes, seconds, gain)

    def _tell(self, sizes: tuple[int, ...], seconds: Sequence[float], gain: float) -> None:
        job, membership = self._job, self._job.regrouping.membership
        if membership.rank == 0:
            job.events.write(
                SlotsDealt(
                    step=job.step,
                    generation=membership.generation,
                    workers=membership.workers,
                    sizes=sizes,
                    pace=tuple(round(one, 6) for one in seconds),
                    gain=round(gain, 3),
                )
            )
