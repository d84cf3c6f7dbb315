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
from phalanx.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, zeros
from phalanx.tensor.experimental import local_map, register_sharding
from phalanx.tensor.parallel import loss_parallel
from phalanx.tensor.redistribute import _log

pytestmark = pytest.mark.fast


def on_mesh(body: Callable[..., Any], *shape: int) -> list[Any]:
    size = 1
    for n in shape:
        size *= n
    return comm.simulate(size).run(lambda group: body(init_device_mesh("cpu", shape)))


def logged(caplog: pytest.LogCaptureFixture, body: Callable[..., Any], *shape: int) -> list[str]:
    """The lines of rank 1."""
    with caplog.at_level(_log.EVERYTHING, logger="phalanx.dtensor"):
        on_mesh(body, *(shape or (2,)))
    assert all(r.message.startswith("rank ") for r in caplog.records), "every line says whose it is"
    return [r.message for r in caplog.records if r.message.startswith("rank 1: ")]


def test_logs_say_what_is_chosen_moved_and_computed_replicated(caplog: pytest.LogCaptureFixture) -> None:
    def body(mesh: Any) -> None:
        a = zeros(5, 7, device_mesh=mesh, placements=[Shard(0)])
        b = zeros(5, 7, device_mesh=mesh, placements=[Shard(1)])
        a + b
        torch.diag_embed(a)
        torch.diag_embed(a)
        b.redistribute(placements=[Replicate()])
        a.square()

    lines = logged(caplog, body)
    (chosen,) = [line for line in lines if "add(" in line]
    assert "float32[5, 7] [0:S(1)]" in chosen
    assert "all_to_all(axis=0, S(" in chosen
    assert "fewest bytes of" in chosen
    (moved,) = [line for line in lines if "float32[5, 7] [0:S(1)] -> [0:R]" in line]
    assert moved.endswith(" B)")
    (replicated,) = [line for line in lines if "diag_embed(" in line and "test_debug.py:" in line]
    assert "computed replicated" in replicated
    assert any("square(" in line and "moves nothing" in line for line in lines)
    levels = {record.levelno for record in caplog.records}
    assert levels == {_log.TRAFFIC, _log.EVERYTHING}
    assert max(levels) <= logging.DEBUG


def test_logs_name_every_collective_and_its_bytes_once(caplog: pytest.LogCaptureFixture) -> None:
    expected: list[Any] = []

    def body(mesh: Any) -> None:
        with comm.observe(lambda event: expected.append((mesh.get_rank(), event.name, event.nbytes))):
            x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
        weight = distribute_tensor(torch.ones(6, 5), mesh, [Replicate()]).requires_grad_()
        for _ in range(2):
            (x @ weight).sum().backward()
            DTensor.from_local(torch.ones(2, 9), mesh, [Shard(0)])
            DTensor.from_local(torch.ones(2, 9), mesh, [Shard(0)], shape=(4, 9))
            DTensor.from_local(torch.ones(2, 8), mesh, [Replicate()], run_check=True)
            with loss_parallel():
                logits = distribute_tensor(torch.ones(4, 10), mesh, [Shard(1)], src_data_rank=None)
                torch.nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long))

    lines = logged(caplog, body)

    def the_line(what: str) -> str:
        (line,) = [line for line in lines if what in line]
        return line

    assert the_line("gradient of float32[6, 5] [0:R]").endswith(": all_reduce 120 B")
    said = "; ".join(f"{name} {nbytes} B" for rank, name, nbytes in expected if rank == 1)
    assert "scatter" in said
    assert the_line("distribute_tensor to float32[4, 6] [0:S(0)]").endswith(f": {said}")
    assert the_line("from_local to float32[4, 9] [0:S(0)]").endswith(": all_gather_into_tensor 176 B")
    assert "broadcast 64 B" in the_line("from_local to float32[2, 8] [0:R]")
    assert the_line("loss_parallel of float32[4, 10]").count("all_reduce 16 B") == 3


def test_nothing_is_logged_or_listened_to_while_the_log_is_off(caplog: pytest.LogCaptureFixture) -> None:
    def body(mesh: Any) -> bool:
        before = _log.listening()
        DTensor.from_local(torch.ones(2, 9), mesh, [Shard(0)])
        return before is _log.listening()

    assert on_mesh(body, 2) == [True, True]
    with caplog.at_level(logging.INFO):  # as a script has it after basicConfig(level=INFO): every rank would say it all
        assert on_mesh(body, 2) == [True, True]
    assert not [record for record in caplog.records if record.name == "phalanx.dtensor"]


def test_the_variable_gives_the_log_an_outlet_of_its_own() -> None:
    level = _log.logger.level
    try:
        _log.configure("other, +dtensor")
        _log.configure("dtensor")
        assert len(_log.logger.handlers) == 1
        assert _log.logger.level == _log.TRAFFIC
        assert not _log.logger.propagate, "or a handler of the program's would write each line once more"
    finally:
        _log.logger.setLevel(level)
        _log.logger.handlers.clear()
        _log.logger.propagate = True


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
    from phalanx.tensor.ops._registry import OPERATORS

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])
        assert torch.diag_embed(x).placements == (Replicate(),)

        @register_sharding(torch.diag_embed)
        def rule(spec: Any) -> Any:
            return [([Shard(0)], [Shard(0)])]

        out = torch.diag_embed(x)
        assert out.placements == (Shard(0),)
        torch.testing.assert_close(out.full_tensor(), torch.diag_embed(x.full_tensor()))

    try:
        on_mesh(body, 1)
    finally:
        OPERATORS.pop("diag_embed", None)


PROGRAM = """
import logging
logging.basicConfig(format="program: %(message)s")  # as a program under ``phalanx run`` finds it
import torch
from phalanx import comm
from phalanx.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

def main(group):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    x.t() @ x.redistribute(placements=[Shard(1)])

comm.simulate(2).run(main)
"""


def test_the_environment_turns_the_log_on_and_each_line_comes_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PHALANX_LOGS": "dtensor"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    messages = [line[line.index("rank ") :] for line in done.stderr.splitlines() if "all_to_all" in line]
    assert messages
    assert len(set(messages)) == len(messages)
