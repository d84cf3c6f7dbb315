"""Parses the flags of ``phalanx run``: one table, errors of one line.

Owns the flags that mean something together with others (those that set one field of ``LaunchConfig`` are described
there), the ``PET_*`` variables of all, and the search for the flag that a person meant. Flags may be written with
dashes or underscores. Imports nothing heavy: a wrong flag is answered at once.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from phalanx._drop_in import PARTS
from phalanx.launch.cli._config_file import config_path, read_config_file
from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.config._flag import Flag, flags_of
from phalanx.launch.config._flag import UsageError as UsageError

FLAGS = (
    Flag(name="config", help="a TOML file with any of these flags, script, args; flags win (docs/watch-commands.md)"),
    Flag(name="nnodes", default="1", help="number of nodes, or MIN:MAX for an elastic job"),
    Flag(name="nproc-per-node", default="1", help="workers per node: a number, auto, cpu, gpu or xpu"),
    Flag(name="rdzv-id", default="", help="the job's name, the same on all nodes"),
    Flag(name="rdzv-conf", default="", help="more rendezvous settings: key=value,key=value"),
    Flag(
        name="standalone",
        kind=None,
        help="one node, own rendezvous on a free port (the default for one node)",
    ),
    Flag(name="module", short="m", kind=None, help="the script is a module name, as in python -m"),
    Flag(name="no-python", kind=None, help="the script is a command, not Python"),
    Flag(name="run-path", kind=None, help="accepted for torchrun's sake: scripts always run that way"),
    Flag(name="log-dir", help="where log files go; a directory per run is made in it"),
    Flag(name="redirects", short="r", default="0", help="streams to log files: 0..3, or rank:value,..."),
    Flag(name="tee", short="t", default="0", help="streams to log files and console, as --redirects"),
    Flag(name="local-ranks-filter", default="", help="local ranks whose output is shown, comma-separated"),
    Flag(name="node-rank", kind=int, default=0, help="this node's rank (static rendezvous)"),
    Flag(name="master-addr", default="127.0.0.1", help="address of node 0 (static rendezvous)"),
    Flag(name="master-port", kind=int, help="port on node 0 (static rendezvous; 29500)"),
    Flag(name="logs-specs", help="name of an installed LogsSpecs plugin"),
    Flag(
        name="numa-binding",
        choices=("node", "socket", "exclusive", "core-complex"),
        help="bind workers to CPUs: node, socket, exclusive or core-complex",
    ),
    *flags_of(LaunchConfig),
)


USE_ENV = Flag(name="use-env", kind=None, help="workers find their local rank in LOCAL_RANK, not in --local-rank")
"""The one flag that ``python -m phalanx.launch`` has and ``phalanx run`` has not."""


def parse(argv: Sequence[str], environ: Mapping[str, str], *, gives_local_rank: bool = False) -> argparse.Namespace:
    """Return the flags' values, ``training_script`` and ``training_script_args``. ``UsageError`` for nonsense.

    ``gives_local_rank``: of ``python -m phalanx.launch``, where scripts find it among their arguments.
    """
    flags = (*FLAGS, USE_ENV) if gives_local_rank else FLAGS
    argv = with_values(argv, flags)
    num_ours = _check_names(argv, flags)
    prog = "python -m phalanx.launch" if gives_local_rank else "phalanx run"
    parser = _Parser(prog=prog, description="Run a script on the workers of a job.")
    path = config_path(argv[:num_ours], environ)
    told = read_config_file(path, flags) if path else {}
    for flag in flags:
        _add(parser, flag, environ, told)
    script = told.get("script")
    many = "?" if script is not None else None
    parser.add_argument("training_script", nargs=many, help="the script (or module, or command) that every worker runs")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    # What follows the script is not shown to argparse, which would take its flags for beginnings of ours.
    args = parser.parse_args(argv[: num_ours + 1])
    args.training_script_args += argv[num_ours + 1 :]
    if args.training_script is None:
        args.training_script, args.training_script_args = script, list(told.get("args", ()))
    args.use_env = getattr(args, "use_env", True)
    if args.no_python and not args.use_env:
        raise UsageError("--no-python needs --use-env: a command need not know what --local-rank is")
    return args


def with_values(argv: Sequence[str], flags: Sequence[Flag]) -> list[str]:
    """Give a bare ``--drop-in`` before the script its value: it means all parts unless a list of parts follows.

    >>> with_values(["--drop-in", "train.py"], FLAGS), with_values(["--drop-in", "ddp", "train.py"], FLAGS)
    (['--drop-in=all', 'train.py'], ['--drop-in=ddp', 'train.py'])
    """
    with_value = [name for flag in flags if flag.kind for name in (f"--{flag.name}", f"-{flag.short or ' '}")]
    words = list(argv)
    skip = False
    for at, word in enumerate(words):
        if skip:
            skip = False
            continue
        if not word.startswith("-"):
            break
        name = word.replace("_", "-")
        if name == "--drop-in":
            following = words[at + 1] if at + 1 < len(words) else ""
            is_list = bool(following) and all(part in PARTS for part in following.split(","))
            words[at : at + 1 + is_list] = [f"--drop-in={following if is_list else 'all'}"]
            break
        skip = any(known.startswith(name) for known in with_value)
    return words


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if message == "the following arguments are required: training_script, training_script_args":
            message = "no script given; expected phalanx run [flags] script.py [its arguments]"
        raise UsageError(message)


def _add(parser: argparse.ArgumentParser, flag: Flag, environ: Mapping[str, str], told: Mapping[str, Any]) -> None:
    names = [f"-{flag.short}"] if flag.short else []
    names.append(f"--{flag.name}")
    if flag.dest != flag.name:
        names.append(f"--{flag.dest}")
    text = environ.get(flag.variable)
    if flag.dest in told:
        shape: dict[str, Any] = {"action": "store_true"} if flag.kind is None else {"type": flag.kind}
        if flag.choices:
            shape["choices"] = flag.choices
        parser.add_argument(*names, dest=flag.dest, default=told[flag.dest], help=flag.help, **shape)
        return
    if flag.kind is None:
        is_on = text is not None and text.strip().lower() not in ("", "0", "false", "no", "off")
        parser.add_argument(*names, dest=flag.dest, action="store_true", default=is_on, help=flag.help)
        return
    default = flag.default
    if text is not None:
        try:
            default = flag.kind(text)
        except ValueError:
            raise UsageError(f"environment variable {flag.variable}={text!r} does not fit --{flag.name}") from None
        if flag.choices and default not in flag.choices:
            raise UsageError(f"environment variable {flag.variable}={text!r}; expected {', '.join(flag.choices)}")
    parser.add_argument(*names, dest=flag.dest, type=flag.kind, default=default, choices=flag.choices, help=flag.help)


def _check_names(argv: Sequence[str], flags: Sequence[Flag]) -> int:
    """Refuse an unknown flag by the nearest known one. Stops at the script, what follows belongs to it; returns how
    many words come before."""
    by_name = {f"--{flag.name}": flag for flag in flags} | {f"-{flag.short}": flag for flag in flags if flag.short}
    skip = False
    for place, word in enumerate(argv):
        if skip:
            skip = False
            continue
        if not word.startswith("-") or word == "-":
            return place
        name, has_value, _ = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name in ("--help", "-h"):
            return place
        matches = [known for known in by_name if known == name] or [
            known for known in by_name if known.startswith(name)
        ]
        if not name.startswith("--") and name[:2] in by_name:  # -r3, as in -r 3
            matches, has_value = [name[:2]], "=" if len(name) > 2 else has_value
        if len(matches) != 1:
            raise UsageError(_unknown(word.partition("=")[0], name, list(by_name), matches))
        skip = by_name[matches[0]].kind is not None and not has_value
    return len(argv)


def _unknown(written: str, name: str, known: list[str], matches: list[str]) -> str:
    if matches:
        return f"flag {written} is ambiguous: {', '.join(sorted(matches))}"
    near = difflib.get_close_matches(name.strip("-"), [flag.lstrip("-") for flag in known], n=1)
    hint = f"did you mean --{near[0]}?" if near else "see phalanx run --help"
    return f"unknown flag {written}; {hint}"
