"""Function workers: values and exceptions come home whole, under every start method."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from phalanx.launch import ChildFailedError, DefaultLogsSpecs, LaunchConfig, elastic_launch

sys.path.insert(0, str(Path(__file__).parent / "workers"))
import functions


def config(tmp_path: Path, **fields: object) -> LaunchConfig:
    defaults = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "max_restarts": 0}
    return LaunchConfig(**{**defaults, "logs_specs": DefaultLogsSpecs(str(tmp_path / "logs")), **fields})


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_return_values_by_global_rank(tmp_path, method):
    result = elastic_launch(config(tmp_path, start_method=method), functions.all_reduced)(1.0)
    assert result == {0: 3.0, 1: 3.0}


def test_config_is_not_changed_by_a_launch(tmp_path):
    given = config(tmp_path, start_method="fork")
    before = dict(vars(given))
    elastic_launch(given, functions.add)(2, 3)
    assert vars(given) == before
    assert given.run_id == ""
    assert given.rdzv_configs == {}


def test_large_values_come_home(tmp_path):
    result = elastic_launch(config(tmp_path, nproc_per_node=1, start_method="fork"), functions.large)(
        3_000_000
    )
    assert torch.equal(result[0], torch.arange(3_000_000))


def test_exceptions_come_home(tmp_path):
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(tmp_path, nproc_per_node=1, start_method="fork"), functions.raising)()
    rank, failure = caught.value.get_first_failure()
    assert (rank, failure.exitcode) == (0, 1)
    assert failure.message == "Custom: ('with this text', 17)"
    assert "raise Custom" in failure.traceback
    assert isinstance(caught.value.__cause__, functions.Custom)
    assert caught.value.__cause__.args == ("with this text", 17)


def test_an_unpicklable_value_is_a_clear_error(tmp_path):
    with pytest.raises(ChildFailedError, match="its return value, a function, cannot be pickled"):
        elastic_launch(config(tmp_path, nproc_per_node=1, start_method="fork"), functions.unpicklable)()


def test_an_unpicklable_function_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(TypeError, match=r"cannot be pickled .*use start_method='fork'"):
        elastic_launch(config(tmp_path, start_method="spawn"), lambda: 1)()


def test_closures_work_with_fork(tmp_path):
    bonus = 5
    result = elastic_launch(config(tmp_path, start_method="fork"), lambda: bonus)()
    assert result == {0: 5, 1: 5}


def test_commands_have_no_values(tmp_path):
    launched = elastic_launch(config(tmp_path), sys.executable)
    assert launched("-c", "import os; assert os.environ['LOCAL_RANK'] in '01'") == {0: None, 1: None}


def test_a_missing_command_fails_at_once(tmp_path):
    with pytest.raises(ChildFailedError, match="cannot execute '/no/such/command'"):
        elastic_launch(config(tmp_path, max_restarts=5), "/no/such/command")()
