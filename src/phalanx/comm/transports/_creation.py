"""Connects the ranks of a group: who the peers are, which transport carries the bytes.

Owns the phases of joining a generation. Every key lives under job and generation, so a stale one is never read.

1. every rank writes its identity and waits for the others' (late ranks are named when the timeout passes), unless all
   know who the others are: an elastic job's workers learn it with their places;
2. the backend is chosen, the same on all ranks, from the identities alone;
3. the engine connects in a thread of its own, since it cannot be interrupted: if a peer dies meanwhile, or the caller
   gives up, the thread is abandoned and ends by itself after ``_CONNECT_TIMEOUT``.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store as C10dStore

from phalanx._devices import accelerator
from phalanx._torch_private import (
    DistributedBackendOptions,
    backend_plugins,
    c10d_world,
    device_types,
    get_backend,
    set_default_timeout,
)
from phalanx.comm import _background as background
from phalanx.comm.failure import _peer_addresses
from phalanx.comm.failure._failure import FailureDetector
from phalanx.comm.failure._identities import identity_record, load_identity, pack_identities, unpack_identities
from phalanx.comm.failure._liveness import Identity, own_identity
from phalanx.comm.failure._mismatch import CallChecker, collectives_checked
from phalanx.comm.stores import Store, wrap_c10d_store
from phalanx.comm.stores._for_torch import ExchangeForTorch, exchange_for_torch
from phalanx.comm.stores._polling import slice_after
from phalanx.comm.transports import _auto
from phalanx.comm.transports._by_device import ByDeviceTransport
from phalanx.comm.transports._c10d import C10dTransport
from phalanx.comm.transports._interface import DEFAULT_TIMEOUT, GroupSpec, Interrupt, Transport
from phalanx.comm.transports._staged import StagedTransport
from phalanx.errors import PeerLost, PeerTimeout, StoreTimeout
from phalanx.protocol import group_prefix

SubgroupMaker = Callable[..., Transport]
"""Called with ranks and key, and with a backend and a timeout where they are not the group's own."""

_CONNECT_TIMEOUT = 30.0
_SLICE = 0.02


@dataclass(frozen=True, kw_only=True)
class Connection:
    """What a ``Group`` is made of: its transport, and how to get those of its subgroups."""

    transport: Transport
    ranks: Sequence[int]
    make_subgroup: SubgroupMaker
    timeout: float = DEFAULT_TIMEOUT
    job: str = "local"
    generation: int = 0
    store: Store | None = None
    checker: CallChecker | None = None
    world_size: int | None = None
    """How many ranks there are in all where ``ranks`` are some of torch's; None: these are all."""
    label: str = ""
    identities: Mapping[int, Identity] = field(default_factory=dict)
    """The ranks' processes, where they are known."""


def connect_ranks(
    spec: GroupSpec, backend: str, interrupt: Interrupt, identities: Mapping[int, Identity] | None = None
) -> Connection:
    """Meet the other ranks of the generation and connect to them; collective. ``identities``: who they are, where all
    of them know it already."""
    spec = replace(spec, store=spec.store.namespace(group_prefix(spec.job, spec.generation)))
    peers = dict(identities) if identities else _exchange_identities(spec, interrupt)
    checker = CallChecker(spec.store, spec.rank, spec.size, spec.timeout) if collectives_checked() else None

    def make_subgroup(
        ranks: tuple[int, ...], key: str, backend: str = backend, timeout: float = spec.timeout
    ) -> Transport:
        sub = replace(
            spec, store=spec.store.namespace(key), rank=ranks.index(spec.rank), size=len(ranks), timeout=timeout
        )
        members = {index: peers[rank] for index, rank in enumerate(ranks)}
        return _connect(sub, backend, members, lambda: None)

    return Connection(
        transport=_connect(spec, backend, peers, interrupt),
        ranks=range(spec.size),
        make_subgroup=make_subgroup,
        timeout=spec.timeout,
        job=spec.job,
        generation=spec.generation,
        store=spec.store,
        checker=checker,
        identities=peers,
    )


def _exchange_identities(spec: GroupSpec, interrupt: Interrupt) -> dict[int, Identity]:
    """Return who the ranks are.

    Each writes its own record; rank 0 reads them all and writes the list that the others read. Were each to read each
    other's, the store would be asked for the square of their number.
    """
    own = {f"member/{spec.rank}": json.dumps(identity_record(own_identity())).encode()}
    for key, data in own.items():
        spec.store.set(key, data)
    if spec.rank == 0:
        records = _await_records(spec, [f"member/{rank}" for rank in range(spec.size)], own, interrupt)
        known = {rank: load_identity(rank, data) for rank, data in enumerate(records)}
        if spec.size > 1:
            spec.store.set(_MEMBERS, pack_identities([known[rank] for rank in range(spec.size)]))
        return known
    (packed,) = _await_records(spec, [_MEMBERS], own, interrupt)
    known = unpack_identities(packed)
    if len(known) != spec.size:
        raise ValueError(
            f"rank {spec.rank}: rank 0 lists {len(known)} ranks; expected {spec.size}: all have to be started with "
            f"the same world size"
        )
    return known


_MEMBERS = "members"


def _await_records(
    spec: GroupSpec, keys: Sequence[str], own: Mapping[str, bytes], interrupt: Interrupt
) -> Sequence[bytes]:
    """Wait for all keys, and see to it that this rank's ``own`` records stay meanwhile."""
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        try:
            return spec.store.wait(keys, timeout=slice_after(waited))
        except StoreTimeout:
            for key, data in own.items():
                if spec.store.get(key) != data:
                    spec.store.set(key, data)  # a stranger wrote over it or deleted it
            cause = interrupt()
            if cause is not None:
                raise cause from None
            if waited > spec.timeout:
                found = spec.store.get_many([f"member/{rank}" for rank in range(spec.size)])
                missing = tuple(rank for rank, value in enumerate(found) if value is None) or (0,)
                raise PeerTimeout(
                    f"rank {spec.rank}: ranks {list(missing)} did not join generation {spec.generation} of job "
                    f"{spec.job!r} within {spec.timeout:g} s; check that they were started with world size "
                    f"{spec.size} and reach {spec.store.address}",
                    generation=spec.generation,
                    ranks=missing,
                ) from None


def _connect_auto(spec: GroupSpec, peers: dict[int, Identity], interrupt: Interrupt) -> Transport:
    """Return one transport for CPU tensors and, where there is an accelerator, another for its tensors."""
    cpu = _auto.connect_auto(spec, peers, interrupt, lambda at, who: _connect(at, "gloo", who, interrupt))
    device = accelerator()
    if device is None:
        return cpu
    choice = _auto.choose_for(device, ["nccl"] if dist.is_nccl_available() else [])

    def connect() -> Transport:
        _auto.say_chosen(spec, f"{choice.kind} for tensors on {device.kind}", choice.why)
        if choice.kind == "staged":
            return StagedTransport(cpu, device)
        return _connect(replace(spec, store=spec.store.namespace(device.kind)), choice.kind, peers, interrupt)

    return ByDeviceTransport(cpu, device.kind, connect)


def _connect(spec: GroupSpec, backend: str, peers: dict[int, Identity], interrupt: Interrupt) -> Transport:
    if backend == "auto":
        return _connect_auto(spec, peers, interrupt)
    store = spec.store.as_c10d()
    exchange: ExchangeForTorch | None = None
    if backend == "gloo":
        store = exchange = exchange_for_torch(store, spec.rank, spec.size, spec.timeout)
    engine = _make_in_thread(spec, peers, interrupt, lambda: make_engine(backend, spec, store), exchange)
    if backend == "gloo":
        _peer_addresses.publish(spec.store, spec.rank)
    failures = FailureDetector(
        rank=spec.rank,
        size=spec.size,
        generation=spec.generation,
        timeout=spec.timeout,
        peers=peers,
        store=spec.store,
    )
    return C10dTransport(engine, backend, spec.timeout, failures, store=store)


def make_engine(backend: str, spec: GroupSpec, store: C10dStore) -> Any:
    """Return a c10d backend by name: torch's own, or one that was registered with ``Backend.register_backend``."""
    timeout = timedelta(seconds=spec.timeout)
    connect = timedelta(seconds=min(spec.timeout, _CONNECT_TIMEOUT))
    store.set_timeout(connect)  # an abandoned thread must not wait for a dead peer's keys for long
    if backend == "gloo":
        engine = dist.ProcessGroupGloo(store, spec.rank, spec.size, connect)
        set_default_timeout(engine, timeout)
        return engine
    if backend == "nccl" and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, spec.rank, spec.size, options)
    plugin = backend_plugins.get(backend.upper())
    if plugin is None:
        known = ["auto", "gloo", "nccl", *(name.lower() for name in backend_plugins)]
        raise ValueError(f"unknown or unavailable backend {backend!r}; expected one of {', '.join(known)}")
    if plugin.extended_api:
        common = DistributedBackendOptions()
        common.store, common.group_rank, common.group_size, common.timeout = (
            store,
            spec.rank,
            spec.size,
            timeout,
        )
        return plugin.creator_fn(common, None)
    return plugin.creator_fn(store, spec.rank, spec.size, timeout)


def _make_in_thread(
    spec: GroupSpec,
    peers: dict[int, Identity],
    interrupt: Interrupt,
    make: Callable[[], Any],
    exchange: ExchangeForTorch | None,
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
    local = {rank: peer for rank, peer in peers.items() if peer.machine == peers[spec.rank].machine}
    while not done.wait(_SLICE):
        dead = tuple(rank for rank, peer in local.items() if rank != spec.rank and not peer.is_alive())
        cause = interrupt() or (_died_while_joining(spec, dead) if dead else None)
        if cause is not None:
            if exchange is not None:
                exchange.give_up()
            raise cause
    if errors:
        if isinstance(errors[0], StoreTimeout):
            missing = () if exchange is None else exchange.missing()
            who = f"ranks {list(missing)}" if missing else "a rank"
            raise PeerTimeout(
                f"rank {spec.rank}: {who} did not say within {spec.timeout:g} s how to be reached in generation "
                f"{spec.generation} of job {spec.job!r}; they may hang: form the next one",
                generation=spec.generation,
                ranks=missing,
            ) from errors[0]
        if isinstance(errors[0], RuntimeError) and FailureDetector.is_fault(errors[0]):
            raise _died_while_joining(spec, ()) from errors[0]
        raise errors[0]
    return outcome.pop()


def _died_while_joining(spec: GroupSpec, dead: tuple[int, ...]) -> PeerLost:
    who = f"rank {', '.join(map(str, dead))}" if dead else "a rank"
    return PeerLost(
        f"rank {spec.rank}: {who} was lost while generation {spec.generation} formed; form the next one",
        generation=spec.generation,
        ranks=dead,
    )


# -- groups that users bring ------------------------------------------------------------------------------------


def wrap_process_group(process_group: dist.ProcessGroup) -> Connection:
    """Use a c10d process group that the caller made and keeps."""
    rank, size = process_group.rank(), process_group.size()
    name = _engine_name(process_group)
    failures = FailureDetector(rank=rank, size=size, timeout=DEFAULT_TIMEOUT)
    registered = process_group in c10d_world.pg_group_ranks
    ranks = dist.get_process_group_ranks(process_group) if registered else list(range(size))

    def make_subgroup(
        members: tuple[int, ...], key: str, backend: str = name, timeout: float = DEFAULT_TIMEOUT
    ) -> Transport:
        store = wrap_c10d_store(process_group.get_group_store()).namespace(f"phalanx/{process_group.group_name}/{key}")
        spec = GroupSpec(
            store=store,
            rank=members.index(rank),
            size=len(members),
            timeout=timeout,
            job="wrapped",
            generation=0,
        )
        native = store.as_c10d()
        engine = make_engine(backend, spec, native)
        detector = FailureDetector(rank=spec.rank, size=spec.size, timeout=timeout, store=store)
        return C10dTransport(engine, backend, timeout, detector, store=native)

    return Connection(
        transport=C10dTransport(_engine_of(process_group), name, DEFAULT_TIMEOUT, failures, store=None),
        ranks=ranks,
        make_subgroup=make_subgroup,
        world_size=dist.get_world_size() if registered else None,
        label=f"wrapped/{process_group.group_name}" if registered else "wrapped",
    )


def _engine_of(process_group: Any) -> Any:
    """Return the backend itself where there is but one: its calls take half the time of the process group's in front of
    it."""
    if not isinstance(process_group, dist.ProcessGroup):
        return process_group
    try:
        backends = [get_backend(process_group, device) for device in device_types(process_group)]
    except RuntimeError:
        return process_group  # a process group without a backend, such as one written in Python
    return backends[0] if backends and all(one is backends[0] for one in backends) else process_group


def _engine_name(process_group: Any) -> str:
    if isinstance(process_group, dist.ProcessGroup):
        try:
            process_group = get_backend(process_group, torch.device("cpu"))
        except RuntimeError:
            pass  # no backend for CPU tensors; the group's own name will do
    return str(process_group.name()).lower()
