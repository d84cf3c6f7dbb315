"""Running torch functions without the user's modes: on meta tensors, to plan, and where a compiler traces.

Owns ``without_user_modes``. A plan is made once, so whatever counts, saves or redirects the user's calls (flop
counters, selective checkpointing, default devices) would find more in the first call than in the next ones. And what is
made to be kept must have data also while somebody traces.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from phalanx._torch_private import DisableTorchFunction, num_dispatch_modes, pop_mode_temporarily


@contextmanager
def without_user_modes() -> Iterator[None]:
    """Neither dispatch modes nor function modes see what torch does in here."""
    with DisableTorchFunction(), ExitStack() as stack:
        for _ in range(num_dispatch_modes()):
            stack.enter_context(pop_mode_temporarily())
        yield
