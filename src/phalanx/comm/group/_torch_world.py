"""Keeps torch's tables of process groups true of ours: names, ranks, and torch's default group.

Owns what is written to them and taken out again. A group of real ranks is registered when it is made, if torch has a
default group with the same numbering (then ``torch.distributed.get_rank(group)`` and the like give the right answer);
without one, torch has nothing to number by, and says so when asked. A name, by which torch's functional collectives
and meshes find a group, is registered when it is first asked for, for simulated ranks too. Also lets
``torch.distributed.monitored_barrier``, which asks for a backend called gloo, take our groups.

Invariants: what has ended is in no table of torch's (a group that torch destroys is taken out by torch); the end of
one default group takes no living group of ours with it.
"""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import Store as C10dStore

from phalanx._torch_private import c10d_world, register_process_group, unregister_process_group
from phalanx.comm.transports import _release

if TYPE_CHECKING:
    from phalanx.comm.group._group import Group

BACKEND = "phalanx"


def make_findable(group: Group) -> None:
    """Give the group a name that no other group of this process has, and register it.

    The generation is no part of it: torch's caches keep names, and find the group that took the place of one that has
    ended.
    """
    group._check_alive()
    who = f"@{group.rank}" if group.rank_token is not None else ""
    for count in itertools.count():
        name = f"{BACKEND}/{group.job}/{group.label}{who}{f'#{count}' if count else ''}"
        try:
            register_process_group(name, group)
        except RuntimeError:  # taken: by a simulated run before, or another wrapping of the same process group
            if count > 1_000_000:
                raise
            continue
        group.setGroupName(name)
        group._on_end.append(forget_name := weakref.finalize(group, unregister_process_group, name))
        forget_name.atexit = False
        return


def register(group: Group) -> None:
    """Enter the group in torch's tables, if its ranks are those of torch's default group."""
    default = dist.group.WORLD if group.rank_token is None else None
    if default is None or group.ranks[group.rank] != default.rank() or group.world_size != default.size():
        return
    name = group.group_name
    tag = f"ptd:{name}"
    c10d_world.pg_map[group] = (BACKEND, None)
    c10d_world.pg_names[group] = name
    c10d_world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(group.ranks)}
    c10d_world.pg_backend_config[group] = f"cpu:{BACKEND}"
    c10d_world.pg_to_tag[group] = tag
    c10d_world.tags_to_pg[tag] = [group]
    group._torch_registered = True


def forget(group: Group) -> None:
    """Take out what ``register`` entered."""
    if not group._torch_registered:
        return
    group._torch_registered = False
    for table in (
        c10d_world.pg_map,
        c10d_world.pg_names,
        c10d_world.pg_group_ranks,
        c10d_world.pg_backend_config,
        c10d_world.pg_coalesce_state,
    ):
        table.pop(group, None)
    c10d_world.tags_to_pg.pop(c10d_world.pg_to_tag.pop(group, ""), None)


def make_default(group: Group) -> Callable[[], None]:
    """Make torch's default process group over the ranks of ``group``; returns what undoes it."""
    if group.store is None:
        raise RuntimeError(
            f"rank {group.rank}: this group has no store (simulated or wrapped ranks); "
            f"only groups from Group.create can become torch's default group"
        )
    if dist.is_initialized():
        raise RuntimeError(
            f"rank {group.rank}: torch has a default process group already; "
            f"destroy it first (torch.distributed.destroy_process_group()), or use Group.wrap on it"
        )
    store: C10dStore | None = group.store.namespace("default").as_c10d()
    dist.init_process_group(
        group.backend if group.backend in ("gloo", "nccl", "ucc", "mpi") else "gloo",
        store=store,
        rank=group.rank,
        world_size=group.size,
        timeout=timedelta(seconds=group.timeout),
    )
    made = dist.group.WORLD
    owner = os.getpid()

    def undo() -> None:
        nonlocal made, store
        store = None  # kept till here: torch does not keep a store written in Python alive
        if made is None or os.getpid() != owner or dist.group.WORLD is not made:
            return
        for other in [pg for pg in c10d_world.pg_names if getattr(pg, "_torch_registered", False)]:
            forget(other)  # torch would shut it down, and it lives on
        holder, made = [made], None
        dist.destroy_process_group()
        _release.drop(holder)

    return undo


def teach_torch(kind: type[Group]) -> None:
    """Let ``torch.distributed.monitored_barrier`` take groups of ``kind``. Does it once."""
    plain = dist.monitored_barrier
    if hasattr(plain, "_phalanx"):
        return

    @functools.wraps(plain)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        found = dist.group.WORLD if group is None else group
        if isinstance(found, kind):
            return found.monitored_barrier(timeout, wait_all_ranks)
        return plain(group, timeout, wait_all_ranks)

    monitored_barrier._phalanx = True  # type: ignore[attr-defined]  # a mark that this was done
    for module in (dist, dist.distributed_c10d):
        module.monitored_barrier = monitored_barrier  # type: ignore[attr-defined]
