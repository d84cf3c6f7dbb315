"""torch.compile with its default backend, Inductor, which writes C++: values and gradients within 1e-6 of eager."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from meshes import MLP, on_mesh
from test_compile_programs import PLAN, run, values

from phalanx.tensor.parallel import parallelize_module

pytestmark = [
    pytest.mark.soak,  # compiling takes half a minute; with aot_eager the same program is compiled in every run
    pytest.mark.timeout(580),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo looks at it
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Inductor's own imports
]


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own for what is built, no pool of compiling processes, which would outlive the test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1), torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


def test_a_tensor_parallel_model_is_within_1e6_of_eager() -> None:
    def body(mesh: Any) -> None:
        torch.manual_seed(0)
        model = parallelize_module(MLP(6, 10), mesh, PLAN)
        held, inputs = list(model.parameters()), [values(3, 6).requires_grad_()]
        expected, sent = run(model, inputs, held)
        found, also_sent = run(torch.compile(model, fullgraph=True), inputs, held)
        assert also_sent == sent
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)

    on_mesh(body, 2, timeout=500.0)
