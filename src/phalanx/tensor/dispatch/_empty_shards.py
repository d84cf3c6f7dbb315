"""Local calls on a rank that holds nothing: their results stay in the graph of the inputs that they come from.

Owns ``kept_in_graph``. Of an empty tensor some torch functions return a constant (attention forgets a trained mask), so
that this rank's backward would not run where the other ranks' does, and they would wait for its share of a gradient.
Here every input that gets a gradient on the other ranks gets one: zeros. Which ones torch forgets is found by running
the local call once, and by asking meta tensors whose shapes are not empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.tensor.dispatch._arguments import walk_tensors
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.ops._rule import Call


def kept_in_graph(run: Callable[..., Any], call: Call, targets: Sequence[Spec]) -> Callable[..., Any]:
    """``run``, the local call of ``call``, which makes new tensors: with those in the graph of all its inputs.

    Those that torch keeps in the graph by itself are left alone: their second derivatives are right as they are.
    """
    everywhere = call.reached()
    here = call.reached_here(run, targets) if everywhere is not None and any(everywhere) else None
    if everywhere is None or here is None or len(here) != len(everywhere):
        return run
    forgotten = [in_global - in_local for in_global, in_local in zip(everywhere, here, strict=True)]
    if not any(forgotten):
        return run

    def kept(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        if not torch.is_grad_enabled():
            return result
        inputs: list[Tensor] = []
        walk_tensors((args, kwargs), inputs.append)
        numbers = iter(forgotten)

        def anchor(made: Tensor) -> Tensor:
            return _keep_in_graph(made, [inputs[i] for i in sorted(next(numbers)) if inputs[i].requires_grad])

        return walk_tensors(result, anchor)

    return kept


def _keep_in_graph(made: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    if not inputs:
        return made
    apply: Any = _KeptInGraph.apply
    result: Tensor = apply(made, *inputs)
    return result


class _KeptInGraph(torch.autograd.Function):
    """The first argument itself; the others get gradients of zeros, which have the same ancestors."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.kinds = [(t.shape, t.dtype) for t in inputs]
        return made.data  # not a view, which nobody could write to

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        zeros = [grad.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.kinds]
        if torch.is_grad_enabled():  # the gradients will be differentiated in turn
            parents = [t for t in (grad, *ctx.saved_tensors) if t.requires_grad]
            zeros = [_keep_in_graph(zero, parents) for zero in zeros]
        return grad, *zeros
