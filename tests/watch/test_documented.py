"""What docs/watch*.md and the Grafana dashboard say is what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from watching import story, told

from phalanx.__main__ import COMMANDS, main
from phalanx.launch.cli._completion import SHELLS, flags_by_command
from phalanx.launch.cli._flags import FLAGS, UsageError, parse
from phalanx.watch import PARTS
from phalanx.watch._prometheus import exposition
from phalanx.watch._site import VIEWS

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parent.parent.parent
PAGE = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("watch*.md")))


def test_the_page_has_every_part_view_metric_and_command() -> None:
    for part in PARTS:
        assert f"| `{part}` |" in PAGE
    for name in VIEWS:
        assert f"| `{name}` |" in PAGE
    metrics = set(re.findall(r"^# TYPE (\w+)", exposition(told(story()).view, 110.0), re.MULTILINE))
    said = set(re.findall(r"`(phalanx_\w+)", PAGE))
    assert said == metrics
    mine = set(COMMANDS) - {"run", "inspect", "export"}
    assert {name for name in mine if f"| `phalanx {name}" in PAGE} == mine


def test_the_dashboard_of_grafana_asks_for_metrics_that_there_are() -> None:
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
    metrics = set(re.findall(r"^(phalanx_\w+)[{ ]", exposition(told(story()).view, 110.0), re.MULTILINE))
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"phalanx_\w+", target["expr"])
    }
    assert asked <= metrics, asked - metrics
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) > 8


def test_completions_name_every_command_and_flag(capsys: Any, tmp_path: Path) -> None:
    flags = flags_by_command()
    assert set(flags) == set(COMMANDS)
    assert set(flags["run"]) == {f"--{flag.name}" for flag in FLAGS}
    assert "--nproc" in flags["scale"]
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        text = capsys.readouterr().out
        assert all(name in text for name in COMMANDS)
        assert "dashboard" in text
        assert "on-failure" in text
        if shutil.which(shell):
            path = tmp_path / shell
            path.write_text(text)
            done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True, timeout=30)
            assert done.returncode == 0, done.stderr
    assert main(["completion", "tcsh"]) == 2
    capsys.readouterr()
    bash = tmp_path / "bash"
    if not bash.exists():
        return
    ask = f"source {bash}; COMP_WORDS=(phalanx run --on-f); COMP_CWORD=2; _phalanx; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["--on-failure"]


def test_a_job_is_read_from_a_file_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    [text] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    path.write_text(text + 'preload = ["a", "b"]\nstandalone = true\n')
    args = parse(["--config", str(path)], {"PET_ON_FAILURE": "restart", "PET_ROLE": "r"})
    assert (args.nproc_per_node, args.on_failure, args.dashboard, args.role) == ("4", "heal", "8080", "r")
    assert (args.training_script, args.training_script_args) == ("train.py", ["--lr", "0.1"])
    assert (args.preload, args.standalone) == (("a", "b"), True)
    args = parse([f"--config={path}", "--nproc-per-node=2", "other.py", "--config", "x"], {})
    assert (args.nproc_per_node, args.training_script) == ("2", "other.py")
    assert args.training_script_args == ["--config", "x"], "the script's own"
    assert parse(["--standalone", "other.py", "--config", "x"], {}).config is None
    for wrong, said in (
        ("nproc-per-nod = 4", "unknown name 'nproc-per-nod'; did you mean nproc_per_node?"),
        ('on-failure = "x"', "on-failure is 'x'; expected restart, heal"),
        ("max-restarts = 'many'", "does not fit --max-restarts"),
        ("standalone = 1", "expected true or false"),
        ("script = 7", "expected text"),
        ("args = 'x'", "expected a list"),
        ("nnodes = [", "cannot be read"),
    ):
        path.write_text(wrong)
        with pytest.raises(UsageError, match=re.escape(said)):
            parse(["--config", str(path), "train.py"], {})
    with pytest.raises(UsageError, match="cannot be read"):
        parse(["--config", str(tmp_path / "none"), "train.py"], {})


def test_a_job_comes_from_a_file_on_a_python_without_a_reader_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Python 3.10, where the package tomli is installed with ours: the same function in another module."""
    tomllib = pytest.importorskip("tomllib", reason="this Python has none: the test above has used tomli")
    monkeypatch.setitem(sys.modules, "tomllib", None)  # its import fails
    monkeypatch.setitem(sys.modules, "tomli", tomllib)
    path = tmp_path / "job.toml"
    path.write_text('script = "train.py"\nnproc-per-node = 3\n')
    assert parse(["--config", str(path)], {}).nproc_per_node == "3"


@pytest.mark.parametrize("command", ["inspect", "export"])
def test_the_flags_of_commands_whose_parsers_are_not_asked_are_theirs(command: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = set(re.findall(r"--[a-z]+", capsys.readouterr().out))
    assert set(flags_by_command()[command]) == said


def test_the_page_has_its_parts_in_the_order_of_their_questions() -> None:
    html = (ROOT / "src" / "phalanx" / "watch" / "page.html").read_text()
    order = re.findall(r'<section id="s-(\w+)"', html)
    assert order[:10] == [
        "line", "workers", "series", "heat", "commits", "goodput", "incidents", "saves", "nodes", "copies",
    ]  # fmt: skip
