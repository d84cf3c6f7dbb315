"""Running torch functions without the user's modes: on meta tensors, to plan.

Owns ``without_user_modes``. A plan is made once, so whatever counts, saves or redirects the user's calls (flop
counters, selective checkpointing, default devices) would find more in the first call than in the next ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import _pop_mode_temporarily


@contextmanager
def without_user_modes() -> Iterator[None]:
    """Neither dispatch modes nor function modes see what torch does in here."""
    with torch._C.DisableTorchFunction(), ExitStack() as stack:
        for _ in range(_len_torch_dispatch_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield
