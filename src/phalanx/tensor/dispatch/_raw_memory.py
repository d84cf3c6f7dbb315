"""Raw memory: pointers and storages, which whoever copies bytes by address or writes them to files asks for.

Owns the answer to ``data_ptr``, ``untyped_storage`` and their like: the truth where every rank holds all of the tensor,
else an error. A shape is global; this rank's memory behind it would be read past its end.
"""

from __future__ import annotations

from typing import Any

from phalanx.tensor.core._copied_views import fresh
from phalanx.tensor.core._dtensor import DTensor

NAMES = ("data_ptr", "const_data_ptr", "mutable_data_ptr", "untyped_storage", "storage", "_typed_storage")


def raw_memory(func: Any, args: Any, kwargs: Any) -> Any:
    """The handler of all of them.

    The error is what torch raises for tensors that have no storage, which some callers know how to do without.
    """
    tensor: DTensor = args[0]
    spec = tensor._spec
    if all(p.is_replicate() or ranks == 1 for p, ranks in zip(spec.placements, spec.mesh.shape, strict=True)):
        return func(fresh(tensor), *args[1:], **(kwargs or {}))
    raise NotImplementedError(
        f"{func.__name__}() of {spec!r}: rank {spec.mesh.get_rank()} holds {spec.local_bytes} of its "
        f"{spec.num_elements * spec.dtype.itemsize} bytes, and no memory of the global shape. Use full_tensor() for "
        f"the whole or to_local() for this rank's part; phalanx.shard.save() and torch.distributed.checkpoint write "
        f"parts to files"
    )
