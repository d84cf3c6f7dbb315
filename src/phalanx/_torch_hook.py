"""Makes ``torch.distributed.init_process_group("phalanx")`` work after ``import phalanx``, without importing torch.

Owns the moment of registration: at once when torch's module is there already, else right after it has been imported.
What it registers imports ``phalanx.comm`` only when a process group is made.
"""

from __future__ import annotations

import sys
from typing import Any

from phalanx._after_import import after_import

BACKEND = "phalanx"
_C10D = "torch.distributed.distributed_c10d"


def install() -> None:
    """Register now or later; harmless when done before."""
    module = sys.modules.get(_C10D)
    if module is not None and hasattr(module, "Backend"):
        register(module)
    else:
        after_import(_C10D, register)


def register(c10d: Any) -> None:
    """Register the backend with torch's module."""
    from phalanx._torch_private import backend_plugins  # start-up: it is torch's, which is there only now

    if BACKEND.upper() not in backend_plugins:
        c10d.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(common: Any, options: Any) -> Any:
    # start-up: it imports torch and all of comm
    from phalanx.comm.torch_interop._c10d_backend import create_process_group

    return create_process_group(common)
