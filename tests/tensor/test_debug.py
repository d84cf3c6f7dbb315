"""Logs, local_map, register_sharding."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from phalanx import comm
from phalanx.comm import init_device_mesh
from phalanx.tensor import Partial, Replicate, Shard, _log, distribute_tensor, zeros
from phalanx.tensor.experimental import local_map, register_sharding

pytestmark = pytest.mark.fast


def on_mesh(body: Callable[..., Any], *shape: int) -> list[Any]:
    size = 1
    for n in shape:
        size *= n
    return comm.simulate(size).run(lambda group: body(init_device_mesh("cpu", shape)))


def test_logs_are_switched_by_the_variable(caplog: pytest.LogCaptureFixture) -> None:
    previous = _log.logger.level
    _log.configure("+dtensor")
    try:

        def body(mesh: Any) -> None:
            a = zeros(5, 7, device_mesh=mesh, placements=[Shard(0)])
            b = zeros(5, 7, device_mesh=mesh, placements=[Shard(1)])
            a + b
            torch.linalg.svdvals(a)
            torch.linalg.svdvals(a)
            b.redistribute(placements=[Replicate()])
            a.square()

        with caplog.at_level(logging.DEBUG, logger="phalanx.dtensor"):
            on_mesh(body, 2)
        lines = [r.message for r in caplog.records if r.message.startswith("rank 1: ")]
        (chosen,) = [line for line in lines if "add(" in line]
        assert "float32[5, 7] [0:S(1)]" in chosen
        assert "all_to_all(axis=0, S(" in chosen
        assert "fewest bytes of" in chosen
        (moved,) = [line for line in lines if "float32[5, 7] [0:S(1)] -> [0:R]" in line]
        assert moved.endswith(" B)")
        replicated = [r.message for r in caplog.records if r.message.startswith("linalg_svdvals(")]
        assert len(replicated) == 2, "once on each rank"
        assert "test_debug.py:" in replicated[0]
        assert any("square(" in line and "moves nothing" in line for line in lines)
    finally:
        _log.logger.setLevel(previous)
        _log.logger.handlers.clear()


def test_local_map_runs_on_parts() -> None:
    def body(mesh: Any) -> None:
        a = distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [Shard(1)]).requires_grad_()
        b = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])

        @local_map(out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)]))
        def product(x: Any, y: Any) -> Any:
            assert x.shape == (2, 2)
            return x @ y

        out = product(a, b)
        assert out.placements == (Partial(),)
        torch.testing.assert_close(out.full_tensor(), torch.arange(8.0).view(2, 4) @ torch.ones(4, 3))
        out.sum().backward()
        assert a.grad is not None
        assert a.grad.full_tensor().unique().tolist() == [3.0]
        with pytest.raises(ValueError, match="redistribute_inputs"):
            product(b, b)
        pair = local_map(
            lambda x: (x * 2, x.shape[0]),
            out_placements=([Shard(0)], None),
            in_placements=([Shard(0)],),
            redistribute_inputs=True,
        )
        doubled, rows = pair(a)
        assert doubled.placements == (Shard(0),)
        assert rows == 1

    on_mesh(body, 2)


def test_users_can_give_an_operation_a_rule() -> None:
    from phalanx.tensor.rules import RULES

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.randn(4, 3, 3), mesh, [Shard(0)])
        assert torch.linalg.det(x).placements == (Replicate(),)

        @register_sharding(torch.linalg.det)
        def rule(spec: Any) -> Any:
            return [([Shard(0)], [Shard(0)])]

        out = torch.linalg.det(x)
        assert out.placements == (Shard(0),)
        torch.testing.assert_close(out.full_tensor(), torch.linalg.det(x.full_tensor()))

    try:
        on_mesh(body, 1)
    finally:
        RULES.pop("linalg_det", None)


PROGRAM = """
import torch
from phalanx import comm
from phalanx.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

def main(group):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    x.t() @ x.redistribute(placements=[Shard(1)])

comm.simulate(2).run(main)
"""


def test_the_environment_turns_the_log_on() -> None:
    def said(setting: str) -> str:
        environment = {**os.environ, "PHALANX_LOGS": setting}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=True,
        )
        return done.stderr + done.stdout

    assert "all_to_all" in said("dtensor")
    assert "all_to_all" not in said("")
