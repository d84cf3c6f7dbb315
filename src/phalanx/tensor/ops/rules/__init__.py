"""The table of sharding rules: operation name -> rule. One explicit table; see ``_rule.py`` for what a rule is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from phalanx.tensor.ops._rule import Call, Sharding, none_empty, none_thin, only_if
from phalanx.tensor.ops.rules import (
    _assign,
    _joining,
    _layers,
    _matmul,
    _pointwise,
    _reduce,
    _shape,
    _softmax,
)

Rule = Callable[[Call], "Sharding | None"]

RULES: dict[str, Rule] = {
    **dict.fromkeys(_pointwise.UNARY, _pointwise.pointwise),
    **dict.fromkeys(_pointwise.BINARY, _pointwise.pointwise),
    **dict.fromkeys(_pointwise.LOSSES, _pointwise.pointwise),
    # products
    "matmul": _matmul.matmul,
    "rmatmul": _matmul.matmul,
    "linear": _matmul.linear,
    "einsum": only_if(none_empty, _matmul.einsum),  # of an empty part torch drops the graph
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "ger"), _matmul.fixed_product),
    **dict.fromkeys(("addmm", "addr", "baddbmm", "addbmm"), _matmul.added_product),
    "addmv": only_if(none_empty, _matmul.added_product),
    # shapes
    "view": _shape.view,
    **dict.fromkeys(("reshape", "flatten", "unflatten", "ravel"), _shape.reshape),
    **dict.fromkeys(
        ("permute", "transpose", "t", "T.get", "mT.get", "movedim", "moveaxis", "swapaxes", "swapdims"),
        _shape.permute,
    ),
    "squeeze": _shape.squeeze,
    "unsqueeze": _shape.unsqueeze,
    **dict.fromkeys(("expand", "broadcast_to"), _shape.expand),
    "narrow": _shape.narrow,
    "select": _shape.select,
    "unbind": _shape.unbind,
    **dict.fromkeys(
        ("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk"), _shape.split
    ),
    **dict.fromkeys(("hsplit", "vsplit", "dsplit"), _shape.split),
    "glu": _shape.untouched_dims((1, "dim", -1)),
    **dict.fromkeys(
        ("fft_fft", "fft_ifft", "fft_rfft", "fft_ihfft"),
        only_if(none_empty, _shape.untouched_dims((2, "dim", -1))),
    ),
    # meta tensors do not tell in which order their results are
    **dict.fromkeys(("fft_irfft", "fft_hfft"), only_if(none_thin, _shape.untouched_dims((2, "dim", -1)))),
    "flip": _shape.untouched_dims((1, "dims", None), partial=("sum", "avg", "min", "max", "product")),
    "roll": _shape.untouched_dims((2, "dims", None), partial=("sum", "avg", "min", "max", "product")),
    "cumsum": _shape.untouched_dims((1, "dim", None), partial=("sum", "avg")),
    "cumprod": _shape.untouched_dims((1, "dim", None)),
    "logcumsumexp": _shape.untouched_dims((1, "dim", None)),
    **dict.fromkeys(("cummax", "cummin"), _shape.untouched_dims((1, "dim", None), num_outputs=2)),
    # reductions
    **dict.fromkeys(("sum", "nansum"), _reduce.sum_like),
    "mean": _reduce.mean,
    **dict.fromkeys(("max", "min"), _reduce.max_or_min),
    "amax": _reduce.extreme("max"),
    "amin": _reduce.extreme("min"),
    "prod": _reduce.extreme("product"),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), _reduce.variance),
    **dict.fromkeys(("argmax", "argmin", "logsumexp", "all", "any"), _reduce.staying_dims()),
    # rows
    **dict.fromkeys(("softmax", "log_softmax", "softmin"), _softmax.rows(1, "dim", None)),
    "sort": _softmax.rows(1, "dim", -1, num_outputs=2),
    "argsort": _softmax.rows(1, "dim", -1),
    "topk": _softmax.rows(2, "dim", -1, num_outputs=2),
    # joining and selecting
    **dict.fromkeys(("cat", "concat", "concatenate"), _joining.cat),
    "stack": _joining.stack,
    "index_select": _joining.index_select,
    "gather": _joining.gather,
    "take_along_dim": _joining.take_along_dim,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), _joining.scatter),
    "pad": _joining.pad,
    **dict.fromkeys(("tril", "triu"), _joining.triangle),
    "one_hot": _joining.one_hot,
    "__getitem__": _joining.getitem,
    "__setitem__": _assign.setitem,
    **dict.fromkeys(("repeat", "tile"), _joining.repeat),
    # layers
    **dict.fromkeys(("layer_norm", "rms_norm"), _layers.layer_norm),
    "group_norm": _layers.group_norm,
    "embedding": _layers.embedding,
    "embedding_bag": _layers.embedding_bag,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _layers.convolution),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _layers.transposed_convolution
    ),
    **dict.fromkeys(
        ("max_pool2d", "max_pool1d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"), _layers.pooling
    ),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"), _layers.pooling),
    "scaled_dot_product_attention": _layers.attention,
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd"), _layers.cross_entropy),
    "batch_norm": _layers.batch_norm,
}

# Functions of torch.nn.functional written in Python that have a rule, or a handler in ``_composite.py``, under their
# name: their body need not run.
DIRECT_PYTHON: frozenset[Any] = frozenset(
    {
        F.softmax,
        F.log_softmax,
        F.relu,
        F.silu,
        F.elu,
        F.leaky_relu,
        F.hardtanh,
        F.relu6,
        F.mish,
        F.celu,
        F.selu,
        F.embedding,
        F.layer_norm,
        F.cross_entropy,
    }
)
