"""From what Dynamo recorded, a graph of operations on DTensors, to the program that this rank runs on local tensors.

Owns ``local_compiler``, which wraps the entry points of torch's compilers. They get a module of local tensors, one for
each input; running it under their tracer runs our interception once, on tensors without data, with collectives as
operators. What they return is called with locals, and its results are wrapped.

Guarantees: what the user can see of DTensors (layout, requires_grad, ...) is guarded by Dynamo. What only we see is
looked at here before every call; where it differs from that of the trace, the recorded operations run as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from phalanx._torch_private import storage_address
from phalanx.tensor.compile._recorded import copy_notes, placeholder, placeholder_for, value_of
from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.core._modes import settings
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.random._traced_draws import Draws


def local_compiler(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an entry point ``compile(graph, example_inputs, ...)``; graphs without DTensors pass straight on."""

    def compile_local(graph: Any, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if not isinstance(graph, fx.GraphModule) or not _concerns_us(graph, inputs):
            return plain(graph, inputs, *args, **kwargs)
        if any(isinstance(value, DTensor) for value in _attributes(graph)):
            disabled: Callable[..., Any] = torch.compiler.disable(graph)  # a compiled optimizer's parameters, not given
            return disabled
        program = _LocalProgram(graph, inputs)
        return program.called_by(plain(program.module(), program.example_locals, *args, **kwargs))

    return compile_local


def _concerns_us(graph: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    if any(isinstance(value, DTensor) for value in (*inputs, *_attributes(graph))):
        return True
    return any(isinstance(value_of(node), DTensor) for node in graph.graph.nodes)


def _attributes(graph: fx.GraphModule) -> list[Any]:
    return [operator.attrgetter(str(node.target))(graph) for node in graph.graph.find_nodes(op="get_attr")]


class _LocalProgram:
    """One recorded graph, run on locals."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._graph = graph
        self._specs: list[Spec | None] = [t._spec if isinstance(t, DTensor) else None for t in inputs]
        self._draws = Draws()
        self._replicates = settings.implicit_replication
        self._results: list[Spec | None] = []
        self._writes = False  # to one of its inputs
        self.example_locals = [t._local if isinstance(t, DTensor) else t for t in inputs] + self._draws.example_inputs()

    def trace(self, *values: Any) -> tuple[Any, ...]:
        """Run the recorded operations on what the compiler traces with."""
        count = len(self._specs)
        given = [
            value if spec is None else wrap(value, spec)
            for value, spec in zip(values[:count], self._specs, strict=True)
        ]
        versions = [value._version for value in values if isinstance(value, Tensor)]
        with self._draws.traced(values[count:]):
            results = self._graph(*given)
        self._writes |= versions != [value._version for value in values if isinstance(value, Tensor)]
        self._results = [r._spec if isinstance(r, DTensor) else None for r in results]
        return tuple(r._local if isinstance(r, DTensor) else r for r in results)

    def module(self) -> fx.GraphModule:
        """Return what the compiler gets: a graph with one node, which traces."""
        made = fx.Graph()
        inputs = self._graph.graph.find_nodes(op="placeholder")
        arguments = [placeholder_for(made, old, is_ours=isinstance(value_of(old), DTensor)) for old in inputs]
        arguments += [placeholder(made, f"stream_{i}") for i in range(len(self.example_locals) - len(arguments))]
        results = made.call_function(self.trace, tuple(arguments))
        (output,) = self._graph.graph.find_nodes(op="output")
        made.output(tuple(made.call_function(_item, (results, i)) for i in range(len(output.args[0]))))
        module = fx.GraphModule(torch.nn.Module(), made)
        copy_notes(self._graph, module)
        return module

    def called_by(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``compiled``, which takes locals, as Dynamo calls it: with DTensors."""
        draws, specs, graph, replicates = self._draws, self._specs, self._graph, self._replicates
        is_ours = [spec is not None for spec in specs]
        shared = _shared_storages(self.example_locals[: len(specs)]) if self._writes else []

        def run(*args: Any) -> tuple[Any, ...]:
            if settings.comm != "auto" or settings.fallback != "auto" or settings.implicit_replication != replicates:
                return graph(*args)  # type: ignore[no-any-return]  # a tuple, as Dynamo recorded it
            given = [a._local if ours else a for a, ours in zip(args, is_ours, strict=True)]
            if draws.would_ask() or (shared and _shared_storages(given) != shared):
                return graph(*args)  # type: ignore[no-any-return]  # as above
            given += draws.reserve()
            results = compiled(*given)
            return tuple([r if spec is None else wrap(r, spec) for r, spec in zip(results, self._results, strict=True)])

        disabled: Callable[..., Any] = torch.compiler.disable(run)
        return disabled


def _shared_storages(values: Sequence[Any]) -> list[int]:
    """Say for each tensor which one is the first with its memory: what is written to one, the others see."""
    first: dict[int, int] = {}
    return [
        first.setdefault(storage_address(value.untyped_storage()), place) if isinstance(value, Tensor) else -1
        for place, value in enumerate(values)
    ]


def _item(values: Any, index: int) -> Any:
    return values[index]
