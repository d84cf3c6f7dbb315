"""Asks a running job for more or fewer workers (``phalanx scale``), to drain a node, to save, to stop.

Owns these commands; what they write into the job's store is ``_asking``'s, and the agents and workers do the rest.
"""

from __future__ import annotations

import getpass
import json
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from phalanx.launch.cli._flags import UsageError
from phalanx.launch.cli._jobs import CommandParser, find_job, job_parser, open_job
from phalanx.launch.system._folders import RunningJob

if TYPE_CHECKING:
    from phalanx.launch.recovery._asking import Asking


def scale_parser() -> CommandParser:
    parser = job_parser("scale", "Change the number of workers of a running job.")
    parser.add_argument("--nproc", type=int, required=True, help="workers per node from now on")
    parser.add_argument(
        "--node", default="", help="only nodes whose id starts with this (host name first); default: all"
    )
    return parser


def drain_parser() -> CommandParser:
    parser = job_parser("drain", "Let the workers of a node leave at their next step; the others go on.")
    parser.add_argument("node", help="the node: the beginning of its id (host name first)")
    return parser


def save_parser() -> CommandParser:
    return job_parser("save", "Save the state of an elastic job after its next step.")


def stop_parser() -> CommandParser:
    parser = job_parser("stop", "Stop a job: its workers leave at their next step, and save if they can.")
    parser.add_argument("--reason", default="", help="for the log and the events")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run ``phalanx scale`` with these arguments; the exit code."""

    def ask(asking: Asking, args: Namespace) -> tuple[str, dict[str, Any]]:
        nodes = asking.scale(args.nproc, args.node)
        return (
            f"asked {len(nodes)} node(s) for {args.nproc} worker(s) each: {', '.join(nodes)}",
            {"nodes": nodes, "nproc": args.nproc},
        )

    def check(args: Namespace) -> None:
        if args.nproc < 1:
            raise UsageError(f"--nproc {args.nproc}; expected at least 1 (a job is ended by phalanx stop)")

    return _run("scale", scale_parser(), argv, ask, check)


def main_drain(argv: Sequence[str]) -> int:
    """Run ``phalanx drain`` with these arguments; the exit code."""

    def ask(asking: Asking, args: Namespace) -> tuple[str, dict[str, Any]]:
        node = asking.drain(args.node)
        return f"node {node} is to be drained; phalanx events tells how it goes", {"node": node}

    return _run("drain", drain_parser(), argv, ask)


def main_save(argv: Sequence[str]) -> int:
    """Run ``phalanx save`` with these arguments; the exit code."""

    def ask(asking: Asking, args: Namespace) -> tuple[str, dict[str, Any]]:
        number = asking.save()
        return "asked for a save after the next step of the first worker", {"request": number}

    return _run("save", save_parser(), argv, ask)


def main_stop(argv: Sequence[str]) -> int:
    """Run ``phalanx stop`` with these arguments; the exit code."""

    def ask(asking: Asking, args: Namespace) -> tuple[str, dict[str, Any]]:
        reason = args.reason or f"phalanx stop, by {_whoami()}"
        asking.stop(reason)
        return "asked all agents to stop", {"reason": reason}

    return _run("stop", stop_parser(), argv, ask)


def _run(
    name: str,
    parser: CommandParser,
    argv: Sequence[str],
    ask: Callable[[Asking, Namespace], tuple[str, dict[str, Any]]],
    check: Callable[[Namespace], None] = lambda args: None,
) -> int:
    try:
        args = parser.parse_args(argv)
        check(args)
        job = find_job(args.rdzv_endpoint, args.rdzv_backend, args.rdzv_id)
        with open_job(job) as (store, _):
            from phalanx.launch.recovery._asking import Asking  # start-up

            asking = Asking(store)
            if not asking.nodes():
                raise UsageError(f"no job {job.run_id!r} at {job.store_url}")
            text, record = ask(asking, args)
    except (ValueError, ConnectionError) as error:
        print(f"phalanx {name}: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"job": job.run_id, **record}) if args.json else text)
    return 0


def _whoami() -> str:
    try:
        return f"{getpass.getuser()} on {socket.gethostname()}"
    except (KeyError, OSError):  # a user without a name
        return socket.gethostname()


def scale(url: str, run_id: str, size: int, node: str = "", *, secret_file: str = "") -> list[str]:
    """Ask the nodes of a job for ``size`` workers each; the ids of those that were asked."""
    from phalanx.launch.recovery._asking import Asking  # start-up

    with open_job(RunningJob(run_id=run_id, store_url=url, secret_file=secret_file)) as (store, _):
        asking = Asking(store)
        if not asking.nodes():
            raise UsageError(f"no job {run_id!r} at {url}")
        return asking.scale(size, node)
