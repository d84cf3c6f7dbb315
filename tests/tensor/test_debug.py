"""CommDebugMode, logs, pictures, local_map, register_sharding."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from phalanx import comm
from phalanx.comm import init_device_mesh
from phalanx.tensor import Partial, Replicate, Shard, _log, distribute_tensor, zeros
from phalanx.tensor.debug import CommDebugMode, sharding_svg, visualize_sharding
from phalanx.tensor.experimental import local_map, register_sharding

pytestmark = pytest.mark.fast


def on_mesh(body: Callable[..., Any], *shape: int) -> list[Any]:
    size = 1
    for n in shape:
        size *= n
    return comm.simulate(size).run(lambda group: body(init_device_mesh("cpu", shape)))


def test_comm_debug_mode_knows_module_phase_bytes_and_line() -> None:
    def body(mesh: Any) -> None:
        net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU())
        net[0].weight = nn.Parameter(distribute_tensor(net[0].weight, mesh, [Shard(1)]))
        x = distribute_tensor(torch.randn(2, 4), mesh, [Shard(1)])
        with CommDebugMode(net) as outer:
            with CommDebugMode(net) as inner:
                out = net(x)
            out.sum().backward()
        assert inner.get_comm_counts() == {"all_reduce": 1}, "the relu needs the sum"
        assert inner.get_total_bytes() == 2 * 4 * 4
        assert outer.get_total_counts() >= inner.get_total_counts()
        assert list(inner.by_module()) == ["1"]
        assert inner.by_module()["1"]["forward"] == {"all_reduce": 1}
        assert "test_debug.py" in inner.table(noise_level=2)
        for level in range(4):
            assert "1 collectives, 32 B" in inner.table(level)
        assert json.loads(inner.to_json())["records"][0]["name"] == "all_reduce"
        page = inner.to_html()
        assert page.count("<details") == 2
        assert "all_reduce" in page

    on_mesh(body, 2)


def test_backward_communication_is_told_apart() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        w = distribute_tensor(torch.ones(4, 4), mesh).requires_grad_()
        with CommDebugMode() as mode:
            (x @ w).sum().backward()
        phases = [(r.name, r.backward) for r in mode.records]
        assert ("all_reduce", True) in phases

    on_mesh(body, 2)


def test_logs_are_switched_by_the_variable(caplog: pytest.LogCaptureFixture) -> None:
    previous = _log.logger.level
    _log.configure("+dtensor")
    try:

        def body(mesh: Any) -> None:
            a = zeros(5, 7, device_mesh=mesh, placements=[Shard(0)])
            b = zeros(5, 7, device_mesh=mesh, placements=[Shard(1)])
            a + b

        with caplog.at_level(logging.DEBUG, logger="phalanx.dtensor"):
            on_mesh(body, 2)
        assert any("add(" in r.message and "all_to_all" in r.message for r in caplog.records)
    finally:
        _log.logger.setLevel(previous)
        _log.logger.handlers.clear()


def test_pictures_show_who_holds_what(capsys: pytest.CaptureFixture[str]) -> None:
    def body(mesh: Any) -> str:
        x = zeros(5, 4, device_mesh=mesh, placements=[Shard(0), Shard(1)])
        visualize_sharding(x, header="x", use_rich=False)
        visualize_sharding(zeros(6, device_mesh=mesh, placements=[Shard(0), Replicate()]))
        with pytest.raises(ValueError, match="one or two dims"):
            visualize_sharding(zeros(2, 2, 2, device_mesh=mesh))
        return sharding_svg(x)

    svg = on_mesh(body, 2, 2)[0]
    text = capsys.readouterr().out
    assert "0-2  rank 0  rank 1" in text
    assert "3-4  rank 2  rank 3" in text
    assert svg.count("<rect") == 4


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
