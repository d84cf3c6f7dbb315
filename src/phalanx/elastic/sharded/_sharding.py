"""JobSharding: the sharded side of a job: its units, this worker's cells, the optimizer's pieces and the waves.

Owns what a sharded job has and an unsharded one has not. The job tells it of new places (``form``) and has it bring
workers level (``_sharded_level``); its steps work on it (``_sharded_step``). Who else holds a cell is in ``holdings``,
alike on all workers of a round.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.comm.stores import MemoryStore
from phalanx.elastic._guard_record import GuardRecord
from phalanx.elastic.checkpoint._saves import Manifest
from phalanx.elastic.checkpoint._state import State, Stateful, digest
from phalanx.elastic.membership._committed_steps import StepsLost
from phalanx.elastic.membership._coordinator import Coordinator
from phalanx.elastic.membership._lost import LOST
from phalanx.elastic.membership._rounds import Membership
from phalanx.elastic.membership._sync import WorkersDiffer
from phalanx.elastic.reduce._waves import WavePlan, even_waves
from phalanx.elastic.sharded._cell_store import CellStore, Fragment
from phalanx.elastic.sharded._full_state import agreed_digests, full_state_dict
from phalanx.elastic.sharded._holdings import Holdings
from phalanx.elastic.sharded._lane_saves import LaneSaves
from phalanx.elastic.sharded._model_units import ModelUnits, trainable
from phalanx.elastic.sharded._object_cells import KIND, ObjectCells
from phalanx.elastic.sharded._passes import Passes
from phalanx.elastic.sharded._pieces import PieceOptimizer, works_on_matrices
from phalanx.elastic.sharded._recovery_choice import Resume
from phalanx.elastic.sharded._sharded_job import PreparedStep, ShardedJob
from phalanx.elastic.sharded._sharded_level import bring_level
from phalanx.elastic.sharded._slices import Slices, hand_over
from phalanx.elastic.sharded._slot_numbers import StepNumbers
from phalanx.elastic.sharded._slot_reduction import MessageKinds, SlotReduction, Wave
from phalanx.elastic.sharded._tensor_groups import TensorGroups, check_possible, find_relay
from phalanx.elastic.sharded._unsharded_state import (
    digests,
    full_state,
    meta_tensors,
    owned_ranges,
    read_fragments,
    small_state,
)
from phalanx.elastic.sharded._verdict import StepVerdict
from phalanx.errors import CommError
from phalanx.fsdp.unit._gradient_sum import Destination
from phalanx.world import World


@dataclass(frozen=True)
class WaveSlots:
    """The slots of all workers and of one, as a job sees them."""

    slots: Sequence[int]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.sizes)

    @property
    def is_alone(self) -> bool:
        return len(self.sizes) == 1


class JobSharding:
    """The sharded side of one job."""

    def __init__(self, job: ShardedJob, *, copies: Any, spread: str, objects: Mapping[str, Stateful]) -> None:
        self.job = job
        self.copies = copies
        self.spread = spread
        matrices = works_on_matrices(job.optimizer)
        self.units = ModelUnits(job.model, matrices=matrices)
        self.objects = ObjectCells(self.units, objects)
        relay = find_relay(self.units.units)
        if relay is not None:
            has_state = bool(job.optimizer.state)
            in_objects = self.objects.of_parameters()
            check_possible(self.units.units, matrices=matrices, has_state=has_state, in_objects=in_objects)
        self.pieces = PieceOptimizer(job.optimizer, self.units.keys, matrices=matrices)
        self.store = CellStore(self.units, job.num_slots, matrices=matrices)
        self.passes = Passes(self.units.units)
        self.trained = trainable(self.units.parameters)
        self.table = self.units.table
        self._fingerprint = self.table.fingerprint()
        self._names = {parameter.key: parameter.name for parameter in self.units.parameters}
        self._numbers = {parameter.key: number for number, parameter in enumerate(self.trained)}
        self.tensor_groups = None if relay is None else TensorGroups(relay, self.units.units, self._names)
        """Of a tensor parallel model; then ``group``, ``workers`` and cells are those of this worker's lane."""
        groups = self.tensor_groups
        self.in_norm = [groups is None or groups.counts_in_norm(one.name) for one in self.trained]
        """Which of the trained parameters this lane adds to the norm."""
        self.holdings: Holdings | None = None
        self.group: Group | None = None
        self.workers: tuple[str, ...] = ()
        self.waves = even_waves(job.num_slots, 1)
        self._membership: Membership | None = None
        self._everyone: Group | None = None
        self.step: PreparedStep | None = None
        """The step under way; it can be rolled forward while it is prepared."""
        self.has_cells = False
        """Whether the model is in cells; before, it is as ``fully_shard`` left it."""
        self.slices = Slices(self)
        self.numbers: StepNumbers | None = None
        """Of the last step that was reduced."""
        self.seconds = 0.0
        """How long the last step took."""
        self.saves_answered = 0
        """Of the requests for a save, how many are dealt with."""
        self.last_verdict: StepVerdict | None = None
        """That of the last step that was applied here, for whoever rolls it forward."""
        self.nodes: dict[str, str] = {}
        self.host = f"{platform.node()}/{World.from_env().node_rank}"
        """Where this worker is, whatever ``spread`` says."""
        self.node = self.host if spread == "node" else None

    def identity(self) -> dict[str, Any]:
        """Return what must be equal on all workers."""
        lanes = {} if self.tensor_groups is None else {"tensor parallel degree": self.tensor_groups.num_lanes}
        return {"copies": self.copies, "spread": self.spread, "cells": self._fingerprint, **lanes}

    # ---- places

    def form(self, membership: Membership) -> WaveSlots:
        """Take a place in a round; cells stay as they are until workers are level."""
        self._membership = membership
        self._everyone = membership.group or Group.create(MemoryStore(), 0, 1)
        if self.tensor_groups is not None:
            return WaveSlots((), ())  # until it knows its lane
        self._take_place(self._everyone, membership.workers)
        return self.deal(even_waves(self.job.num_slots, self.num_computing))

    def form_tensor_groups(self, lanes: Sequence[int], hosts: Sequence[str]) -> None:
        """Take a place in a lane and a group, if the model is tensor parallel, from what all workers say of theirs."""
        groups = self.tensor_groups
        if groups is None:
            return
        workers = self.live_membership.workers
        lane = groups.form(self.everyone, lanes, hosts, workers, self.passes)
        assert groups.lanes is not None, "they were formed"
        self._take_place(lane, tuple(workers[rank] for rank in groups.lanes.members[groups.lane]))
        self.job.regrouping.use(self.deal(even_waves(self.job.num_slots, self.num_computing)))  # type: ignore[arg-type]  # its step does not ask for sums

    def _take_place(self, group: Group, workers: tuple[str, ...]) -> None:
        self.group, self.workers = group, workers
        self.passes.use(group)

    def deal(self, waves: WavePlan) -> WaveSlots:
        """Compute slots in these waves from the next step on."""
        self.waves = waves
        return WaveSlots(waves.slots_of(self.live_group.rank), waves.sizes(self.live_group.size))

    @property
    def num_computing(self) -> int:
        """Return how many of this group's workers carry slots: the first ones."""
        return self.live_group.size if self.tensor_groups is None else self.tensor_groups.num_computing

    @property
    def everyone(self) -> Group:
        """Return the group of all workers of the round, of all lanes."""
        assert self._everyone is not None, "the job has a place"
        return self._everyone

    @property
    def live_membership(self) -> Membership:
        assert self._membership is not None, "the job has a place"
        return self._membership

    @property
    def me(self) -> str:
        """Return this worker's name among those of the round."""
        return self.live_membership.workers[self.live_membership.rank]

    @property
    def live_group(self) -> Group:
        assert self.group is not None, "the job has a place"
        return self.group

    def settle(self, holdings: Holdings, received: Sequence[Fragment] = ()) -> None:
        """Hold what ``holdings`` says, and give the optimizer the pieces of it."""
        self.collect()
        self.store.settle(holdings, self.workers, self.live_group, self.passes, received)
        self.pieces.use(self.store.pieces)
        self.objects.use(self.store.pieces)
        self.units.show(self.store.pieces)
        self.holdings = holdings
        self.has_cells = True

    def collect(self) -> None:
        """Give this worker's pieces the states that the optimizer and the objects have for them now."""
        self.pieces.collect(self.store.pieces)
        self.objects.collect(self.store.pieces)

    def forget_model(self) -> None:
        """Let go of the model that ``fully_shard`` left: the job's is another, and its cells come later."""
        self.objects.forget_initial()
        if not self.has_cells:
            self.pieces.release()
            self.units.put_placeholders()

    def roll_forward(self, verdict: StepVerdict, ahead: State) -> None:
        """Apply the prepared step, which another worker has applied; ``ahead`` is that one's small state."""
        step, job = self.step, self.job
        assert step is not None, "the choice asks for workers in a step"
        step.follow(verdict)
        job.move_on(step)
        job.hold_objects(ahead)

    def check_saves(self, choice: Resume) -> None:
        """Refuse to go on after a loss of cells if the job has no saves at all."""
        if self.job.saving.options is None:
            raise StepsLost(
                f"{self.describe_loss(choice)}, and the job has no saves. Give it saves, "
                f"Job(saves=Saves(directory=..., every=...)), or more copies (it has copies={self.copies})"
            )

    def describe_loss(self, choice: Resume) -> str:
        """Say which cells nobody holds any more."""
        count = f"{len(choice.lost)} of {len(self.table)} cells"
        return f"{count} were lost with their last holders at step {choice.version}"

    def load_save(self, saved: Manifest, holdings: Holdings) -> None:
        """Become what was saved, each worker its cells; all workers call it."""
        job, everyone = self.job, self.everyone
        self.forget_model()
        self.store.clear()
        self.step = None
        state, fragments = self._read_save(saved, holdings)
        job.resume(state, is_first=everyone.rank == 0)
        self.settle(holdings, fragments)
        job.attempt = everyone.broadcast_value(job.attempt)

    def go_back(self, step: int) -> GuardRecord:
        """Become what was saved at a step, apart from the data position; the guard's record of then.

        No collective: who follows a worker that has done so does it alone.
        """
        assert self.holdings is not None, "the job has begun"
        state, fragments = self._read_save(self.job.saving.open_good(step), self.holdings)
        self.job.take_parts(state["parts"])
        found = {(one.key, one.begin, one.end): one for one in fragments}
        for piece in self.store.pieces:
            one = found[piece.key, piece.begin, piece.end]
            piece.tensor.detach().copy_(one.values.view(piece.tensor.shape))
            piece.states = one.states
        self.pieces.use(self.store.pieces)
        self.objects.use(self.store.pieces)
        return GuardRecord.from_state(state.get("guard"))

    def _read_save(self, saved: Manifest, holdings: Holdings) -> tuple[State, list[Fragment]]:
        """Return the small state of a save, and what this worker holds of it."""
        state = small_state(self, saved)
        held = {
            (u, s): self.store.layout(u, s, holdings, self.workers).held[self.live_group.rank]
            for u, s, _ in self.units.sections()
        }
        return state, read_fragments(self, state, saved, held)

    def submit_save(self, key: str, clean_since: int | None) -> None:
        """Copy what this worker owns and have it written in the background; all workers call it."""
        lane = self.lane_saves()
        try:
            state = full_state(self, meta_tensors() if lane is None else lane.meta)
        except LOST as error:
            self.note_loss(error)
            return
        everyone, ranges = self.everyone, owned_ranges(self)
        self.job.saving.submit_cells(
            self.job.step,
            state,
            ranges if lane is None else lane.ranges(ranges),
            number=everyone.rank,
            count=everyone.size,
            key=key,
            clean_since=clean_since,
        )

    def lane_saves(self) -> LaneSaves | None:
        """Return how this worker's lane writes and reads saves, if the model is tensor parallel."""
        return None if self.tensor_groups is None else LaneSaves(self)

    def wait_for_submits(self) -> None:
        """Return when every worker has its part of a save submitted: worker 0 can only wait for what others do."""
        try:
            self.everyone.barrier()
        except LOST as error:
            self.note_loss(error)

    def note_loss(self, error: CommError) -> None:
        """A worker was lost while a save was made: there is none of this step, and the next step finds out."""
        self.passes.lost = error
        if self.job.regrouping.is_over:
            raise error

    def take_save_request(self) -> bool:
        """Return whether a save was asked for before the last step; alike on all workers, and once."""
        if self.numbers is None:
            return False
        before = max(int(one["answered"]) for one in self.numbers.wishes)
        asked = max(int(one["asked"]) for one in self.numbers.wishes)
        before, self.saves_answered = max(before, self.saves_answered), max(asked, before, self.saves_answered)
        return self.saves_answered > before

    def verify(self) -> None:
        """Raise if holders of a cell have different bits of it, or workers different small states; all call it.

        Loops may be at different places behind one commit, so the cells of the user's objects are compared at the end.
        """
        agreed_digests(self, ["optimizer"])
        told = self.live_group.all_gather_values(digest(self.job.state_dict()))
        for worker, one in zip(self.workers, told, strict=True):
            if one != told[0]:
                raise WorkersDiffer(
                    f"at step {self.job.step}, workers {self.workers[0]} and {worker} differ in what every worker has: "
                    "position, buffers, scheduler, or the objects of Job(state=...)"
                )

    def full_state_dict(self, *, everywhere: bool) -> dict[str, Tensor]:
        return full_state_dict(self, everywhere=everywhere)

    def finish(self) -> str:
        """Return the digest after the last step; all workers call it."""
        if self.job.run.verify:
            agreed_digests(self, ["optimizer", KIND])
        return self.digest()

    def digest(self) -> str:
        """Return the digest that the unsharded job would have; all workers call it."""
        state = full_state(self, digests(self))
        if self.tensor_groups is not None:
            return self.tensor_groups.join_digests(self.everyone, self.live_membership.workers, state)
        return digest({"parts": state["parts"], "sampler": state["sampler"]})

    def with_all_names(self, values: Mapping[str, Any], buffers: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict as the unsharded model's: parameters under all their names, and the buffers."""
        model = self.job.model
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        found = {
            name: values[first[id(parameter)]] for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        alike = {id(buffer): name for name, buffer in model.named_buffers()}
        for name, buffer in model.named_buffers(remove_duplicate=False):
            found[name] = buffers[alike[id(buffer)]]
        return {name: found[name] for name in self.units.state_names}

    def dtype_of(self, key: tuple[int, int, int]) -> torch.dtype:
        return self.units.units[key[0]].sections[key[1]].dtype

    def dtype_of_name(self, name: str) -> torch.dtype:
        return self.dtype_of(next(key for key, found in self._names.items() if found == name))

    def bring_level(self, coordinator: Coordinator, membership: Membership) -> None:
        bring_level(self, coordinator, membership)

    # ---- steps

    def before_step(self) -> None:
        """Move the next slice of cells; a loss meanwhile is found by the step that follows."""
        if self.passes.lost is None:
            paces = [] if self.numbers is None else [(one["seconds"], one["rate"]) for one in self.numbers.wishes]
            self.passes.waits(True)
            try:
                self.slices.run(self.job.step, paces)
            except LOST as error:
                self.passes.lost = error
            self.passes.waits(False)

    def pace(self) -> dict[str, float]:
        """Return what this worker tells of its speed."""
        return {"seconds": self.seconds, "rate": self.slices.rate}

    def hand_over(self) -> bool:
        """Before workers leave: give their cells to others. False if the group was lost: nobody leaves yet."""
        assert self.numbers is not None, "a step was reduced"
        leaving = [w for w, one in zip(self.workers, self.numbers.wishes, strict=True) if one["leaving"]]
        try:
            hand_over(self, leaving)
        except LOST as error:
            self.passes.lost = error
        return self.passes.lost is None

    def reductions(self) -> Iterator[tuple[list[str], SlotReduction]]:
        """Yield the reductions of all sections that are trained, with the names of their parameters."""
        for u, s, section in self.units.sections():
            reduction = self.store.sections[u, s].reduction
            if reduction is not None:
                yield [self._names[u, s, index] for index in section.trainable()], reduction

    def mute(self, is_muted: bool) -> None:
        """Leave out the gradients that arrive."""
        for held in self.store.sections.values():
            if held.reduction is not None:
                held.reduction.is_muted = is_muted

    # ---- evaluations

    def share_out(self, missing: Sequence[int]) -> Iterator[int]:
        """Yield this worker's share of numbered batches; in between it takes part where others compute theirs."""
        group = self.live_group
        self.passes.renew()
        for first in range(0, len(missing), self.num_computing):
            wave = missing[first : first + self.num_computing]
            self.passes.begin(range(len(wave)), is_step=False)
            if group.rank < len(wave):
                yield wave[group.rank]
                self.passes.end()
            else:
                self.passes.follow()

    def abandon_pass(self) -> None:
        """Forget a forward that a loss has cut short."""
        self.units.states[0].context.reset(drop_gradients=True)
        self.passes.close()

    # ---- waves

    def begin_wave(self, wave: Wave, messages: MessageKinds | None = None) -> None:
        """Sum the slots of a wave from now on; ``messages`` sees what travels."""
        for u, s, section in self.units.sections():
            if section.trainable():
                reduction: Any = section.reduction()  # a SlotReduction: it was relocated
                names = ", ".join(self._names[u, s, index] for index in section.trainable())
                reduction.wave, reduction.messages = wave, messages and messages.of(f"gradients of {names}")

    def set_reduces(self, reduces: bool) -> None:
        """Say whether the backward pass that comes is the slot's last: then gradients go to their owners."""
        for state in self.units.states:
            state.settings.reduce_gradients = reduces

    def end_wave(self, wave: Wave, *, several_parts: bool) -> None:
        """See that all slots of the wave are in the sums of all sections."""
        if several_parts:
            self._reduce_leftovers()
        for held in self.store.sections.values():
            held.sums.fill(wave.end)

    def _reduce_leftovers(self) -> None:
        """Reduce units that an earlier part of a slot's batch used and the last did not."""
        group = self.live_group
        units = self.units.units
        mine = torch.tensor([float(unit.has_gradients) for unit in units])
        told = torch.empty(group.size * len(units))
        group.all_gather_into_tensor(told, mine)
        self.passes.begin(range(group.size), is_step=True)
        for unit, count in zip(units, told.view(group.size, -1).sum(0).tolist(), strict=True):
            if count:
                unit.start_reduce(Destination(shard=group, replicate=None, factor=1.0))
                unit.finish_reduce()
        self.passes.end()

    def take_used(self) -> list[int]:
        """Return the numbers of the trained parameters that had a gradient in this worker's slot, and forget them."""
        found = []
        for u, s, section in self.units.sections():
            wanted = section.trainable()
            reduction = self.store.sections[u, s].reduction
            if reduction is not None:
                found += [self._numbers[u, s, wanted[index]] for index in sorted(reduction.used)]
                reduction.used.clear()
        return found

    def drop_step(self) -> None:
        """Forget what was computed of a step: all units sharded, no gradient, sums empty."""
        root = self.units.states[0]
        root.context.reset(drop_gradients=True)
        for held in self.store.sections.values():
            held.sums.reset()
        for piece in self.store.pieces:
            piece.tensor.grad = None
        self.passes.close()

    def name_of(self, key: tuple[int, int, int]) -> str:
        return self._names[key]

    def number_of(self, key: tuple[int, int, int]) -> int | None:
        """Return the number of a trained parameter."""
        return self._numbers.get(key)
