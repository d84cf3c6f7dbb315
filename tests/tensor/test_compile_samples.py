"""A few of torch's operator samples compiled; ``python tests/tensor/coverage.py --compile`` runs all of them."""

from __future__ import annotations

import pytest
from compiled_samples import NOT_COMPILED, cover_compiled
from coverage import op_db

# One of each kind: by rule, with a sum, random, by fallback. The others, seconds each, are for the long repetitions.
SAMPLED = ("add", "matmul", "nn.functional.dropout", "linalg.qr")
LONGER = ("sum", "softmax", "transpose", "cat", "split")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo looks at it
]


@pytest.mark.parametrize("name", [*SAMPLED, *(pytest.param(name, marks=pytest.mark.soak) for name in LONGER)])
def test_a_compiled_operator_gives_what_eager_does(name: str) -> None:
    op = next(op for op in op_db if op.name == name)
    report = cover_compiled(op, 1, 2)
    assert not report.counts["wrong"], report.problems
    assert report.counts["one graph"] + report.counts["broken"], report


def test_the_list_names_operators_that_exist() -> None:
    assert {op.name for op in op_db} >= {*SAMPLED, *LONGER, *NOT_COMPILED}


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", [("nn.functional.interpolate", "linear"), ("prod", ""), ("istft", ""), ("linalg.eig", "")]
)
def test_what_torch_compiles_otherwise_is_told_from_what_is_wrong(name: tuple[str, str]) -> None:
    op = next(op for op in op_db if (op.name, op.variant_test_name) == name)
    counts = cover_compiled(op, 1, 2).counts
    assert counts["as torch compiles"], counts
    assert set(counts) <= {"one graph", "as torch compiles"}
