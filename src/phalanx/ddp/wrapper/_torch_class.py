"""Answers for PyTorch's own wrapper class, where tools ask that one: what to unwrap, and whose forward runs.

Owns the one contact with that class. ``isinstance(model, <PyTorch's class>)`` is true of ours, which is registered as a
virtual subclass (its metaclass is ``ABCMeta``). And ``torch.compile`` asks that class for the wrapper whose forward
runs, to cut its graphs where buckets fill up: inside of a forward of ours the answer is ours, elsewhere what it was.
Nothing of that class is inherited, and it is never imported here: ``import torch`` has done so. What such tools go on
to use (``module``, ``no_sync``, ``reducer.prepare_for_backward``, ...) exists here too; docs/ddp.md lists who asks and
what they get.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from phalanx.comm.torch_interop._dcp import Spread
from phalanx.ddp.buckets._assignment import FIRST_CAP, Caps

if TYPE_CHECKING:
    from phalanx.ddp.wrapper._wrapper import DistributedDataParallel


class ActiveWrapper(NamedTuple):
    """What ``torch.compile`` wants to know of the wrapper whose forward runs."""

    bucket_bytes_cap: int
    """A graph ends where its parameters fill a bucket of this size; the first one at 1 MiB, which is the least."""


def answer_for_torchs_class(wrapper: type[DistributedDataParallel]) -> None:
    """Let PyTorch's class count ``wrapper`` as its own, and name the one whose forward runs; once is enough."""
    home: Any = sys.modules.get("torch.nn.parallel.distributed")
    theirs = getattr(home, wrapper.__name__, None)
    if theirs is None:
        return
    theirs.register(wrapper)
    before = theirs._get_active_ddp_module

    @functools.wraps(before)
    def get_active(cls: type) -> Any:
        ours: DistributedDataParallel | None = wrapper._get_active_ddp_module()
        return before() if ours is None else _answer(ours._caps, [member.param for member in ours._scanner.members])

    theirs._get_active_ddp_module = classmethod(get_active)


def _answer(caps: Caps, parameters: Sequence[nn.Parameter]) -> ActiveWrapper | None:
    """Return what to tell ``torch.compile``; None: it is to leave graphs whole, as it cannot cut one of DTensors."""
    if any(isinstance(parameter, Spread) for parameter in parameters):
        return None
    return ActiveWrapper(max(caps.at(1), FIRST_CAP))
