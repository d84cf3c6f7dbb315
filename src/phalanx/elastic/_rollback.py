"""Takes all workers back to the weights of the last good save, and leaves the samples since then out.

Weights, optimizer and the other objects become those of the save; the data position goes on after the step that spiked:
with the same samples the same would come again, bit for bit. Phases: 1. everybody tells of which step its last good
save is (one small gather); 2. who has the newest reads it and sends it to the others, one after the other; 3. each
takes it over and commits the step without an update, together. When a worker is lost meanwhile, those that are through
have committed the step, and the others take their state over; where nobody is, all come to the same spike again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.elastic._guard import LossSpike
from phalanx.elastic._guard_record import GuardRecord, after_rollback
from phalanx.elastic.checkpoint._state import State
from phalanx.elastic.checkpoint._stream import receive_state, send_state
from phalanx.elastic.membership._rounds import choose_source

if TYPE_CHECKING:
    from phalanx.elastic._job import Job


def roll_back(job: Job, step: int, why: str) -> int:
    """Make the parts of the job those of the last good save, and return its step. Raises as collectives do.

    Raises:
        LossSpike: no worker has a save to go back to.
    """
    membership = job.regrouping.membership
    group = membership.group
    job.saving.settle()  # what was submitted counts
    mine = job.saving.good_step(before=step)
    told = group.all_gather_values(mine) if group is not None else [mine]
    source = choose_source(told)
    to = told[source]
    if to < 0:
        raise LossSpike(f"step {step} spiked: {why}; there is no save to go back to yet. Save more often", step=step)
    if membership.rank == source:
        state = job.saving.load_good(to)
        state = {"parts": state["parts"], "guard": state.get("guard")}
        for rank in range(len(membership.workers)):
            if group is not None and rank != source:
                send_state(group, state, rank)
    else:
        assert group is not None, "a worker alone is its own source"
        state = receive_state(group, source)
    _take(job, state, step)
    return to


def _take(job: Job, state: State, step: int) -> None:
    job.take_parts(state["parts"])
    saved = GuardRecord.from_state(state["guard"])
    job.guarding.record = after_rollback(job.guarding.record, saved, step)
