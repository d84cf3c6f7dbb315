"""Chooses which transport carries a group's bytes when the user says ``auto``, and says why.

Owns the decision, a pure function of where the ranks are, so that all of them decide alike, and the fallback: whatever
keeps the ranks of one host from sharing memory is found by all of them together, said in one log line, and gloo takes
over. Every group says in one log line (``phalanx.comm``, INFO) what it got and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from phalanx._devices import Device
from phalanx.comm.failure._liveness import Identity, own_identity
from phalanx.comm.transports._interface import GroupSpec, Interrupt, ReduceOp, Transport
from phalanx.comm.transports._two_level import Hosts, TwoLevelTransport
from phalanx.comm.transports.shm._segment_join import ShmUnavailable, trial
from phalanx.comm.transports.shm._transport import ShmTransport

log = logging.getLogger("phalanx.comm")


MakeC10d = Callable[[GroupSpec, dict[int, Identity]], Transport]
"""Connects the ranks of a group with gloo."""


@dataclass(frozen=True)
class TransportChoice:
    """The kind of transport (``shm``, ``two_level``, ``gloo``; ``nccl`` or ``staged``) and the reason in words."""

    kind: str
    why: str


def host_key(identity: Identity) -> str:
    """Equal for ranks that may share memory."""
    return f"{identity.machine}/{identity.uid}"


def hosts_of(identities: Mapping[int, Identity]) -> Hosts:
    return Hosts.group([host_key(identities[rank]) for rank in range(len(identities))])


def choose(identities: Mapping[int, Identity]) -> TransportChoice:
    """Return what carries CPU tensors between these ranks."""
    hosts = hosts_of(identities)
    if len(hosts.ranks) == 1:
        return TransportChoice("shm", f"all {len(identities)} ranks share host {identities[0].host}")
    if hosts.pays:
        sizes = ", ".join(str(len(ranks)) for ranks in hosts.ranks)
        return TransportChoice("two_level", f"{len(hosts.ranks)} hosts have {sizes} ranks")
    return TransportChoice("gloo", f"each of {len(identities)} ranks is on a host, container or user of its own")


def choose_for(device: Device, engines: Collection[str]) -> TransportChoice:
    """Return what carries an accelerator's tensors, if these c10d backends are there."""
    if device.engine in engines:
        return TransportChoice(device.engine, f"it is made for {device.kind}")
    has = f"this torch has no {device.engine}" if device.engine else f"{device.kind} has no backend of its own here"
    return TransportChoice("staged", f"{has}: they go through the host's memory")


def foresee() -> TransportChoice:
    """Return what would carry CPU tensors between two ranks of this machine, tried out; for ``phalanx doctor``."""
    trouble = trial()
    if trouble is not None:
        return TransportChoice("gloo", trouble)
    return choose({0: own_identity(), 1: own_identity()})


def connect_auto(
    spec: GroupSpec, identities: dict[int, Identity], interrupt: Interrupt, make_c10d: MakeC10d
) -> Transport:
    """Return the transport for CPU tensors; collective over the ranks of ``spec``."""
    choice = choose(identities)
    try:
        if choice.kind == "shm":
            transport: Transport = _connect_shm(spec, identities, interrupt)
        elif choice.kind == "two_level":
            transport = _connect_two_level(spec, identities, interrupt, make_c10d)
        else:
            transport = make_c10d(spec, identities)
    except ShmUnavailable as error:
        say_chosen(spec, "gloo", str(error))
        return make_c10d(spec, identities)
    if transport.name == choice.kind:
        say_chosen(spec, choice.kind, choice.why)
    return transport


def say_chosen(spec: GroupSpec, what: str, why: str) -> None:
    """Log one line of the first rank for whoever shows INFO, that of every rank for DEBUG."""
    level = logging.INFO if spec.rank == 0 else logging.DEBUG
    log.log(level, "generation %d, rank %d: %s, since %s", spec.generation, spec.rank, what, why)


def _connect_shm(spec: GroupSpec, identities: Mapping[int, Identity], interrupt: Interrupt) -> ShmTransport:
    return ShmTransport.create(
        spec.store,
        spec.rank,
        spec.size,
        timeout=spec.timeout,
        generation=spec.generation,
        identities=identities,
        interrupt=interrupt,
    )


def _connect_two_level(
    spec: GroupSpec, identities: dict[int, Identity], interrupt: Interrupt, make_c10d: MakeC10d
) -> Transport:
    hosts = hosts_of(identities)
    host = hosts.host_of(spec.rank)

    def among(name: str, ranks: Sequence[int]) -> tuple[GroupSpec, dict[int, Identity]]:
        sub = replace(spec, store=spec.store.namespace(name), rank=ranks.index(spec.rank), size=len(ranks))
        return sub, {index: identities[rank] for index, rank in enumerate(ranks)}

    flat = make_c10d(spec, identities)
    made: list[Transport] = [flat]
    try:
        local = _shared_by_all_hosts(spec, flat, *among(f"host/{host}", hosts.ranks[host]), interrupt)
        if local is None:
            say_chosen(spec, "gloo", "a host has no shared memory")
            return flat
        made.append(local)
        first = [ranks[0] for ranks in hosts.ranks]
        leaders = make_c10d(*among("leaders", first)) if spec.rank in first else None
        return TwoLevelTransport(spec.rank, hosts, local, leaders, flat)
    except BaseException:
        for transport in made:
            transport.close()
        raise


def _shared_by_all_hosts(
    spec: GroupSpec, flat: Transport, sub: GroupSpec, members: dict[int, Identity], interrupt: Interrupt
) -> ShmTransport | None:
    """Return this host's shared memory; None on every rank of every host when one host has none."""
    local: ShmTransport | None = None
    try:
        local = _connect_shm(sub, members, interrupt)
    except ShmUnavailable as error:
        log.debug("generation %d, rank %d: %s", spec.generation, spec.rank, error)
    everywhere = torch.tensor([local is not None], dtype=torch.uint8)
    flat.all_reduce(everywhere, ReduceOp.MIN, async_op=False)
    if local is not None and not everywhere.item():
        local.close()
        return None
    return local
