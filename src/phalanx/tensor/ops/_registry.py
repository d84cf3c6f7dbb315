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

from phalanx.tensor.layout._placement import LINEAR_OPS, REDUCE_OPS
from phalanx.tensor.ops._elementwise_rows import ELEMENTWISE_ROWS, rows
from phalanx.tensor.ops._rule import Operator, Rule, none_empty, none_thin, only_if
from phalanx.tensor.ops.rules import (
    _assign,
    _batched,
    _joining,
    _layers,
    _matmul,
    _rearranged,
    _reduce,
    _shape,
)


def _random(names: str, module: str = "random", **says: Any) -> Iterator[Operator]:
    for name in names.split():
        yield Operator(name, handler=f"{module}.{name}", **says)


_FFT = _shape.untouched_dims((2, "dim", -1), partial=LINEAR_OPS)
_NO_RESIZE = "its global shape is fixed; make a new one"
_NO_DUAL = "forward-mode differentiation is not distributed; use torch.autograd.functional.jvp"
_NO_STORAGE = "its memory is this rank's part; use as_strided and the tensor it returns"
_NO_NUMBERS = (
    "its random numbers would differ from rank to rank; compute it of full_tensor() and distribute the result, "
    "which takes that of the first rank"
)

_ROWS: tuple[Iterable[Operator], ...] = (
    *ELEMENTWISE_ROWS,
    # ---- products
    rows("matmul", _matmul.matmul, dunders="matmul", quick="__matmul__ matmul"),
    rows("rmatmul", _matmul.matmul, dunders="rmatmul"),
    rows("linear", _matmul.linear),
    rows("einsum", only_if(none_empty, _matmul.einsum)),  # of an empty shard torch drops the graph
    rows("tensordot", only_if(none_empty, _matmul.tensordot)),
    rows("mm", _matmul.product("mk,kn", "mn")),
    rows("bmm", _matmul.product("bmk,bkn", "bmn")),
    rows("mv", _matmul.product("mk,k", "m")),
    rows("dot vdot", _matmul.product("k,k", "")),
    rows("inner", _matmul.product("k,k", ""), handler="assembled.inner"),
    rows("kron", handler="assembled.kron"),
    rows("linalg_multi_dot", handler="assembled.multi_dot"),
    rows("outer ger", _matmul.product("m,n", "mn")),
    rows("addmm", _matmul.added_product("mk,kn", "mn")),
    rows("addr", _matmul.added_product("m,n", "mn")),
    rows("baddbmm", _matmul.added_product("bmk,bkn", "bmn")),
    rows("addbmm", _matmul.added_product("bmk,bkn", "mn")),
    rows("addmv", only_if(none_empty, _matmul.added_product("mk,k", "m"))),
    # ---- shapes
    rows("view", _shape.view, quick="view"),
    rows("reshape", _shape.reshape, aliasing="if_needed", quick="reshape"),
    rows("flatten", _shape.reshape, aliasing="if_needed", quick="flatten"),
    rows("ravel", _shape.reshape, aliasing="if_needed"),
    rows("unflatten", _shape.reshape, quick="unflatten"),
    rows("permute", _shape.permute, quick="permute"),
    rows("transpose", _shape.permute, quick="transpose", in_place="attributes.reshape_in_place"),
    rows("t", _shape.permute, quick="t", in_place="attributes.reshape_in_place"),
    rows("swapaxes swapdims", _shape.permute, in_place="attributes.reshape_in_place"),
    rows("T.get mT.get H.get mH.get adjoint movedim moveaxis", _shape.permute),
    rows("squeeze", _shape.squeeze, quick="squeeze", in_place="attributes.reshape_in_place"),
    rows("unsqueeze", _shape.unsqueeze, quick="unsqueeze", in_place="attributes.reshape_in_place"),
    rows("expand", _shape.expand, quick="expand"),
    rows("broadcast_to", _shape.expand),
    rows("broadcast_tensors", handler="composite.broadcast_tensors"),
    rows("view_as reshape_as expand_as", handler="attributes.as_other"),
    rows("as_strided", in_place_refused=_NO_STORAGE),
    rows("narrow", _shape.narrow, handler="assembled.with_values"),
    rows("select", _shape.select),
    rows("unbind", _shape.unbind),
    rows("split", _shape.split(None), quick="split"),
    rows("chunk", _shape.split(None), quick="chunk"),
    rows("split_with_sizes unsafe_split unsafe_chunk", _shape.split(None)),
    rows("tensor_split", _shape.split(None), handler="assembled.with_values"),
    rows("hsplit", _shape.split(1)),
    rows("vsplit", _shape.split(0)),
    rows("dsplit", _shape.split(2)),
    rows("glu", _shape.untouched_dims((1, "dim", -1))),
    rows("view_as_real", _rearranged.as_real),
    rows("view_as_complex", _rearranged.as_complex),
    rows("diagonal", _rearranged.diagonal(0, 1)),
    rows("linalg_diagonal", _rearranged.diagonal(-2, -1)),
    rows("slice", _rearranged.slice_dim),
    rows("atleast_1d atleast_2d atleast_3d", _rearranged.at_least, aliasing="self", handler="assembled.at_least"),
    # copies of views
    rows("alias_copy", _rearranged.except_dim(partial=REDUCE_OPS)),
    rows("detach_copy", _rearranged.except_dim(partial=REDUCE_OPS)),
    rows("expand_copy", _rearranged.copying(_shape.expand)),
    rows("view_copy _reshape_copy", _rearranged.copying(_shape.view)),
    rows("permute_copy transpose_copy t_copy", _rearranged.copying(_shape.permute)),
    rows("squeeze_copy", _rearranged.copying(_shape.squeeze)),
    rows("unsqueeze_copy", _rearranged.copying(_shape.unsqueeze)),
    rows("narrow_copy", _rearranged.copying(_shape.narrow), handler="assembled.with_values"),
    rows("select_copy", _rearranged.copying(_shape.select)),
    rows("slice_copy", _rearranged.copying(_rearranged.slice_dim)),
    rows("unbind_copy", _rearranged.copying(_shape.unbind)),
    rows("split_copy split_with_sizes_copy", _rearranged.copying(_shape.split(None))),
    rows("diagonal_copy", _rearranged.copying(_rearranged.diagonal(0, 1))),
    rows("unfold_copy", _rearranged.copying(_rearranged.unfold)),
    rows("view_as_real_copy", _rearranged.copying(_rearranged.as_real)),
    rows("view_as_complex_copy", _rearranged.copying(_rearranged.as_complex)),
    # rearrangements
    rows("fft_fft fft_ifft fft_rfft fft_ihfft", only_if(none_empty, _FFT)),
    # meta tensors do not tell in which order their results are
    rows("fft_irfft fft_hfft", only_if(none_thin, _FFT)),
    rows("fft_fft2 fft_ifft2 fft_rfft2", _rearranged.transform((-2, -1))),
    rows("fft_irfft2 fft_hfft2 fft_ihfft2", only_if(none_thin, _rearranged.transform((-2, -1)))),
    rows("fft_fftn fft_ifftn fft_rfftn", _rearranged.transform(None)),
    rows("fft_irfftn fft_hfftn fft_ihfftn", only_if(none_thin, _rearranged.transform(None))),
    rows("fft_fftshift fft_ifftshift", _shape.untouched_dims((1, "dim", None), partial=REDUCE_OPS)),
    rows("flip", _shape.untouched_dims((1, "dims", None), partial=REDUCE_OPS)),
    rows("fliplr", _rearranged.except_dim(1, partial=REDUCE_OPS)),
    rows("flipud", _rearranged.except_dim(0, partial=REDUCE_OPS)),
    rows("rot90", _rearranged.rotate),
    rows("roll", _shape.untouched_dims((2, "dims", None), partial=REDUCE_OPS)),
    rows("diff", _rearranged.differences),
    rows("gradient", _rearranged.gradients),
    rows("pixel_shuffle pixel_unshuffle channel_shuffle", only_if(none_empty, _rearranged.shuffled_pixels)),
    rows("repeat_interleave", _rearranged.repeat_interleave),
    rows("frexp", _rearranged.except_dim(num_outputs=2)),
    rows("msort", _rearranged.except_dim(0)),
    rows("cumsum", _shape.untouched_dims((1, "dim", None), partial=LINEAR_OPS)),
    rows("cumprod logcumsumexp", _shape.untouched_dims((1, "dim", None))),
    rows("cummax cummin", _shape.untouched_dims((1, "dim", None), num_outputs=2)),
    # ---- reductions
    rows("sum", _reduce.sum_like, quick="sum"),
    rows("nansum", _reduce.sum_like),
    rows("mean", _reduce.mean, quick="mean"),
    rows("max", _reduce.max_or_min, monotone="++", joins="max", handler="extremes.extreme"),
    rows("min", _reduce.max_or_min, monotone="++", joins="min", handler="extremes.extreme"),
    rows("amax", _reduce.extreme("max")),
    rows("amin", _reduce.extreme("min")),
    rows("prod", _reduce.extreme("product")),
    rows("std var std_mean var_mean", _reduce.variance),
    rows("argmax argmin", _reduce.staying_dims(), handler="extremes.arg_extreme"),
    rows("logsumexp all any", _reduce.staying_dims()),
    rows("aminmax", _reduce.aminmax),
    rows("kthvalue", _reduce.picked(2)),
    rows("mode median nanmedian", _reduce.picked(1)),
    rows("linalg_vector_norm", handler="composite.vector_norm"),
    rows("linalg_norm linalg_matrix_norm", _reduce.named_norm, handler="assembled.norm"),
    rows("dist", handler="assembled.dist"),
    rows("sum_to_size", handler="assembled.sum_to_size"),
    # ---- rows
    rows("softmax", _shape.rows(1, "dim", None), quick="softmax", functional="composite.softmax"),
    rows("log_softmax", _shape.rows(1, "dim", None), quick="log_softmax", functional="composite.softmax"),
    rows("softmin _safe_softmax", _shape.rows(1, "dim", None)),
    rows("_softmax_backward_data _log_softmax_backward_data", _batched.same_shape(2)),
    rows("sort", _shape.rows(1, "dim", -1, num_outputs=2)),
    rows("argsort", _shape.rows(1, "dim", -1)),
    rows("topk", _shape.rows(2, "dim", -1, num_outputs=2), handler="extremes.topk"),
    # ---- joining and selecting
    rows("cat concat concatenate", _joining.cat),
    rows("stack", _joining.stack),
    rows("hstack", handler="assembled.hstack"),
    rows("vstack row_stack", handler="assembled.vstack"),
    rows("dstack", handler="assembled.dstack"),
    rows("column_stack", handler="assembled.column_stack"),
    rows("meshgrid", handler="assembled.meshgrid"),
    rows("cartesian_prod", handler="assembled.cartesian_prod"),
    rows("index_select", _joining.index_select),
    rows("gather", _joining.gather),
    rows("take_along_dim", _joining.take_along_dim),
    rows("scatter scatter_add scatter_reduce", _joining.scatter),
    rows("select_scatter slice_scatter diagonal_scatter", _joining.inserted),
    rows("index_add index_copy index_fill", _joining.index_write),
    rows("index_put", handler="assembled.index_put", in_place="assembled.index_put_in_place"),
    rows("take", _joining.take),
    rows("isin bucketize", _batched.searched),
    rows("pad constant_pad_nd", _joining.pad),
    rows("tril triu", _joining.triangle),
    rows("one_hot", _joining.one_hot),
    rows("__getitem__", _joining.getitem, indexes=True),
    rows("__setitem__", _assign.setitem, handler="composite.setitem", indexes=True),
    rows("repeat tile", _joining.repeat),
    # ---- layers
    rows("layer_norm", _layers.layer_norm, functional="composite.layer_norm"),
    rows("rms_norm", _layers.layer_norm, handler="assembled.rms_norm"),
    rows("group_norm", _layers.group_norm),
    rows("batch_norm", _layers.batch_norm, handler="composite.batch_norm", writes=(3, 4)),
    rows("native_batch_norm _native_batch_norm_legit", _layers.native_batch_norm, writes=(3, 4)),
    rows("instance_norm _batch_norm_impl_index _batch_norm_with_update", writes=(3, 4)),
    rows(
        "embedding", _layers.embedding, handler="composite.dense_embedding", functional="composite.embedding",
        sharded="embedding",
    ),
    rows(
        "embedding_bag", _layers.embedding_bag, handler="composite.dense_embedding_bag", module_makes="offsets",
        sharded="embedding_bag",
    ),
    rows("conv1d conv2d conv3d", _layers.convolution),
    rows("conv_transpose1d conv_transpose2d conv_transpose3d", _layers.transposed_convolution),
    rows(
        "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
        "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
        _layers.pooling(linear=False),
    ),
    rows(
        "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
        _layers.pooling(linear=True),
    ),
    rows(
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa",
        _layers.resizing, handler="assembled.resized",
    ),
    rows("max_unpool2d", only_if(none_empty, _batched.batched(2, 2))),
    rows("max_unpool3d", only_if(none_empty, _batched.batched(3, 3))),
    rows("max_pool2d_with_indices_backward", only_if(none_empty, _batched.batched(2, 2, 2))),
    rows("grid_sampler grid_sampler_2d grid_sampler_3d", only_if(none_empty, _batched.grid_sample)),
    rows("prelu", _batched.prelu),
    rows(
        "cosine_similarity", only_if(none_empty, _batched.pairs(2, 1, removed=True)),
        handler="assembled.cosine_similarity",
    ),
    rows("pairwise_distance", only_if(none_empty, _batched.batched(1, 1)), handler="composite.pairwise_distance"),
    rows("cosine_embedding_loss", _batched.loss_by_rows, handler="composite.elementwise_loss", reduction_at=4),
    rows("triplet_margin_loss", _batched.loss_by_rows, handler="composite.triplet_margin_loss", reduction_at=7),
    # ---- linear algebra
    *(
        rows(names, only_if(none_empty, rule))
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
            ("ormqr", _batched.batched(2, 1, 2, linear=2)),
            ("linalg_vander", _batched.batched(1)),
            ("cross", _batched.pairs(2, None, removed=False)),
            ("linalg_cross", _batched.pairs(2, -1, removed=False)),
            ("trapezoid trapz", _batched.pairs(2, -1, removed=True, linear=0)),
            ("cumulative_trapezoid", _batched.pairs(2, -1, removed=False, linear=0)),
        )
    ),
    rows("scaled_dot_product_attention", _layers.attention, handler="composite.attention"),
    rows("cross_entropy", functional="composite.functional_cross_entropy"),
    rows("cross_entropy_loss", _layers.cross_entropy, handler="composite.cross_entropy"),
    rows("nll_loss_nd", _layers.cross_entropy, handler="composite.nll_loss"),
    rows("lstm gru rnn_tanh rnn_relu", handler="composite.recurrent", module_makes="states"),
    rows("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", module_makes="states"),
    # ---- random numbers
    _random("rand_like randn_like", sharded="shards"),
    _random("randint_like log_normal cauchy geometric multinomial"),
    _random("uniform normal exponential random bernoulli", sharded="shards"),
    _random("dropout native_dropout feature_dropout alpha_dropout feature_alpha_dropout rrelu", "dropout"),
    rows("rrelu_with_noise", handler="dropout.rrelu"),
    rows(
        "poisson binomial _sample_dirichlet _standard_gamma fractional_max_pool2d fractional_max_pool3d "
        "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices svd_lowrank pca_lowrank lobpcg",
        refused=_NO_NUMBERS,
    ),
    # ---- lists of tensors
    rows("_fused_adagrad _fused_adam _fused_adamw _fused_sgd", handler="foreach.fused"),
    rows("_amp_foreach_non_finite_check_and_unscale", handler="foreach.unscale"),
    # ---- autograd
    rows("backward", handler="autograd.backward"),
    rows("grad", handler="autograd.grad"),
    rows("register_hook", handler="autograd.register_hook"),
    rows("register_post_accumulate_grad_hook", handler="autograd.register_post_accumulate_grad_hook"),
    rows("retain_grad", handler="autograd.retain_grad"),
    rows("_make_dual _unpack_dual", refused=_NO_DUAL),
    # ---- what tensors tell about themselves; the local tensor knows what is true of all of them
    rows(
        "element_size get_device has_names is_conj is_cpu.get is_cuda.get is_floating_point is_hpu.get is_inference "
        "is_ipu.get is_maia.get is_mkldnn.get is_mps.get is_mtia.get is_neg is_nested.get is_quantized.get is_shared "
        "is_signed is_sparse.get is_sparse_csr.get is_vulkan.get is_xla.get is_xpu.get itemsize.get layout.get "
        "names.get output_nr.get retains_grad.get storage_offset",
        handler="attributes.from_local", sharded="metadata",
    ),
    rows(
        "_cdata.get _is_view _is_zerotensor has_symint.get is_coalesced is_pinned name.get storage_type "
        "suggest_memory_format volatile.get",
        handler="attributes.from_local",
    ),
    rows(
        "_backward_hooks.get _base.get _post_accumulate_grad_hooks.get _version.get grad_dtype.get is_meta.get "
        "is_tensor ndim.get shape.get __get_validity",
        sharded="metadata",
    ),
    rows("is_complex", handler="attributes.is_complex", sharded="metadata"),
    rows("size dim numel nelement ndimension __len__", handler="attributes.shape_answer", sharded="metadata"),
    rows("stride", handler="attributes.stride", sharded="metadata"),
    rows("is_contiguous", handler="attributes.is_contiguous", sharded="metadata"),
    rows("nbytes.get", handler="attributes.nbytes", sharded="metadata"),
    rows("is_same_size", handler="attributes.is_same_size", sharded="metadata"),
    # ---- their memory, and tensors made like them
    rows(
        "data_ptr const_data_ptr mutable_data_ptr untyped_storage storage _typed_storage",
        handler="attributes.raw_memory", sharded="no_memory",
    ),
    rows("data.get", sharded="detach"),
    rows("data.set", handler="attributes.set_data", sharded="set_data"),
    rows("set", handler="attributes.set_", quick="set_"),
    rows("resize resize_as", refused=_NO_RESIZE),
    rows("share_memory", handler="attributes.share_memory"),
    rows("__dlpack__", handler="attributes.of_whole"),
    rows("eye zeros ones full arange linspace logspace", handler="attributes.factory_out"),
    rows("new_empty new_zeros new_ones new_full", handler="attributes.new"),
    rows("new_empty_strided", handler="attributes.new_tensor"),
    rows("new_tensor", handler="attributes.new_tensor"),
    rows("apply map map2", writes=(0,)),
    rows("equal", sharded="equal"),
    rows("allclose", sharded="allclose"),
    rows("_has_compatible_shallow_copy_type", sharded="are_sharded"),
    rows("softsign", sharded="shards"),
    rows("_nested_tensor_from_mask_left_aligned", handler="attributes.no_nested_tensors"),
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
