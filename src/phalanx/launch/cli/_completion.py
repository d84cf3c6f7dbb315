"""Writes what bash, zsh and fish need to complete ``phalanx``: ``phalanx completion SHELL``.

Made from the same tables and parsers that read the command lines, so it cannot name a flag that is not there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from phalanx.launch.cli._flags import FLAGS

PARSERS = {
    "scale": ("phalanx.launch.cli._scale", "scale_parser"),
    "drain": ("phalanx.launch.cli._scale", "drain_parser"),
    "save": ("phalanx.launch.cli._scale", "save_parser"),
    "stop": ("phalanx.launch.cli._scale", "stop_parser"),
    "status": ("phalanx.launch.cli._status_command", "parser"),
    "events": ("phalanx.launch.cli._events_command", "events_parser"),
    "logs": ("phalanx.launch.cli._look_commands", "logs_parser"),
    "report": ("phalanx.launch.cli._look_commands", "report_parser"),
    "dashboard": ("phalanx.launch.cli._look_commands", "dashboard_parser"),
    "doctor": ("phalanx.launch.cli._doctor", "doctor_parser"),
}
OTHERS: dict[str, dict[str, str]] = {
    "completion": {},
    "inspect": {"--help": "", "--json": "as JSON"},
    "export": {
        "--help": "",
        "--format": "hf, dcp or torch",
        "--names": "only tensors whose names fit",
        "--dtype": "cast floating-point tensors",
        "--overwrite": "replace what is there",
        "--json": "say what was written as JSON",
    },
}
"""Commands whose parsers would import torch, which takes seconds that whoever opens a shell would wait for."""
SHELLS = ("bash", "zsh", "fish")


def main(argv: Sequence[str]) -> int:
    """Run ``phalanx completion`` with these arguments; the exit code."""
    if len(argv) != 1 or argv[0] not in SHELLS:
        print(f"usage: phalanx completion {{{','.join(SHELLS)}}}", file=sys.stderr)
        return 2
    print({"bash": bash, "zsh": zsh, "fish": fish}[argv[0]](flags_by_command()))
    return 0


def flags_by_command() -> dict[str, dict[str, str]]:
    """Return the flags of every command, with what each does."""
    found = {"run": {f"--{flag.name}": flag.help for flag in FLAGS}}
    for name, (module, function) in PARSERS.items():
        parser: argparse.ArgumentParser = getattr(import_module(module), function)()
        found[name] = {
            option: action.help or ""
            for action in parser._actions
            for option in action.option_strings
            if option.startswith("--") and "_" not in option
        }
    return {**found, **OTHERS}


def bash(flags: dict[str, dict[str, str]]) -> str:
    """Return what ``source <(phalanx completion bash)`` reads."""
    cases = "\n".join(f'    {name}) words="{" ".join(options)}" ;;' for name, options in flags.items())
    return f"""_phalanx() {{
  local words="{" ".join(flags)}" current="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -gt 1 ]; then
    case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="" ;;
    esac
    case "$current" in -*) ;; *) COMPREPLY=($(compgen -f -- "$current")); return ;; esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -F _phalanx phalanx"""


def zsh(flags: dict[str, dict[str, str]]) -> str:
    """Return the file ``_phalanx`` for a directory of ``fpath``."""
    cases = "\n".join(f"    {name}) compadd -- {' '.join(options)}; _files ;;" for name, options in flags.items())
    return f"""#compdef phalanx
_phalanx() {{
  if (( CURRENT == 2 )); then
    compadd -- {" ".join(flags)}
    return
  fi
  case "$words[2]" in
{cases}
  esac
}}
_phalanx "$@\""""


def fish(flags: dict[str, dict[str, str]]) -> str:
    """Return the file ``phalanx.fish`` for fish's directory of completions."""
    lines = [f'complete -c phalanx -n __fish_use_subcommand -a "{" ".join(flags)}"']
    for name, options in flags.items():
        for option, text in options.items():
            said = text.replace("\\", "\\\\").replace("'", "\\'")
            when, flag = f"'__fish_seen_subcommand_from {name}'", option.removeprefix("--")
            lines.append(f"complete -c phalanx -n {when} -l {flag} -d '{said}'")
    return "\n".join(lines)
