"""Turns an entrypoint and a start method into the order that a parked process gets.

Owns the table of start methods. Scripts: ``warm`` runs them in the forked process, every other method except ``fork``
and ``forkserver`` gives a fresh interpreter. Functions: ``fork`` takes them from the zygote's memory, ``forkserver``
unpickles them in a fork of a clean process that has torch, ``spawn`` in a fresh interpreter. Commands are exec'd.

Functions that exist in this process only (typed at a prompt or in a notebook's cell) are forked, whatever start method
was asked for: pickle sends a function by the name of its module, and a fresh interpreter finds no file behind the
``__main__`` of a session.
"""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from phalanx.launch.config._worker_spec import Entrypoint, Script
from phalanx.launch.workers._call import write_payload
from phalanx.launch.workers._script import interpreter_command

log = logging.getLogger(__name__)

SCRIPT_METHODS = ("warm", "exec", "spawn", "fork", "forkserver")
FUNCTION_METHODS = ("spawn", "fork", "forkserver")
LOCAL_RANK_MACRO = "${local_rank}"


@dataclass(frozen=True, kw_only=True)
class WorkerStart:
    """Says what the workers of a job run and how they are started; made once for a launch."""

    entrypoint: Entrypoint
    args: tuple[Any, ...]
    method: str
    name: str = "main"
    """Under which a zygote that is a fork of the caller knows the function."""

    def __post_init__(self) -> None:
        allowed = FUNCTION_METHODS if callable(self.entrypoint) else SCRIPT_METHODS
        if self.method not in allowed:
            raise ValueError(f"start_method is {self.method!r}; expected one of {', '.join(allowed)}")

    @classmethod
    def choose(cls, entrypoint: Entrypoint, args: tuple[Any, ...], method: str) -> WorkerStart:
        """Choose how to start an entrypoint; a function that no other method can bring to its workers is forked."""
        if callable(entrypoint):
            method = method_that_works(entrypoint, args, method)
        return cls(entrypoint=entrypoint, args=args, method=method)

    def check(self) -> None:
        """Fail now rather than after the rendezvous: ``TypeError`` when the function cannot reach its workers."""
        if callable(self.entrypoint) and self.method != "fork":
            os.close(write_payload(self.entrypoint, self.args))

    @property
    def is_function(self) -> bool:
        return callable(self.entrypoint)

    @property
    def copies_caller(self) -> bool:
        """Whether workers are forks of the calling process, with its memory."""
        return self.is_function and self.method == "fork"

    @property
    def is_warm(self) -> bool:
        """Whether workers run inside the zygote's fork, so that its imports are theirs."""
        if isinstance(self.entrypoint, Script):
            return self.method in ("warm", "fork", "forkserver") and not os.environ.get("PYTHON_EXEC")
        return self.is_function and self.method != "spawn"

    def cold(self) -> WorkerStart:
        """Return the same for fresh interpreters: for processes that were forked before anything was imported."""
        return replace(self, method="spawn" if self.is_function else "exec") if self.is_warm else self

    def order(
        self, env: Mapping[str, str], local_rank: int, stacks: str, scratch: str = ""
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """Return the order and the descriptors that go with it (the caller closes them after sending)."""
        order: dict[str, Any] = {
            "env": dict(env),
            "cpus": [],
            "cwd": os.getcwd(),
            "name": "python",
            "stacks": stacks,
            "scratch": scratch,
        }
        fds: dict[str, int] = {}
        if callable(self.entrypoint):
            if self.method != "fork":
                fds["payload"] = write_payload(self.entrypoint, self.args)
            if self.method == "spawn":
                order |= self._executed(
                    interpreter_command(["-m", "phalanx.launch.workers._call"]), env, stacks, scratch
                )
            else:
                order |= {"kind": "call", "function": self.name}
            return order, fds
        words = [str(arg).replace(LOCAL_RANK_MACRO, str(local_rank)) for arg in self.args]
        if isinstance(self.entrypoint, str):
            order |= self._executed([self.entrypoint, *words], env)
        elif self.is_warm:
            script = self.entrypoint
            order |= {"kind": "script", "target": script.target, "is_module": script.is_module, "args": words}
            order["command"] = _interpreter(script, words)  # should warm start turn out not to do
        else:
            order |= self._executed(_interpreter(self.entrypoint, words), env, stacks, scratch)
        return order, fds

    def _executed(
        self, command: list[str], env: Mapping[str, str], stacks: str = "", scratch: str = ""
    ) -> dict[str, Any]:
        extra = {"PHALANX_STACKS_FILE": stacks, "PHALANX_SCRATCH": scratch}
        return {
            "kind": "exec",
            "command": command,
            "env": {**env, **{name: value for name, value in extra.items() if value}},
        }


def _interpreter(script: Script, words: list[str]) -> list[str]:
    flag = ["-m"] if script.is_module else []
    foreign = os.environ.get("PYTHON_EXEC")
    if foreign:  # another interpreter may not have us installed: start the script plainly
        return [foreign, "-u", *flag, script.target, *words]
    return interpreter_command(["-m", "phalanx.launch.workers._script", *flag, script.target, *words])


def method_that_works(fn: Callable[..., Any], args: tuple[Any, ...], method: str) -> str:
    """Return ``method``, or ``fork`` (and a line that says so) where nothing else can bring the function to its
    workers."""
    why = "" if method == "fork" else why_only_here(fn, args)
    if not why:
        return method
    used = _accelerator_in_use()
    if used:
        raise TypeError(
            f"{why}, so that its workers must be forked; but this process has used {used.upper()}, which forks cannot. "
            "Write the function to a file (%%writefile in a notebook) and import it"
        )
    log.warning("%s: its workers are forked from this process (start_method='fork', not %r)", why, method)
    return "fork"


def _accelerator_in_use() -> str:
    if "torch" not in sys.modules:
        return ""
    from phalanx._devices import used_before_fork  # start-up speed: torch is there already

    return used_before_fork()


def why_only_here(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return why a fresh interpreter could not find the function or its arguments; "" when it can, or pickle itself
    refuses.

    >>> why_only_here(os.getcwd, ())
    ''
    """
    try:
        mentions_main = b"__main__" in pickle.dumps((fn, args))
    except Exception:  # whoever sends them says what is wrong
        return ""
    if not mentions_main:
        return ""
    name = getattr(fn, "__qualname__", repr(fn))
    if not _has_a_file(sys.modules["__main__"]):
        return f"the function {name} or its arguments are defined in an interactive session"
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if fn.__module__ == "__main__" and code is not None and not os.path.exists(code.co_filename):
        return f"the function {name} was typed into an interactive session"
    return ""


def _has_a_file(main: Any) -> bool:
    if getattr(main, "__spec__", None) is not None:
        return True  # python -m name: found by that name again
    return os.path.exists(getattr(main, "__file__", None) or "")
