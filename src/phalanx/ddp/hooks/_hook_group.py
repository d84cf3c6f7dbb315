"""Finds the group that a hook reduces over: ours, PyTorch's, or None for the current one as its state.

While a wrapper runs its hook, the current group is the wrapper's: with a subgroup (one axis of a mesh, say) the whole
group would mix replicas with other parts of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx import comm

if TYPE_CHECKING:
    from phalanx.comm import Group

_wrapped: dict[int, tuple[Any, Any]] = {}


def resolve(process_group: Any) -> Group:
    """Our group for ``process_group``. A PyTorch group is wrapped once and remembered while it lives."""
    if process_group is None:
        return comm.current_group()
    if isinstance(process_group, comm.Group):
        return process_group
    known = _wrapped.get(id(process_group))
    if known is None or known[0] is not process_group:
        known = _wrapped[id(process_group)] = (process_group, comm.Group.wrap(process_group))
    return known[1]
