"""Reads ``backend_override``: which backend and timeout the group of a mesh axis has in place of the mesh's own.

Owns the forms that torch takes, and what they mean here. Of a c10d ``Options`` value the backend's name and the timeout
count, as they do in torch for gloo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from phalanx._torch_private import BackendOptions, GlooOptions


class Override(NamedTuple):
    """What one axis has of its own; None is as the rest of the mesh."""

    backend: str | None = None
    timeout: float | None = None


def parse_overrides(
    given: Mapping[int | str, Any] | Sequence[Any] | None, num_axes: int, names: Sequence[str] | None
) -> list[Override]:
    """Return one for each axis. A dict goes by axis or name; a sequence has one entry for each axis.

    >>> parse_overrides({"tp": "gloo"}, 2, ("dp", "tp"))[1]
    Override(backend='gloo', timeout=None)
    """
    if given is None:
        return [Override()] * num_axes
    if not isinstance(given, Mapping):
        if len(given) != num_axes:
            raise ValueError(f"backend_override has {len(given)} entries; expected one for each of {num_axes} axes")
        return [_parse(value) for value in given]
    left = dict(given)
    result = []
    for axis in range(num_axes):
        name = names[axis] if names else None
        if axis in left and name is not None and name in left:
            raise RuntimeError(f"backend_override says axis {axis} and its name {name!r}; expected one of them")
        value = left.pop(axis, None) if name is None or name not in left else left.pop(name)
        result.append(_parse(value))
    if left:
        raise RuntimeError(
            f"backend_override has keys {list(left)}; expected axes in [0, {num_axes}) or names of {tuple(names or ())}"
        )
    return result


def _parse(value: Any) -> Override:
    if value is None or isinstance(value, str):
        return Override(backend=value)
    name, options = (None, value) if isinstance(value, BackendOptions) else value
    if options is None:
        return Override(backend=name)
    if type(options) not in (BackendOptions, GlooOptions):
        raise ValueError(
            f"backend_override got a {type(options).__qualname__}; expected a backend's name, or Options with a name "
            f"and a timeout: other options of a backend are not passed on"
        )
    return Override(backend=name or options.backend, timeout=options._timeout.total_seconds())
