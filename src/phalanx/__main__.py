"""Runs ``phalanx`` and ``python -m phalanx``: one command, its subcommands loaded only when asked for.

Owns the table of subcommands. Each is a function ``(argv) -> exit code`` of a module, ``main`` unless it is named.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

# Subcommand -> (module, or module:function where it is not main; what it does).
COMMANDS = {
    "run": ("phalanx.launch.cli._run_command", "run a script on the workers of a job"),
    "status": ("phalanx.launch.cli._status_command", "say how a running job is"),
    "events": ("phalanx.launch.cli._events_command:main_events", "show what happens to a job"),
    "logs": ("phalanx.launch.cli._look_commands:main_logs", "show what its workers wrote"),
    "report": ("phalanx.launch.cli._look_commands:main_report", "write one HTML file about a job"),
    "dashboard": ("phalanx.launch.cli._look_commands:main_dashboard", "show a job from its log directory"),
    "scale": ("phalanx.launch.cli._scale", "change the number of workers of a running job"),
    "drain": ("phalanx.launch.cli._scale:main_drain", "let the workers of a node leave"),
    "save": ("phalanx.launch.cli._scale:main_save", "save after the next step"),
    "stop": ("phalanx.launch.cli._scale:main_stop", "stop a running job"),
    "doctor": ("phalanx.launch.cli._doctor", "check this machine and say in plain words what is wrong"),
    "completion": ("phalanx.launch.cli._completion", "write completions for bash, zsh or fish"),
    "inspect": ("phalanx.checkpoint._commands:inspect_main", "show what a checkpoint holds"),
    "export": ("phalanx.checkpoint._commands:export_main", "write a checkpoint for other tools"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from phalanx import __version__  # start-up: of no use to the other commands

        print(f"phalanx {__version__}")
        return 0
    if words[0] not in COMMANDS:
        import difflib  # start-up: it is not small

        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(COMMANDS)}"
        print(f"phalanx: unknown command {words[0]!r}; {hint}", file=sys.stderr)
        return 2
    module, _, function = COMMANDS[words[0]][0].partition(":")
    code: int = getattr(import_module(module), function or "main")(words[1:])
    return code


def _usage() -> str:
    lines = [f"  {name:10} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: phalanx COMMAND ...", "", *lines, "", "phalanx COMMAND --help says more."])


if __name__ == "__main__":
    sys.exit(main())
