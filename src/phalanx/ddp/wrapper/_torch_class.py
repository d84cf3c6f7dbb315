"""Makes ``isinstance(model, <PyTorch's wrapper class>)`` true of ours, since that is how tools ask what to unwrap.

Owns the one contact with that class: ours is registered as a virtual subclass (its metaclass is ``ABCMeta``), which
changes nothing in it, and nothing of it is inherited or called. It is never imported here: ``import torch`` has done
so. What such tools go on to use (``module``, ``no_sync``, ``reducer.prepare_for_backward``, ...) exists here too;
docs/ddp.md lists who asks and what they get.
"""

from __future__ import annotations

import sys
from typing import Any


def register_as_virtual_subclass(wrapper: type) -> None:
    """Let PyTorch's class count ``wrapper`` as its own; once is enough."""
    home: Any = sys.modules.get("torch.nn.parallel.distributed")
    theirs = getattr(home, wrapper.__name__, None)
    if theirs is not None:
        theirs.register(wrapper)
