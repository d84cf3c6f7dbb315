"""Moves boxes between ranks: planned as copies of overlaps, done in one collective for any number of tensors.

Phases of ``exchange``: (1) each rank packs what it owes the others into one buffer of bytes (in shared memory where
peers can read that), or sends from where it lies if it is one run of memory; (2) one ``scatter`` if a single rank
sends, one ``gather`` if a single rank receives, else one ``all_to_all``, and while it is under way what stays on a rank
is copied directly; (3) each rank unpacks. If nothing changes ranks, there is no collective.

Invariant: every rank makes the same plan from the same metadata, so both sides agree on the order of the bytes.
Tensors with wide elements travel first: then every piece begins at a multiple of its element size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from phalanx._devices import device_of_engine
from phalanx.comm import Group
from phalanx.shard.exchange._groups import owner_of
from phalanx.shard.layout._boxes import Box, intersect, split_box, view_of
from phalanx.shard.layout._metadata import ShardMetadata

# Buffers to pack into are kept from one exchange of a group to the next. Ranks of one machine read them where they lie,
# which saves a copy; made anew each time they would cost more than that copy, since every page has to be made and
# mapped, so a group keeps its largest buffer, up to ``MAX_BYTES``, while it lives. A buffer has one user: it is taken,
# and given back when no peer reads it any more; one that never comes back (the collective failed) is freed. Module
# state on purpose: it belongs to groups, which know nothing of sharding.
MIN_BYTES = 1 << 20
MAX_BYTES = 64 << 20
_lock = Lock()
_kept: WeakKeyDictionary[Group, Tensor] = WeakKeyDictionary()

_ALIGNMENT = 16  # bytes of the widest element


class RankBox(NamedTuple):
    """A box that a rank (of the group) holds."""

    rank: int
    box: Box


class Copy(NamedTuple):
    """``box`` goes from the piece ``source`` to the piece ``target`` (positions in their lists)."""

    source: int
    target: int
    box: Box


@dataclass(frozen=True)
class TensorMove:
    """What happens to one tensor; ``local_*`` hold the tensors of the pieces that are this rank's, by position.

    What comes for a target without a tensor is dropped.
    """

    dtype: torch.dtype
    sources: Sequence[RankBox]
    targets: Sequence[RankBox]
    copies: Sequence[Copy]
    local_sources: dict[int, Tensor] = field(default_factory=dict)
    local_targets: dict[int, Tensor] = field(default_factory=dict)

    def nbytes(self) -> int:
        """Bytes that change ranks."""
        return self.dtype.itemsize * sum(
            copy.box.volume for copy in self.copies if self.sources[copy.source].rank != self.targets[copy.target].rank
        )


def pieces_of(shards: Iterable[ShardMetadata], group: Group) -> list[RankBox]:
    return [RankBox(owner_of(shard, group), shard.box) for shard in shards]


def plan_copies(sources: Sequence[RankBox], targets: Sequence[RankBox]) -> list[Copy]:
    """Return every overlap of a source with a target. Each element of a target has one source if sources do not
    overlap."""
    copies = []
    for t, target in enumerate(targets):
        for s, source in enumerate(sources):
            common = intersect(source.box, target.box)
            if common is not None:
                copies.append(Copy(s, t, common))
    return copies


def split_copies(copies: Sequence[Copy], max_volume: int) -> list[list[Copy]]:
    """Rounds of copies of at most ``max_volume`` elements each, in order; together they are the same."""
    rounds: list[list[Copy]] = [[]]
    room = max_volume
    for copy in copies:
        for box in split_box(copy.box, max_volume):
            if box.volume > room and rounds[-1]:
                rounds.append([])
                room = max_volume
            rounds[-1].append(Copy(copy.source, copy.target, box))
            room -= box.volume
    return rounds


def exchange(group: Group, moves: Sequence[TensorMove]) -> None:
    """Do the moves. Collective: every rank passes the same plan with its own local tensors."""
    outgoing: list[list[Tensor]] = [[] for _ in range(group.size)]
    incoming: list[list[Tensor]] = [[] for _ in range(group.size)]
    senders: set[int] = set()
    receivers: set[int] = set()
    staying: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for move in sorted(moves, key=lambda move: -move.dtype.itemsize):
            for copy in move.copies:
                source, target = move.sources[copy.source], move.targets[copy.target]
                if source.rank != target.rank:
                    senders.add(source.rank)
                    receivers.add(target.rank)
                if group.rank not in (source.rank, target.rank):
                    continue
                if source.rank == group.rank:
                    given = view_of(move.local_sources[copy.source].detach(), copy.box, source.box.offsets)
                if target.rank == group.rank:
                    wanted = _room(move, copy)
                if source.rank == target.rank:
                    staying.append((wanted, given))
                elif source.rank == group.rank:
                    outgoing[target.rank].append(given)
                else:
                    incoming[source.rank].append(wanted)
        finish = _carry(group, outgoing, incoming, senders, receivers) if senders else None
        for wanted, given in staying:
            wanted.copy_(given)
        if finish is not None:
            finish()


def _room(move: TensorMove, copy: Copy) -> Tensor:
    """Return where a copy goes on this rank; if its piece has no tensor, memory that is dropped after the exchange."""
    tensor = move.local_targets.get(copy.target)
    if tensor is None:
        return torch.empty(copy.box.sizes, dtype=move.dtype)
    return view_of(tensor.detach(), copy.box, move.targets[copy.target].box.offsets)


def _carry(
    group: Group,
    outgoing: list[list[Tensor]],
    incoming: list[list[Tensor]],
    senders: set[int],
    receivers: set[int],
) -> Callable[[], None]:
    """Start the collective; what is returned waits for it and unpacks."""
    device = buffer_device(group)
    scratch = _take_scratch(group, outgoing) if min(len(senders), len(receivers)) > 1 else None
    sent = _buffers(outgoing, device) if scratch is None else _split(scratch, outgoing)
    received = _buffers(incoming, device)
    for buffer, views in zip(sent, outgoing, strict=True):
        _copy_parts(buffer, views, pack=True)
    if len(senders) == 1:
        (src,) = senders
        work = group.scatter(
            received[src] if group.rank != src else sent[src],
            sent if group.rank == src else None,
            src,
            async_op=True,
        )
    elif len(receivers) == 1:
        (dst,) = receivers
        work = group.gather(
            sent[dst] if group.rank != dst else received[dst],
            received if group.rank == dst else None,
            dst,
            async_op=True,
        )
    else:
        work = group.all_to_all(received, sent, async_op=True)

    def finish() -> None:
        work.wait()
        if scratch is not None:
            give_buffer_back(group, scratch)
        for buffer, views in zip(received, incoming, strict=True):
            _copy_parts(buffer, views, pack=False)

    return finish


def buffer_device(group: Group) -> torch.device:
    """Return where the buffers live: NCCL moves device memory only, everything else moves host memory."""
    return device_of_engine(group.backend)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _direct(views: Sequence[Tensor], device: torch.device) -> bool:
    """Return whether the views are one run of memory on the right device, so that no packing is needed."""
    return len(views) == 1 and views[0].is_contiguous() and views[0].device == device


def _nbytes(views: Sequence[Tensor]) -> int:
    return sum(view.numel() * view.element_size() for view in views)


def _buffers(views_by_rank: Sequence[Sequence[Tensor]], device: torch.device) -> list[Tensor]:
    """Return a run of bytes per peer: the memory of the views where it can be, else end to end in one buffer.

    With several peers that is one buffer, which a transport can carry as it is, if every run then begins aligned.
    """
    if sum(bool(views) for views in views_by_rank) == 1 and any(_direct(views, device) for views in views_by_rank):
        return [
            _bytes(views[0]) if views else torch.empty(0, dtype=torch.uint8, device=device) for views in views_by_rank
        ]
    sizes = [_nbytes(views) for views in views_by_rank]
    if any(size % _ALIGNMENT for size in sizes):
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    return _split(torch.empty(sum(sizes), dtype=torch.uint8, device=device), views_by_rank)


def _take_scratch(group: Group, views_by_rank: Sequence[Sequence[Tensor]]) -> Tensor | None:
    """Shared memory for all that this rank sends, if there is some and every run begins aligned in it."""
    sizes = [_nbytes(views) for views in views_by_rank]
    return None if any(size % _ALIGNMENT for size in sizes) else take_buffer(group, sum(sizes))


def _split(buffer: Tensor, views_by_rank: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    sizes = [_nbytes(views) for views in views_by_rank]
    return list(buffer[: sum(sizes)].split(sizes))


def _copy_parts(buffer: Tensor, views: Sequence[Tensor], *, pack: bool) -> None:
    """Between the views and their buffer, unless that is their own memory."""
    for view, room in _rooms(buffer, views):
        if view.data_ptr() != room.data_ptr():
            room.copy_(view) if pack else view.copy_(room)


def _rooms(buffer: Tensor, views: Sequence[Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
    """Pair each view with its room in the buffer, in its dtype and shape."""
    begin = 0
    for view in views:
        end = begin + view.numel() * view.element_size()
        yield view, buffer[begin:end].view(view.dtype).view(view.shape)
        begin = end


def take_buffer(group: Group, nbytes: int) -> Tensor | None:
    """At least ``nbytes`` bytes that peers can read in place; None where that would not help."""
    if group.backend != "shm" or not MIN_BYTES <= nbytes <= MAX_BYTES:
        return None
    with _lock:
        kept = _kept.pop(group, None)
    if kept is not None and kept.numel() >= nbytes:
        return kept
    del kept  # before more is asked for
    try:
        return group.shared_empty((nbytes,), torch.uint8)
    except OSError:  # there is no shared memory left; private memory is as right
        return None


def give_buffer_back(group: Group, buffer: Tensor) -> None:
    with _lock:
        other = _kept.get(group)
        if other is None or other.numel() < buffer.numel():
            _kept[group] = buffer
