"""Chooses the CPUs that a worker is bound to, by what sysfs says.

Owns the topology of a machine as the kernel shows it (NUMA nodes, sockets, cores, last-level caches, where
GPUs hang) and four ways to share it among workers. Pure but for reading files: the caller binds with
``os.sched_setaffinity``. Only CPUs that this process may use count, so containers and batch systems are
respected. Linux only; elsewhere every call raises ``NumaError``. Invariants: a worker is bound to at least
one CPU, and the workers of one node that ask for ``exclusive`` share no core.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from phalanx.errors import PhalanxError

log = logging.getLogger(__name__)

T = TypeVar("T")


class NumaError(PhalanxError, ValueError):
    """The machine does not have what the binding asks for."""


class AffinityMode(str, Enum):
    """Says how workers share the CPUs of a machine."""

    NODE = "node"
    """All CPUs of the worker's NUMA node."""
    SOCKET = "socket"
    """All CPUs of the socket that the worker's NUMA node is on."""
    EXCLUSIVE = "exclusive"
    """Its own cores, an even share of the worker's NUMA node."""
    CORE_COMPLEX = "core-complex"
    """CPUs that share one last-level cache."""


@dataclass(frozen=True)
class NumaOptions:
    """Says what to bind to, and whether to run unbound when the machine cannot.

    >>> NumaOptions(AffinityMode.NODE).should_fall_back_if_binding_fails
    False
    """

    affinity_mode: AffinityMode
    should_fall_back_if_binding_fails: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "affinity_mode", AffinityMode(self.affinity_mode))


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The usable CPUs of a machine. ``cores`` and ``caches`` map a CPU to those that share its core /
    cache."""

    nodes: Mapping[int, frozenset[int]]
    sockets: Mapping[int, int]
    cores: Mapping[int, frozenset[int]]
    caches: Mapping[int, frozenset[int]]
    gpu_nodes: tuple[int, ...] = ()


def cpus_for(
    options: NumaOptions,
    local_rank: int,
    local_size: int,
    *,
    sysfs: str | Path = "/sys",
    allowed: Iterable[int] | None = None,
    environ: Mapping[str, str] | None = None,
) -> set[int]:
    """Return the CPUs for one of ``local_size`` workers; empty when it may and has to run unbound.

    >>> cpus_for(NumaOptions(AffinityMode.NODE), 0, 1) <= os.sched_getaffinity(0)  # doctest: +SKIP
    True
    """
    if not 0 <= local_rank < local_size:
        raise ValueError(f"local rank {local_rank} is outside [0, {local_size})")
    env = os.environ if environ is None else environ
    try:
        topology = read_topology(Path(sysfs), _allowed_cpus() if allowed is None else set(allowed), env)
        return set(choose_cpus(topology, options.affinity_mode, local_rank, local_size))
    except NumaError as error:
        if not options.should_fall_back_if_binding_fails:
            raise
        log.warning("local rank %d runs unbound: %s", local_rank, error)
        return set()


def bind(cpus: Iterable[int]) -> None:
    """Bind this process (its future threads too) to ``cpus``; nothing when there are none."""
    chosen = set(cpus)
    if chosen:
        os.sched_setaffinity(0, chosen)


def choose_cpus(topology: Topology, mode: AffinityMode, local_rank: int, local_size: int) -> frozenset[int]:
    """Choose, purely. Workers are spread over nodes by the GPU they use, else in even contiguous blocks."""
    homes = [_home(topology, rank, local_size) for rank in range(local_size)]
    node = homes[local_rank]
    if mode is AffinityMode.NODE:
        return topology.nodes[node]
    if mode is AffinityMode.SOCKET:
        socket = topology.sockets[min(topology.nodes[node])]
        return frozenset(cpu for cpus in topology.nodes.values() for cpu in cpus if topology.sockets[cpu] == socket)
    neighbours = [rank for rank in range(local_size) if homes[rank] == node]
    place = neighbours.index(local_rank)
    if mode is AffinityMode.EXCLUSIVE:
        cores = _groups(topology.nodes[node], topology.cores)
        if len(cores) < len(neighbours):
            raise NumaError(
                f"exclusive binding: NUMA node {node} has {len(cores)} usable core(s) for "
                f"{len(neighbours)} workers (one each is needed); start fewer workers "
                "or choose another binding"
            )
        share = _share(len(cores), len(neighbours), place)
        return frozenset(cpu for core in cores[share.start : share.stop] for cpu in core)
    caches = _groups(topology.nodes[node], topology.caches)
    # The largest first, so that few workers do not end up on a complex that is mostly forbidden.
    caches.sort(key=lambda group: (-len(group), min(group)))
    return caches[place % len(caches)]


def _home(topology: Topology, local_rank: int, local_size: int) -> int:
    if len(topology.gpu_nodes) >= local_size and topology.gpu_nodes[local_rank] in topology.nodes:
        return topology.gpu_nodes[local_rank]
    nodes = sorted(topology.nodes)
    return nodes[local_rank * len(nodes) // local_size]


def _share(total: int, parts: int, index: int) -> range:
    """Return the ``index``-th of ``parts`` contiguous shares of ``range(total)``; the first ones get the
    remainder."""
    small, extra = divmod(total, parts)
    start = index * small + min(index, extra)
    return range(start, start + small + (index < extra))


def _groups(cpus: frozenset[int], sharing: Mapping[int, frozenset[int]]) -> list[frozenset[int]]:
    """Return the sets of CPUs that share something, cut to ``cpus``, in the order of their first CPU."""
    return sorted({sharing[cpu] & cpus for cpu in cpus}, key=min)


def read_topology(sysfs: Path, allowed: set[int], environ: Mapping[str, str]) -> Topology:
    """Return what the kernel says about the CPUs in ``allowed``."""
    directory = sysfs / "devices/system/node"
    found = sorted(directory.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    if not found:
        raise NumaError(f"no NUMA nodes under {directory}; NUMA binding needs Linux with sysfs")
    nodes = {}
    for path in found:
        if cpus := frozenset(parse_cpu_list(_read(path / "cpulist"))) & allowed:
            nodes[int(path.name[4:])] = cpus
    if not nodes:
        raise NumaError(f"none of the CPUs that this process may use ({sorted(allowed)}) is on a NUMA node")
    cpu_dir = sysfs / "devices/system/cpu"
    return Topology(
        nodes=nodes,
        sockets=_Lazy(lambda cpu: int(_read(cpu_dir / f"cpu{cpu}/topology/physical_package_id"))),
        cores=_Lazy(lambda cpu: _cpu_set(cpu_dir / f"cpu{cpu}/topology/thread_siblings_list")),
        caches=_Lazy(lambda cpu: _last_cache(cpu_dir / f"cpu{cpu}/cache")),
        gpu_nodes=_gpu_nodes(sysfs, environ.get("CUDA_VISIBLE_DEVICES")),
    )


def parse_cpu_list(text: str) -> set[int]:
    """Return the numbers of a kernel list.

    >>> sorted(parse_cpu_list("0-2,8"))
    [0, 1, 2, 8]
    """
    cpus: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


class _Lazy(dict[int, T]):
    """Reads an entry when it is first asked for: a binding by node needs neither caches nor cores."""

    def __init__(self, read: Callable[[int], T]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, cpu: int) -> T:
        return self.setdefault(cpu, self._read(cpu))


def _allowed_cpus() -> set[int]:
    if not hasattr(os, "sched_getaffinity"):
        raise NumaError("NUMA binding needs Linux: this system cannot bind processes to CPUs")
    return os.sched_getaffinity(0)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise NumaError(f"this machine does not say what the binding needs: {path}: {error.strerror}") from error


def _cpu_set(path: Path) -> frozenset[int]:
    return frozenset(parse_cpu_list(_read(path)))


def _last_cache(directory: Path) -> frozenset[int]:
    """Return the CPUs that share the cache of the highest level."""
    levels = {int(_read(path / "level")): path for path in sorted(directory.glob("index[0-9]*"))}
    if not levels:
        raise NumaError(f"core-complex binding: no caches under {directory}; choose another binding")
    return _cpu_set(levels[max(levels)] / "shared_cpu_list")


def _gpu_nodes(sysfs: Path, visible: str | None) -> tuple[int, ...]:
    """Return the NUMA nodes of NVIDIA GPUs in the order of their bus addresses, cut to ``CUDA_VISIBLE_DEVICES``."""
    nodes = []
    for device in sorted((sysfs / "bus/pci/devices").glob("*")):
        try:
            vendor, kind = _read(device / "vendor"), _read(device / "class")
            if vendor == "0x10de" and kind.startswith("0x03"):
                nodes.append(int(_read(device / "numa_node")))
        except NumaError:
            continue  # not a PCI device that tells
    if visible is None:
        return tuple(nodes)
    chosen: Sequence[str] = [part.strip() for part in visible.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) < len(nodes) for part in chosen):
        return ()  # named by UUID: which is which cannot be told from here
    return tuple(nodes[int(part)] for part in chosen)
