"""The table of operators: for each its rule or handler, its forms, and what it promises. There is no other.

Owns ``OPERATORS`` (name -> ``Operator``) and ``op_name``, which says under which name a torch function stands there:
one name for ``torch.add``, ``Tensor.add``, ``Tensor.add_``, ``+`` and ``+=``. An operator that has a rule and a handler
goes to the handler, which asks the rule for the cases that it leaves to it. What is not in the table is computed
replicated, or is Python whose body runs; ``patches/_handlers.py`` decides. ``phalanx.shard`` reads the same table.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch

from phalanx.tensor.ops._rule import Operator, Rule, none_empty, none_thin, only_if
from phalanx.tensor.ops.rules import (
    _assign,
    _batched,
    _joining,
    _layers,
    _matmul,
    _pointwise,
    _rearranged,
    _reduce,
    _shape,
)


def _ops(names: str, rule: Rule | None = None, **says: Any) -> Iterator[Operator]:
    for name in names.split():
        yield Operator(name, rule, **says)


def _pointwise_ops(names: str, **says: Any) -> Iterator[Operator]:
    """Rows of operators that go element by element, and whose numbers are operands."""
    return _ops(names, _pointwise.pointwise, **{"numbers": True, **says})


def _random(names: str, module: str = "random", **says: Any) -> Iterator[Operator]:
    for name in names.split():
        yield Operator(name, handler=f"{module}.{name}", **says)


_SUMS = ("sum", "avg")
_SHIFTED = ("sum", "avg", "min", "max", "product")  # every reduction: elements only move
_NO_RESIZE = "its global shape is fixed; make a new one"
_NO_DUAL = "forward-mode differentiation is not distributed; use torch.autograd.functional.jvp"
_NO_STORAGE = "its memory is this rank's part; use as_strided and the tensor it returns"
_NO_NUMBERS = (
    "its random numbers would differ from rank to rank; compute it of full_tensor() and distribute the result, "
    "which takes that of the first rank"
)

_CASTS = {
    "bfloat16": torch.bfloat16, "half": torch.float16, "float": torch.float32, "double": torch.float64,
    "chalf": torch.complex32, "cfloat": torch.complex64, "cdouble": torch.complex128, "bool": torch.bool,
    "int": torch.int32, "long": torch.int64, "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
}  # fmt: skip

_ROWS: tuple[Iterable[Operator], ...] = (
    # ---- element by element, of one tensor
    _pointwise_ops(
        "absolute arccos arccosh arcsin arctanh fix i0 isreal mvlgamma polygamma special_airy_ai special_bessel_j0 "
        "special_bessel_j1 special_bessel_y0 special_bessel_y1 special_digamma special_entr special_erfinv "
        "special_gammaln special_i0 special_i0e special_i1e special_log1p special_log_ndtr special_logit "
        "special_modified_bessel_i0 special_modified_bessel_k0 special_modified_bessel_k1 special_multigammaln "
        "special_ndtri special_polygamma special_psi special_scaled_modified_bessel_k0 "
        "special_scaled_modified_bessel_k1 special_sinc special_spherical_bessel_j0 native_dropout_backward.default"
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
    _ops("to", _pointwise.pointwise, handler="attributes.to", linear="first", aliasing="self", cast="given"),
    _ops("type", _pointwise.pointwise, handler="attributes.type_", linear="first", aliasing="self", cast="given"),
    _ops("type_as", handler="attributes.to", sharded="shards"),
    _ops("cpu cuda", _pointwise.pointwise, linear="identity", aliasing="self"),
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
    _pointwise_ops("logaddexp logaddexp2", monotone="++", sharded="shards"),
    _pointwise_ops("complex", linear="both"),
    _pointwise_ops("copy", linear="both", cast="given", foreach="contributions", sharded="copy"),
    _pointwise_ops("where", linear="values", sharded="shards"),
    _pointwise_ops("lerp", foreach="locals", quick="lerp_", sharded="shards"),
    _pointwise_ops("addcmul", foreach="locals", quick="addcmul_", sharded="shards"),
    _pointwise_ops("addcdiv", foreach="locals", quick="addcdiv_", sharded="shards"),
    _pointwise_ops(
        "fmod float_power atan2 copysign not_equal greater greater_equal less less_equal fmax fmin gcd lcm heaviside "
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
        _ops(names, _pointwise.pointwise, handler="composite.elementwise_loss", reduction_at=place)
        for names, place in (
            ("mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div", 2),
            ("binary_cross_entropy hinge_embedding_loss", 3),
            ("binary_cross_entropy_with_logits margin_ranking_loss", 4),
            ("poisson_nll_loss", 5),
        )
    ),
    # ---- products
    _ops("matmul", _matmul.matmul, dunders="matmul", quick="__matmul__ matmul"),
    _ops("rmatmul", _matmul.matmul, dunders="rmatmul"),
    _ops("linear", _matmul.linear),
    _ops("einsum", only_if(none_empty, _matmul.einsum)),  # of an empty shard torch drops the graph
    _ops("mm", _matmul.product("mk,kn", "mn")),
    _ops("bmm", _matmul.product("bmk,bkn", "bmn")),
    _ops("mv", _matmul.product("mk,k", "m")),
    _ops("dot vdot inner", _matmul.product("k,k", "")),
    _ops("outer ger", _matmul.product("m,n", "mn")),
    _ops("addmm", _matmul.added_product("mk,kn", "mn")),
    _ops("addr", _matmul.added_product("m,n", "mn")),
    _ops("baddbmm", _matmul.added_product("bmk,bkn", "bmn")),
    _ops("addbmm", _matmul.added_product("bmk,bkn", "mn")),
    _ops("addmv", only_if(none_empty, _matmul.added_product("mk,k", "m"))),
    # ---- shapes
    _ops("view", _shape.view, quick="view"),
    _ops("reshape", _shape.reshape, aliasing="if_needed", quick="reshape"),
    _ops("flatten", _shape.reshape, aliasing="if_needed", quick="flatten"),
    _ops("ravel", _shape.reshape, aliasing="if_needed"),
    _ops("unflatten", _shape.reshape, quick="unflatten"),
    _ops("permute", _shape.permute, quick="permute"),
    _ops("transpose", _shape.permute, quick="transpose", in_place="attributes.reshape_in_place"),
    _ops("t", _shape.permute, quick="t", in_place="attributes.reshape_in_place"),
    _ops("swapaxes swapdims", _shape.permute, in_place="attributes.reshape_in_place"),
    _ops("T.get mT.get H.get mH.get adjoint movedim moveaxis", _shape.permute),
    _ops("squeeze", _shape.squeeze, quick="squeeze", in_place="attributes.reshape_in_place"),
    _ops("unsqueeze", _shape.unsqueeze, quick="unsqueeze", in_place="attributes.reshape_in_place"),
    _ops("expand", _shape.expand, quick="expand"),
    _ops("broadcast_to", _shape.expand),
    _ops("broadcast_tensors", handler="composite.broadcast_tensors"),
    _ops("view_as reshape_as expand_as", handler="attributes.as_other"),
    _ops("as_strided", in_place_refused=_NO_STORAGE),
    _ops("narrow", _shape.narrow, handler="assembled.with_values"),
    _ops("select", _shape.select),
    _ops("unbind", _shape.unbind),
    _ops("split", _shape.split(None), quick="split"),
    _ops("chunk", _shape.split(None), quick="chunk"),
    _ops("split_with_sizes unsafe_split unsafe_chunk", _shape.split(None)),
    _ops("tensor_split", _shape.split(None), handler="assembled.with_values"),
    _ops("hsplit", _shape.split(1)),
    _ops("vsplit", _shape.split(0)),
    _ops("dsplit", _shape.split(2)),
    _ops("glu", _shape.untouched_dims((1, "dim", -1))),
    _ops("view_as_real", _rearranged.as_real),
    _ops("view_as_complex", _rearranged.as_complex),
    _ops("diagonal", _rearranged.diagonal(0, 1)),
    _ops("linalg_diagonal", _rearranged.diagonal(-2, -1)),
    _ops("slice.Tensor", _rearranged.slice_dim),
    _ops("atleast_1d atleast_2d atleast_3d", _rearranged.at_least, aliasing="self", handler="assembled.at_least"),
    # copies of views
    _ops("alias_copy", _rearranged.except_dim(partial=_SHIFTED)),
    _ops("detach_copy", _rearranged.except_dim(partial=_SHIFTED)),
    _ops("expand_copy", _rearranged.copying(_shape.expand)),
    _ops("view_copy _reshape_copy", _rearranged.copying(_shape.view)),
    _ops("permute_copy transpose_copy t_copy", _rearranged.copying(_shape.permute)),
    _ops("squeeze_copy", _rearranged.copying(_shape.squeeze)),
    _ops("unsqueeze_copy", _rearranged.copying(_shape.unsqueeze)),
    _ops("narrow_copy", _rearranged.copying(_shape.narrow), handler="assembled.with_values"),
    _ops("select_copy", _rearranged.copying(_shape.select)),
    _ops("slice_copy", _rearranged.copying(_rearranged.slice_dim)),
    _ops("unbind_copy", _rearranged.copying(_shape.unbind)),
    _ops("split_copy split_with_sizes_copy", _rearranged.copying(_shape.split(None))),
    _ops("diagonal_copy", _rearranged.copying(_rearranged.diagonal(0, 1))),
    _ops("unfold_copy", _rearranged.copying(_rearranged.unfold)),
    _ops("view_as_real_copy", _rearranged.copying(_rearranged.as_real)),
    _ops("view_as_complex_copy", _rearranged.copying(_rearranged.as_complex)),
    # rearrangements
    _ops("fft_fft fft_ifft fft_rfft fft_ihfft", only_if(none_empty, _shape.untouched_dims((2, "dim", -1), partial=_SUMS))),
    # meta tensors do not tell in which order their results are
    _ops("fft_irfft fft_hfft", only_if(none_thin, _shape.untouched_dims((2, "dim", -1), partial=_SUMS))),
    _ops("fft_fft2 fft_ifft2 fft_rfft2", _rearranged.transform((-2, -1))),
    _ops("fft_irfft2 fft_hfft2 fft_ihfft2", only_if(none_thin, _rearranged.transform((-2, -1)))),
    _ops("fft_fftn fft_ifftn fft_rfftn", _rearranged.transform(None)),
    _ops("fft_irfftn fft_hfftn fft_ihfftn", only_if(none_thin, _rearranged.transform(None))),
    _ops("fft_fftshift fft_ifftshift", _shape.untouched_dims((1, "dim", None), partial=_SHIFTED)),
    _ops("flip", _shape.untouched_dims((1, "dims", None), partial=_SHIFTED)),
    _ops("fliplr", _rearranged.except_dim(1, partial=_SHIFTED)),
    _ops("flipud", _rearranged.except_dim(0, partial=_SHIFTED)),
    _ops("rot90", _rearranged.rotate),
    _ops("roll", _shape.untouched_dims((2, "dims", None), partial=_SHIFTED)),
    _ops("diff", _rearranged.differences),
    _ops("gradient", _rearranged.gradients),
    _ops("pixel_shuffle pixel_unshuffle channel_shuffle", _rearranged.shuffled_pixels),
    _ops("repeat_interleave", _rearranged.repeat_interleave),
    _ops("frexp", _rearranged.except_dim(num_outputs=2)),
    _ops("msort", _rearranged.except_dim(0)),
    _ops("cumsum", _shape.untouched_dims((1, "dim", None), partial=("sum", "avg"))),
    _ops("cumprod logcumsumexp", _shape.untouched_dims((1, "dim", None))),
    _ops("cummax cummin", _shape.untouched_dims((1, "dim", None), num_outputs=2)),
    # ---- reductions
    _ops("sum", _reduce.sum_like, quick="sum"),
    _ops("nansum", _reduce.sum_like),
    _ops("mean", _reduce.mean, quick="mean"),
    _ops("max", _reduce.max_or_min, monotone="++", joins="max", handler="extremes.extreme"),
    _ops("min", _reduce.max_or_min, monotone="++", joins="min", handler="extremes.extreme"),
    _ops("amax", _reduce.extreme("max")),
    _ops("amin", _reduce.extreme("min")),
    _ops("prod", _reduce.extreme("product")),
    _ops("std var std_mean var_mean", _reduce.variance),
    _ops("argmax argmin", _reduce.staying_dims(), handler="extremes.arg_extreme"),
    _ops("logsumexp all any", _reduce.staying_dims()),
    _ops("aminmax", _reduce.aminmax),
    _ops("kthvalue", _reduce.picked(2)),
    _ops("mode median nanmedian", _reduce.picked(1)),
    _ops("linalg_vector_norm", handler="composite.vector_norm"),
    _ops("linalg_norm linalg_matrix_norm", _reduce.named_norm, handler="assembled.norm"),
    _ops("dist", handler="assembled.dist"),
    _ops("sum_to_size", handler="assembled.sum_to_size"),
    # ---- rows
    _ops("softmax", _shape.rows(1, "dim", None), quick="softmax", functional="composite.softmax"),
    _ops("log_softmax", _shape.rows(1, "dim", None), quick="log_softmax", functional="composite.softmax"),
    _ops("softmin _safe_softmax.default", _shape.rows(1, "dim", None)),
    _ops("_softmax_backward_data _log_softmax_backward_data", _batched.same_shape(2)),
    _ops("sort", _shape.rows(1, "dim", -1, num_outputs=2)),
    _ops("argsort", _shape.rows(1, "dim", -1)),
    _ops("topk", _shape.rows(2, "dim", -1, num_outputs=2), handler="extremes.topk"),
    # ---- joining and selecting
    _ops("cat concat concatenate", _joining.cat),
    _ops("stack", _joining.stack),
    _ops("hstack vstack row_stack dstack column_stack", handler="assembled.stack"),
    _ops("meshgrid", handler="assembled.meshgrid"),
    _ops("cartesian_prod", handler="assembled.cartesian_prod"),
    _ops("index_select", _joining.index_select),
    _ops("gather", _joining.gather),
    _ops("take_along_dim", _joining.take_along_dim),
    _ops("scatter scatter_add scatter_reduce", _joining.scatter),
    _ops("select_scatter slice_scatter diagonal_scatter", _joining.inserted),
    _ops("index_add index_copy index_fill", _joining.index_write),
    _ops("take", _joining.take),
    _ops("isin bucketize", _batched.searched),
    _ops("pad constant_pad_nd", _joining.pad),
    _ops("tril triu", _joining.triangle),
    _ops("one_hot", _joining.one_hot),
    _ops("__getitem__", _joining.getitem, indexes=True),
    _ops("__setitem__", _assign.setitem, handler="composite.setitem", indexes=True),
    _ops("repeat tile", _joining.repeat),
    # ---- layers
    _ops("layer_norm", _layers.layer_norm, functional="composite.layer_norm"),
    _ops("rms_norm", _layers.layer_norm),
    _ops("group_norm", _layers.group_norm),
    _ops("batch_norm", _layers.batch_norm, handler="composite.batch_norm", writes=(3, 4)),
    _ops("native_batch_norm instance_norm _batch_norm_impl_index", writes=(3, 4)),
    _ops(
        "embedding", _layers.embedding, handler="composite.dense_embedding", functional="composite.embedding",
        sharded="embedding",
    ),
    _ops(
        "embedding_bag", _layers.embedding_bag, handler="composite.dense_embedding_bag", module_makes="offsets",
        sharded="embedding_bag",
    ),
    _ops("conv1d conv2d conv3d", _layers.convolution),
    _ops("conv_transpose1d conv_transpose2d conv_transpose3d", _layers.transposed_convolution),
    _ops(
        "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
        "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
        _layers.pooling(linear=False),
    ),
    _ops(
        "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
        _layers.pooling(linear=True),
    ),
    _ops(
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa",
        _layers.resizing, handler="assembled.resized",
    ),
    _ops("max_unpool2d", only_if(none_empty, _batched.batched(2, 2))),
    _ops("max_unpool3d", only_if(none_empty, _batched.batched(3, 3))),
    _ops("max_pool2d_with_indices_backward.default", only_if(none_empty, _batched.batched(2, 2, 2))),
    _ops("grid_sampler grid_sampler_2d grid_sampler_3d", only_if(none_empty, _batched.grid_sample)),
    _ops("prelu", _batched.prelu),
    _ops("cosine_similarity", only_if(none_empty, _batched.pairs(2, 1, removed=True))),
    _ops("pairwise_distance", only_if(none_empty, _batched.batched(1, 1))),
    _ops("cosine_embedding_loss", _batched.loss_by_rows, handler="composite.elementwise_loss", reduction_at=4),
    _ops("triplet_margin_loss", _batched.loss_by_rows, handler="composite.elementwise_loss", reduction_at=7),
    # ---- linear algebra
    *(
        _ops(names, only_if(none_empty, rule))
        for names, rule in (
            (
                "cholesky cholesky_inverse det geqrf inverse linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det "
                "linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex linalg_ldl_factor "
                "linalg_ldl_factor_ex linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_matrix_exp "
                "linalg_matrix_power linalg_qr linalg_slogdet linalg_svd linalg_svdvals logdet matrix_exp matrix_power "
                "pinverse qr slogdet svd",
                _batched.batched(2),
            ),
            ("linalg_matrix_rank linalg_pinv", _batched.batched(2, 0, 0)),
            ("linalg_householder_product lu_unpack orgqr", _batched.batched(2, 1)),
            ("linalg_solve linalg_solve_ex", _batched.solve),
            ("linalg_solve_triangular", _batched.batched(2, 2, linear=1)),
            ("cdist linalg_lstsq", _batched.batched(2, 2)),
            ("cholesky_solve triangular_solve", _batched.batched(2, 2)),
            ("linalg_ldl_solve linalg_lu_solve", _batched.batched(2, 1, 2, linear=2)),
            ("lu_solve", _batched.batched(2, 2, 1)),
            ("ormqr", _batched.batched(2, 1, 2)),
            ("linalg_vander", _batched.batched(1)),
            ("cross", _batched.pairs(2, None, removed=False)),
            ("linalg_cross", _batched.pairs(2, -1, removed=False)),
            ("trapezoid trapz", _batched.pairs(2, -1, removed=True, linear=0)),
            ("cumulative_trapezoid", _batched.pairs(2, -1, removed=False, linear=0)),
        )
    ),
    _ops("scaled_dot_product_attention", _layers.attention, handler="composite.attention"),
    _ops("cross_entropy", functional="composite.functional_cross_entropy"),
    _ops("cross_entropy_loss", _layers.cross_entropy, handler="composite.cross_entropy"),
    _ops("nll_loss_nd", _layers.cross_entropy, handler="composite.nll_loss"),
    _ops("lstm gru rnn_tanh rnn_relu", handler="composite.recurrent", module_makes="states"),
    _ops("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", module_makes="states"),
    # ---- random numbers
    _random("rand_like randn_like", sharded="shards"),
    _random("randint_like log_normal cauchy geometric multinomial"),
    _random("uniform normal exponential random bernoulli", sharded="shards"),
    _random("dropout native_dropout feature_dropout alpha_dropout feature_alpha_dropout rrelu", "dropout"),
    _ops("rrelu_with_noise", handler="dropout.rrelu"),
    _ops(
        "poisson binomial _sample_dirichlet _standard_gamma fractional_max_pool2d fractional_max_pool3d "
        "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices svd_lowrank pca_lowrank lobpcg",
        refused=_NO_NUMBERS,
    ),
    # ---- lists of tensors
    _ops("_fused_adagrad _fused_adam _fused_adamw _fused_sgd", handler="foreach.fused"),
    _ops("_amp_foreach_non_finite_check_and_unscale", handler="foreach.unscale"),
    # ---- autograd
    _ops("backward", handler="autograd.backward"),
    _ops("grad", handler="autograd.grad"),
    _ops("register_hook", handler="autograd.register_hook"),
    _ops("register_post_accumulate_grad_hook", handler="autograd.register_post_accumulate_grad_hook"),
    _ops("retain_grad", handler="autograd.retain_grad"),
    _ops("_make_dual _unpack_dual", refused=_NO_DUAL),
    # ---- what tensors tell about themselves; the local tensor knows what is true of all of them
    _ops(
        "element_size get_device has_names is_conj is_cpu.get is_cuda.get is_floating_point is_hpu.get is_inference "
        "is_ipu.get is_maia.get is_mkldnn.get is_mps.get is_mtia.get is_neg is_nested.get is_quantized.get is_shared "
        "is_signed is_sparse.get is_sparse_csr.get is_vulkan.get is_xla.get is_xpu.get itemsize.get layout.get "
        "names.get output_nr.get retains_grad.get storage_offset",
        handler="attributes.from_local", sharded="metadata",
    ),
    _ops(
        "_cdata.get _is_view _is_zerotensor has_symint.get is_coalesced is_pinned name.get storage_type "
        "suggest_memory_format volatile.get",
        handler="attributes.from_local",
    ),
    _ops(
        "_backward_hooks.get _base.get _post_accumulate_grad_hooks.get _version.get grad_dtype.get is_meta.get "
        "is_tensor ndim.get shape.get __get_validity",
        sharded="metadata",
    ),
    _ops("is_complex", handler="attributes.is_complex", sharded="metadata"),
    _ops("size dim numel nelement ndimension __len__", handler="attributes.shape_answer", sharded="metadata"),
    _ops("stride", handler="attributes.stride", sharded="metadata"),
    _ops("is_contiguous", handler="attributes.is_contiguous", sharded="metadata"),
    _ops("nbytes.get", handler="attributes.nbytes", sharded="metadata"),
    _ops("is_same_size", handler="attributes.is_same_size", sharded="metadata"),
    # ---- their memory, and tensors made like them
    _ops(
        "data_ptr const_data_ptr mutable_data_ptr untyped_storage storage _typed_storage",
        handler="attributes.raw_memory", sharded="no_memory",
    ),
    _ops("data.get", sharded="detach"),
    _ops("data.set", handler="attributes.set_data", sharded="set_data"),
    _ops("set", handler="attributes.set_", quick="set_"),
    _ops("resize resize_as", refused=_NO_RESIZE),
    _ops("share_memory", handler="attributes.share_memory"),
    _ops("__dlpack__", handler="attributes.of_whole"),
    _ops("eye zeros ones full arange linspace logspace", handler="attributes.factory_out"),
    _ops("new_empty new_zeros new_ones new_full", handler="attributes.new"),
    _ops("new_empty_strided", handler="attributes.new_tensor"),
    _ops("new_tensor", handler="attributes.new_tensor"),
    _ops("apply map map2", writes=(0,)),
    _ops("equal", sharded="equal"),
    _ops("allclose", sharded="allclose"),
    _ops("_has_compatible_shallow_copy_type", sharded="are_sharded"),
    _ops("softsign", sharded="shards"),
)  # fmt: skip


class _Table(dict[str, Operator]):
    """By name; an operator without a row has one that says nothing."""

    def __missing__(self, name: str) -> Operator:
        return Operator(name)


def _table(rows: Iterable[Iterable[Operator]]) -> _Table:
    table = _Table()
    for operator in itertools.chain.from_iterable(rows):
        assert operator.name not in table, f"{operator.name} has two rows"
        table[operator.name] = operator
    return table


OPERATORS = _table(_ROWS)


def give_rule(name: str, rule: Rule) -> None:
    """Replace the rule of an operator by a user's, of whose numbers nothing is known."""
    OPERATORS[name] = dataclasses.replace(OPERATORS[name], rule=rule, numbers=False)


class OpName(NamedTuple):
    """The name of an operation; ``in_place`` if it writes to its first argument."""

    base: str
    in_place: bool


_DUNDERS = {
    dunder: OpName(row.name, dunder[0] == "i" and dunder[1:] in row.dunders.split())
    for row in OPERATORS.values()
    for dunder in row.dunders.split()
}


@cache
def op_name(func: Any) -> OpName:
    """
    >>> import torch
    >>> op_name(torch.Tensor.__iadd__), op_name(torch.relu)
    (OpName(base='add', in_place=True), OpName(base='relu', in_place=False))
    """
    schema = getattr(func, "_qualified_op_name", None) or getattr(getattr(func, "_schema", None), "name", "")
    if schema and not schema.startswith("aten::"):  # an operation of a library, never torch's of the same name
        return OpName(schema, False)
    name = getattr(func, "__name__", type(func).__name__)
    if isinstance(func, FunctionType) and (func.__module__ or "").partition(".")[0] != "torch":
        return OpName(f"{func.__module__}.{name}", False)  # a user's, which may have the name of one of torch's
    if name in ("__get__", "__set__", "__delete__"):
        return OpName(f"{func.__self__.__name__}.{name.strip('_')}", False)
    if name.startswith("__") and name.endswith("__"):
        found = _DUNDERS.get(name[2:-2])
        return OpName(name, name == "__setitem__") if found is None else found
    if name.endswith("_") and not name.endswith("__"):
        return OpName(name[:-1], True)
    return OpName(name, False)
