"""Building groups: who the peers are, which transport carries the bytes, and the bridge to torch's default group.

Owns the phases of joining a generation. Every key lives under job and generation, so a stale one is never read.

1. every rank writes its identity and waits for the others' (late ranks are named when the timeout passes);
2. the backend is chosen, the same on all ranks, from the identities alone;
3. the engine connects in a thread of its own, since it cannot be interrupted: if a peer dies meanwhile, or the caller
   gives up, the thread is abandoned and ends by itself after ``_CONNECT_TIMEOUT``.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store as C10dStore

from phalanx._fields import Fields, load_json
from phalanx.comm import _background as background
from phalanx.comm.failure import _addresses
from phalanx.comm.failure._failure import FailureDetector
from phalanx.comm.failure._liveness import Identity, own_identity
from phalanx.comm.failure._mismatch import CallChecker, collectives_checked
from phalanx.comm.group._group import DEFAULT_TIMEOUT, Group, Interrupt
from phalanx.comm.stores import Store
from phalanx.comm.transports import _auto, _release
from phalanx.comm.transports._by_device import ByDeviceTransport
from phalanx.comm.transports._c10d import C10dTransport
from phalanx.comm.transports._interface import Transport
from phalanx.errors import PeerLost, PeerTimeout, StoreTimeout
from phalanx.protocol import group_prefix

_CONNECT_TIMEOUT = 30.0
_SLICE = 0.02


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank belongs: everything that two ranks need to find each other."""

    store: Store
    rank: int
    size: int
    timeout: float
    job: str
    generation: int

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(
                f"rank {self.rank} of a group of {self.size}; expected a rank in [0, world_size)"
            )


def create_group(place: Place, backend: str, interrupt: Interrupt) -> Group:
    place = replace(place, store=place.store.namespace(group_prefix(place.job, place.generation)))
    peers = _exchange_identities(place, interrupt)
    checker = (
        CallChecker(place.store, place.rank, place.size, place.timeout) if collectives_checked() else None
    )

    def make_subgroup(ranks: tuple[int, ...], key: str) -> Transport:
        sub = replace(place, store=place.store.namespace(key), rank=ranks.index(place.rank), size=len(ranks))
        members = {index: peers[rank] for index, rank in enumerate(ranks)}
        return _connect(sub, backend, members, lambda: None)

    return Group(
        _connect(place, backend, peers, interrupt),
        ranks=range(place.size),
        make_subgroup=make_subgroup,
        timeout=place.timeout,
        job=place.job,
        generation=place.generation,
        store=place.store,
        checker=checker,
    )


def _exchange_identities(place: Place, interrupt: Interrupt) -> dict[int, Identity]:
    mine = json.dumps({"v": 1, **own_identity().to_record()}).encode()
    own = f"member/{place.rank}"
    place.store.set(own, mine)
    keys = [f"member/{rank}" for rank in range(place.size)]
    deadline = time.monotonic() + place.timeout
    while True:
        try:
            records = place.store.wait(keys, timeout=_SLICE)
            break
        except StoreTimeout:
            if place.store.get(own) != mine:
                place.store.set(own, mine)  # a stranger wrote over it or deleted it
            cause = interrupt()
            if cause is not None:
                raise cause from None
            if time.monotonic() > deadline:
                found = place.store.get_many(keys)
                missing = tuple(rank for rank, value in enumerate(found) if value is None)
                raise PeerTimeout(
                    f"rank {place.rank}: ranks {list(missing)} did not join generation {place.generation} of job "
                    f"{place.job!r} within {place.timeout:g} s; check that they were started with world size "
                    f"{place.size} and reach {place.store.address}",
                    generation=place.generation,
                    ranks=missing,
                ) from None
    return {rank: _identity(rank, record) for rank, record in enumerate(records)}


def _identity(rank: int, data: bytes) -> Identity:
    """``ValueError`` when it is none of this release."""
    record = Fields(load_json(data, f"identity of rank {rank}"), f"identity of rank {rank}")
    if record.get("v") != 1:
        raise ValueError(
            f"identity of rank {rank} has an unknown version: {data[:80]!r}; run one release everywhere"
        )
    return Identity(
        machine=record.text("machine"),
        host=record.text("host"),
        pid=record.integer("pid", low=0),
        started=record.integer("started"),
        uid=record.integer("uid"),
    )


def _connect_auto(place: Place, peers: dict[int, Identity], interrupt: Interrupt) -> Transport:
    """One transport for CPU tensors and, where there is an accelerator, another for its tensors."""
    cpu = _auto.connect_auto(place, peers, interrupt, lambda at, who: _connect(at, "gloo", who, interrupt))
    device = _auto.accelerator()
    if device is None:
        return cpu
    choice = _auto.choose_for(device, dist.is_nccl_available())
    if choice.kind == cpu.name:
        return cpu

    def connect() -> Transport:
        _auto.say_chosen(place, f"{choice.kind} for tensors on {device}", choice.why)
        return _connect(replace(place, store=place.store.namespace(device)), choice.kind, peers, interrupt)

    return ByDeviceTransport(cpu, device, connect)


def _connect(place: Place, backend: str, peers: dict[int, Identity], interrupt: Interrupt) -> Transport:
    if backend == "auto":
        return _connect_auto(place, peers, interrupt)
    store = place.store.as_c10d()
    engine = _make_in_thread(place, peers, interrupt, lambda: make_engine(backend, place, store))
    if backend == "gloo":
        _addresses.publish(place.store, place.rank)
    failures = FailureDetector(
        rank=place.rank,
        size=place.size,
        generation=place.generation,
        timeout=place.timeout,
        peers=peers,
        store=place.store,
    )
    return C10dTransport(engine, backend, place.timeout, failures, store=store)


def make_engine(backend: str, place: Place, store: C10dStore) -> Any:
    """A c10d backend by name: torch's own, or one that was registered with ``Backend.register_backend``."""
    timeout = timedelta(seconds=place.timeout)
    connect = timedelta(seconds=min(place.timeout, _CONNECT_TIMEOUT))
    store.set_timeout(connect)  # an abandoned thread must not wait for a dead peer's keys for long
    if backend == "gloo":
        engine = dist.ProcessGroupGloo(store, place.rank, place.size, connect)
        engine._set_default_timeout(timeout)
        return engine
    if backend == "nccl" and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, place.rank, place.size, options)
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None:
        known = ["auto", "gloo", "nccl", *(name.lower() for name in dist.Backend._plugins)]
        raise ValueError(f"unknown or unavailable backend {backend!r}; expected one of {', '.join(known)}")
    if plugin.extended_api:
        common = torch._C._distributed_c10d._DistributedBackendOptions()
        common.store, common.group_rank, common.group_size, common.timeout = (
            store,
            place.rank,
            place.size,
            timeout,
        )
        return plugin.creator_fn(common, None)
    return plugin.creator_fn(store, place.rank, place.size, timeout)


def _make_in_thread(
    place: Place, peers: dict[int, Identity], interrupt: Interrupt, make: Callable[[], Any]
) -> Any:
    """Run ``make`` in a thread; give up when a peer of this machine dies or ``interrupt`` says so."""
    outcome: list[Any] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        outcome.append(make())
        done.set()

    def failed(error: BaseException) -> None:
        errors.append(error)
        done.set()

    background.start(run, "phalanx-connect", on_failure=failed)
    local = {rank: peer for rank, peer in peers.items() if peer.machine == peers[place.rank].machine}
    while not done.wait(_SLICE):
        dead = tuple(rank for rank, peer in local.items() if rank != place.rank and not peer.is_alive())
        cause = interrupt() or (_died_while_joining(place, dead) if dead else None)
        if cause is not None:
            raise cause
    if errors:
        if isinstance(errors[0], RuntimeError) and FailureDetector.is_fault(errors[0]):
            raise _died_while_joining(place, ()) from errors[0]
        raise errors[0]
    return outcome.pop()


def _died_while_joining(place: Place, dead: tuple[int, ...]) -> PeerLost:
    who = f"rank {', '.join(map(str, dead))}" if dead else "a rank"
    return PeerLost(
        f"rank {place.rank}: {who} was lost while generation {place.generation} formed; form the next one",
        generation=place.generation,
        ranks=dead,
    )


# -- groups that users bring, and torch's default group ---------------------------------------------------------


def wrap_group(process_group: dist.ProcessGroup) -> Group:
    rank, size = process_group.rank(), process_group.size()
    name = _engine_name(process_group)
    failures = FailureDetector(rank=rank, size=size, timeout=DEFAULT_TIMEOUT)
    registered = process_group in dist.distributed_c10d._world.pg_group_ranks
    ranks = dist.get_process_group_ranks(process_group) if registered else list(range(size))

    def make_subgroup(members: tuple[int, ...], key: str) -> Transport:
        from phalanx.comm.stores import wrap_c10d_store  # only groups that users bring need it

        store = wrap_c10d_store(process_group.get_group_store()).namespace(
            f"phalanx/{process_group.group_name}/{key}"
        )
        place = Place(
            store=store,
            rank=members.index(rank),
            size=len(members),
            timeout=DEFAULT_TIMEOUT,
            job="wrapped",
            generation=0,
        )
        native = store.as_c10d()
        engine = make_engine(name, place, native)
        detector = FailureDetector(rank=place.rank, size=place.size, timeout=DEFAULT_TIMEOUT, store=store)
        return C10dTransport(engine, name, DEFAULT_TIMEOUT, detector, store=native)

    return Group(
        C10dTransport(_engine_of(process_group), name, DEFAULT_TIMEOUT, failures, store=None),
        ranks=ranks,
        make_subgroup=make_subgroup,
    )


def _engine_of(process_group: Any) -> Any:
    """The backend itself where there is but one: its calls take half the time of the process group's in front of it."""
    if not isinstance(process_group, dist.ProcessGroup):
        return process_group
    try:
        backends = [process_group._get_backend(device) for device in process_group._device_types]
    except RuntimeError:
        return process_group  # a process group without a backend, such as one written in Python
    return backends[0] if backends and all(one is backends[0] for one in backends) else process_group


def _engine_name(process_group: Any) -> str:
    if isinstance(process_group, dist.ProcessGroup):
        try:
            process_group = process_group._get_backend(torch.device("cpu"))
        except RuntimeError:
            pass  # no backend for CPU tensors; the group's own name will do
    return str(process_group.name()).lower()


def make_torch_default(group: Group) -> Callable[[], None]:
    """Make torch's default process group over the same ranks; returns what undoes it."""
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
    backend = group.backend if group.backend in ("gloo", "nccl", "ucc", "mpi") else "gloo"
    store: C10dStore | None = group.store.namespace("default").as_c10d()
    dist.init_process_group(
        backend,
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
        holder, made = [made], None
        dist.destroy_process_group()
        _release.drop(holder)

    return undo
