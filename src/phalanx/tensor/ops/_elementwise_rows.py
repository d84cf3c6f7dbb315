"""Rows of the table of operators: those that go element by element.

Owns ``ELEMENTWISE_ROWS``, a part of the table that ``_registry.py`` holds together, and ``rows``, which writes several
rows that say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from phalanx.tensor.ops._rule import Operator, Rule
from phalanx.tensor.ops.rules import _pointwise


def rows(names: str, rule: Rule | None = None, **says: Any) -> Iterator[Operator]:
    for name in names.split():
        yield Operator(name, rule, **says)


def _pointwise_ops(names: str, **says: Any) -> Iterator[Operator]:
    """Rows of operators that go element by element, and whose numbers are operands."""
    return rows(names, _pointwise.pointwise, **{"numbers": True, **says})


_CASTS = {
    "bfloat16": torch.bfloat16, "half": torch.float16, "float": torch.float32, "double": torch.float64,
    "chalf": torch.complex32, "cfloat": torch.complex64, "cdouble": torch.complex128, "bool": torch.bool,
    "int": torch.int32, "long": torch.int64, "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
}  # fmt: skip

ELEMENTWISE_ROWS: tuple[Iterable[Operator], ...] = (
    # ---- element by element, of one tensor
    _pointwise_ops(
        "absolute arccos arccosh arcsin arctanh fix i0 isreal mvlgamma polygamma special_airy_ai special_bessel_j0 "
        "special_bessel_j1 special_bessel_y0 special_bessel_y1 special_digamma special_entr special_erfinv "
        "special_gammaln special_i0 special_i0e special_i1e special_log1p special_log_ndtr special_logit "
        "special_modified_bessel_i0 special_modified_bessel_k0 special_modified_bessel_k1 special_multigammaln "
        "special_ndtri special_polygamma special_psi special_scaled_modified_bessel_k0 "
        "special_scaled_modified_bessel_k1 special_sinc special_spherical_bessel_j0 native_dropout_backward"
    ),
    _pointwise_ops(
        "arcsinh arctan special_erf special_exp2 special_expit special_expm1 special_i1 special_modified_bessel_i1 "
        "special_ndtr special_round",
        monotone="+",
    ),
    _pointwise_ops("special_erfc special_erfcx", monotone="-"),
    _pointwise_ops(
        "acosh angle atanh digamma erfinv gelu hardswish isfinite isinf isnan isneginf isposinf logical_not logit "
        "nan_to_num sgn signbit sinc softplus square tanhshrink threshold",
        sharded="shards",
    ),
    _pointwise_ops(
        "asinh clamp clip exp2 hardshrink hardsigmoid log_sigmoid logsigmoid softshrink", monotone="+", sharded="shards"
    ),
    _pointwise_ops("fill", makes_anew=True, sharded="shards"),
    _pointwise_ops(
        "acos asin cos cosh frac lgamma log10 log1p log2 reciprocal sign sin tan",
        foreach="locals", sharded="shards",
    ),
    _pointwise_ops(
        "atan ceil erf expm1 floor round sinh trunc", monotone="+", foreach="locals", sharded="shards"
    ),
    _pointwise_ops("erfc", monotone="-", foreach="locals", sharded="shards"),
    _pointwise_ops("clamp_max", monotone="++", joins="min", foreach="locals", sharded="shards"),
    _pointwise_ops("clamp_min", monotone="++", joins="max", foreach="locals", sharded="shards"),
    _pointwise_ops("exp", monotone="+", foreach="locals", quick="exp", sharded="shards"),
    _pointwise_ops("log", foreach="locals", quick="log", sharded="shards"),
    _pointwise_ops("rsqrt", foreach="locals", quick="rsqrt", sharded="shards"),
    _pointwise_ops("sigmoid", monotone="+", foreach="locals", quick="sigmoid", sharded="shards"),
    _pointwise_ops("sqrt", foreach="locals", quick="sqrt", sharded="shards"),
    _pointwise_ops("tanh", monotone="+", foreach="locals", quick="tanh", sharded="shards"),
    _pointwise_ops("abs", foreach="locals", dunders="abs", sharded="shards"),
    _pointwise_ops("bitwise_not", dunders="invert", sharded="shards"),
    _pointwise_ops("relu", monotone="+", quick="relu", functional="composite.activation", sharded="shards"),
    _pointwise_ops(
        "celu elu hardtanh leaky_relu mish relu6 selu silu", functional="composite.activation", sharded="shards"
    ),
    # linear ones: what is still a partial sum may pass through them
    _pointwise_ops("deg2rad rad2deg", linear="first", monotone="+", sharded="shards"),
    _pointwise_ops("negative", linear="first", monotone="-", sharded="shards"),
    _pointwise_ops("neg", linear="first", monotone="-", foreach="locals", dunders="neg", sharded="shards"),
    _pointwise_ops("clone", linear="identity", foreach="locals", sharded="clone"),
    _pointwise_ops("positive", linear="identity", aliasing="self", dunders="pos", sharded="shards"),
    _pointwise_ops("conj", linear="first", monotone="+", aliasing="self", sharded="shards"),
    _pointwise_ops("resolve_conj resolve_neg", linear="first", monotone="+", aliasing="self"),
    _pointwise_ops("conj_physical", linear="first", monotone="+"),
    _pointwise_ops("real", linear="first", monotone="+", aliasing="view"),
    _pointwise_ops("imag", linear="first", aliasing="view"),
    _pointwise_ops("detach", linear="identity", aliasing="view", sharded="detach"),
    _pointwise_ops("contiguous", linear="identity", aliasing="if_needed", quick="contiguous", sharded="contiguous"),
    _pointwise_ops("ones_like zeros_like full_like empty_like", linear="first", makes_anew=True, sharded="shards"),
    _pointwise_ops("zero", linear="first", makes_anew=True, foreach="contributions", sharded="shards"),
    # casts
    *(
        _pointwise_ops(name, linear="first", aliasing="self", cast=dtype, sharded="" if dtype.is_complex else "shards")
        for name, dtype in _CASTS.items()
    ),
    rows("to", _pointwise.pointwise, handler="attributes.to", linear="first", aliasing="self", cast="given"),
    rows("type", _pointwise.pointwise, handler="attributes.type_", linear="first", aliasing="self", cast="given"),
    rows("type_as", handler="attributes.to", sharded="shards"),
    rows("cpu cuda", _pointwise.pointwise, linear="identity", aliasing="self"),
    # ---- element by element, of several tensors
    _pointwise_ops(
        "add", linear="both", monotone="++", foreach="locals", dunders="add radd iadd", quick="__add__ add add_",
        sharded="shards",
    ),
    _pointwise_ops(
        "sub", linear="both", monotone="+-", foreach="locals", dunders="sub isub", quick="__sub__ sub sub_",
        sharded="shards",
    ),
    _pointwise_ops("subtract", linear="both", monotone="+-", sharded="shards"),
    _pointwise_ops("rsub", linear="both", monotone="-+", dunders="rsub", sharded="shards"),
    _pointwise_ops(
        "mul", linear="either", foreach="locals", dunders="mul rmul imul", quick="__mul__ mul mul_", sharded="shards"
    ),
    _pointwise_ops("multiply", linear="either", sharded="shards"),
    _pointwise_ops(
        "div", linear="dividend", foreach="locals", dunders="truediv itruediv div idiv", quick="__truediv__ div div_",
        sharded="shards",
    ),
    _pointwise_ops("divide true_divide", linear="dividend", sharded="shards"),
    _pointwise_ops("rdiv", dunders="rtruediv rdiv", sharded="shards"),
    _pointwise_ops("floor_divide", dunders="floordiv ifloordiv", sharded="shards"),
    _pointwise_ops("rfloor_divide", dunders="rfloordiv", sharded="shards"),
    _pointwise_ops("remainder", dunders="mod rmod imod", sharded="shards"),
    _pointwise_ops("pow", foreach="locals", dunders="pow ipow", quick="pow", sharded="shards"),
    _pointwise_ops("rpow", dunders="rpow", sharded="shards"),
    _pointwise_ops("bitwise_and", dunders="and rand iand", sharded="shards"),
    _pointwise_ops("bitwise_or", dunders="or ror ior", sharded="shards"),
    _pointwise_ops("bitwise_xor", dunders="xor rxor ixor", sharded="shards"),
    _pointwise_ops("bitwise_left_shift", dunders="lshift ilshift", sharded="shards"),
    _pointwise_ops("bitwise_right_shift", dunders="rshift irshift", sharded="shards"),
    _pointwise_ops("rlshift", dunders="rlshift"),
    _pointwise_ops("rrshift", dunders="rrshift"),
    _pointwise_ops("eq", dunders="eq", sharded="shards"),
    _pointwise_ops("ne", dunders="ne", sharded="shards"),
    _pointwise_ops("lt", dunders="lt", sharded="shards"),
    _pointwise_ops("le", dunders="le", sharded="shards"),
    _pointwise_ops("gt", dunders="gt", sharded="shards"),
    _pointwise_ops("ge", dunders="ge", sharded="shards"),
    _pointwise_ops("maximum", monotone="++", joins="max", foreach="locals", sharded="shards"),
    _pointwise_ops("minimum", monotone="++", joins="min", foreach="locals", sharded="shards"),
    _pointwise_ops("fmax", monotone="++", passes="min", sharded="shards"),  # of not-a-number and y: y, the least
    _pointwise_ops("fmin", monotone="++", passes="max", sharded="shards"),
    _pointwise_ops("logaddexp logaddexp2", monotone="++", sharded="shards"),
    _pointwise_ops("complex", linear="both"),
    _pointwise_ops("copy", linear="both", cast="given", foreach="contributions", sharded="copy"),
    _pointwise_ops("where", linear="values", sharded="shards"),
    _pointwise_ops("lerp", foreach="locals", quick="lerp_", sharded="shards"),
    _pointwise_ops("addcmul", foreach="locals", quick="addcmul_", sharded="shards"),
    _pointwise_ops("addcdiv", foreach="locals", quick="addcdiv_", sharded="shards"),
    _pointwise_ops(
        "fmod float_power atan2 copysign not_equal greater greater_equal less less_equal gcd lcm heaviside "
        "hypot ldexp logical_and logical_or logical_xor nextafter xlogy isclose masked_fill",
        sharded="shards",
    ),
    _pointwise_ops(
        "arctan2 equal_to igamma igammac special_zeta special_xlog1py special_xlogy special_gammainc special_gammaincc "
        "polar special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
        "special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he "
        "special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t "
        "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
        "special_shifted_chebyshev_polynomial_w"
    ),
    # losses: without their reduction, which the handler takes away first
    *(
        rows(names, _pointwise.pointwise, handler="composite.elementwise_loss", reduction_at=place)
        for names, place in (
            ("mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div", 2),
            ("binary_cross_entropy hinge_embedding_loss", 3),
            ("binary_cross_entropy_with_logits margin_ranking_loss", 4),
            ("poisson_nll_loss", 5),
        )
    ),
)  # fmt: skip
