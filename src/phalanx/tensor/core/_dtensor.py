"""DTensor: a tensor with a global shape whose data is spread over a device mesh.

Owns the wrapper class and its methods. A DTensor *holds* this rank's local tensor; autograd runs on local tensors, and
every torch function on a DTensor comes to ``__torch_function__`` (handlers: ``patches/_handlers.py``), above autograd.
What slips past the interception reaches ``__torch_dispatch__``, which refuses: the wrapper itself has no data (it is a
meta tensor).

Invariants: ``_local`` has the shape that ``_spec`` gives this rank; ``_spec`` has the local's dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx._torch_private import (
    TracingContext,
    execution_engine,
    is_view,
    local_scalar_dense,
    make_subclass,
    num_dispatch_modes,
)
from phalanx.comm import DeviceMesh
from phalanx.comm.torch_interop._dcp import HeldBox, Spread, TrainedShard
from phalanx.tensor.core._checkpoint_boxes import held_boxes, slices
from phalanx.tensor.core._copied_views import (
    check_up_to_date,
    check_writable,
    checked_local,
    mark_copied_view,
)
from phalanx.tensor.core._implicit_communication import moved_for, on_one_mesh
from phalanx.tensor.core._modes import user_line
from phalanx.tensor.core._tracing import handlers, is_compiling, refuse_below, run_traced
from phalanx.tensor.layout._placement import REPLICATE, Placement, normalize
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.ops._signatures import first_by_position
from phalanx.tensor.redistribute._execute import (
    entered_gradient,
    exposed_gradient,
    follow,
    local_with_gradient,
    num_averaged,
    run_plan,
)
from phalanx.tensor.redistribute._plan import plan_redistribute

_TRANSIENT = ("_alias", "_gathered", "_grads", "_lifted")  # attributes that copies and pickles leave out
_run_backward = execution_engine.run_backward


class DTensor(torch.Tensor, Spread):
    """A distributed tensor; made by ``distribute_tensor``, ``DTensor.from_local`` or a factory such as ``zeros``.

    >>> x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])   # doctest: +SKIP
    >>> (x @ x.T).redistribute(placements=[Replicate()]).to_local()   # doctest: +SKIP
    """

    __slots__ = ("_copied_view", "_local", "_spec")

    _local: Tensor
    _spec: Spec
    _copied_view: Any  # None, or what ``_copied_views.py`` says about a view that had to be copied
    _grads: tuple[Tensor, DTensor] | None = None  # the local gradient that ``grad`` was last wrapped for
    _alias: Any = None  # what operations share whose gradients are summed; see ``reduce_gradient``
    _gathered: Any = None  # where it came from, if it was gathered for one module; see ``Gathered``
    _lifted: Any = None  # set on results of a user's autograd.Function; see ``patches/_autograd_function.py``

    __array_ufunc__ = None  # numpy must not turn ``dtensor + array`` into a plain array

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if num_dispatch_modes() and is_compiling(func, (args, kwargs)):
            return run_traced(above, func, args, kwargs)
        if not args:
            args, kwargs = first_by_position(func, kwargs)
        try:
            handler = handlers[func]
        except KeyError:
            handler = above.find_handler(func)
        return handler(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out func
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is local_scalar_dense.default and type(args[0]) is cls:
            return number_of("reading a number", args[0])  # torch.arange(x), torch.full(size, x)
        return refuse_below(func)

    # ---- making and unmaking

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """Return each rank's ``local_tensor`` as its shard of one distributed tensor; differentiable.

        Without ``shape``, sizes of sharded dims are gathered from the ranks (shards may be uneven), and shards that do
        not fit raise on all of them. ``run_check`` also compares shapes along the other axes, which are taken on trust
        without it, and broadcasts replicas from the first rank. ``grad_placements``: how the gradient is laid out of
        which ``local_tensor`` gets its shard (default: as the tensor, replicated where that is partial).
        ``stride`` is only checked: a DTensor has the memory order of its local tensor.
        """
        return above.from_local(local_tensor, device_mesh, placements, run_check, shape, stride, grad_placements)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's local tensor as a plain tensor; ``grad_placements`` says how its gradient will be laid
        out."""
        spec = self._spec
        if self._copied_view is not None:
            check_up_to_date(self)
        local = self._local
        if (grad_placements is not None or spec.is_partial) and local.requires_grad:
            local = local_with_gradient(local, spec, grad_placements)
        elif local.is_leaf:
            local = local.view_as(local) if torch.is_grad_enabled() else local.detach()
        if "_is_param" in self.__dict__:
            local._is_param = True  # torch takes it for a parameter
        return local

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Lay the tensor out by ``placements``; ``forward_dtype`` is what travels and what comes out.

        The gradient travels in ``backward_dtype`` (default: the dtype of the result) and arrives in the tensor's own.

        The plan that runs is ``self.plan(placements)``. With ``async_op`` the result comes back while the (last)
        collective is under way, and waits for it when its data is first used.
        """
        spec = self._spec
        if num_dispatch_modes() and is_compiling("redistribute", self):
            async_op = False  # the graph says when it begins
        if self._copied_view is not None:
            check_up_to_date(self)
        if (
            placements is not None
            and device_mesh is None
            and not async_op
            and forward_dtype is None
            and backward_dtype is None
        ):  # nothing unusual: straight to the plan, if there is one already
            route = spec.routes.get(tuple(placements))
            if route is not None:
                local = self._local
                if not local.requires_grad:
                    return wrap(run_plan(local, route.plan), route.target)
                if not torch.is_grad_enabled():
                    return wrap(run_plan(local.detach(), route.plan), route.target)
                return wrap(follow(route, local), route.target)
        return above.redistribute(self, device_mesh, placements, forward_dtype, backward_dtype, async_op)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Gather the global tensor on every rank, as a plain tensor."""
        full = self.redistribute(placements=[REPLICATE] * self._spec.mesh.ndim)
        return full.to_local(grad_placements=grad_placements)

    def plan(self, placements: Sequence[Placement]) -> Any:
        """Return the collectives that ``redistribute(placements=placements)`` runs; print it, or ask for its
        ``nbytes``.
        """
        spec = self._spec
        return plan_redistribute(spec, spec.with_placements(normalize(placements, spec.mesh.ndim, len(spec.shape))))

    # ---- layout

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._spec.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._spec.mesh

    @property
    def _local_tensor(self) -> Tensor:
        return self._local

    # ---- what every tensor tells about itself; plain properties, so that asking costs no dispatch

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # torch declares attributes as plain variables
        return self._spec.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # see shape
        return self._spec.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # see shape
        return self._local.device

    @property
    def ndim(self) -> int:  # type: ignore[override]  # see shape
        return len(self._spec.shape)

    def dim(self) -> int:
        return len(self._spec.shape)

    def size(self, dim: Any = None) -> Any:
        return self._spec.shape if dim is None else self._spec.shape[dim]

    def numel(self) -> int:
        return self._spec.num_elements

    def __len__(self) -> int:
        if not self._spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._spec.shape[0]

    def __hash__(self) -> int:
        return id(self)

    @property
    def is_meta(self) -> bool:  # type: ignore[override]  # see shape
        return self._local.is_meta

    @property
    def requires_grad(self) -> bool:
        return self._local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._local.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        self._local.requires_grad_(requires_grad)
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]  # see shape
        return self._local.is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]  # see shape
        node = self._local.grad_fn
        if self._lifted is None or node is None:
            return node
        return self._lifted.node_of(node)

    def _is_view(self) -> bool:
        """Return whether the local tensor is a view; not to torch.compile, which would look for its base."""
        return is_view(self._local) and TracingContext.try_get() is None

    @property
    def _base(self) -> None:  # type: ignore[override]  # see shape
        return None

    @property
    def _version(self) -> int:  # type: ignore[override]  # see shape
        return self._local._version

    @property
    def grad(self) -> DTensor | None:
        """Return the gradient, laid out as this tensor (Replicate where this tensor is partial)."""
        local_grad = self._local.grad
        if local_grad is None:
            return None
        known = self._grads
        if known is None or known[0] is not local_grad:
            spec = self._spec
            shown = exposed_gradient(local_grad, spec)
            grad = wrap(shown, spec.cotangent)
            if num_averaged(spec) > 1:
                # A multiple of the local one: a copy, which backward will not keep up to date.
                mark_copied_view(grad, wrap(local_grad, spec.cotangent), "grad")
                return grad
            known = self._grads = (local_grad, grad)
        return known[1]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._grads = None
        if value is None:
            self._local.grad = None
            return
        value = _distributed("gradient", value)
        if value.shape != self.shape:
            raise RuntimeError(f"a gradient of shape {tuple(value.shape)} for a DTensor of shape {tuple(self.shape)}")
        if value._spec is self._spec.cotangent:
            local = value._local
        else:
            with torch.no_grad():
                local = local_gradient("assigning .grad", value, self._spec)
        self._local.grad = kept = entered_gradient(local, self._spec)
        if kept is value._local:
            self._grads = (local, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def backward(
        self, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        spec = self._spec
        if type(gradient) is DTensor and inputs is None and gradient._spec is spec and spec is spec.cotangent:
            keep = create_graph if retain_graph is None else retain_graph
            grads = (gradient._local,)
            _run_backward((self._local,), grads, keep, create_graph, (), allow_unreachable=True, accumulate_grad=True)
            return
        func = torch.Tensor.backward
        (handlers.get(func) or above.find_handler(func))(
            func, (self, gradient, retain_graph, create_graph, inputs), None
        )

    @property
    def data(self) -> DTensor:
        data = wrap(checked_local(self).data, self._spec)
        if self._copied_view is not None:
            data._copied_view = self._copied_view.read_only()
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        value = _distributed("data", value)
        self._local.data = checked_local(value).detach()
        self._spec = value._spec
        self._alias = self._gathered = None  # they would keep the memory of before

    # ---- what ``torch.distributed.checkpoint`` and data parallelism ask, by way of ``phalanx.comm``

    def _held_boxes(self, purpose: str) -> list[HeldBox]:
        spec = self._spec
        if spec.is_partial:
            raise ValueError(
                f"cannot {purpose} {spec!r} in a checkpoint: where it is partial, the values are "
                f"known only after a reduction. redistribute() it to Replicate() or Shard() first"
            )
        if purpose == "load":
            check_writable(self, "loading a checkpoint", anywhere=False)
        return held_boxes(spec, checked_local(self).detach())

    def _trained_part(self) -> TrainedShard:
        spec = self._spec
        cut = [
            coordinate for coordinate, p in zip(spec.coordinate, spec.placements, strict=True) if not p.is_replicate()
        ]
        return TrainedShard(self._local, f"{cut} of {spec.layout}, shape {tuple(spec.shape)}")

    def _whole(self) -> Tensor:
        with torch.no_grad():
            return self.full_tensor()

    def _cut_from(self, full: Tensor) -> Tensor:
        tensor, spec = self, self._spec
        if tensor.is_meta:
            tensor = wrap(torch.empty(spec.local_shape, dtype=spec.dtype, device=full.device), spec)
        for box in tensor._held_boxes("load"):
            box.tensor.copy_(full[slices(box)])
        return tensor

    def _distributed_from(self, full: Tensor) -> Tensor:
        return above.distribute(full.detach(), self.device_mesh, self.placements)

    def _over(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        return wrap(function(checked_local(self).detach()), self._spec)

    # ---- what ``torch.compile`` asks of a tensor that holds another

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local"], (self._spec, self._local.requires_grad, self._copied_view is None)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], facts: Any, size: Any, stride: Any) -> DTensor:
        return wrap(inner["_local"], facts[0])

    @classmethod
    def __metadata_guard__(cls, before: Any, now: Any) -> bool:
        return bool(before == now)

    # ---- text and copies

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        spec = self._spec
        return f"DTensor({spec.layout}, shape={tuple(spec.shape)}, local={self._local!r}, mesh={spec.mesh!r})"

    def __format__(self, spec: str) -> str:
        return format(self.full_tensor().item(), spec) if spec and not self.shape else repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name not in _TRANSIENT}
        return _rebuild, (
            checked_local(self).detach(),
            self._spec,
            self.requires_grad and self.is_leaf,
            state,
            self._spec.mesh.get_coordinate(),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if not self.is_leaf:
            raise RuntimeError("only leaf DTensors can be deep-copied; detach() first")
        local = copy.deepcopy(checked_local(self), memo)  # with its gradient; what shares its memory still does
        state = {name: value for name, value in self.__dict__.items() if name not in _TRANSIENT}
        copied = memo[id(self)] = wrap(local, self._spec)
        copied.__dict__.update(state)
        return copied


# Bound once: torch asks for them several times in every call, and a classmethod is bound anew for each.
DTensor.__torch_function__ = DTensor.__torch_function__  # type: ignore[method-assign]  # the same, bound
DTensor.__torch_dispatch__ = DTensor.__torch_dispatch__  # type: ignore[method-assign]  # the same, bound


def wrap(local: Tensor, spec: Spec) -> DTensor:
    """Return a DTensor of ``local``. The hot path of every operation."""
    if local.dtype is not spec.dtype:
        spec = spec.with_dtype(local.dtype)
    result: DTensor = make_subclass(DTensor, spec.template)
    result._local = local
    result._spec = spec
    result._copied_view = None
    return result


def number_of(op: str, tensor: Tensor) -> Any:
    """Read the number that a 0-d tensor is, on every rank."""
    if tensor.requires_grad:
        raise TypeError(
            f"{op} takes a number where it got a 0-d tensor that requires grad, at {user_line()}: detach() it"
        )
    if isinstance(tensor, DTensor):
        tensor = moved_for(op, checked_local(tensor), tensor._spec, tensor._spec.replicated)
    return tensor.item()


def local_gradient(op: str, given: DTensor, spec: Spec) -> Tensor:
    """Bring a gradient into the layout that one of a tensor laid out as ``spec`` has; its local tensor.

    It may come in any layout, also on a mesh that is a part of the tensor's or that contains it.
    """
    source, target = on_one_mesh(op, given._spec, spec.cotangent.with_dtype(given.dtype))
    return moved_for(op, checked_local(given), source, target)


def _distributed(what: str, value: Any) -> DTensor:
    if isinstance(value, DTensor):
        return value
    raise TypeError(
        f"the {what} of a DTensor is a DTensor, got a plain {type(value).__name__}: make it one with "
        f"distribute_tensor() or DTensor.from_local()"
    )


def _rebuild(
    local: Tensor,
    spec: Spec,
    requires_grad: bool,
    state: dict[str, Any],
    saved_at: tuple[int, ...] | None = None,
) -> DTensor:
    own = spec.coordinate
    for axis, (placement, there) in enumerate(zip(spec.placements, own if saved_at is None else saved_at, strict=True)):
        if there != own[axis] and not placement.is_replicate():
            raise ValueError(
                f"rank {spec.mesh.get_rank()}, at {own} of {spec.mesh!r}, got the part of {spec!r} that the rank at "
                f"{tuple(saved_at or ())} saved: each rank loads what it wrote. phalanx.shard.save() and "
                f"torch.distributed.checkpoint write files that any rank can load"
            )
    tensor = wrap(local.requires_grad_(requires_grad), spec)
    tensor.__dict__.update(state)
    return tensor


class Above:
    """What sub-packages above this one do for methods of ``DTensor``; ``phalanx.tensor`` fills it in."""

    find_handler: Callable[[Any], Callable[[Any, Any, Any], Any]]
    from_local: Callable[..., DTensor]
    redistribute: Callable[..., DTensor]
    distribute: Callable[..., DTensor]


above = Above()
