"""``parallelize_module`` under the module name that torch's users import it from."""

from __future__ import annotations

from phalanx.tensor.parallel._parallelize import parallelize_module

__all__ = [
    "parallelize_module",
]
