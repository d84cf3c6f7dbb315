"""The table of sharding rules: operation name -> rule. One explicit table; see ``_rule.py`` for what a rule is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from phalanx.tensor._rule import Call, Sharding, none_empty, none_thin, only_if
from phalanx.tensor.rules import assign, joining, layers, matmul, pointwise, reduce, shape, softmax

Rule = Callable[[Call], "Sharding | None"]

RULES: dict[str, Rule] = {
    **dict.fromkeys(pointwise.UNARY, pointwise.pointwise),
    **dict.fromkeys(pointwise.BINARY, pointwise.pointwise),
    **dict.fromkeys(pointwise.LOSSES, pointwise.pointwise),
    # products
    "matmul": matmul.matmul,
    "rmatmul": matmul.matmul,
    "linear": matmul.linear,
    "einsum": only_if(none_empty, matmul.einsum),  # of an empty part torch drops the graph
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "ger"), matmul.fixed_product),
    **dict.fromkeys(("addmm", "addr", "baddbmm", "addbmm"), matmul.added_product),
    "addmv": only_if(none_empty, matmul.added_product),
    # shapes
    "view": shape.view,
    **dict.fromkeys(("reshape", "flatten", "unflatten", "ravel"), shape.reshape),
    **dict.fromkeys(
        ("permute", "transpose", "t", "T.get", "mT.get", "movedim", "moveaxis", "swapaxes", "swapdims"),
        shape.permute,
    ),
    "squeeze": shape.squeeze,
    "unsqueeze": shape.unsqueeze,
    **dict.fromkeys(("expand", "broadcast_to"), shape.expand),
    "narrow": shape.narrow,
    "select": shape.select,
    "unbind": shape.unbind,
    **dict.fromkeys(
        ("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk"), shape.split
    ),
    **dict.fromkeys(("hsplit", "vsplit", "dsplit"), shape.split),
    "glu": shape.untouched_dims((1, "dim", -1)),
    **dict.fromkeys(
        ("fft_fft", "fft_ifft", "fft_rfft", "fft_ihfft"),
        only_if(none_empty, shape.untouched_dims((2, "dim", -1))),
    ),
    # meta tensors do not tell in which order their results are
    **dict.fromkeys(("fft_irfft", "fft_hfft"), only_if(none_thin, shape.untouched_dims((2, "dim", -1)))),
    "flip": shape.untouched_dims((1, "dims", None), partial=("sum", "avg", "min", "max", "product")),
    "roll": shape.untouched_dims((2, "dims", None), partial=("sum", "avg", "min", "max", "product")),
    "cumsum": shape.untouched_dims((1, "dim", None), partial=("sum", "avg")),
    "cumprod": shape.untouched_dims((1, "dim", None)),
    "logcumsumexp": shape.untouched_dims((1, "dim", None)),
    **dict.fromkeys(("cummax", "cummin"), shape.untouched_dims((1, "dim", None), num_outputs=2)),
    # reductions
    **dict.fromkeys(("sum", "nansum"), reduce.sum_like),
    "mean": reduce.mean,
    **dict.fromkeys(("max", "min"), reduce.max_or_min),
    "amax": reduce.extreme("max"),
    "amin": reduce.extreme("min"),
    "prod": reduce.extreme("product"),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), reduce.variance),
    **dict.fromkeys(("argmax", "argmin", "logsumexp", "all", "any"), reduce.staying_dims()),
    # rows
    **dict.fromkeys(("softmax", "log_softmax", "softmin"), softmax.rows(1, "dim", None)),
    "sort": softmax.rows(1, "dim", -1, num_outputs=2),
    "argsort": softmax.rows(1, "dim", -1),
    "topk": softmax.rows(2, "dim", -1, num_outputs=2),
    # joining and selecting
    **dict.fromkeys(("cat", "concat", "concatenate"), joining.cat),
    "stack": joining.stack,
    "index_select": joining.index_select,
    "gather": joining.gather,
    "take_along_dim": joining.take_along_dim,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), joining.scatter),
    "pad": joining.pad,
    **dict.fromkeys(("tril", "triu"), joining.triangle),
    "one_hot": joining.one_hot,
    "__getitem__": joining.getitem,
    "__setitem__": assign.setitem,
    **dict.fromkeys(("repeat", "tile"), joining.repeat),
    # layers
    **dict.fromkeys(("layer_norm", "rms_norm"), layers.layer_norm),
    "group_norm": layers.group_norm,
    "embedding": layers.embedding,
    "embedding_bag": layers.embedding_bag,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), layers.convolution),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), layers.transposed_convolution
    ),
    **dict.fromkeys(
        ("max_pool2d", "max_pool1d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"), layers.pooling
    ),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"), layers.pooling),
    "scaled_dot_product_attention": layers.attention,
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd"), layers.cross_entropy),
    "batch_norm": layers.batch_norm,
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
