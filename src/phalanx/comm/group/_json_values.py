"""Sends small Python values between ranks, as JSON in byte tensors (never pickle).

Owns the encoding. Two collectives per call: the lengths, then the text.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from phalanx.comm.group._group import Group


def broadcast_value(group: Group, value: Any, src: int) -> Any:
    data = _encode(group, value) if group.rank == src else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([data.numel()])
    group.broadcast(length, src)
    if group.rank != src:
        data = torch.empty(int(length.item()), dtype=torch.uint8)
    group.broadcast(data, src)
    return _decode(data)


def all_gather_values(group: Group, value: Any) -> list[Any]:
    data = _encode(group, value)
    lengths = torch.empty(group.size, dtype=torch.int64)
    group.all_gather_into_tensor(lengths, torch.tensor([data.numel()]))
    outputs = [torch.empty(int(length), dtype=torch.uint8) for length in lengths.tolist()]
    group.all_gather(outputs, data)
    return [_decode(output) for output in outputs]


def _encode(group: Group, value: Any) -> Tensor:
    try:
        text = json.dumps(value, allow_nan=True)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"rank {group.rank}: {type(value).__name__} cannot be sent as JSON ({error}); "
            f"expected None, bool, numbers, text, lists, or dicts with text keys"
        ) from error
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _decode(data: Tensor) -> Any:
    return json.loads(bytes(data.numpy()))
