"""Runs ``phalanx`` and ``python -m phalanx``: one command, its subcommands loaded only when asked for.

Owns the table of subcommands. Each is a module with ``main(argv) -> exit code``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

# Subcommand -> (module, what it does).
COMMANDS = {
    "run": ("phalanx.launch.cli._run_command", "run a script on the workers of a job"),
    "scale": ("phalanx.launch.cli._scale", "change the number of workers of a running job"),
    "doctor": ("phalanx.launch.cli._doctor", "check this machine and say in plain words what is wrong"),
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
    module = import_module(COMMANDS[words[0]][0])
    code: int = module.main(words[1:])
    return code


def _usage() -> str:
    lines = [f"  {name:8} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: phalanx COMMAND ...", "", *lines, "", "phalanx COMMAND --help says more."])


if __name__ == "__main__":
    sys.exit(main())
