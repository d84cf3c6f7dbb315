"""DTensors without data, which Dynamo traces with: a DTensor whose local tensor is a ``FakeTensor``.

Owns ``faker``. Shapes are those of now, never symbols: a layout is made of numbers. Made for Dynamo alone; make_fx and
torch.export, which would record this rank's part as if it were all, are refused.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx._torch_private import TracingContext, UnsupportedFakeTensor, WeakTensorKeyDictionary
from phalanx.tensor.compile._recorded import LOCAL, attributes_of, local_source
from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.core._strides import strides_of

# Attribute of a FakeTensorMode: local tensor -> the fake of each DTensor that holds it, by the id of the DTensor. The
# mode lives as long as its graph, and module.to(dtype) swaps no parameter to which there is a weak reference.
_KEPT = "_phalanx_fakes"


def faker(plain: Any) -> Any:
    """Wrap ``FakeTensorMode.from_tensor``, which would make a tensor of the global shape of the wrapper."""

    def from_tensor(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return plain(self, tensor, *args, **kwargs)
        source = kwargs.get("source")
        if source is None or TracingContext.try_get() is None or torch.compiler.is_exporting():
            raise NotImplementedError(
                f"a FakeTensor of {tensor._spec!r}: make_fx, torch.export and FakeTensorMode do not work on a DTensor. "
                f"Export the plain module before it is distributed, or give it full_tensor()"
            )
        _check_traceable(tensor, source)
        kept = self.__dict__.setdefault(_KEPT, WeakTensorKeyDictionary()).setdefault(tensor._local, {})
        key = id(tensor), tensor._spec
        if key not in kept:
            local = plain(self, tensor._local, static_shapes=True, source=local_source(source))
            kept[key] = wrap(local, tensor._spec)
        return kept[key]

    return from_tensor


def static_shapes(plain: Any) -> Any:
    """Wrap Dynamo's choice of the dims that become symbols: none of a DTensor, nor of its local tensor."""

    def automatic_dynamic(e: Any, tx: Any, source: Any, static_shapes: bool, *args: Any, **kwargs: Any) -> Any:
        is_local = next(attributes_of(source), None) == LOCAL
        return plain(e, tx, source, static_shapes or is_local or isinstance(e, DTensor), *args, **kwargs)

    return automatic_dynamic


def _check_traceable(tensor: DTensor, source: Any) -> None:
    """Have the graph broken where a DTensor is more than a local tensor and a layout."""
    if type(tensor) is not DTensor:
        why = "its data is still on its way (async_op=True)"
    elif tensor._copied_view is not None:
        why = f"it is a copied view, made by {tensor._copied_view.op}"
    elif tensor._spec.is_outside:
        why = f"rank {tensor._spec.mesh.get_rank()} is outside of its mesh"
    elif "grad" in attributes_of(source):  # Dynamo guards torch's own field, which a DTensor leaves empty
        why = "it is the gradient of another (optimizers stay outside)"
    elif strides_of(tensor) != tensor._spec.template.stride():  # which Dynamo's guards would compare
        why = "its dims are in another order in memory, as after transpose(); contiguous() puts them in order"
    else:
        return
    raise UnsupportedFakeTensor(f"{tensor._spec!r} runs as it is, outside of the graphs of torch.compile: {why}")
