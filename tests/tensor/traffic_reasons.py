"""Why we send more than torch's DTensor: each such cell that ``traffic.py`` finds needs a reason here.

A reason names operators and, by a pattern, the layouts and shapes that it holds for. ``unused`` lists those that no
cell of a complete run needed: they are to be removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """Why the operators send, in layouts (and shapes, as ``of [(5, 3)]``) that the pattern is found in."""

    operators: str
    layouts: str
    why: str


REASONS = (
    Reason(
        "bernoulli cauchy exponential geometric log_normal multinomial normal.in_place rand_like randint_like "
        "randn_like uniform nn.functional.feature_alpha_dropout.with_train nn.functional.rrelu "
        "nn.functional.multi_head_attention_forward",
        "",
        "the sample sets torch's seed before the call, and at the first draw after that the ranks agree on it (and on "
        "whether probabilities are to be refused); torch draws the same numbers on every shard of a CPU mesh",
    ),
    Reason(
        "repeat_interleave",
        r"S\(\d\) of \[\(2, 3, 4\)\]",
        "without a dim it flattens, and the pieces of the repeated vector are the repeated pieces only where all ranks "
        "hold equally much: that case has no rule of its own",
    ),
    Reason(
        "bfloat16 float half",
        r"P\((sum|avg)\)",
        "rounding every contribution to a narrower dtype is not rounding their sum",
    ),
    Reason(
        "byte char int long short",
        r"P\((max|min)\)",
        "a contribution that is none of the result may be out of the range of the integers, and wraps around",
    ),
    Reason(
        "fmax",
        r"P\(max\)",
        "of not-a-number and y it is y, which another contribution may exceed: the maximum, not-a-number, comes first",
    ),
    Reason(
        "fmin",
        r"P\(min\)",
        "of not-a-number and y it is y, which another contribution may be below: the minimum, not-a-number, comes "
        "first",
    ),
    Reason(
        "nan_to_num sgn sign",
        r"P\((max|min)\)",
        "they turn not-a-number into a number: a contribution that is one makes the maximum one, which comes first",
    ),
    Reason(
        "nn.functional.threshold",
        r"P\((max|min)\)",
        "its value below the threshold may be above it, so that it neither grows nor falls",
    ),
    Reason(
        "special.modified_bessel_k0 special.modified_bessel_k1 special.scaled_modified_bessel_k0 "
        "special.scaled_modified_bessel_k1",
        r"P\(min\)",
        "of negative numbers they are not-a-number, and a contribution may be negative where the result is not",
    ),
    Reason(
        "isreal",
        r"P\(",
        "it asks every element, also of real dtypes, where the answer is known: one reduction of a rare function",
    ),
    Reason(
        "any nansum",
        r"P\(sum\)",
        "contributions that are not zero (or not numbers) may have a sum that is: they are added first",
    ),
    Reason(
        "nn.functional.cross_entropy nn.functional.linear_cross_entropy",
        r"S\(0\) S\(0\)",
        "a mean is divided by the number of targets that are not ignored on all ranks; torch's is that of each rank",
    ),
    Reason(
        "nn.functional.gaussian_nll_loss",
        r"S\(0\)",
        "a negative variance on one rank is refused on all: one byte for each element says whether there is one",
    ),
    Reason(
        "norm norm.fro linalg.norm linalg.norm.subgradients_at_zero linalg.matrix_norm dist "
        "nn.functional.pairwise_distance",
        r"S\(",
        "each rank's norm (a number for each result) is gathered and its norm taken; no reduction of Partial is one",
    ),
    Reason(
        "as_strided",
        r"of \[\(1,\)\]",
        "it addresses memory that one rank has; it is computed on the whole tensor, here of one element",
    ),
    Reason(
        "linalg.matrix_rank linalg.matrix_rank.hermitian nn.functional.adaptive_avg_pool1d "
        "nn.functional.adaptive_avg_pool3d nn.functional.softsign nn.functional.tanhshrink",
        r"of \[\((0, |1, 0, )",
        "the tensor has no elements: a collective of no bytes",
    ),
    Reason(
        "native_batch_norm _native_batch_norm_legit _batch_norm_with_update nn.functional.batch_norm",
        r"P\(",
        "partial running statistics are written to, as one device's are: all is computed replicated. torch "
        "reduces copies of "
        "them and writes to those: its running statistics stay what they were",
    ),
    Reason(
        "nn.functional.local_response_norm",
        r"S\(1\) of \[\(1, ",
        "padding exchanges the cut channels for columns, as there is only one image, and pooling gathers those",
    ),
    Reason(
        "nn.functional.gaussian_nll_loss",
        r"P\(",
        "a clone of a partial variance is partial, and what follows it (a clamp, a logarithm, a division) reduces "
        "it each "
        "time; torch's clone reduces. (What went through exp or softplus is not partial any more.)",
    ),
    Reason(
        "_batch_norm_with_update",
        "",
        "an operator inside of torch's batch_norm, which has the rule; called by itself it is computed replicated",
    ),
    Reason(
        "trapezoid trapz cumulative_trapezoid",
        r"P\(sum\) P\(sum\)|P\(avg\) S\(0\)",
        "torch takes the differences of neighbours, one less than there are, before it reduces them",
    ),
    Reason(
        "fft.rfft2 fft.rfftn",
        r"S\(2\) of \[\(5, 6, 7\)\]",
        "the transform is of fewer rows (s=) than there are: torch drops the others before it gathers, here all "
        "are exchanged",
    ),
    Reason(
        "special.xlog1py",
        r"^\S+ sample \d P\((sum|avg)\)",
        "it is zero where x is, whatever the logarithm: contributions that cancel out would be infinities that do not",
    ),
    Reason(
        "nn.functional.l1_loss nn.functional.margin_ranking_loss nn.functional.kl_div",
        r"P\((sum|avg)\) P\((sum|avg)\)",
        "both arguments of a loss are reduced, where torch reduces their difference (or product) once: targets "
        "are data, "
        "which is not partial",
    ),
    Reason(
        "linalg.pinv.singular",
        r"P\((max|min)\) P\((max|min)\)",
        "the sample multiplies its two arguments first: they are scattered along the dim that is summed over, "
        "half of what "
        "reducing both takes, and the product, which is larger than they are here, is a partial sum",
    ),
    Reason(
        "index_put",
        r"S\(0\) P\(\S+ of \[\(5, 5\), \(5,\), \(5,\)\]",
        "how many places a mask has is known where all of it is: it is computed replicated",
    ),
    Reason(
        "masked.logaddexp",
        r"P\((sum|avg)\) P\((sum|avg)\) S\(0\) S\(0\)",
        "masking keeps the contributions, for a mask that is gathered (a byte for each element); their sum comes "
        "after it",
    ),
    Reason(
        "nn.functional.kl_div",
        r"P\(avg\) R",
        "the loss is affine in its input, which only an average would pass: it is reduced first",
    ),
)


# What we refuse and torch's DTensor takes.
REFUSED = {
    "masked.std masked.var": (
        "torch's function makes a plain tensor of shape (1, 1, 1) inside and divides a DTensor by it. Torch's DTensor "
        "takes every plain tensor of one element for a replica; here only those without dims are: a batch of one "
        "sample has one element too, another on each rank. They run within implicit_replication()"
    ),
}


def refusal_for(name: str) -> str:
    """Say why ``name`` is refused; empty if nobody said."""
    return next((why for operators, why in REFUSED.items() if name in operators.split()), "")


def reason_for(name: str, case: str) -> str:
    """Say why ``name`` sends in ``case`` (the text of a ``Case``); empty if nobody said."""
    return next((r.why for r in REASONS if name in r.operators.split() and re.search(r.layouts, case)), "")


def unused(explained: Iterable[tuple[str, str]]) -> list[str]:
    """Return operators with a reason that none of the (name, case) in ``explained`` needed."""
    met = {name for name, _ in explained}
    return [name for reason in REASONS for name in reason.operators.split() if name not in met]
