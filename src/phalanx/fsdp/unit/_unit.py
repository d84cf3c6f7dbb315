"""Unit: the parameters that one call of ``fully_shard`` manages, gathered and reduced together.

Owns whether the unit is sharded, on its way, or gathered, and what is registered in the modules meanwhile. When that
happens is decided by ``fsdp/schedule``. Public for what builds on it: ``sections`` (each with ``layout``, ``storage``,
``extents``), ``gather``, ``release``, ``start_reduce``, ``finish_reduce``.

Invariants: modules hold shards unless the unit is gathered; a unit that was gathered is read only, and a write to one
of its parameters is an error at the latest when it is released; all ranks of the group call ``start_gather`` and
``start_reduce`` of the same units in the same order, which is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from weakref import ref

import torch
from torch import Tensor, nn

from phalanx._torch_private import DisableTorchFunctionSubclass, post_accumulate_grad_hooks, will_engine_execute_node
from phalanx.comm import Group
from phalanx.errors import CommError
from phalanx.fsdp.unit._gradient_sum import Destination
from phalanx.fsdp.unit._parameter import ManagedParameter
from phalanx.fsdp.unit._section import Section, UnitPlace
from phalanx.fsdp.unit._unit_driver import UnitDriver
from phalanx.fsdp.unit._unit_gather import Gather
from phalanx.fsdp.unit._unit_order import numbers_of
from phalanx.tensor.debug._attribution import acting_for


class UnitState(Enum):
    SHARDED = "sharded"
    ON_ITS_WAY = "being gathered"
    GATHERED = "gathered"


class Unit:
    """Parameters that are gathered in one go (one collective for each dtype among them)."""

    def __init__(self, path: str, module: nn.Module, parameters: Sequence[ManagedParameter], place: UnitPlace) -> None:
        self.path = path
        self.module = module
        self.parameters = list(parameters)
        self.place = place
        self.number = numbers_of(place.group).add(self)
        self._block_number = 0 if place.block is None else numbers_of(place.block).add(self)
        self._under_way: list[Gather] = []
        self.sections = self._by_dtype()
        self.state = UnitState.SHARDED
        self.is_kept = False
        """Users asked for the whole parameters, by ``unshard``."""
        self.settings_changed: Callable[[], None] = lambda: None
        self.gradient_arrived: Callable[[], None] = lambda: None
        self.driver: UnitDriver | None = None
        self._kept_by_block = False
        self._shard_versions: list[int] = []
        self._whole_versions: list[int] = []

    def __str__(self) -> str:
        return f"unit {self.path!r}"

    @property
    def group(self) -> Group:
        return self.place.group

    def _by_dtype(self) -> list[Section]:
        found: dict[torch.dtype, list[ManagedParameter]] = {}
        for parameter in self.parameters:
            found.setdefault(parameter.local.dtype, []).append(parameter)
        return [Section(self.number, each, self.place) for each in found.values()]

    def join(self, place: UnitPlace, driver: UnitDriver) -> None:
        """Be a unit of another group, with a new number; then its sections are relocated."""
        self.place, self.driver = place, driver
        self.number = numbers_of(place.group).add(self)
        self._kept_by_block = False

    # ---- shards

    def bring_home(self, *, required: bool = True) -> None:
        """See that every shard lies in its storage, whatever users did to the parameters since.

        Parameters on the meta device are an error, unless that is not ``required`` yet.
        """
        for parameter in self.parameters:
            found = parameter.replaced()
            if found is not None:
                parameter.take_over(found, str(self))
        if all(section.is_in_storage() for section in self.sections):
            return
        lost = [p.name for p in self.parameters if p.local.is_meta]
        if lost and not required:
            return
        if lost:
            raise RuntimeError(
                f"rank {self.group.rank}: {self} has parameters without data ({', '.join(lost[:3])}...): after "
                f"construction on the meta device call model.to_empty(device=...) and initialise them, or load a state "
                f"dict with assign=True, before forward"
            )
        changed = any(p.local.dtype != section.dtype for section in self.sections for p in section.parameters)
        if changed:
            for parameter in self.parameters:
                parameter.spec = parameter.sharded._spec  # type: ignore[attr-defined]  # a DTensor
            self.sections = self._by_dtype()
            self.settings_changed()
        for section in self.sections:
            section.take_in()

    # ---- gathering

    @torch.inference_mode(mode=False)  # else what is made in the first evaluation could never be trained with
    def start_gather(self, *, async_op: bool = False) -> None:
        """Begin to gather, unless it is gathered already with the values that the shards have now."""
        if self.state is UnitState.ON_ITS_WAY:
            return
        if self.state is UnitState.GATHERED:
            if self._versions() == self._shard_versions:
                return
            self.release()  # somebody wrote to the shards: optimizer, load_state_dict
        self.bring_home()
        version = None if self.driver is None else self.driver.version
        if version is not None and all(section.is_kept(version) for section in self.sections):
            self._shard_versions = self._versions()
            self._under_way += [section.start_again() for section in self.sections]
            self.state = UnitState.ON_ITS_WAY
            return
        if self.driver is not None:
            self.driver.gathers(self)
        of_block = self._kept_by_block and self._versions() == self._shard_versions
        self._shard_versions = self._versions()
        with self._named("gathering"):
            for section in self.sections:
                self._prepare(section)
                gather, storage = section.source(of_block=of_block)
                number = self._block_number if of_block else self.number
                gather.start(storage, number, async_op=async_op)
                self._under_way.append(gather)
        self.state = UnitState.ON_ITS_WAY

    def _prepare(self, section: Section) -> Gather:
        self.settings_changed()
        return section.prepare_gather(lambda i: self._on_gradient(section, i))

    def serve(self) -> None:
        """Do this rank's part of a gather that it does not need itself."""
        with self._named("gathering"):
            for section in self.sections:
                self._prepare(section)
                gather, storage = section.source(of_block=False)
                gather.serve(storage, self.number)

    def keep(self) -> bool:
        """Put this rank's part where all read it until values change (see ``Gather.keep``); whether all of it is."""
        found = []
        for section in self.sections:
            self._prepare(section)
            gather, storage = section.source(of_block=False)
            found.append(section.comm is None and gather.keep(storage))
        return all(found)

    def prefetch(self) -> None:
        """Begin to gather, where that goes on by itself while this rank computes."""
        try:
            self.start_gather(async_op=True)
        except CommError as error:
            if self.driver is None or not self.driver.survives(error):
                raise

    def _finish_gather(self) -> None:
        under_way, self._under_way = self._under_way, []
        with self._named("gathering"):
            for gather in under_way:
                gather.finish()

    @torch.inference_mode(mode=False)
    def gather(self) -> None:
        """Gather, and put whole parameters into the modules."""
        try:
            self.start_gather()
            if self.state is UnitState.GATHERED:
                return
            self._finish_gather()
        except CommError as error:
            if self.driver is None or not self.driver.survives(error):
                raise
            self._under_way.clear()
            for section in self.sections:
                self._prepare(section).blank()
        for parameter in self.parameters:
            parameter.reopen()
            leaf = parameter.leaf
            if leaf.requires_grad != parameter.sharded.requires_grad:
                leaf.requires_grad_(parameter.sharded.requires_grad)
            assert parameter.whole is not None, "made when the gather was prepared"
            parameter.forget_alias()
            parameter.register(parameter.whole)
        self._whole_versions = [p.leaf._version for p in self.parameters]
        self.state = UnitState.GATHERED

    def release(self, *, keep_part: bool = False) -> None:
        """Put shards back into the modules and give the gathered memory back.

        With ``keep_part``, and if the unit has a block of ranks, they keep it, a part each, for the next gather.
        """
        if self.state is UnitState.SHARDED:
            return
        if self.state is UnitState.ON_ITS_WAY:
            self._finish_gather()
        if keep_part and self.place.block is not None:
            with torch.no_grad():
                for section in self.sections:
                    section.keep_part()
        self._kept_by_block = keep_part and self.place.block is not None
        written = [
            p.name
            for p, version in zip(self.parameters, self._whole_versions, strict=False)
            if self.state is UnitState.GATHERED and p.leaf._version != version
        ]
        self.forget_gathered()
        if written:
            raise RuntimeError(
                f"rank {self.group.rank}: {self} was written to in place while it was gathered ({', '.join(written)}): "
                f"the write would be lost. Write to the shards (DTensors) between steps, under torch.no_grad()"
            )

    def forget_gathered(self) -> None:
        """Be sharded, whatever was under way; for the way out of a failure."""
        self.state = UnitState.SHARDED
        self.is_kept = False
        self._under_way.clear()
        for parameter in self.parameters:
            parameter.put_back()
            parameter.close(str(self), self.group.rank)
        for section in self.sections:
            if section.gather is not None:
                section.gather.release()

    def _versions(self) -> list[int]:
        return [p.local._version for p in self.parameters]

    # ---- gradients

    def _on_gradient(self, section: Section, index: int) -> Callable[[Tensor], None]:
        """Return what takes the gradient of a parameter in.

        It holds the unit weakly: the collector does not look into what torch keeps of such a hook, so the whole
        parameter, which the unit has, would keep the unit for good. A graph that may still run keeps the unit itself.
        """
        unit, there = ref(self), ref(section)

        def arrived(leaf: Tensor) -> None:
            grad, leaf.grad = leaf.grad, None
            assert grad is not None, "autograd has just accumulated it"
            owner, place = unit(), there()
            if owner is None or place is None:
                return  # nobody is left who could ask for it
            if grad.layout is not torch.strided:
                raise RuntimeError(
                    f"rank {owner.group.rank}: the gradient of {place.parameters[index].name!r} in {owner} has layout "
                    f"{grad.layout}; expected a dense one: use Embedding(sparse=False)"
                )
            if grad.requires_grad:
                raise RuntimeError(
                    f"rank {owner.group.rank}: backward(create_graph=True) accumulates the gradient of "
                    f"{place.parameters[index].name!r} in {owner}; what is summed over ranks has no graph, so that to "
                    f"differentiate it again would give nothing. For a penalty on gradients of inputs, call "
                    f"torch.autograd.grad(loss, inputs, create_graph=True)"
                )
            owner.gradient_arrived()
            with torch.no_grad():
                place.add_gradient(index, grad.detach())

        return arrived

    @property
    def has_gradients(self) -> bool:
        return any(section.has_gradients for section in self.sections)

    @property
    def is_trainable(self) -> bool:
        return any(p.sharded.requires_grad for p in self.parameters)

    def accumulates(self) -> bool:
        """Return whether the backward pass that runs now writes gradients (``torch.autograd.grad`` does not)."""
        for parameter in self.parameters:
            if parameter.whole is not None and parameter.leaf.requires_grad:
                with torch.enable_grad(), DisableTorchFunctionSubclass():
                    node = parameter.leaf.view_as(parameter.leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]  # it requires grad
                if will_engine_execute_node(node):
                    return True
        return False

    def start_reduce(self, to: Destination, *, async_op: bool = False) -> None:
        """Send the gradients that have arrived."""
        if self.driver is not None:
            self.driver.reduces(self)
        with self._named("reducing"), torch.no_grad():
            for section in self.sections:
                if section.trainable():
                    section.start_reduce(to, async_op=async_op)

    def sum_replicas(self) -> bool:
        """Wait for the sums of the shard group and begin those of the replicas; whether there are any."""
        with self._named("reducing"), torch.no_grad():
            began = [section.sum_replicas() for section in self.sections if section.trainable()]
        return any(began)

    def finish_reduce(self) -> None:
        """Wait, and give shards their gradients; then run the hooks that users registered on them."""
        with self._named("reducing"), torch.no_grad():
            got = [p for section in self.sections if section.trainable() for p in section.finish_reduce()]
        for parameter in got:
            for hook in (post_accumulate_grad_hooks(parameter.local) or {}).values():
                hook(parameter.local)

    def drop_gradients(self) -> None:
        for section in self.sections:
            section.drop_gradients()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Tell which unit the block sends for: debug tools, and whoever reads an error of its collectives."""
        if self.driver is not None:
            self.driver.waits(True)
        try:
            with acting_for(self.module):
                yield
        except CommError as error:
            if error.args and " (while " not in str(error.args[0]):
                note = f"while {what} {self}, on rank {self.group.rank} of the group {list(self.group.ranks)}"
                error.args = (f"{error.args[0]} ({note})", *error.args[1:])
            raise
        finally:
            if self.driver is not None:
                self.driver.waits(False)
