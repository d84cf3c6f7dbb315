"""Runs the units of a model in passes that all workers take part in, also those that have nothing to compute.

A *pass* is one forward (and backward) of a micro-batch on the workers that have one. The others *follow*: they take
part in every gather and reduction, which those who compute announce (one small all-gather each, in passes with
followers only). So no order of units needs to be known beforehand; that workers who compute run the same units in the
same order is checked, here or by the numbers that gathers and reductions carry.

Owns what becomes of a lost worker in the middle of a user's forward, which no caller of ours could catch: the pass goes
on with zeros and without communication, and ``lost`` keeps the error for whoever ends the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from phalanx._torch_private import current_graph_task_id
from phalanx.comm import Group
from phalanx.elastic.membership._lost import LOST
from phalanx.errors import CollectiveMismatch, CommError
from phalanx.fsdp.unit._gradient_sum import Destination
from phalanx.fsdp.unit._unit import Unit

_FOLLOWS, _GATHERS, _REDUCES, _ENDS = range(4)
_DOES = {_GATHERS: "gathers", _REDUCES: "reduces", _ENDS: "ends its pass, after"}
_SHIFT = 32


class Passes:
    """The passes of one model in one group; the ``UnitDriver`` of all its units."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self.lost: CommError | None = None
        """Why the group is gone, if a pass found out."""
        self.tell_waiting: Callable[[bool], None] = lambda is_waiting: None
        """Whom to tell that this worker waits for others, and so cannot progress by itself."""
        self._group: Group | None = None
        self._version = 0
        self._computing: tuple[int, ...] = ()
        self._is_open = False
        self._is_step = False
        self._follows = False

    def use(self, group: Group) -> None:
        """Run in this group from now on."""
        self._group, self.lost = group, None
        self._is_open = self._follows = False

    @property
    def group(self) -> Group:
        assert self._group is not None, "the job has a place"
        return self._group

    def renew(self) -> None:
        """Say that values may have changed: what was gathered before is not gathered again from memory."""
        self._version += 1

    # ---- passes

    def begin(self, computing: Sequence[int], *, is_step: bool) -> None:
        """Begin a pass that these ranks compute. In a step's, a loss during forward is kept for the step's end."""
        if self.lost is not None:
            raise self.lost
        self._computing = tuple(computing)
        self._is_open, self._is_step = True, is_step

    def end(self) -> None:
        """End the pass on a rank that computed; followers hear of it."""
        if self.lost is None and self._has_followers:
            self._meet(_ENDS, 0)
        self._is_open = False

    def close(self) -> None:
        """Leave a pass that failed."""
        self._is_open = self._follows = False

    def follow(self) -> None:
        """Take part in a pass of others until its end."""
        numbers = {unit.number: unit for unit in self.units}
        self._follows = True
        self.waits(True)
        try:
            while True:
                does, number = self._meet(_FOLLOWS, 0)
                if does == _ENDS:
                    return
                unit = numbers[number]
                if does == _GATHERS:
                    unit.serve()
                else:
                    unit.start_reduce(Destination(shard=self.group, replicate=None, factor=1.0))
                    unit.finish_reduce()
        finally:
            self._is_open = self._follows = False
            self.waits(False)

    @property
    def _has_followers(self) -> bool:
        return len(self._computing) < self.group.size

    # ---- the driver of the units

    @property
    def version(self) -> int | None:
        return self._version if self._is_open and self.lost is None else None

    def gathers(self, unit: Unit) -> None:
        self._check_open(unit, "ran")
        if self._has_followers:
            self._meet(_GATHERS, unit.number)

    def reduces(self, unit: Unit) -> None:
        if self._follows:
            return  # it was announced
        self._check_open(unit, "was reduced")
        if self._has_followers:
            self._meet(_REDUCES, unit.number)

    def survives(self, error: CommError) -> bool:
        if not isinstance(error, LOST) or not self._is_step or current_graph_task_id() != -1:
            return False  # an evaluation or a backward pass is called by us, who catch it
        if self.lost is None:
            self.lost = error
        return True

    # ---- the driver of a tensor parallel mesh's calls

    def check_group(self) -> None:
        if self.lost is not None:
            raise self.lost

    def survives_call(self, error: CommError) -> bool:
        return self._is_open and self.survives(error)

    def waits(self, is_waiting: bool) -> None:
        self.tell_waiting(is_waiting or self._follows)

    def describes(self, unit: Unit) -> None:
        raise RuntimeError(
            f"{unit} is held in cells by several workers, so it has no state dict of its own: job.full_state_dict() "
            "collects the model's (call it on all workers), and job.save() writes it"
        )

    def _check_open(self, unit: Unit, what: str) -> None:
        if self.lost is not None:
            raise self.lost
        if not self._is_open:
            raise RuntimeError(
                f"{unit} {what} outside of a step and of job.evaluate(): the other workers, who hold most of it, would "
                "not take part. Run the model on the micro-batches of a step, or inside job.evaluate()"
            )

    def _meet(self, does: int, number: int) -> tuple[int, int]:
        """Tell the others what this rank does next; what those who compute do."""
        group = self.group
        told = torch.empty(group.size, dtype=torch.int64)
        self.waits(True)
        group.all_gather_into_tensor(told, torch.tensor([does << _SHIFT | number]))
        self.waits(False)
        found: list[tuple[int, int]] = [divmod(code, 1 << _SHIFT) for code in told.tolist()]
        first = found[self._computing[0]]
        for rank in self._computing:
            if found[rank] != first:
                raise CollectiveMismatch(
                    f"rank {self._computing[0]} {self._tell(*first)} where rank {rank} {self._tell(*found[rank])}; "
                    "every worker must run the same modules in the same order in each micro-batch"
                )
        return first

    def _tell(self, does: int, number: int) -> str:
        unit = next((str(unit) for unit in self.units if unit.number == number), "the last unit")
        return f"{_DOES.get(does, 'follows')} {unit}"
