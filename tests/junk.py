"""What strangers write: any JSON, any bytes, and records of ours with something in them changed.

``EXAMPLES`` is how often ``make test`` tries each reader; ``make soak`` tries each ``LONG`` times.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES, LONG = 60, 20_000

quick = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
long = settings(max_examples=LONG, suppress_health_check=list(HealthCheck))

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 10**30, -(10**30), 1e308, float("nan"), float("inf"), "", "\ud800"]),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["../x", "/", "a\0b", "<script>", "F32", "step", "0", "$", "tensor", "dict"]),
)
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
)
_DEEP = {"lists": b"[" * 100_000, "objects": b'{"a":' * 100_000, "closed": b"[" * 900 + b"]" * 900}
deep = st.sampled_from(sorted(_DEEP)).map(_DEEP.get)  # by name: what fails is shown
raw = st.one_of(st.binary(max_size=60), deep, junk.map(lambda value: json.dumps(value).encode()))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something can be changed in a JSON value."""
    found = [path] if path else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        found += places(child, (*path, key))
    return found


@st.composite
def changed(draw: Callable[..., Any], value: Any, most: int = 3) -> Any:
    """A copy of a JSON value with some parts of it replaced, left out, doubled or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, most))):
        known = places(value)
        if not known:
            return draw(junk)
        *path, last = draw(st.sampled_from(known))
        parent = value
        for key in path:
            parent = parent[key]
        how = draw(st.sampled_from(["replace", "replace", "drop", "double", "swap"]))
        if how == "replace":
            parent[last] = draw(junk)
        elif how == "drop":
            del parent[last]
        elif how == "double" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[last]))
        else:
            other = parent
            *path, key = draw(st.sampled_from(known))
            for step in path:
                other = other[step] if isinstance(other, (dict, list)) and _has(other, step) else parent
            if isinstance(other, (dict, list)) and _has(other, key):
                parent[last] = copy.deepcopy(other[key])
    return value


def _has(value: Any, key: Any) -> bool:
    return key in value if isinstance(value, dict) else type(key) is int and key < len(value)


def torn(data: bytes) -> st.SearchStrategy[bytes]:
    """The bytes cut short, or with one of them changed."""
    cut = st.integers(0, max(0, len(data) - 1)).map(lambda end: data[:end])
    flip = st.tuples(st.integers(0, max(0, len(data) - 1)), st.integers(1, 255)).map(
        lambda at: data[: at[0]] + bytes([data[at[0]] ^ at[1]]) + data[at[0] + 1 :] if data else data
    )
    return cut | flip
