"""The command line: torchrun's flags and meanings, and errors of one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.launch.cli._flags import FLAGS, UsageError, parse
from phalanx.launch.cli._from_flags import config_from_args, parse_nodes, parse_settings
from phalanx.launch.cli._run_command import local_world_size, main
from phalanx.launch.config._flag import words
from phalanx.launch.numa import AffinityMode
from phalanx.launch.rendezvous import _settings
from phalanx.launch.telemetry._logs import Std

pytestmark = pytest.mark.fast


def config(*argv: str, environ: dict[str, str] | None = None, size: int = 1):
    return config_from_args(parse([*argv, "script.py"], environ or {}), size)


def test_torchruns_flags_are_all_known():
    from torch.distributed.run import get_args_parser

    theirs = {action.dest for action in get_args_parser()._actions} - {"help"}
    ours = {flag.dest for flag in FLAGS} | {"training_script", "training_script_args"}
    assert theirs <= ours


def test_the_flags_that_users_were_promised_are_there():
    promised = (
        "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf standalone max-restarts monitor-interval "
        "start-method role module no-python run-path log-dir redirects tee local-ranks-filter node-rank master-addr "
        "master-port local-addr numa-binding signals-to-handle event-log-handler duplicate-stdout-filters "
        "duplicate-stderr-filters virtual-local-rank shutdown-timeout on-failure preload hang-timeout"
    )
    assert set(promised.split()) <= {flag.name for flag in FLAGS}


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_flag_in_every_spelling_and_from_its_variable(flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some,text").write_text("")  # what --config names is read
    text = flag.choices[-1] if flag.choices else {int: "7", float: "2.5"}.get(flag.kind, "some,text")
    text = {"drop-in": "ddp,sampler", "restart-window": "90s"}.get(flag.name, text)
    expected = True if flag.kind is None else flag.kind(text)
    default = getattr(parse(["a.py"], {}), flag.dest)
    assert default == (flag.default if flag.kind else False)
    assert default != expected
    names = [f"--{flag.name}", f"--{flag.dest}", *([f"-{flag.short}"] if flag.short else [])]
    for name in names:
        given = [name] if flag.kind is None else [name, text]
        assert getattr(parse([*given, "a.py"], {}), flag.dest) == expected
    assert flag.variable == f"PET_{flag.name.upper().replace('-', '_')}"
    environ = {flag.variable: "1" if flag.kind is None else text}
    assert getattr(parse(["a.py"], environ), flag.dest) == expected
    with pytest.raises(UsageError, match=rf"^unknown flag --{flag.name}x; did you mean --{flag.name}\?$"):
        parse([f"--{flag.name}x", "a.py"], {})


def test_dashes_and_underscores_mean_the_same():
    for spelling in ("--nproc-per-node", "--nproc_per_node"):
        assert parse([spelling, "4", "a.py"], {}).nproc_per_node == "4"
        assert parse([f"{spelling}=4", "a.py"], {}).nproc_per_node == "4"


def test_what_follows_the_script_belongs_to_the_script():
    args = parse(["--nnodes", "2", "a.py", "--nnodes", "9", "--no-such-flag", "-m"], {})
    assert args.nnodes == "2"
    assert args.training_script_args == ["--nnodes", "9", "--no-such-flag", "-m"]
    assert not args.module
    args = parse(["a.py", "--e", "--", "-r", "--help"], {})
    assert args.training_script_args == ["--e", "--", "-r", "--help"], "--e could mean two flags of ours"


def test_environment_gives_defaults_and_flags_win():
    environ = {"PET_NNODES": "1:4", "PET_STANDALONE": "1", "PET_MAX_RESTARTS": "7"}
    args = parse(["--max-restarts", "2", "a.py"], environ)
    assert (args.nnodes, args.standalone, args.max_restarts) == ("1:4", True, 2)
    assert not parse(["a.py"], {"PET_STANDALONE": "0"}).standalone


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nproc-pernode", "4", "a.py"], "unknown flag --nproc-pernode; did you mean --nproc-per-node?"),
        (["--max_restart=4", "--bogus", "a.py"], "unknown flag --bogus; see phalanx run --help"),
        (["--duplicate", "x", "a.py"], "flag --duplicate is ambiguous"),
        (["--max-restarts", "many", "a.py"], "invalid int value: 'many'"),
        (["--on-failure", "pray", "a.py"], "invalid choice: 'pray'"),
        ([], "no script given"),
    ],
)
def test_wrong_flags_get_one_line(argv, message):
    with pytest.raises(UsageError) as caught:
        parse(argv, {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_environment_variable_is_named():
    with pytest.raises(UsageError, match="PET_MAX_RESTARTS='x' does not fit --max-restarts"):
        parse(["a.py"], {"PET_MAX_RESTARTS": "x"})


@pytest.mark.parametrize("text", ["", "2:1", "0", "a", "1:2:3", "1:"])
def test_nonsense_nodes_are_refused(text):
    with pytest.raises(UsageError, match="--nnodes"):
        parse_nodes(text)


def test_settings_and_words():
    assert parse_settings("a=1, b=c=d") == {"a": "1", "b": "c=d"}
    with pytest.raises(UsageError, match="'oops'"):
        parse_settings("oops")
    assert words("apple,,pie,orange") == ["apple,pie", "orange"]


def test_one_node_is_standalone_unless_a_rendezvous_is_named():
    assert (config().rdzv_backend, config().rdzv_endpoint) == ("c10d", "localhost:0")
    static = config("--master-port", "29511")
    assert (static.rdzv_backend, static.rdzv_endpoint, static.rdzv_configs["rank"]) == (
        "static",
        "127.0.0.1:29511",
        0,
    )
    many = config("--nnodes", "2", "--node-rank", "1", "--master-addr", "node0")
    assert (many.rdzv_backend, many.rdzv_endpoint, many.rdzv_configs["rank"]) == ("static", "node0:29500", 1)
    elastic = config("--nnodes", "1:4", "--rdzv-backend", "etcd", "--rdzv-endpoint", "e:2379", "--rdzv-id", "j")
    assert (elastic.min_nodes, elastic.max_nodes, elastic.rdzv_endpoint, elastic.run_id) == (
        1,
        4,
        "e:2379",
        "j",
    )


def test_a_backend_without_endpoint_is_refused():
    with pytest.raises(UsageError, match="needs --rdzv-endpoint"):
        config("--nnodes", "2", "--rdzv-backend", "c10d")


def test_jobs_of_one_node_get_names_of_their_own():
    assert config().run_id != config().run_id


def test_max_restarts_depends_on_the_policy():
    assert config().max_restarts == 0
    assert config("--on-failure", "heal").max_restarts == 100
    assert config("--on-failure", "heal", "--max-restarts", "0").max_restarts == 0


def test_all_other_flags_reach_the_config():
    made = config(
        "--role", "trainer", "--log-dir", "/nowhere/logs", "-r", "3", "-t", "0:1", "--local-ranks-filter", "0,2",
        "--numa-binding", "exclusive", "--shutdown-timeout", "5", "--preload", "json,csv", "--hang-timeout", "9",
        "--standby", "2", "--virtual-local-rank", "--signals-to-handle", "SIGUSR1", "--start-method", "exec",
        "--duplicate-stdout-filters", "x", "--local-addr", "10.0.0.1", "--monitor-interval", "0.5",
    )  # fmt: skip
    assert made.role == "trainer"
    assert made.logs_specs._redirects == Std.ALL
    assert made.logs_specs._tee == {0: Std.OUT}
    assert made.logs_specs._local_ranks_filter == {0, 2}
    assert made.numa_options.affinity_mode is AffinityMode.EXCLUSIVE
    assert (made.shutdown_timeout, made.preload, made.hang_timeout, made.standby) == (
        5,
        ("json", "csv"),
        9.0,
        2,
    )
    assert (made.virtual_local_rank, made.signals_to_handle, made.start_method) == (True, "SIGUSR1", "exec")
    assert (made.duplicate_stdout_filters, made.local_addr, made.monitor_interval) == (["x"], "10.0.0.1", 0.5)


def test_a_missing_script_is_noticed_before_anything_starts(capsys):
    assert main(["no_such_file.py"]) == 2
    assert "script 'no_such_file.py' does not exist" in capsys.readouterr().err
    assert main(["-m", "no_such_package.train"]) == 2
    assert "module 'no_such_package.train' was not found" in capsys.readouterr().err
    assert main(["--no-python", "no-such-command"]) == 2
    assert "command 'no-such-command' was not found" in capsys.readouterr().err
    assert main(["-m", "--no-python", "x"]) == 2


def test_a_wrong_flag_is_answered_without_importing_torch():
    code = (
        "import sys; from phalanx.__main__ import main; code = main(['run', '--nproc-pre-node', '2', 'x.py']);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("phalanx run: unknown flag --nproc-pre-node; did you mean --nproc-per-node?")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nproc-per-node", "many"], "--nproc-per-node many; expected a number, auto, cpu, gpu or xpu"),
        (["--nproc-per-node", "0"], "--nproc-per-node 0; expected at least 1"),
        (["--nnodes", "3:1"], "--nnodes 3:1; expected 1 <= MIN <= MAX"),
        (["--local-ranks-filter", "0,x"], "--local-ranks-filter 0,x; expected numbers"),
        (["--rdzv-conf", "oops"], "--rdzv-conf has 'oops'; expected key=value"),
        (
            ["--rdzv-conf", "endpoint=h:1"],
            "--rdzv-conf has 'endpoint=h:1'; that is said with --rdzv-endpoint",
        ),
        (["--rdzv-conf", "lease=4,join_timout=9"], "'join_timout' is unknown (did you mean 'join_timeout'?)"),
        (["--rdzv-conf", "foo=1"], "'foo' is unknown; expected one of admit_delay, ca_cert"),
        (["--redirects", "7"], "streams are '7'; expected 0, 1, 2 or 3"),
        (["--signals-to-handle", "SIGX"], "unknown signal 'SIGX'"),
        (["--logs-specs", "none-such"], "no installed package offers it"),
        (["--numa-binding", "core"], "invalid choice: 'core'"),
        (["--max-restarts", "-1"], "max_restarts is -1; expected 0 or more"),
        (["--log-dir", __file__], "which is a file; expected a directory"),
    ],
)
def test_wrong_values_get_one_line_and_code_2(flags, message, capsys):
    assert main([*flags, __file__]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("phalanx run: ")
    assert printed.count("\n") == 1
    assert message in printed


def test_every_setting_that_backends_read_is_in_the_table_and_in_the_manual():
    source = Path(_settings.__file__).parent
    text = "".join(path.read_text() for path in source.glob("*.py"))
    read = set(re.findall(r"params\.get(?:_as_\w+)?\(\s*\"(\w+)\"", text))
    assert read == _settings.SETTINGS
    manual = (Path(__file__).parents[2] / "docs" / "rendezvous.md").read_text()
    assert [key for key in _settings.SETTINGS if f"`{key}" not in manual] == []
    _settings.check_settings(["heartbeat_timeout", "use_libuv", "rank"], "c10d")  # a torchrun user's
    _settings.check_settings(["anything"], "a-plugin")


def test_unknown_commands_get_the_nearest(capsys):
    from phalanx.__main__ import main as phalanx

    assert phalanx(["rum"]) == 2
    assert "did you mean run?" in capsys.readouterr().err
    assert phalanx(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out


def test_the_number_of_workers_is_a_number_or_what_the_machine_has(monkeypatch):
    devices = {"auto": 0, "gpu": 0, "xpu": 2}
    monkeypatch.setattr("phalanx.launch.cli._run_command._usable_cpus", lambda: 6)
    monkeypatch.setattr("phalanx.launch.cli._run_command._count_devices", devices.__getitem__)
    assert [local_world_size(text) for text in ("3", "cpu", "auto", "xpu")] == [3, 6, 6, 2]
    with pytest.raises(UsageError, match=r"^--nproc-per-node gpu: this machine has no such device"):
        local_world_size("gpu")
    devices.update(auto=4, gpu=4)
    assert [local_world_size(text) for text in ("cpu", "auto", "gpu")] == [6, 4, 4]
    for text in ("0", "-1", "tpu"):
        with pytest.raises(UsageError, match=f"^--nproc-per-node {text}; expected"):
            local_world_size(text)


def test_the_usable_cpus_are_those_this_process_may_run_on(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 2, 5}, raising=False)
    assert local_world_size("cpu") == 3
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert local_world_size("cpu") == 8


def test_devices_that_torch_cannot_be_asked_about_are_none(monkeypatch):
    class Answer:
        stdout = ""

    asked = []
    monkeypatch.setattr("subprocess.run", lambda command, **_: asked.append(command[-1]) or Answer)
    with pytest.raises(UsageError, match="no such device"):
        local_world_size("gpu")
    Answer.stdout = "a banner\n3\n"
    assert local_world_size("gpu") == 3
    assert all("count_usable('gpu')" in question for question in asked)
