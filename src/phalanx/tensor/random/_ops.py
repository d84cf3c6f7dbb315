"""Random functions on DTensors: each draws one stream and gives every element its own value from it.

Owns the handlers of those that are no dropout (``_dropout.py``); the values are in ``_distributions.py``. What draws
numbers and is not here is refused (``Operator.refused``): computed replicated it would use torch's generators, whose
values differ from rank to rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.tensor.core._copied_views import checked_local
from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.core._implicit_communication import moved_for
from phalanx.tensor.core._memory_order import kept_order
from phalanx.tensor.dispatch._fallback import write_out
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.random import _philox
from phalanx.tensor.random._distributions import (
    CAUCHY,
    EXPONENTIAL,
    GEOMETRIC,
    LOG_NORMAL,
    NORMAL,
    UNIFORM,
    Distribution,
    integers,
    random_integers,
)
from phalanx.tensor.random._drawing import (
    FLOATS,
    INTEGERS,
    Handler,
    check_generator,
    drawn,
    option,
    require,
    require_dtype,
    require_everywhere,
    write,
)
from phalanx.tensor.random._state import check_not_traced, next_stream


def _like(values: Callable[[str, torch.dtype, Any, Any], _philox.Make]) -> Handler:
    """rand_like, randn_like, randint_like: in the layout of the argument, with a dtype maybe."""

    def handler(func: Any, args: Any, kwargs: Any) -> DTensor:
        options = dict(kwargs or {})
        check_generator(options)
        tensor: DTensor = args[0]
        dtype = options.get("dtype") or tensor.dtype
        _check_like(func.__name__, tensor, options)
        made = _in_memory(drawn(tensor, values(func.__name__, dtype, args, options), dtype), tensor, options)
        made.requires_grad_(bool(options.get("requires_grad")))
        return wrap(made, tensor._spec.cotangent.with_dtype(dtype))

    return handler


def _check_like(name: str, tensor: DTensor, options: dict[str, Any]) -> None:
    """Refuse what ``empty_like`` would take, but cannot mean anything on a mesh."""
    device, mesh = options.get("device"), tensor._spec.mesh
    if device is not None and torch.device(device).type != mesh.device_type:
        raise ValueError(f"{name}(device={device!r}) on a DTensor: its mesh is on {mesh.device_type!r}")
    layout = options.get("layout")
    if layout is not None and layout is not torch.strided:
        raise ValueError(f"{name}(layout={layout}) on a DTensor: DTensors are strided")
    if options.get("pin_memory"):
        raise NotImplementedError(f"{name}(pin_memory=True) on a DTensor: pin_memory() the local tensor")


def _standard(distribution: Distribution) -> Callable[[str, torch.dtype, Any, Any], _philox.Make]:
    return lambda name, dtype, args, options: distribution.standard(dtype, name)


def _between(name: str, dtype: torch.dtype, args: Any, options: Any) -> _philox.Make:
    bounds = [*args[1:], *(options[k] for k in ("low", "high") if k in options)]
    low, high = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
    return integers(name, dtype, int(low), int(high))


def _in_memory(values: Tensor, tensor: DTensor, options: dict[str, Any]) -> Tensor:
    """In the order of ``tensor``, if no other is asked for."""
    form = options.get("memory_format") or torch.preserve_format
    if form is torch.preserve_format:
        return kept_order(values, tensor._spec.cotangent, tensor)
    return values.contiguous(memory_format=form)


def _fill(make: Callable[[torch.dtype, Any, Any], _philox.Make]) -> Handler:
    """In-place fillers: uniform_, random_, exponential_..."""

    def handler(func: Any, args: Any, kwargs: Any) -> DTensor:
        options = dict(kwargs or {})
        check_generator(options)
        tensor: DTensor = args[0]
        return write(tensor, drawn(tensor, make(tensor.dtype, args, options)), func.__name__)

    return handler


def _constant(tensor: Any) -> Any:
    """Zeros that depend on ``tensor`` with gradient zero, as the results of random functions do."""
    return tensor.masked_fill(torch.ones_like(tensor, dtype=torch.bool), 0)


def _bernoulli(func: Any, args: Any, kwargs: Any) -> DTensor:
    """``bernoulli(probabilities)``, ``bernoulli(x, p)``, ``x.bernoulli_(p)`` with a number or a DTensor."""
    options = dict(kwargs or {})
    check_generator(options)
    tensor: DTensor = args[0]
    in_place = func.__name__.endswith("_")
    p = option(args, options, 1, "p", 0.5 if in_place else None)
    if p is None or (isinstance(p, DTensor) and p.ndim):
        values = _coins(func.__name__, tensor, tensor if p is None else p)
    else:
        require_dtype(func.__name__, tensor.dtype, FLOATS | INTEGERS | {torch.bool})
        chance = float(p)
        require(0 <= chance <= 1, f"{func.__name__} on a DTensor needs p between 0 and 1, got {chance}")
        values = drawn(tensor, lambda bits: _philox.is_below(bits, chance))
    if in_place:
        return write(tensor, values, func.__name__)
    made = wrap(values, tensor._spec.cotangent)
    return made + _constant(tensor) if tensor.requires_grad and torch.is_grad_enabled() else made


def _coins(name: str, tensor: DTensor, p: DTensor) -> Tensor:
    """Ones with the probabilities ``p``, in the layout of ``tensor``."""
    require_dtype(name, p.dtype, FLOATS)
    require_dtype(name, tensor.dtype, FLOATS | INTEGERS | {torch.bool})
    target = tensor._spec.cotangent.with_dtype(p.dtype)
    full: Any = p.detach() if p is tensor else p.detach().expand(tensor.shape)
    chance = moved_for(name, checked_local(full), full._spec, target)
    told = f"{name} on a DTensor needs probabilities between 0 and 1; some are not"
    require_everywhere(name, (chance >= 0) & (chance <= 1), target, told)
    limits = chance.to(device="cpu", dtype=torch.float64).numpy()
    return drawn(tensor, lambda bits: _philox.uniform(bits) < limits)


def _normal_from(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.normal(mean, std)`` where at least one is a DTensor."""
    options = dict(kwargs or {})
    check_generator(options)
    mean, std = option(args, options, 0, "mean", 0.0), option(args, options, 1, "std", 1.0)
    given = [v for v in (mean, std) if isinstance(v, DTensor)]
    if not given or len(args) > 2 or "size" in options:
        raise NotImplementedError("torch.normal with size= and a DTensor: use x.normal_(mean, std)")
    dtype = given[0].dtype  # of the mean, if that is a tensor
    require_dtype("normal", dtype, NORMAL.takes)
    if isinstance(std, DTensor):
        require_dtype("normal", std.dtype, FLOATS | INTEGERS)
        spread = std.detach()
        full = spread._spec.cotangent  # type: ignore[attr-defined]  # a DTensor
        local_std = moved_for("normal", checked_local(spread), spread._spec, full)  # type: ignore[arg-type,attr-defined]  # as above
        require_everywhere(
            "normal", local_std >= 0, full, "normal on a DTensor needs std >= 0 everywhere; some are not"
        )
    else:
        require(std >= 0, f"normal on a DTensor needs std >= 0, got {std}")
    wide = torch.complex128 if dtype.is_complex else torch.float64
    centre, spread = (v.detach().to(wide) if isinstance(v, DTensor) else v for v in (mean, std))
    template: Any = centre + spread
    noise = wrap(drawn(template, NORMAL.of(wide)), template._spec.cotangent)
    made = (noise * spread + centre).to(dtype)
    for tensor in given:
        if tensor.requires_grad and torch.is_grad_enabled():
            made = made + _constant(tensor)
    return made


def _multinomial(func: Any, args: Any, kwargs: Any) -> DTensor:
    """By ranking exponential clocks (without replacement) or inverting the distribution (with)."""
    options = dict(kwargs or {})
    check_generator(options)
    weights: DTensor = args[0].detach()
    count = option(args, options, 1, "num_samples", 1)
    mesh, everywhere = weights._spec.mesh, weights._spec.replicated
    check_not_traced(mesh)  # before the checks below, which look at values
    require(0 < weights.ndim < 3, f"multinomial on a DTensor needs 1 or 2 dims, got {tuple(weights.shape)}")
    require_dtype("multinomial", weights.dtype, FLOATS)
    require(count > 0, f"multinomial on a DTensor needs num_samples > 0, got {count}")
    local = moved_for("multinomial", checked_local(weights), weights._spec, everywhere)
    full = local.to(device="cpu", dtype=torch.float64)
    require(
        bool(((full >= 0) & full.isfinite()).all() & (full.sum(-1) > 0).all()),
        "multinomial on a DTensor needs weights that are finite, not negative, and not all zero",
    )
    if not option(args, options, 2, "replacement", False):
        require(
            not bool(((full > 0).sum(-1) < count).any()),
            "multinomial on a DTensor, without replacement: fewer non-zero weights than samples",
        )
        bits = _philox.element_bits(everywhere, next_stream(mesh))
        clocks = torch.from_numpy(-np.log(_philox.open_uniform(bits))) / full
        chosen = clocks.argsort(-1)[..., :count].contiguous()
    else:
        spec = Spec.of(mesh, everywhere.placements, (*full.shape[:-1], count), torch.float64)
        draw = torch.from_numpy(_philox.uniform(_philox.element_bits(spec, next_stream(mesh))))
        totals = full.cumsum(-1)
        chosen = torch.searchsorted(totals / totals[..., -1:], draw, right=True)
    spec = Spec.of(mesh, everywhere.placements, chosen.shape, chosen.dtype)
    return wrap(chosen.clamp_max(full.shape[-1] - 1).to(local.device), spec)


def sparse_(tensor: DTensor, sparsity: float, std: float = 0.01, generator: Any = None) -> DTensor:
    """Draw normal values of which each column loses the same number, in random rows: ``nn.init.sparse_``.

    torch's own draws the rows from the rank's generator, so that replicas would differ; the other functions of
    ``nn.init`` are made of random functions on tensors and need nothing.
    """
    check_generator({"generator": generator})
    if tensor.ndim != 2:
        raise ValueError(f"sparse_ on a DTensor needs 2 dims, got {tuple(tensor.shape)}")
    values = drawn(tensor, NORMAL.of(tensor.dtype, (tensor, 0.0, std)))
    spec = tensor._spec.cotangent
    rows, columns = spec.shape
    ranking = _philox.words(next_stream(spec.mesh), 0, rows * columns).reshape(rows, columns).argsort(axis=0)
    is_zero = torch.zeros(rows, columns, dtype=torch.bool)
    is_zero.scatter_(0, torch.from_numpy(ranking)[: math.ceil(sparsity * rows)], True)
    for dim in range(2):
        is_zero = is_zero.index_select(dim, torch.tensor(spec.local_indices(dim), dtype=torch.int64))
    with torch.no_grad():
        return write(tensor, values.masked_fill_(is_zero.to(values.device), 0), "sparse_")


def sparse_init(plain: Any) -> Any:
    """Have ``nn.init.sparse_`` take DTensors."""

    def sparse(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (sparse_ if isinstance(tensor, DTensor) else plain)(tensor, *args, **kwargs)  # type: ignore[arg-type]  # a DTensor for the first

    return sparse


def _with_out(handler: Handler) -> Handler:
    def run(func: Any, args: Any, kwargs: Any) -> Any:
        options = dict(kwargs or {})
        out = options.pop("out", None)
        result = handler(func, args, options)
        return result if out is None else write_out(result, out)

    return run


# The handlers, under the names that the table of operators gives them.
rand_like = _like(_standard(UNIFORM))
randn_like = _like(_standard(NORMAL))
randint_like = _like(_between)
uniform = _fill(UNIFORM.of)
log_normal = _fill(LOG_NORMAL.of)
exponential = _fill(EXPONENTIAL.of)
cauchy = _fill(CAUCHY.of)
geometric = _fill(GEOMETRIC.of)
random = _fill(random_integers)
bernoulli = _with_out(_bernoulli)
multinomial = _with_out(_multinomial)
_fill_normal, _draw_normal = _fill(NORMAL.of), _with_out(_normal_from)


def normal(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.normal_(mean, std)``, which fills, or ``torch.normal(mean, std)`` of tensors."""
    return (_fill_normal if func is torch.Tensor.normal_ else _draw_normal)(func, args, kwargs)
