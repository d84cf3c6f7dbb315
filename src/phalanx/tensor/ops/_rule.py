"""What a sharding rule sees and what it answers.

Owns ``Call`` (one torch call, its DTensor arguments replaced by ``In``), ``Choice`` (what one mesh axis may do) and
``Sharding`` (a rule's answer). Rules are pure functions from ``Call`` to ``Sharding`` or None (no rule for this
call: it is computed replicated). They are listed in ``_registry.py``; ``_select.py`` picks among choices by bytes.
Owns ``Operator`` too, what that table says of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from phalanx._devices import names_device
from phalanx._without_modes import without_user_modes
from phalanx.tensor.layout._placement import REPLICATE, Placement
from phalanx.tensor.layout._spec import Spec

Rule = Callable[["Call"], "Sharding | None"]


@dataclass(frozen=True, slots=True)
class Operator:
    """One row of the table of operators (``_registry.py``): how it runs on DTensors, its forms, what it promises.

    A handler is named ``module.function``; ``patches/_handlers.py`` knows the modules. It takes (func, args, kwargs) as
    torch gave them. Names of several forms are separated by spaces.
    """

    name: str
    rule: Rule | None = None
    handler: str = ""  # runs it in place of the rule, or leaves some calls to the rule
    functional: str = ""  # handler of ``torch.nn.functional``'s Python function of this name, whose body does not run
    in_place: str = ""  # handler of the form that writes to its first argument
    refused: str = ""  # why it raises
    in_place_refused: str = ""
    # ---- forms
    dunders: str = ""  # Python operators that are this one; those with an ``i`` in front write in place
    quick: str = ""  # methods and operators that DTensor has without the detour through torch's argument parser
    foreach: Literal["", "locals", "contributions"] = ""  # ``_foreach_<name>`` runs on the locals, also partial ones
    sharded: str = ""  # for ShardedTensor: "metadata", "shards" (element by element), or its handler's name
    # ---- promises
    numbers: bool = False  # numbers among its arguments are operands: a decision holds for all of them
    linear: Linear = ""  # which tensors may be partial sums, with a result that is one too
    monotone: str = ""  # by argument: "+" grows with it, "-" falls; so maxima and minima may be taken later
    passes: Literal["", "max", "min"] = ""  # only these partial values: of the others not-a-number would come first
    joins: Literal["", "max", "min"] = ""  # it is that itself, of two tensors
    cast: torch.dtype | Literal["", "given"] = ""  # the dtype of the result
    aliasing: Literal["", "view", "self", "if_needed"] = ""  # what it may return besides a new tensor
    makes_anew: bool = False  # of its first argument it takes no values
    indexes: bool = False  # its second argument is an index
    reduction_at: int = -1  # position of a loss's reduction
    writes: tuple[int, ...] = ()  # arguments that it writes to without raising their version
    module_makes: Literal["", "states", "offsets"] = ""  # plain tensors that modules give it


Linear = Literal["", "first", "identity", "dividend", "either", "both", "values"]
"""``first``: the first; ``identity``: that, whatever its reduction; ``dividend``: the first, divided by no zero;
``either``: one of two; ``both``: two together; ``values``: those of three that are no condition."""


# torch takes numpy's names for these arguments too, in every function.
NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}


def torch_keywords(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``kwargs`` under torch's names.

    >>> torch_keywords({"axis": 0, "keepdims": True})
    {'dim': 0, 'keepdim': True}
    """
    return {NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}


@dataclass(slots=True)
class In:
    """Stands for a DTensor argument inside a ``Call``."""

    index: int
    spec: Spec
    shape: torch.Size
    ndim: int
    dtype: torch.dtype

    @property
    def is_partial(self) -> bool:
        return self.spec.is_partial


@dataclass(frozen=True)
class Choice:
    """What one mesh axis may do without communication: a placement for each input and each output."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


Valid = Callable[[Sequence[tuple[Placement, ...]]], bool]
Local = Callable[["LocalRun", tuple[Any, ...], dict[str, Any]], Any]


@dataclass
class Sharding:
    """A rule's answer: choices for one mesh axis, the best guess first among equals.

    ``local`` computes on local tensors in place of the torch function itself; ``bind`` gives such a function once, when
    layouts are chosen, for the caller's arguments with locals in them. ``valid`` may veto a combination over all
    axes (given each input's placements). ``shapes`` gives the outputs' global shapes where the rule knows them.
    ``elementwise``: each element of the result is of those elements of the inputs that meet when they are broadcast.
    """

    choices: list[Choice]
    local: Local | None = None
    valid: Valid | None = None
    shapes: list[torch.Size] | None = None
    is_view: bool = False
    elementwise: bool = False
    bind: Callable[[LocalRun], Callable[..., Any]] | None = None


@dataclass(slots=True)
class LocalRun:
    """What a rule's ``local`` may ask when it runs: the function, and the layouts that were chosen."""

    func: Any
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]


@dataclass
class Call:
    """One torch call. ``args`` and ``kwargs`` are the caller's, with ``In`` in place of DTensors and torch's names in
    place of numpy's. What it computes on meta tensors it computes without the user's modes: ``decide`` sees to that.
    """

    op: Operator
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[In]
    grad: bool
    in_place: bool = False
    name: str = field(init=False)
    _meta: Any = field(default=None, repr=False)
    asked_for_grad: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.name = self.op.name
        self.kwargs = torch_keywords(self.kwargs)

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """Return the argument at ``position`` or called ``name``."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    @property
    def needs_grad(self) -> bool:
        """Whether gradients are needed. A rule that asks is asked twice, once for either case."""
        self.asked_for_grad = True
        return self.grad

    @property
    def num_axes(self) -> int:
        return self.inputs[0].spec.mesh.ndim

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        return self.inputs[0].spec.mesh.shape

    def meta(self) -> Any:
        """Say what the call returns for the global shapes, computed on meta tensors."""
        if self._meta is None:
            try:
                self._meta = (self.on(self._meta_tensors()),)
            except AssertionError as error:  # torch's way to refuse arguments on meta tensors
                raise RuntimeError(f"{self.name} on a DTensor: {error}") from error
        return self._meta[0]

    def meta_with(self, strides: Sequence[int]) -> tuple[Tensor, Any]:
        """Return the first input as a meta tensor with these strides, and what the call returns for it."""
        first, *others = self.inputs
        with without_user_modes():
            tensors = [
                _meta_tensor(first, first.shape, strides),
                *(_meta_tensor(one, one.shape) for one in others),
            ]
            return tensors[0], self.on(tensors)

    def on(self, tensors: Sequence[Tensor]) -> Any:
        """Say what the call returns for these tensors, which are on one device, in place of its inputs."""
        with torch.no_grad():
            return self.func(*_filled(self.args, tensors), **_filled(self.kwargs, tensors))

    def output_shapes(self) -> list[torch.Size]:
        return [t.shape for t in tensors_in(self.meta())]

    def local_shapes(self, specs: Sequence[Spec]) -> list[tuple[int, ...]] | None:
        """Return the shapes of torch's results on this rank, inputs laid out so; None if meta tensors cannot tell."""
        try:
            result = self.on(
                [_meta_tensor(one, spec.local_shape) for one, spec in zip(self.inputs, specs, strict=True)]
            )
        except CANNOT_TELL:
            return None
        if result is NotImplemented:  # Python asks the other operand, and compares by identity in the end
            raise TypeError(f"{self.name} of a DTensor and {self.args[1:]!r}")
        return [tuple(t.shape) for t in tensors_in(result)]

    def reached(self) -> list[frozenset[int]] | None:
        """For each tensor that the call returns, which inputs get a gradient through it; None if meta tensors cannot
        tell.
        """
        return self._reached(self.func, self._meta_tensors())

    def reached_here(self, run: Callable[..., Any], specs: Sequence[Spec]) -> list[frozenset[int]] | None:
        """Find that out for ``run``, the local call of a rank that holds nothing, by running it."""
        with torch.inference_mode(False):
            parts = [
                torch.zeros(spec.local_shape, dtype=one.dtype, device=spec.mesh.device_type)
                for one, spec in zip(self.inputs, specs, strict=True)
            ]
        return self._reached(run, parts)

    def _reached(self, run: Callable[..., Any], tensors: list[Tensor]) -> list[frozenset[int]] | None:
        for tensor in tensors:
            tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        try:
            with torch.inference_mode(False), torch.enable_grad():
                made = run(*_filled(self.args, tensors), **_filled(self.kwargs, tensors))
        except CANNOT_TELL:
            return None
        results = tensors_in(made)
        return [frozenset(i for i, leaf in enumerate(tensors) if _leads_to(one, leaf)) for one in results]

    def _meta_tensors(self) -> list[Tensor]:
        return [_meta_tensor(one, one.shape) for one in self.inputs]


# What torch raises where it has no kernel for meta tensors, and for a call that will raise anyway.
CANNOT_TELL = (RuntimeError, ValueError, TypeError, AssertionError, IndexError)


def _meta_tensor(one: In, shape: Sequence[int], strides: Sequence[int] | None = None) -> Tensor:
    """Return a meta tensor in place of an input; row-major without ``strides``."""
    with torch.inference_mode(False):
        if strides is None:
            return torch.empty(shape, dtype=one.dtype, device="meta")
        return torch.empty_strided(shape, strides, dtype=one.dtype, device="meta")


def _filled(value: Any, tensors: Sequence[Tensor]) -> Any:
    """``value`` with tensors for inputs, and their device for devices."""
    if isinstance(value, In):
        return tensors[value.index]
    if isinstance(value, (list, tuple)):
        items = [_filled(v, tensors) for v in value]
        return tuple(items) if type(value) is tuple else items
    if isinstance(value, dict):
        return {k: _filled(v, tensors) for k, v in value.items()}
    if isinstance(value, torch.device) or (isinstance(value, str) and names_device(value)):
        return tensors[0].device
    return value


def _leads_to(result: Tensor, leaf: Tensor) -> bool:
    """Return whether backward from ``result`` reaches ``leaf``."""
    if result is leaf or not (leaf.requires_grad and result.requires_grad):
        return result is leaf
    end, left, known = get_gradient_edge(leaf).node, [result.grad_fn], set()
    while left:
        node = left.pop()
        if node is end:
            return True
        if node is not None and node not in known:
            known.add(node)
            left += [parent for parent, _ in node.next_functions]
    return False


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a result, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_in(item)]
    return []


def all_replicated(call: Call, num_outputs: int) -> Choice:
    return Choice((REPLICATE,) * len(call.inputs), (REPLICATE,) * num_outputs)


def norm_dim(dim: int, ndim: int) -> int:
    """Return a non-negative dim; 0-d tensors have one dim in torch's eyes."""
    return dim % max(ndim, 1)


def none_empty(call: Call, placements: Sequence[tuple[Placement, ...]]) -> bool:
    """Return whether every rank would hold something of every input."""
    return not any(spec.has_empty_shard for spec in _laid_out(call, placements))


def none_thin(call: Call, placements: Sequence[tuple[Placement, ...]]) -> bool:
    """Return whether every rank would hold more than a row of every dim that has more."""
    return not any(spec.has_thin_shard for spec in _laid_out(call, placements))


def _laid_out(call: Call, placements: Sequence[tuple[Placement, ...]]) -> list[Spec]:
    return [one.spec.with_placements(given) for one, given in zip(call.inputs, placements, strict=True)]


def only_if(good: Callable[[Call, Sequence[tuple[Placement, ...]]], bool], rule: Rule) -> Rule:
    """``rule`` without the layouts of inputs that are not ``good``."""

    def stricter(call: Call) -> Sharding | None:
        sharding = rule(call)
        if sharding is not None:
            before = sharding.valid
            sharding.valid = lambda placements: good(call, placements) and (before is None or before(placements))
        return sharding

    return stricter
