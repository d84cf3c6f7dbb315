"""Group: the ranks of one generation, and the one place that every collective passes through.

Owns the life of the group (building, subgroups, the end) and its collectives: a short way for the tensors that nearly
every call brings, checks (``_checks``) and contiguous copies (``_staging``) for the others; before each, observers are
told (``_observe``) and the ranks compared if asked (``PHALANX_DEBUG=collectives``). A ``Transport`` carries the bytes.
Ranks in the arguments are ranks of this group; ``ranks`` maps them to the root group's.

Invariants: a group belongs to one job and one generation; after the first failure every call raises it again; a
collective calls ``_enter`` once, after its checks and before the transport (the short ways ask first whether it has
anything to do).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.failure._mismatch import CallChecker
from phalanx.comm.group import _context, _json_values, _observe
from phalanx.comm.group._checks import (
    MOVED,
    PLAIN,
    STRIDED,
    TENSORS,
    check_flat,
    check_list,
    check_others,
    check_peer,
    check_rank,
    check_same_shape,
    check_tensor,
    equal_parts,
    is_plain,
    parse_op,
    reducible,
    shard_dtype,
    split_parts,
)
from phalanx.comm.group._monitored_barrier import monitored_barrier
from phalanx.comm.group._staging import copy_back, settled
from phalanx.comm.stores import Store
from phalanx.comm.transports._creation import (
    Connection,
    SubgroupMaker,
    connect_ranks,
    make_torch_default,
    wrap_process_group,
)
from phalanx.comm.transports._interface import DEFAULT_TIMEOUT, Arrived, GroupSpec, Interrupt, ReduceOp, Transport, Work
from phalanx.errors import GroupAborted
from phalanx.world import World


class Group:
    """A set of ranks that exchange tensors.

    >>> from phalanx.comm import simulate
    >>> def main(group):
    ...     tensor = torch.tensor([float(group.rank)])
    ...     group.all_reduce(tensor)
    ...     return tensor.item()
    >>> simulate(4).run(main)
    [6.0, 6.0, 6.0, 6.0]
    """

    def __init__(
        self,
        transport: Transport,
        *,
        ranks: Sequence[int],
        make_subgroup: SubgroupMaker,
        timeout: float = DEFAULT_TIMEOUT,
        job: str = "local",
        generation: int = 0,
        store: Store | None = None,
        checker: CallChecker | None = None,
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.ranks = tuple(ranks)
        self.timeout = timeout
        self.job = job
        self.generation = generation
        self.store = store
        self.rank_token = _context.rank_token()
        self._transport = transport
        self._make_subgroup = make_subgroup
        self._checker = checker
        self._num_subgroups: dict[tuple[int, ...], int] = {}
        self._subgroups: list[Group] = []
        self._on_end: list[Callable[[], None]] = []
        self._ended: BaseException | None = None
        self._guarded = checker is not None
        self._lock = threading.Lock()

    # -- building ---------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        *,
        backend: str = "auto",
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        job: str = "local",
        generation: int = 0,
        interrupt: Interrupt | None = None,
    ) -> Group:
        """Join generation ``generation`` of ``job`` as ``rank``; returns when all ``world_size`` ranks have.

        ``backend``: ``auto`` (the fastest for where the ranks are), or a c10d backend by name (``gloo``, ``nccl``...).
        ``interrupt`` is asked every few milliseconds while this waits; an error that it returns is raised here.
        Raises ``PeerTimeout`` naming the ranks that never came, ``PeerLost`` when one dies while the group forms.

        >>> group = Group.create(connect("tcp://10.0.0.1:29500"), rank=0, world_size=2)   # doctest: +SKIP
        """
        spec = GroupSpec(
            store=store, rank=rank, size=world_size, timeout=_seconds(timeout), job=job, generation=generation
        )
        return cls._over(connect_ranks(spec, backend, interrupt or (lambda: None)))

    @classmethod
    def wrap(cls, process_group: dist.ProcessGroup) -> Group:
        """Return a group over a c10d process group that the caller made and keeps the ownership of."""
        return cls._over(wrap_process_group(process_group))

    @classmethod
    def _over(cls, connection: Connection) -> Group:
        return cls(
            connection.transport,
            ranks=connection.ranks,
            make_subgroup=connection.make_subgroup,
            timeout=connection.timeout,
            job=connection.job,
            generation=connection.generation,
            store=connection.store,
            checker=connection.checker,
        )

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """Return a group of some ranks of this one, in the given order; None on ranks that are not in it.

        Only the members need to call it; they must all ask for the same lists in the same order.
        """
        members = tuple(ranks)
        if not members or len(set(members)) != len(members) or not all(0 <= r < self.size for r in members):
            raise ValueError(
                f"rank {self.rank}: subgroup of {list(members)}; expected distinct ranks in [0, {self.size})"
            )
        if self.rank not in members:
            return None
        self._check_alive()
        with self._lock:
            count = self._num_subgroups.get(members, 0)
            self._num_subgroups[members] = count + 1
        key = f"sub/{'-'.join(map(str, members))}/{count}"
        child = Group(
            self._make_subgroup(members, key),
            ranks=[self.ranks[r] for r in members],
            make_subgroup=lambda grand, name: self._make_subgroup(tuple(members[r] for r in grand), f"{key}/{name}"),
            timeout=self.timeout,
            job=self.job,
            generation=self.generation,
            store=None if self.store is None else self.store.namespace(key),
            checker=None if self._checker is None else self._checker.for_subgroup(members, key),
        )
        with self._lock:
            self._subgroups.append(child)
        return child

    def make_default(self) -> None:
        """Also become torch's default process group, so that ``torch.distributed`` calls keep working."""
        if self.store is None:
            raise RuntimeError(
                f"rank {self.rank}: this group has no store (simulated or wrapped ranks); "
                f"only groups from Group.create can become torch's default group"
            )
        spec = GroupSpec(
            store=self.store,
            rank=self.rank,
            size=self.size,
            timeout=self.timeout,
            job=self.job,
            generation=self.generation,
        )
        self._on_end.append(make_torch_default(spec, self.backend))

    # -- what it is -------------------------------------------------------------------------------------------

    @property
    def backend(self) -> str:
        return self._transport.name

    @property
    def world(self) -> World:
        return World(rank=self.rank, size=self.size, job=self.job, generation=self.generation)

    def __repr__(self) -> str:
        return (
            f"Group(rank={self.rank}, size={self.size}, generation={self.generation}, "
            f"job={self.job!r}, backend={self.backend!r})"
        )

    # -- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: ReduceOp | str = "sum", *, async_op: bool = False) -> Work:
        """Replace ``tensor`` on every rank by the reduction over all ranks."""
        try:
            plain = PLAIN[op][tensor.dtype] if type(tensor) in TENSORS and tensor.data_ptr() else None
        except (KeyError, TypeError, RuntimeError):
            plain = None
        if (
            plain is not None
            and tensor.layout is STRIDED
            and tensor.is_contiguous()
            and not tensor.is_nested
            and (tensor.numel() != 1 or not tensor.is_neg())
        ):
            if self._guarded or _observe._observers:
                self._enter("all_reduce", (tensor,), plain)
            return self._transport.all_reduce(tensor, plain, async_op=async_op)
        check_tensor("all_reduce", tensor, written=True)
        staged = settled(tensor)
        view, kind = reducible("all_reduce", staged, parse_op(op))
        self._enter("all_reduce", (tensor,), kind)
        work = self._transport.all_reduce(view, kind, async_op=async_op)
        return copy_back(work, [(tensor, staged)], async_op)

    def reduce(self, tensor: Tensor, dst: int, op: ReduceOp | str = "sum", *, async_op: bool = False) -> Work:
        """Like ``all_reduce``, but only ``dst`` gets the result; the others' tensors stay as they are."""
        check_rank(self, "reduce", "dst", dst)
        check_tensor("reduce", tensor, written=self.rank == dst)
        staged = settled(tensor)
        view, kind = reducible("reduce", staged, parse_op(op))
        self._enter("reduce", (tensor,), kind, root=dst)
        work = self._transport.reduce(view, kind, dst, async_op=async_op)
        return copy_back(work, [(tensor, staged)] if self.rank == dst else [], async_op)

    def broadcast(self, tensor: Tensor, src: int, *, async_op: bool = False) -> Work:
        """Replace ``tensor`` on every rank by that of ``src``."""
        check_rank(self, "broadcast", "src", src)
        if is_plain(tensor):
            if self._guarded or _observe._observers:
                self._enter("broadcast", (tensor,), root=src)
            return self._transport.broadcast(tensor, src, async_op=async_op)
        check_tensor("broadcast", tensor, written=self.rank != src)
        staged = settled(tensor)
        self._enter("broadcast", (tensor,), root=src)
        work = self._transport.broadcast(staged, src, async_op=async_op)
        return copy_back(work, [(tensor, staged)] if self.rank != src else [], async_op)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, async_op: bool = False) -> Work:
        """``outputs[r]`` becomes rank r's tensor; shapes may differ from rank to rank."""
        check_tensor("all_gather", tensor)
        check_list(self, "all_gather", "outputs", outputs, like=tensor, written=True)
        check_same_shape(self, "all_gather", "outputs", outputs[self.rank], tensor)
        staged = [settled(output) for output in outputs]
        self._enter("all_gather", (outputs,))
        work = self._transport.all_gather(staged, settled(tensor), async_op=async_op)
        return copy_back(work, list(zip(outputs, staged, strict=True)), async_op)

    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor, *, async_op: bool = False) -> Work:
        """``output`` becomes the ranks' tensors, one after the other; all have one shape."""
        if shard_dtype(self.size, output, tensor) in MOVED:
            if self._guarded or _observe._observers:
                self._enter("all_gather_into_tensor", (output,))
            return self._transport.all_gather_into_tensor(output, tensor, async_op=async_op)
        check_flat(self, "all_gather_into_tensor", output, tensor, written=output)
        staged = settled(output)
        self._enter("all_gather_into_tensor", (output,))
        work = self._transport.all_gather_into_tensor(staged, settled(tensor), async_op=async_op)
        return copy_back(work, [(output, staged)], async_op)

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp | str = "sum", *, async_op: bool = False
    ) -> Work:
        """``output`` becomes the reduction of all ranks' ``inputs[rank]``; shapes may differ from rank to rank."""
        check_tensor("reduce_scatter", output, written=True)
        check_list(self, "reduce_scatter", "inputs", inputs, like=output)
        check_same_shape(self, "reduce_scatter", "inputs", inputs[self.rank], output)
        parsed = parse_op(op)
        staged = settled(output)
        view, kind = reducible("reduce_scatter", staged, parsed)
        parts = [reducible("reduce_scatter", settled(part), parsed)[0] for part in inputs]
        self._enter("reduce_scatter", (inputs,), kind)
        work = self._transport.reduce_scatter(view, parts, kind, async_op=async_op)
        return copy_back(work, [(output, staged)], async_op)

    def reduce_scatter_tensor(
        self, output: Tensor, tensor: Tensor, op: ReduceOp | str = "sum", *, async_op: bool = False
    ) -> Work:
        """``tensor`` holds one equal part per rank; ``output`` becomes the reduction of this rank's part."""
        try:
            plain = PLAIN[op][shard_dtype(self.size, tensor, output)]
        except (KeyError, TypeError):
            plain = None
        if plain is not None:
            if self._guarded or _observe._observers:
                self._enter("reduce_scatter_tensor", (tensor,), plain)
            return self._transport.reduce_scatter_tensor(output, tensor, plain, async_op=async_op)
        check_flat(self, "reduce_scatter_tensor", tensor, output, written=output)
        parsed = parse_op(op)
        staged = settled(output)
        view, kind = reducible("reduce_scatter_tensor", staged, parsed)
        source, _ = reducible("reduce_scatter_tensor", settled(tensor), parsed)
        self._enter("reduce_scatter_tensor", (tensor,), kind)
        work = self._transport.reduce_scatter_tensor(view, source, kind, async_op=async_op)
        return copy_back(work, [(output, staged)], async_op)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, async_op: bool = False) -> Work:
        """``inputs[r]`` goes to rank r, ``outputs[r]`` comes from it; shapes may all differ."""
        check_list(self, "all_to_all", "inputs", inputs, like=inputs[0] if inputs else None)
        check_list(self, "all_to_all", "outputs", outputs, like=inputs[0], written=True)
        staged = [settled(output) for output in outputs]
        sent = [settled(tensor) for tensor in inputs]
        self._enter("all_to_all", (outputs, inputs))
        work = self._transport.all_to_all(staged, sent, async_op=async_op)
        return copy_back(work, list(zip(outputs, staged, strict=True)), async_op)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """``all_to_all`` on parts of dim 0; without splits the parts are equal."""
        if output_splits is None and input_splits is None and equal_parts(self.size, output, tensor):
            if self._guarded or _observe._observers:
                self._enter("all_to_all_single", (output, tensor))
            return self._transport.all_to_all_flat(output, tensor, async_op=async_op)
        check_tensor("all_to_all_single", output, written=True)
        check_tensor("all_to_all_single", tensor)
        staged = settled(output)
        received = split_parts(self, "all_to_all_single", "output_splits", staged, output_splits)
        sent = split_parts(self, "all_to_all_single", "input_splits", settled(tensor), input_splits)
        self._enter("all_to_all_single", (output, tensor))
        work = self._transport.all_to_all(received, sent, async_op=async_op)
        return work if staged is output else copy_back(work, [(output, staged)], async_op)

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, *, async_op: bool = False) -> Work:
        """On ``dst``, ``outputs[r]`` becomes rank r's tensor; the other ranks pass None."""
        check_rank(self, "gather", "dst", dst)
        check_tensor("gather", tensor)
        if self.rank == dst:
            check_list(self, "gather", "outputs", outputs, like=tensor, written=True)
            check_same_shape(self, "gather", "outputs", (outputs or ())[self.rank], tensor)
        wanted = list(outputs or ()) if self.rank == dst else []
        staged = [settled(output) for output in wanted]
        self._enter("gather", (tensor, wanted), root=dst)
        work = self._transport.gather(staged if self.rank == dst else None, settled(tensor), dst, async_op=async_op)
        return copy_back(work, list(zip(wanted, staged, strict=True)), async_op)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, *, async_op: bool = False) -> Work:
        """``output`` becomes ``src``'s ``inputs[rank]``; the other ranks pass None."""
        check_rank(self, "scatter", "src", src)
        check_tensor("scatter", output, written=True)
        if self.rank == src:
            check_list(self, "scatter", "inputs", inputs, like=output)
            check_same_shape(self, "scatter", "inputs", (inputs or ())[self.rank], output)
        given = [settled(tensor) for tensor in inputs or ()] if self.rank == src else []
        staged = settled(output)
        self._enter("scatter", (output, given), root=src)
        work = self._transport.scatter(staged, given if self.rank == src else None, src, async_op=async_op)
        return work if staged is output else copy_back(work, [(output, staged)], async_op)

    def send(self, tensor: Tensor, dst: int, tag: int = 0, *, async_op: bool = False) -> Work:
        """Send to one rank; it must ``recv`` the same size with the same tag."""
        check_peer(self, "send", "dst", dst)
        check_tensor("send", tensor)
        self._enter("send", (tensor,), root=dst)
        return self._transport.send(settled(tensor), dst, tag, async_op=async_op)

    def recv(self, tensor: Tensor, src: int, tag: int = 0, *, async_op: bool = False) -> Work:
        """Receive from one rank into ``tensor``."""
        check_peer(self, "recv", "src", src)
        check_tensor("recv", tensor, written=True)
        staged = settled(tensor)
        self._enter("recv", (tensor,), root=src)
        work = self._transport.recv(staged, src, tag, async_op=async_op)
        return copy_back(work, [(tensor, staged)], async_op)

    def recv_any(self, tensor: Tensor, tag: int = 0, *, arrived: Arrived = int, async_op: bool = False) -> Work:
        """Receive from whichever rank sends first with this tag; ``arrived`` is called with its rank."""
        check_others(self, "recv_any")
        check_tensor("recv", tensor, written=True)
        staged = settled(tensor)
        self._enter("recv", (tensor,))
        return copy_back(
            self._transport.recv_any(staged, tag, arrived, async_op=async_op), [(tensor, staged)], async_op
        )

    def monitored_barrier(self, timeout: float | None = None) -> None:
        """Wait like ``barrier``, but ``PeerTimeout`` names every rank that did not come within ``timeout`` seconds."""
        monitored_barrier(self, self.timeout if timeout is None else timeout)

    def barrier(self, *, async_op: bool = False) -> Work:
        """Return when every rank has called it."""
        if self._guarded or _observe._observers:
            self._enter("barrier", ())
        return self._transport.barrier(async_op=async_op)

    # -- values and memory ---------------------------------------------------------------------------------------

    def broadcast_value(self, value: Any, src: int = 0) -> Any:
        """``src``'s value on every rank. The value is JSON: None, bool, numbers, text, lists, dicts with text keys."""
        return _json_values.broadcast_value(self, value, src)

    def all_gather_values(self, value: Any) -> list[Any]:
        """Return every rank's value (JSON), in the order of the ranks."""
        return _json_values.all_gather_values(self, value)

    def shared_empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor in memory that collectives of this group can use without copying it first."""
        return self._transport.shared_empty(shape, dtype)

    # -- the end ----------------------------------------------------------------------------------------------

    def abort(self, cause: BaseException | None = None) -> None:
        """End the group at once, from any thread; whoever waits in it gets ``cause`` (default ``GroupAborted``)."""
        self._end(
            cause
            or GroupAborted(
                f"rank {self.rank}: the group of generation {self.generation} was aborted; "
                f"form the next generation's group to go on"
            ),
            abort=True,
        )

    def close(self) -> None:
        """Release what the group holds. The ranks need not call it together; the peers see this one leave."""
        self._end(
            GroupAborted(f"rank {self.rank}: the group of generation {self.generation} was closed"),
            abort=False,
        )

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _end(self, cause: BaseException, *, abort: bool) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = cause
            self._guarded = True
            children, self._subgroups = self._subgroups, []
            callbacks, self._on_end = self._on_end, []
        for child in children:
            child._end(cause, abort=abort)
        if abort:
            self._transport.abort(cause)
        else:
            self._transport.close()
        for callback in callbacks:
            callback()

    # -- the one place ----------------------------------------------------------------------------------------

    def _enter(
        self,
        name: str,
        sides: Sequence[Tensor | Sequence[Tensor]],
        op: ReduceOp | None = None,
        root: int | None = None,
    ) -> None:
        """Do what precedes every collective: is the group alive, who looks, do the ranks agree."""
        if self._ended is not None:
            raise self._ended
        if _observe._observers:
            _observe.emit(self, name, sides, "" if op is None else op.value)
        if self._checker is not None:
            self._checker.check(name, sides, "" if op is None else op.value, root)

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise self._ended


def _seconds(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if seconds <= 0:
        raise ValueError(f"timeout is {seconds} s; expected a positive number of seconds")
    return seconds
