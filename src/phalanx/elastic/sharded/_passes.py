"""Runs the units of a model in passes that all workers take part in, also those that have nothing to compute.

A *pass* is one forward (and backward) of a micro-batch on the workers that have one. The others *follow*: they take
part in every gather and reduction. Those who compute announce each (one small all-gather, in passes with followers
only) until the order is known: where all units are gathered ahead of a version's first pass (``KeptUnits``) what is
left are reductions, and later passes of the step reduce in the order of the first. That workers who compute run the
same units in the same order is checked, here or by the numbers that gathers and reductions carry.

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
from phalanx.fsdp.unit._mapped_gather import kept_of
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
        self._kept_version = 0
        """The version that was gathered ahead, as far as there was room."""
        self._all_kept = False
        self._order: list[int] | None = None
        """In which order units were reduced in this version, if that is known."""
        self._reduced: list[int] = []
        """Those that were reduced in the pass that runs."""
        self._computing: tuple[int, ...] = ()
        self._is_open = False
        self._is_step = False
        self._follows = False
        self._reduces = False
        self._announces = False
        """Whether followers are told of each gather and reduction; else they rely on the order."""
        self._has_followers = False

    def use(self, group: Group) -> None:
        """Run in this group from now on."""
        self._group, self.lost = group, None
        self._kept_version, self._all_kept, self._order = 0, False, None
        self._is_open = self._follows = False

    @property
    def group(self) -> Group:
        assert self._group is not None, "the job has a place"
        return self._group

    def renew(self) -> None:
        """Say that values may have changed: what was gathered before is not gathered again from memory."""
        self._version += 1
        self._order = None

    # ---- passes

    def begin(self, computing: Sequence[int], *, is_step: bool, reduces: bool = False) -> None:
        """Begin a pass that these ranks compute, and all take part in.

        In a step's, a loss during forward is kept for the step's end. With ``reduces`` its backward reduces every unit
        that was used.
        """
        if self.lost is not None:
            raise self.lost
        self._gather_ahead()
        self._computing = tuple(computing)
        self._is_open, self._is_step, self._reduces, self._reduced = True, is_step, reduces, []
        is_known = self._all_kept and (not reduces or self._order is not None)
        self._has_followers = len(self._computing) < self.group.size
        self._announces = self._has_followers and not is_known

    def _gather_ahead(self) -> None:
        """Gather all units that there is room for, once for each version."""
        group = self.group
        if self._kept_version == self._version or group.size == 1 or group.backend != "shm":
            return
        self.waits(True)
        kept_of(group).begin(group, self._version)
        num_kept = sum(unit.keep() for unit in self.units)
        self._all_kept = num_kept == len(self.units)
        group.barrier()
        self.waits(False)
        self._kept_version = self._version

    def end(self) -> None:
        """End the pass on a rank that computed; followers hear of it."""
        if self.lost is None:
            if self._announces:
                self._meet(_ENDS, 0)
            elif self._expected:
                raise CollectiveMismatch(self._tell_order("reduces no more units"))
            self._note_order()
        self._is_open = False

    @property
    def _expected(self) -> list[int] | None:
        """The units that followers rely on to be reduced from now on in this pass; None if nobody relies on that."""
        if self._announces or not self._has_followers or not self._reduces:
            return None
        assert self._order is not None, "else they are told"
        return self._order[len(self._reduced) :]

    def _note_order(self) -> None:
        if self._reduces and self._order is None:
            self._order = self._reduced

    def close(self) -> None:
        """Leave a pass that failed."""
        self._is_open = self._follows = False

    def follow(self) -> None:
        """Take part in a pass of others until its end."""
        self._follows = True
        self.waits(True)
        try:
            self._follow_announced() if self._announces else self._follow_known()
            self._note_order()
        finally:
            self._is_open = self._follows = False
            self.waits(False)

    def _follow_announced(self) -> None:
        numbers = {unit.number: unit for unit in self.units}
        while True:
            does, number = self._meet(_FOLLOWS, 0)
            if does == _ENDS:
                return
            if does == _GATHERS:
                numbers[number].serve()
            else:
                self._reduced.append(number)
                self._reduce_nothing(numbers[number])

    def _follow_known(self) -> None:
        numbers = {unit.number: unit for unit in self.units}
        for number in (self._order or ()) if self._reduces else ():
            self._reduce_nothing(numbers[number])

    def _reduce_nothing(self, unit: Unit) -> None:
        """Take part in a reduction, with what earlier parts of a slot's batch have left here."""
        unit.start_reduce(Destination(shard=self.group, replicate=None, factor=1.0))
        unit.finish_reduce()

    # ---- the driver of the units

    @property
    def version(self) -> int | None:
        return self._version if self._is_open and self.lost is None else None

    def gathers(self, unit: Unit) -> None:
        self._check_open(unit, "ran")
        if self._announces:
            self._meet(_GATHERS, unit.number)

    def reduces(self, unit: Unit) -> None:
        if self._follows:
            return  # it was announced
        self._check_open(unit, "was reduced")
        if self._announces:
            self._meet(_REDUCES, unit.number)
        elif self._expected is not None and self._expected[:1] != [unit.number]:
            raise CollectiveMismatch(self._tell_order(f"reduces {unit}"))
        self._reduced.append(unit.number)

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

    def _tell_order(self, found: str) -> str:
        """Say that this pass does something else than the passes before it did at this place."""
        names = {each.number: each for each in self.units}
        before = f"reduced {names[self._expected[0]]}" if self._expected else "had no more"
        return (
            f"rank {self.group.rank} {found} where earlier micro-batches of the step {before}; every micro-batch must "
            "run the same modules in the same order. Call a module in all of them or in none, on dummy data if need be"
        )

    def _tell(self, does: int, number: int) -> str:
        unit = next((str(unit) for unit in self.units if unit.number == number), "the last unit")
        return f"{_DOES.get(does, 'follows')} {unit}"
