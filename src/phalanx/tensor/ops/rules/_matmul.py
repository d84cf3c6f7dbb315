"""Products: an axis may shard any one index of the product; a summed index leaves a partial sum.

Owns the rules for matmul, linear, einsum and their relatives, all described by letters for dims, as in einsum. A
term that is added (a bias) is kept on one rank only where the product is partial.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.tensor.layout._placement import PARTIAL_SUM, REPLICATE, Partial, Placement, Shard
from phalanx.tensor.ops._rule import Call, Choice, In, Rule, Sharding, all_replicated
from phalanx.tensor.ops.rules._shape import with_strided


def contraction(call: Call, operands: Sequence[str], output: str, added: dict[int, str] | None = None) -> Sharding:
    """Choices for a product. ``operands[i]`` names the dims of input i; ``added`` those of terms added to the result.

    A broadcast dim of size one gets no letter that could be sharded: use ``.`` for it.
    """
    added = added or {}
    letters = list(dict.fromkeys(letter for text in operands for letter in text if letter != "."))
    choices: list[Choice] = []
    factors = [i for i in range(len(call.inputs)) if i not in added]
    for letter in letters:
        inputs: list[Placement] = []
        for i in range(len(call.inputs)):
            text = added[i] if i in added else operands[factors.index(i)]
            if letter in text:
                inputs.append(Shard(text.index(letter)))
            else:
                inputs.append(PARTIAL_SUM if i in added and letter not in output else REPLICATE)
        out: Placement = Shard(output.index(letter)) if letter in output else PARTIAL_SUM
        choices.append(Choice(tuple(inputs), (out,)))
    choices = [*with_strided(call, choices), all_replicated(call, 1)]
    for given in ("sum", "avg"):
        partial = Partial(given)
        for own, one in enumerate(call.inputs):
            if any(p.is_partial(given) for p in one.spec.placements) and (own in factors or given == "avg"):
                placed = [partial if i == own or i in added else REPLICATE for i in range(len(call.inputs))]
                choices.append(Choice(tuple(placed), (partial,)))
    return Sharding(choices)


def matmul(call: Call) -> Sharding | None:
    left, right = call.inputs[:2]
    if call.name == "rmatmul":
        left, right = right, left
    if len(call.inputs) != 2 or not left.ndim or not right.ndim:
        return None
    batch = "abcdefgh"[: max(left.ndim, right.ndim, 2) - 2]
    texts = [
        _batched(left, batch, "k" if left.ndim == 1 else "mk"),
        _batched(right, batch, "k" if right.ndim == 1 else "kn"),
    ]
    output = batch + ("m" if left.ndim > 1 else "") + ("n" if right.ndim > 1 else "")
    return contraction(call, texts[::-1] if call.name == "rmatmul" else texts, output)


def _batched(one: In, batch: str, core: str) -> str:
    own = one.ndim - len(core)
    letters = batch[len(batch) - own :] if own else ""
    sizes = one.shape[:own]
    return "".join("." if size == 1 else letter for letter, size in zip(letters, sizes, strict=True)) + core


def linear(call: Call) -> Sharding | None:
    first, weight = call.inputs[:2]
    if weight.ndim != 2 or first.ndim < 1 or any(bias.shape != weight.shape[:1] for bias in call.inputs[2:]):
        return None
    batch = "abcdefgh"[: first.ndim - 1]
    added = {2: "n"} if len(call.inputs) == 3 else {}
    return contraction(call, [batch + "k", "nk"], batch + "n", added)


def product(operands: str, output: str) -> Rule:
    """Make the rule of a product of tensors whose dims are these letters, such as ``product("mk,kn", "mn")``."""
    texts = operands.split(",")

    def rule(call: Call) -> Sharding | None:
        if [one.ndim for one in call.inputs] != [len(text) for text in texts]:
            return None
        return contraction(call, texts, output)

    return rule


def added_product(operands: str, output: str) -> Rule:
    """Make the rule of ``beta * input + alpha * (a @ b)``: the input is the added term."""
    texts = operands.split(",")

    def rule(call: Call) -> Sharding | None:
        if len(call.inputs) != 3 or [one.ndim for one in call.inputs[1:]] != [len(text) for text in texts]:
            return None
        term = call.inputs[0]
        if term.ndim > len(output):
            return None
        meta = term.shape if call.in_place else call.meta().shape
        letters = output[len(output) - term.ndim :]
        sizes = meta[len(output) - term.ndim :]
        text = "".join(
            letter if own == size else "." for letter, own, size in zip(letters, term.shape, sizes, strict=True)
        )
        return contraction(call, texts, output, {0: text})

    return rule


def einsum(call: Call) -> Sharding | None:
    equation = call.arg(0, "equation")
    operands = call.inputs
    if not isinstance(equation, str) or "." in equation or not operands:
        return None
    left, arrow, output = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    if len(texts) != len(operands) or [len(t) for t in texts] != [one.ndim for one in operands]:
        return None
    if not arrow:
        output = "".join(sorted(c for c in set(left) if c != "," and left.count(c) == 1))
    if any(len(set(text)) != len(text) for text in texts):
        return None  # a diagonal: its two dims cannot be sharded apart
    dotted = [
        "".join("." if size == 1 else letter for letter, size in zip(text, one.shape, strict=True))
        for text, one in zip(texts, operands, strict=True)
    ]
    sharding = contraction(call, dotted, output)
    sharding.is_view = len(texts) == 1 and len(output) == len(left)  # dims in another order
    return sharding


def tensordot(call: Call) -> Sharding | None:
    """``tensordot(a, b, dims_of_a, dims_of_b)``, which torch's Python function calls: sums over pairs of dims."""
    dims, (left, right) = call.args[2:], call.inputs[:2]
    if len(call.inputs) != 2 or len(dims) != 2 or len(dims[0]) != len(dims[1]) or not (left.ndim and right.ndim):
        return None
    texts = [list("abcdefghijklm"[: left.ndim]), list("nopqrstuvwxyz"[: right.ndim])]
    for own, other in zip(*dims, strict=True):
        texts[1][other] = texts[0][own]
    shared = set(texts[0]) & set(texts[1])
    output = "".join(letter for text in texts for letter in text if letter not in shared)
    dotted = [
        "".join("." if size == 1 else letter for letter, size in zip(text, one.shape, strict=True))
        for text, one in zip(texts, call.inputs, strict=True)
    ]
    return contraction(call, dotted, output)
