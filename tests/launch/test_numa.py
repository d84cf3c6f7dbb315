"""NUMA binding on made-up sysfs trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.launch.numa import AffinityMode, NumaError, NumaOptions, bind, cpus_for, parse_cpu_list

pytestmark = pytest.mark.fast


def ranges(cpus: range | list[int]) -> str:
    return ",".join(map(str, cpus))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def make_machine(
    root: Path,
    *,
    sockets: int = 2,
    nodes_per_socket: int = 2,
    cores: int = 4,
    threads: int = 2,
    caches: int = 2,
) -> Path:
    """``cores`` per node; CPU n and n + all cores are threads of one core; ``caches`` last-level caches per
    node."""
    total = sockets * nodes_per_socket * cores
    cpu_dir = root / "devices/system/cpu"
    for node in range(sockets * nodes_per_socket):
        mine = range(node * cores, (node + 1) * cores)
        cpus = [core + t * total for t in range(threads) for core in mine]
        write(root / f"devices/system/node/node{node}/cpulist", ranges(cpus))
        per_cache = cores // caches
        for core in mine:
            first = mine.start + (core - mine.start) // per_cache * per_cache
            shared = [c + t * total for t in range(threads) for c in range(first, first + per_cache)]
            for cpu in (core + t * total for t in range(threads)):
                here = cpu_dir / f"cpu{cpu}"
                write(here / "topology/physical_package_id", str(node // nodes_per_socket))
                write(here / "topology/thread_siblings_list", ranges([core + t * total for t in range(threads)]))
                write(here / "cache/index0/level", "1")
                write(here / "cache/index0/shared_cpu_list", str(cpu))
                write(here / "cache/index3/level", "3")
                write(here / "cache/index3/shared_cpu_list", ranges(shared))
    return root


def add_gpu(root: Path, address: str, node: int) -> None:
    for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", str(node))):
        write(root / f"bus/pci/devices/{address}/{name}", text)


def choose(root: Path, mode: str, rank: int, size: int, **kwargs: object) -> list[int]:
    options = NumaOptions(AffinityMode(mode))
    allowed = kwargs.pop("allowed", range(256))
    return sorted(cpus_for(options, rank, size, sysfs=root, allowed=allowed, environ={}, **kwargs))  # type: ignore[arg-type]


def test_node_binding_spreads_workers_over_nodes(tmp_path: Path) -> None:
    root = make_machine(tmp_path)
    assert choose(root, "node", 0, 4) == [0, 1, 2, 3, 16, 17, 18, 19]
    assert choose(root, "node", 3, 4) == [12, 13, 14, 15, 28, 29, 30, 31]
    assert choose(root, "node", 1, 8) == choose(root, "node", 0, 8)
    assert choose(root, "node", 2, 8) == [4, 5, 6, 7, 20, 21, 22, 23]


def test_socket_binding_takes_all_nodes_of_the_socket(tmp_path: Path) -> None:
    root = make_machine(tmp_path)
    assert choose(root, "socket", 0, 4) == [*range(8), *range(16, 24)]
    assert choose(root, "socket", 2, 4) == [*range(8, 16), *range(24, 32)]


@pytest.mark.parametrize("size", [4, 5, 7, 8, 16])
def test_exclusive_binding_gives_disjoint_whole_cores_and_uses_all(tmp_path: Path, size: int) -> None:
    root = make_machine(tmp_path)
    shares = [choose(root, "exclusive", rank, size) for rank in range(size)]
    assert all(shares)
    assert sorted(cpu for share in shares for cpu in share) == list(range(32))
    for share in shares:
        assert {(cpu + 16) % 32 for cpu in share} == set(share), "a core's threads were split"


def test_exclusive_binding_refuses_more_workers_than_cores(tmp_path: Path) -> None:
    root = make_machine(tmp_path, sockets=1, nodes_per_socket=1, cores=2)
    with pytest.raises(NumaError, match=r"2 usable core\(s\) for 3 workers"):
        choose(root, "exclusive", 0, 3)


def test_core_complex_binding_gives_each_worker_another_cache(tmp_path: Path) -> None:
    root = make_machine(tmp_path, sockets=1, nodes_per_socket=1, cores=8, caches=4)
    shares = [choose(root, "core-complex", rank, 4) for rank in range(4)]
    assert shares[0] == [0, 1, 8, 9]
    assert sorted(cpu for share in shares for cpu in share) == list(range(16))
    assert choose(root, "core-complex", 4, 5) == shares[0]


def test_core_complex_prefers_the_cache_with_most_usable_cpus(tmp_path: Path) -> None:
    root = make_machine(tmp_path, sockets=1, nodes_per_socket=1, cores=8, caches=4, threads=1)
    assert choose(root, "core-complex", 0, 1, allowed=[1, 4, 5]) == [4, 5]


def test_only_allowed_cpus_count(tmp_path: Path) -> None:
    root = make_machine(tmp_path)
    assert choose(root, "node", 0, 1, allowed=[5, 21]) == [5, 21]
    with pytest.raises(NumaError, match="none of the CPUs"):
        choose(root, "node", 0, 1, allowed=[99])


def test_workers_follow_their_gpus(tmp_path: Path) -> None:
    root = make_machine(tmp_path)
    add_gpu(root, "0000:01:00.0", 2)
    add_gpu(root, "0000:81:00.0", 0)
    assert choose(root, "node", 0, 2) == choose(root, "node", 2, 4)
    options = NumaOptions(AffinityMode.NODE)
    swapped = cpus_for(options, 0, 2, sysfs=root, allowed=range(64), environ={"CUDA_VISIBLE_DEVICES": "1,0"})
    assert sorted(swapped) == [0, 1, 2, 3, 16, 17, 18, 19]


def test_a_machine_without_the_information_is_refused_or_runs_unbound(tmp_path: Path) -> None:
    with pytest.raises(NumaError, match="no NUMA nodes"):
        choose(tmp_path, "node", 0, 1)
    root = make_machine(tmp_path / "m", sockets=1, nodes_per_socket=1)
    for cache in root.glob("devices/system/cpu/cpu0/cache/*/*"):
        cache.unlink()
    for cache in root.glob("devices/system/cpu/cpu0/cache/*"):
        cache.rmdir()
    with pytest.raises(NumaError, match="no caches"):
        choose(root, "core-complex", 0, 1)
    lenient = NumaOptions(AffinityMode.CORE_COMPLEX, should_fall_back_if_binding_fails=True)
    assert cpus_for(lenient, 0, 1, sysfs=root, allowed=range(8)) == set()


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="outside"):
        cpus_for(NumaOptions(AffinityMode.NODE), 2, 2)
    with pytest.raises(ValueError, match="core-simplex"):
        NumaOptions("core-simplex")  # type: ignore[arg-type]
    assert parse_cpu_list(" 0-1,4 ,") == {0, 1, 4}


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="this machine shows no NUMA nodes")
@pytest.mark.parametrize("mode", ["node", "socket", "exclusive"])
def test_this_machine_can_be_bound(mode: str) -> None:
    before = os.sched_getaffinity(0)
    chosen = cpus_for(NumaOptions(AffinityMode(mode)), 0, 1)
    assert chosen
    assert chosen <= before
    try:
        bind(chosen)
        assert os.sched_getaffinity(0) == chosen
        bind(set())
        assert os.sched_getaffinity(0) == chosen
    finally:
        os.sched_setaffinity(0, before)
