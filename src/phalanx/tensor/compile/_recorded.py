"""What Dynamo's records look like: where a graph's inputs come from, and what it notes beside graphs for the compilers.

Owns the names of those notes; ``tests/tensor/test_compile_internals.py`` looks for each in this torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

LOCAL = "_local"  # where a DTensor holds its local tensor
_OF_GRAPHS = ("_param_name_to_source", "_backend_id")
_VALUE, _FACTS = "example_value", "tensor_dict"  # in the ``meta`` of a node


def value_of(node: fx.Node) -> Any:
    """Return what stood for the node's value while Dynamo traced; None if nothing did."""
    return node.meta.get(_VALUE)


def placeholder(made: fx.Graph, name: str, source: Any = None) -> fx.Node:
    """Return a new input of ``made`` that comes from ``source``; None: from nowhere in the user's program."""
    node = made.placeholder(name)
    node._dynamo_source = source
    return node


def placeholder_for(made: fx.Graph, old: fx.Node, *, is_ours: bool) -> fx.Node:
    """Return an input of ``made`` in place of ``old``: the same tensor, or the local tensor of a DTensor."""
    source = getattr(old, "_dynamo_source", None)
    node = placeholder(made, old.name, local_source(source) if is_ours and source is not None else source)
    if _FACTS in old.meta and not is_ours:
        node.meta[_FACTS] = old.meta[_FACTS]
    return node


def copy_notes(old: fx.GraphModule, new: fx.GraphModule) -> None:
    """Give ``new`` what Dynamo noted beside the graph ``old``."""
    new.meta.update(old.meta)
    for name in _OF_GRAPHS:
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))


def local_source(source: Any) -> Any:
    """Return where the local tensor of a DTensor comes from that comes from ``source``."""
    from phalanx._torch_private import AttrSource  # start-up: it imports Dynamo

    return AttrSource(source, LOCAL)


def attributes_of(source: Any) -> Iterator[str]:
    """Names of the attributes on the way to what comes from ``source``, the last one first."""
    while source is not None:
        member = getattr(source, "member", None)
        if isinstance(member, str):
            yield member
        source = getattr(source, "base", None)
