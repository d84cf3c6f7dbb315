"""Element by element: every input sharded alike (where its dim is not broadcast) gives that sharding.

Owns the rules for pointwise functions and their names. Some are linear and pass sums that are still partial: see
``linear.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.tensor.layout._placement import REPLICATE, Placement, Shard
from phalanx.tensor.ops._rule import Call, Choice, In, Sharding, all_replicated
from phalanx.tensor.ops.rules._linear import CAST_NAMES, linear_choices

UNARY = [
    *CAST_NAMES,
    "abs",
    "absolute",
    "acos",
    "acosh",
    "angle",
    "arccos",
    "arccosh",
    "arcsin",
    "arcsinh",
    "arctan",
    "arctanh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "bitwise_not",
    "ceil",
    "celu",
    "clone",
    "conj",
    "conj_physical",
    "contiguous",
    "cos",
    "cosh",
    "deg2rad",
    "detach",
    "digamma",
    "elu",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "fix",
    "floor",
    "frac",
    "gelu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "i0",
    "isfinite",
    "isinf",
    "isnan",
    "isneginf",
    "isposinf",
    "isreal",
    "leaky_relu",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_sigmoid",
    "logical_not",
    "logit",
    "logsigmoid",
    "mish",
    "mvlgamma",
    "neg",
    "negative",
    "polygamma",
    "positive",
    "rad2deg",
    "reciprocal",
    "relu",
    "relu6",
    "resolve_conj",
    "resolve_neg",
    "round",
    "rsqrt",
    "selu",
    "sgn",
    "sigmoid",
    "sign",
    "signbit",
    "silu",
    "sin",
    "sinc",
    "sinh",
    "softplus",
    "softshrink",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "tanhshrink",
    "threshold",
    "trunc",
    "special_bessel_j0",
    "special_bessel_j1",
    "special_bessel_y0",
    "special_bessel_y1",
    "special_digamma",
    "special_entr",
    "special_erf",
    "special_erfc",
    "special_erfcx",
    "special_erfinv",
    "special_exp2",
    "special_expit",
    "special_expm1",
    "special_gammaln",
    "special_i0",
    "special_i0e",
    "special_i1",
    "special_i1e",
    "special_log1p",
    "special_log_ndtr",
    "special_logit",
    "special_modified_bessel_i0",
    "special_modified_bessel_i1",
    "special_modified_bessel_k0",
    "special_modified_bessel_k1",
    "special_multigammaln",
    "special_ndtr",
    "special_ndtri",
    "special_polygamma",
    "special_psi",
    "special_round",
    "special_scaled_modified_bessel_k0",
    "special_scaled_modified_bessel_k1",
    "special_sinc",
    "special_spherical_bessel_j0",
    "ones_like",
    "zeros_like",
    "full_like",
    "empty_like",
    "to",
    "type",
    "cpu",
    "cuda",
    "nan_to_num",
    "clip",
    "clamp",
    "clamp_min",
    "clamp_max",
    "fill",
    "zero",
    "real",
    "imag",
]

BINARY = [
    "add",
    "sub",
    "subtract",
    "rsub",
    "mul",
    "multiply",
    "div",
    "divide",
    "true_divide",
    "rdiv",
    "floor_divide",
    "rfloor_divide",
    "fmod",
    "remainder",
    "pow",
    "rpow",
    "float_power",
    "atan2",
    "arctan2",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_left_shift",
    "bitwise_right_shift",
    "copysign",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "equal_to",
    "not_equal",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "fmax",
    "fmin",
    "gcd",
    "lcm",
    "heaviside",
    "hypot",
    "igamma",
    "igammac",
    "ldexp",
    "logaddexp",
    "logaddexp2",
    "logical_and",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "nextafter",
    "special_zeta",
    "special_xlog1py",
    "xlogy",
    "special_xlogy",
    "special_gammainc",
    "special_gammaincc",
    "isclose",
    "polar",
    "complex",
    "copy",
    "masked_fill",
    "where",
    "lerp",
    "addcmul",
    "addcdiv",
    "special_chebyshev_polynomial_t",
    "special_chebyshev_polynomial_u",
    "special_chebyshev_polynomial_v",
    "special_chebyshev_polynomial_w",
    "special_hermite_polynomial_h",
    "special_hermite_polynomial_he",
    "special_laguerre_polynomial_l",
    "special_legendre_polynomial_p",
    "special_shifted_chebyshev_polynomial_t",
    "special_shifted_chebyshev_polynomial_u",
    "special_shifted_chebyshev_polynomial_v",
    "special_shifted_chebyshev_polynomial_w",
    "rlshift",
    "rrshift",
]

# Losses without their reduction, which ``_composite.py`` takes away first.
LOSSES = [
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "hinge_embedding_loss", "margin_ranking_loss", "poisson_nll_loss",
]  # fmt: skip

_ALIASES = frozenset({"detach", "real", "imag"})  # their result shares the memory of their argument
_MAKES_ANEW = frozenset({"zeros_like", "ones_like", "empty_like", "full_like", "zero"})


def broadcast_shape(shapes: Sequence[torch.Size]) -> torch.Size:
    """The shape that torch broadcasts ``shapes`` to."""
    result: torch.Size = torch.broadcast_shapes(*shapes)
    return result


def pointwise(call: Call) -> Sharding | None:
    """Sharded as the inputs are, dim by dim; see the module."""
    shapes = [one.shape for one in call.inputs]
    out = broadcast_shape(shapes)
    if call.in_place and out != shapes[0]:
        raise RuntimeError(
            f"{call.name}_ on a DTensor of shape {tuple(shapes[0])}: the arguments broadcast to {tuple(out)}"
        )
    if call.name == "where" and len(call.args) + len(call.kwargs) == 1:
        return None  # it gives indices
    choices = [all_replicated(call, 1)]
    dims = sorted(
        {d for one in call.inputs for d in _out_dims(one, len(out)) if out[d] > 1 or len(shapes) == 1}
    )
    choices[:0] = [c for d in dims for c in shard_choices(call, d, out, 1)]
    choices += linear_choices(call)
    if call.name in _MAKES_ANEW:
        value = (REPLICATE,) * (len(call.inputs) - 1)  # what full_like fills with
        choices += [
            Choice((p, *value), (REPLICATE if p.is_partial() else p,))
            for p in {*call.inputs[0].spec.placements}
        ]
        choices = [c for c in choices if not c.outputs[0].is_partial() or call.in_place]
    made = None if call.in_place else [torch.Size(out)]
    return Sharding(choices, shapes=made, is_view=call.name in _ALIASES, elementwise=True)


def _out_dims(one: In, ndim: int) -> set[int]:
    return {d + ndim - one.ndim for d in one.sharded_dims}


def shard_choices(call: Call, dim: int, out: torch.Size, num_outputs: int) -> list[Choice]:
    """All inputs cut along output dim ``dim``; whole where they have no such dim or broadcast it.

    One choice for each way of cutting that occurs (plain, strided).
    """
    ways: dict[Placement, None] = {}
    for one in call.inputs:
        for p in one.spec.placements:
            if isinstance(p, Shard) and p.dim + len(out) - one.ndim == dim:
                ways[p.on_dim(dim)] = None
    result = []
    for way in ways or {Shard(dim): None}:
        assert isinstance(way, Shard), "only shards were collected"
        inputs: list[Placement] = []
        for one in call.inputs:
            own = dim - (len(out) - one.ndim)
            inputs.append(
                REPLICATE if own < 0 or (one.shape[own] == 1 and out[dim] != 1) else way.on_dim(own)
            )
        result.append(Choice(tuple(inputs), (way,) * num_outputs))
    return result
