"""Finds the plain tensor behind a parameter: data parallelism reduces and broadcasts what this rank holds.

A distributed tensor (``phalanx.tensor``) answers through ``Spread``, so nothing here knows its layout: autograd runs on
its local tensor, whose ``.grad`` is what its own ``.grad`` shows. Every other tensor is its own part.
"""

from __future__ import annotations

from torch import Tensor

from phalanx.comm.torch_interop._dcp import Spread


def local_part(tensor: Tensor) -> Tensor:
    """Return the plain tensor that autograd works on."""
    return tensor._trained_part().tensor if isinstance(tensor, Spread) else tensor


def described_part(tensor: Tensor) -> str:
    """Say which part of which layout this rank holds; empty for a plain tensor."""
    return tensor._trained_part().where if isinstance(tensor, Spread) else ""


def check_trainable(name: str, tensor: Tensor) -> None:
    """``TypeError`` for a tensor subclass whose gradient no plain tensor gets."""
    if isinstance(tensor, Spread):
        try:
            tensor._trained_part()
        except TypeError as error:
            raise TypeError(f"cannot train parameter {name!r} data-parallel: {error}") from None
    elif type(tensor).__module__.startswith("torch.distributed"):
        raise TypeError(
            f"cannot train parameter {name!r} data-parallel: it is torch's own {type(tensor).__name__}, whose gradient "
            f"autograd keeps as one; distribute the module with phalanx.tensor (the same names), or use torch's wrapper"
        )
