"""From what a local call returned to what the caller gets: a DTensor of it, or the argument itself.

Owns ``finish``. What aliases what is as on one device (``_strides.py`` says it of functions that copy if they must);
where that needs memory which no rank has, the result is marked as a copied view (``core/_copied_views.py``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from phalanx._torch_private import is_alias_of
from phalanx.tensor.core._copied_views import mark_copied_view, written
from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.core._memory_order import say_order, telling_strides
from phalanx.tensor.core._strides import COPY, SELF, VIEW, Aliasing, known_strides
from phalanx.tensor.dispatch._decision import Decision
from phalanx.tensor.ops._rule import tensors_in

_SEQUENCES = frozenset({tuple, list})
_TENSORS = frozenset({Tensor})


def finish(decision: Decision, result: Any, first: DTensor, given: Any) -> Any:
    """DTensors of what the local call returned; ``first`` is the first DTensor that it was given."""
    if decision.form == "self":
        if first._copied_view is not None:
            written(first)
        return first
    if decision.aliasing is not None and not decision.is_view:
        return _finish_if_needed(decision, decision.aliasing, result, first, given)
    copied = decision.is_view and (decision.moves or first._copied_view is not None)
    if decision.form == "one" and not copied:
        return first if result is first._local else wrap(result, decision.outputs[0])
    if type(result) in _SEQUENCES and not copied and _TENSORS.issuperset(map(type, result)):
        return type(result)(map(wrap, result, decision.outputs))
    wrapped = _wrap_all(result, iter(decision.outputs))
    if copied:
        _mark_copied(decision, tensors_in(wrapped), first, given)
    return wrapped


def _finish_if_needed(decision: Decision, aliasing: Aliasing, result: Tensor, first: DTensor, given: Any) -> DTensor:
    """Finish a function that copies only if it must, as the global tensor would, whatever this shard allows.

    Where ranks might disagree about a copied view, it counts as one that cannot be written.
    """
    copied = decision.moves or first._copied_view is not None
    unsure = copied and known_strides(first) is None
    kind, strides = aliasing.of(first)
    if kind is SELF and not (unsure and decision.name == "contiguous"):
        return first
    if (kind is COPY or unsure) and is_alias_of(result, first._local):
        result = result.clone()
    spec = decision.outputs[0]
    if spec.has_thin_shard:
        told = telling_strides(spec, strides, result.stride())
        if told != result.stride():
            say_order(result, told)
    wrapped = wrap(result, spec)
    if copied and (kind is VIEW or unsure):
        _mark_copied(decision, [wrapped], first, () if unsure else given)
    return wrapped


def _mark_copied(decision: Decision, views: list[Any], base: DTensor, given: Any) -> None:
    assert decision.aliasing is not None, "it is a view"
    for view, strides in zip(views, decision.aliasing.view_strides(base, len(views)), strict=True):
        mark_copied_view(view, base, decision.name, tuple(given), strides)


def _wrap_all(result: Any, outputs: Any) -> Any:
    if isinstance(result, Tensor):
        return wrap(result, next(outputs))
    if isinstance(result, (list, tuple)):
        items = [_wrap_all(item, outputs) for item in result]
        if type(result) in (list, tuple):
            return type(result)(items)
        return type(result)(items) if type(result).__module__ == "torch.return_types" else type(result)(*items)
    return result
