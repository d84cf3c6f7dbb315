"""Sends a state from one worker to another, as one JSON message and a few large blocks of bytes.

Only the two workers concerned take part; the others go on. The receiver allocates from the header, so it needs to
know nothing beforehand. Phases: length of the header, the header (JSON tree, shapes, dtypes), then all tensors packed
one after the other in blocks of ``BLOCK`` bytes, each with its digest behind it. A block that is not what its digest
says is refused (``StateDamaged``) before anything of the state counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx._fields import Fields, load_json, short
from phalanx.comm import Group
from phalanx.elastic.checkpoint._state import State
from phalanx.elastic.checkpoint._state_codec import Json, decode, dtype_from_name, encode
from phalanx.errors import PhalanxError

BLOCK = 16 << 20
DIGEST_BYTES = 16


class StateDamaged(PhalanxError):
    """A state did not come as it was sent; the worker that has it ends."""


def send_state(group: Group, state: State, dst: int) -> int:
    """Send a state to one rank; returns the bytes sent."""
    return send_encoded(group, *encode(state), dst=dst)


def send_encoded(group: Group, tree: Json, tensors: Sequence[Tensor], *, dst: int) -> int:
    """Return the same for a state that is encoded already."""
    shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    header = json.dumps({"tree": tree, "tensors": shapes}).encode()
    group.send(torch.tensor([len(header)]), dst)
    group.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), dst)
    pieces = [t.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    total = sum(p.numel() for p in pieces)
    block = torch.empty(min(BLOCK, total), dtype=torch.uint8)
    for spans in _blocks([p.numel() for p in pieces]):
        for i, start, end, at in spans:
            block[at : at + end - start].copy_(pieces[i][start:end])
        filled = spans[-1][3] + spans[-1][2] - spans[-1][1]
        group.send(block[:filled], dst)
        group.send(_digest(block[:filled]), dst)
    return len(header) + total


def receive_state(group: Group, src: int) -> State:
    """Return the counterpart of ``send_state``."""
    length = torch.zeros(1, dtype=torch.int64)
    group.recv(length, src)
    data = torch.empty(int(length), dtype=torch.uint8)
    group.recv(data, src)
    tree, kinds = parse_header(data.numpy().tobytes())
    tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in kinds]
    pieces = [t.reshape(-1).view(torch.uint8) for t in tensors]
    block = torch.empty(min(BLOCK, sum(p.numel() for p in pieces)), dtype=torch.uint8)
    digest = torch.empty(DIGEST_BYTES, dtype=torch.uint8)
    for spans in _blocks([p.numel() for p in pieces]):
        filled = spans[-1][3] + spans[-1][2] - spans[-1][1]
        group.recv(block[:filled], src)
        group.recv(digest, src)
        if not torch.equal(digest, _digest(block[:filled])):
            named = ", ".join(f"{i} ({kinds[i][0]} {tuple(kinds[i][1])})" for i, *_ in spans[:3])
            raise StateDamaged(
                f"rank {group.rank}: the state that rank {src} sent did not come as it was: of {len(kinds)} tensors, "
                f"number {named}{' or a later one' if len(spans) > 3 else ''} differs. The memory of one of them, or "
                "what is between them, is at fault; this worker ends"
            )
        for i, start, end, at in spans:
            pieces[i][start:end].copy_(block[at : at + end - start])
    state: State = decode(tree, tensors)
    return state


def _digest(block: Tensor) -> Tensor:
    return torch.frombuffer(
        bytearray(hashlib.blake2b(block.numpy().data, digest_size=DIGEST_BYTES).digest()), dtype=torch.uint8
    )


def parse_header(data: bytes) -> tuple[Json, list[tuple[torch.dtype, list[int]]]]:
    """Return the JSON tree, and dtype and shape of each tensor; ``ValueError`` when it is no header."""
    header = Fields(load_json(data, "a state's header"), "a state's header")
    kinds = []
    for entry in header.items("tensors"):
        if not isinstance(entry, list) or len(entry) != 2:
            raise ValueError(f"a state's header names a tensor {short(entry)}; expected dtype and shape")
        fields = Fields(dict(zip(("dtype", "shape"), entry, strict=True)), "a state's header")
        kinds.append((dtype_from_name(fields.text("dtype")), fields.integers("shape", low=0)))
    return header.get("tree"), kinds


def _blocks(sizes: list[int]) -> Iterator[list[tuple[int, int, int, int]]]:
    """Cut tensors of these sizes into blocks: per block, spans of (tensor, start, end, place in the block)."""
    spans: list[tuple[int, int, int, int]] = []
    at = 0
    for i, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(size, start + BLOCK - at)
            spans.append((i, start, end, at))
            at += end - start
            start = end
            if at == BLOCK:
                yield spans
                spans, at = [], 0
    if spans:
        yield spans
