"""Runs collectives on contiguous copies of tensors that need one, and copies back when they are done.

Owns what a copy is needed for, and the handle that copies back. Nothing here talks to a peer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx._torch_private import is_zerotensor
from phalanx.comm.transports._interface import Done, Work


def settled(tensor: Tensor) -> Tensor:
    """``tensor`` as bytes can carry it: contiguous, with what torch put off (conjugation, sign, zeros) done."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if is_zerotensor(tensor):
        tensor = tensor.clone()
    return tensor.contiguous()


class StagedWork(Work):
    """Copies results back to where the caller wants them when the collective is done."""

    def __init__(self, inner: Work, copies: list[tuple[Tensor, Tensor]]) -> None:
        self._inner = inner
        self._copies = copies

    def wait(self, timeout: float | None = None) -> None:
        self._inner.wait(timeout)
        copies, self._copies = self._copies, []
        _copy(copies)

    def is_done(self) -> bool:
        return self._inner.is_done()


def copy_back(work: Work, pairs: list[tuple[Tensor, Tensor]], async_op: bool) -> Work:
    """``pairs`` are (wanted, staged); where ``settled`` returned the tensor itself there is nothing to do."""
    copies = [(wanted, staged) for wanted, staged in pairs if wanted.data_ptr() != staged.data_ptr()]
    if not copies:
        return work
    if async_op and not isinstance(work, Done):
        return StagedWork(work, copies)
    _copy(copies)
    return work


def _copy(copies: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for wanted, staged in copies:
            wanted.copy_(staged)
