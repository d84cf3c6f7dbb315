"""The README's examples run as they stand, and print what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.fast

BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(), re.DOTALL
)


def names_that_a_reader_has() -> dict[str, object]:
    """What the examples take for granted: a model, an optimizer, data and a loss."""
    model = torch.nn.Linear(3, 1)
    return {
        "__name__": "readme",
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "dataset": torch.utils.data.TensorDataset(torch.randn(200, 3), torch.randn(200, 1)),
        "loss_fn": torch.nn.functional.mse_loss,
    }


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_examples_run_and_print_what_they_say(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BLOCKS[number], f"README.md block {number}", "exec"), names_that_a_reader_has())
    promised = re.findall(r"^# (.*)$", BLOCKS[number], re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == promised


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 2
    assert any("simulate(4)" in block for block in BLOCKS)
