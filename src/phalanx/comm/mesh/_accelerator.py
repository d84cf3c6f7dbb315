"""Which accelerator a process computes on, settled when its first mesh is made, unless the program has said so before.

Owns the choice (pure) and its execution. A launcher's local rank decides; without one, ranks take the devices of their
host in turn, with a warning, since that is right only where all hosts have as many.
"""

from __future__ import annotations

import warnings

from phalanx._devices import of


def choose_device(rank: int, size: int, local_rank: int | None, count: int, kind: str) -> int:
    """Return the number of the device for this rank, of ``count`` that its process sees.

    >>> choose_device(rank=5, size=8, local_rank=1, count=4, kind="cuda")
    1
    """
    if local_rank is not None:
        if local_rank >= count:
            raise RuntimeError(
                f"rank {rank}: LOCAL_RANK={local_rank}, but this process sees {count} {kind} devices: start at most as "
                f"many workers per node as it has devices, or choose one with torch.{kind}.set_device() before the mesh"
            )
        return local_rank
    if size > count and size % count:
        raise RuntimeError(
            f"rank {rank}: {size} ranks on hosts of {count} {kind} devices, and no LOCAL_RANK to tell which is this "
            f"rank's: call torch.{kind}.set_device() before the mesh is made, or use a launcher"
        )
    return rank % count


def select_device(device_type: str, rank: int, size: int, local_rank: int | None) -> None:
    """Make the rank's accelerator the current device; not where there is none, or the program has used one already."""
    device = of(device_type)
    count = 0 if device.is_host or device.is_in_use() else device.count()
    if not count:
        return
    chosen = choose_device(rank, size, local_rank, count, device_type)
    if local_rank is None:
        warnings.warn(
            f"rank {rank}: no {device_type} device was chosen before the mesh was made, and LOCAL_RANK is not set: "
            f"taking device {chosen}, rank modulo {count}. Call torch.{device_type}.set_device() first",
            stacklevel=4,
        )
    device.select(chosen)
