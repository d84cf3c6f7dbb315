"""Says where a shard lives: the value behind the strings ``"rank:0/cpu"``, ``"trainer0/cuda:0"`` and ``"cpu"``.

Ranks are those of the whole job (a group's ``ranks``), not ranks inside a subgroup.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx._torch_private import remote_device

_FORMATS = "expected 'rank:<rank>/<device>', '<worker name>/<device>' or '<device>', e.g. 'rank:0/cpu'"


class RemoteDevice(remote_device):  # type: ignore[misc]  # torch's is looked up by name
    """A device of some worker; immutable. Torch's own, of the same worker and device, is equal to it.

    >>> place = RemoteDevice("rank:3/cpu")
    >>> place.rank(), place.device(), place
    (3, device(type='cpu'), rank:3/cpu)
    """

    def __init__(self, remote_device: str | torch.device) -> None:
        self._worker_name: str | None = None
        self._rank: int | None = None
        if isinstance(remote_device, torch.device):
            self._device = remote_device
            return
        if not isinstance(remote_device, str):
            raise TypeError(f"a placement of type {type(remote_device).__name__}; {_FORMATS}")
        owner, slash, device = remote_device.partition("/")
        if not slash and _is_device(owner):
            owner, device = "", owner
        elif not slash:
            device = "cpu"
        if not remote_device or not device or "/" in device or (slash and not owner):
            raise ValueError(f"cannot read the placement {remote_device!r}; {_FORMATS}")
        self._device = torch.device(device)
        if not owner:
            return
        kind, colon, number = owner.partition(":")
        if not colon:
            self._worker_name = owner
        elif kind == "rank" and number.isdigit():
            self._rank = int(number)
        else:
            raise ValueError(f"cannot read the placement {remote_device!r}; {_FORMATS}")

    @classmethod
    def of(cls, value: Any) -> RemoteDevice:
        """From a string, a device, one of ours, or torch's own remote device."""
        if isinstance(value, cls):
            return value
        if all(callable(getattr(value, name, None)) for name in ("worker_name", "rank", "device")):
            return cls(str(value))
        return cls(value)

    def worker_name(self) -> str | None:
        return self._worker_name

    def rank(self) -> int | None:
        return self._rank

    def device(self) -> torch.device:
        return self._device

    def on(self, device: torch.device) -> RemoteDevice:
        """Return the same worker, another device."""
        moved = RemoteDevice(device)
        moved._worker_name, moved._rank = self._worker_name, self._rank
        return moved

    def _owner(self) -> str:
        return f"rank:{self._rank}/" if self._rank is not None else f"{self._worker_name or ''}/"

    def __repr__(self) -> str:
        return f"{self._owner()}{self._device}".lstrip("/")

    def _value(self) -> tuple[Any, ...]:
        return self.worker_name(), self.rank(), self.device()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, remote_device) and self._value() == RemoteDevice._value(other)

    def __hash__(self) -> int:
        return int(super().__hash__())  # as torch's: the two may stand in one set

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteDevice, (repr(self),)


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True
