"""One configuration: what a user says reaches every part of an agent as the same object, through no other container."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch import AgentOptions, DefaultLogsSpecs, LaunchConfig, LocalElasticAgent, WorkerSpec
from phalanx.launch.agent import _launch, _local_agent
from phalanx.launch.agent._generation import Generation
from phalanx.launch.agent._launch import launch_agent
from phalanx.launch.agent._node import NodeAgent
from phalanx.launch.cli import _flags, _from_flags, _run_command
from phalanx.launch.cli._flags import parse
from phalanx.launch.cli._from_flags import config_from_args
from phalanx.launch.config._flag import flag as field_flag
from phalanx.launch.config._flag import flags_of
from phalanx.launch.config._worker_spec import RunResult, WorkerState
from phalanx.launch.workers import _zygotes
from phalanx.launch.workers._processes import Zygote

pytestmark = pytest.mark.fast

FILLED_IN = {
    "run_id", "rdzv_endpoint", "rdzv_backend", "rdzv_configs", "logs_specs", "shutdown_timeout", "master_addr",
}  # fmt: skip
"""What ``resolved`` may replace where the user left it open."""


class PretendZygote:
    def close(self) -> None:
        pass


class PretendHandler:
    def __init__(self, *_: Any) -> None:
        pass

    def get_run_id(self) -> str:
        return "job"

    def shutdown(self) -> bool:
        return True


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[NodeAgent]]:
    """The nodes that were made and would have run."""
    made: list[NodeAgent] = []
    result = RunResult(WorkerState.SUCCEEDED, {0: "value"})
    monkeypatch.setattr(NodeAgent, "run", lambda self: made.append(self) or result)
    monkeypatch.setattr(_launch, "get_rendezvous_handler", PretendHandler)
    for module in (_launch, _local_agent):
        monkeypatch.setattr(module, "adapted", lambda handler: handler)
    monkeypatch.setattr(Zygote, "fork", lambda *_: PretendZygote())
    monkeypatch.setattr(Zygote, "execute", lambda *_: PretendZygote())
    yield made
    for node in made:
        node.pool.close()
        node._observer.close()


def parts_of(node: NodeAgent) -> list[Any]:
    """Everything in an agent that has a setting to look at."""
    return [node, node.agent, node.pool]


def unusual(config_type: type, tmp_path: Path) -> dict[str, Any]:
    """A value for each field, none of them its default, each an object of its own."""
    values: dict[str, Any] = {
        "min_nodes": 1, "max_nodes": 1000, "nproc_per_node": 1001, "logs_specs": DefaultLogsSpecs(str(tmp_path)),
        "signals_to_handle": "SIGUSR1", "on_failure": "heal", "start_method": "exec", "rdzv_backend": "c10d",
        "rdzv_endpoint": "node0:29400", "rdzv_configs": {"lease": 40}, "metrics_cfg": {"type": "null"},
        "event_log_handler": "null", "numa_options": None, "rdzv_timeout": 12345, "notice": ("file:/nowhere/notice",),
        "leave_signal": "SIGUSR2", "otel": "http://127.0.0.1:4318",
    }  # fmt: skip
    for n, each in enumerate(fields(config_type)):
        if each.name not in values:
            kind = str(each.type)
            values[each.name] = (
                True if kind == "bool" else 2000.5 + n if "float" in kind else 3000 + n if "int" in kind else
                [f"text {n}"] if "list" in kind else (f"text {n}",) if "tuple" in kind else f"text {n}"
            )  # fmt: skip
    return values


def test_every_field_reaches_every_part_as_the_same_object(nodes: list[NodeAgent], tmp_path: Path) -> None:
    values = unusual(LaunchConfig, tmp_path)
    assert launch_agent(LaunchConfig(**values), "command", []) == {0: "value"}
    (node,) = nodes
    assert {id(part.config) for part in parts_of(node)} == {id(node.config)}
    for name in values.keys() - FILLED_IN:
        assert getattr(node.config, name) is values[name], name
    assert node.agent._hang.timeout == values["hang_timeout"]
    for name in (
        "run_id",
        "rdzv_endpoint",
        "shutdown_timeout",
        "master_addr",
    ):  # said, so nothing is filled in
        assert getattr(node.config, name) is values[name], name


def test_every_plain_flag_reaches_the_agent_as_it_was_parsed(
    nodes: list[NodeAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line too makes one configuration and says once how workers start."""
    monkeypatch.setattr(_run_command, "begin_to_load", lambda path: lambda: None)
    seen: list[Any] = []
    monkeypatch.setattr(_run_command, "parse", lambda *given, **more: seen.append(parse(*given, **more)) or seen[-1])
    words = ["--hang-timeout", "77.5", "--standby", "3", "--preload", "json", "--role", "trainer"]
    assert _run_command.main([*words, __file__]) == 0
    (node,), (args,) = nodes, seen
    for flag in flags_of(LaunchConfig):
        if flag.dest not in FILLED_IN | {"max_restarts", "restart_window"}:  # whose defaults depend on others
            assert getattr(node.config, flag.dest) is getattr(args, flag.dest), flag.name
    assert (node.config.hang_timeout, node.config.standby, node.config.role) == (77.5, 3, "trainer")


def test_a_new_field_with_a_flag_needs_no_other_place() -> None:
    """Each flag of a field is parsed and passed on by its name: no list of names stands in between."""
    args = parse(["script.py"], {})
    config = config_from_args(args, 2)
    assert {flag.dest for flag in flags_of(LaunchConfig)} <= {each.name for each in fields(LaunchConfig)}
    assert all(hasattr(args, flag.dest) for flag in flags_of(LaunchConfig))
    assert config.nproc_per_node == 2


def test_a_field_more_is_all_that_a_new_flag_needs(nodes: list[NodeAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line to the agent: two files, the configuration and the one that uses the field."""

    @dataclass
    class Wider(LaunchConfig):
        colour: str = field(default="", metadata=field_flag(help="of the agent"))

    (new,) = (each for each in flags_of(Wider) if each not in flags_of(LaunchConfig))
    monkeypatch.setattr(_flags, "FLAGS", (*_flags.FLAGS, new))
    monkeypatch.setattr(_from_flags, "LaunchConfig", Wider)
    monkeypatch.setattr(_run_command, "begin_to_load", lambda path: lambda: None)
    assert _run_command.main(["--colour", "red", __file__]) == 0
    assert [part.config.colour for part in parts_of(nodes[0])] == ["red"] * 3


def test_users_of_the_elastic_api_get_the_same_agent(nodes: list[NodeAgent], tmp_path: Path) -> None:
    logs = DefaultLogsSpecs(str(tmp_path))
    spec = WorkerSpec(
        role="r", local_world_size=3, rdzv_handler=PretendHandler(), entrypoint="command", max_restarts=7,
        monitor_interval=0.5, master_addr="here", min_nodes=2, virtual_local_rank=True,
    )  # fmt: skip
    options = AgentOptions(on_failure="heal", hang_timeout=9.0, exit_barrier_timeout=1.5)
    agent = LocalElasticAgent(spec, logs, options=options, standby=4, preload=("json",))
    assert agent.run().return_values == {0: "value"}
    config = nodes[0].config
    assert config.logs_specs is logs
    for name in (
        "role",
        "max_restarts",
        "monitor_interval",
        "master_addr",
        "min_nodes",
        "virtual_local_rank",
    ):
        assert getattr(config, name) is getattr(spec, name)
    for each in fields(AgentOptions):
        assert getattr(config, each.name) is getattr(options, each.name)
    assert (config.nproc_per_node, config.standby, config.preload, config.run_id) == (3, 4, ("json",), "job")


def test_nothing_between_the_configuration_and_its_use_has_settings_of_its_own() -> None:
    """Constructors of an agent's parts take the configuration, not settings out of it."""
    from inspect import signature

    from phalanx.launch.agent._agent import Agent
    from phalanx.launch.hang._hang_watch import HangWatch
    from phalanx.launch.workers._pool import WorkerPool

    names = {each.name for each in fields(LaunchConfig)}
    for part in (NodeAgent, Agent, WorkerPool, HangWatch, Generation, _zygotes.make_zygote):
        parameters = signature(part).parameters.keys()
        assert "config" in parameters
        assert not parameters & names, part
