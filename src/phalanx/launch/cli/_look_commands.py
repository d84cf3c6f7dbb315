"""Shows what a job has told: ``phalanx logs``, ``report`` and ``dashboard``.

Each takes a log directory, or finds the running job by itself: through its page where it has one, else by the log
directories of its agents on this machine.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

from phalanx.launch.cli._flags import UsageError
from phalanx.launch.cli._jobs import (
    CommandParser,
    PageClient,
    directory_of,
    find_job,
    guarded,
    job_parser,
    log_dirs_here,
    open_job,
    page_of,
    pages_elsewhere,
)

LOOK_EVERY = 0.3


def logs_parser() -> CommandParser:
    parser = job_parser("logs", "Show what the workers of a job wrote to their log files.")
    parser.add_argument("log_dir", nargs="?", default="", help="of a job that ended, or runs elsewhere")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as long as the job does")
    parser.add_argument("--rank", type=int, default=None, help="of this rank only")
    parser.add_argument("--node", default="", help="of nodes whose host name starts with this")
    return parser


def report_parser() -> CommandParser:
    parser = job_parser("report", "Write one HTML file about a job, with everything in it.")
    parser.add_argument("log_dir", nargs="?", default="", help="of a job that ended, or runs elsewhere")
    parser.add_argument("-o", "--output", default="report.html", help="the file to write (report.html)")
    return parser


def dashboard_parser() -> CommandParser:
    parser = CommandParser(prog="phalanx dashboard", description="Show a job from its log directory, live if it runs.")
    parser.add_argument("log_dir", help="as given to phalanx run --log-dir, or to RunOptions(log_dir=...)")
    parser.add_argument("--bind", default="8080", help="[HOST:]PORT to serve at (8080, on this machine only)")
    return parser


def main_logs(argv: Sequence[str]) -> int:
    """Run ``phalanx logs`` with these arguments; the exit code."""
    return guarded("logs", logs_parser(), argv, _logs)


def main_report(argv: Sequence[str]) -> int:
    """Run ``phalanx report`` with these arguments; the exit code."""
    return guarded("report", report_parser(), argv, _report)


def main_dashboard(argv: Sequence[str]) -> int:
    """Run ``phalanx dashboard`` with these arguments; the exit code."""
    return guarded("dashboard", dashboard_parser(), argv, _dashboard)


# -- logs -----------------------------------------------------------------------------------------------------------


def _logs(args: Namespace) -> int:
    from phalanx.watch._log_files import log_files, new_lines  # start-up

    nodes: list[_NodeLogs] = []
    if args.log_dir:
        directories = [directory_of(args.log_dir)]
    else:
        job = find_job(args.rdzv_endpoint, args.rdzv_backend, args.rdzv_id)
        directories = [Path(directory) for directory in log_dirs_here(job)]
        with open_job(job) as (store, secret):
            nodes = [_NodeLogs(page, args) for page in pages_elsewhere(store, secret, is_here=bool(directories))]
    positions: dict[Path, int] = {}
    found = False
    while True:
        is_over = not args.follow or (_has_ended(directories) if args.log_dir else not log_dirs_here(job))
        for file in log_files(directories):
            if (args.rank is None or args.rank == file.rank) and file.host.startswith(args.node):
                found = True
                lines, positions[file.path] = new_lines(file.path, positions.get(file.path, 0))
                for line in lines:
                    _print_line(line, file.stream, file.rank, args)
        for node in nodes:
            found = node.show() or found
        if is_over and not (args.follow and any(node.answers for node in nodes)):
            break  # asked before the files were read: what was written last is shown
        time.sleep(LOOK_EVERY)
    if not found:
        raise UsageError(
            "no log files of such workers are here or at the pages of the job's agents; run it with "
            "--log-dir DIR --tee 3 (or --redirects 3)"
        )
    return 0


class _NodeLogs:
    """The log files of a node that is another machine, from its agent's page."""

    def __init__(self, page: PageClient, args: Namespace) -> None:
        self._page = page
        self._args = args
        self._since = ""
        self.answers = True

    def show(self) -> bool:
        """Print what is new; whether there are lines of such workers."""
        found = False
        while self.answers:
            wish = {"rank": "" if self._args.rank is None else self._args.rank, "node": self._args.node}
            try:
                answer = self._page.get(f"/api/v1/logs?{urlencode({**wish, 'since': self._since})}")
            except UsageError as problem:
                if not self._since:
                    print(f"phalanx logs: {problem}", file=sys.stderr)
                self.answers = False
                break
            self._since = answer["since"]
            for one in answer["lines"]:
                found = True
                _print_line(one["line"], one["stream"], one["rank"], self._args)
            if not answer["more"]:
                break
        return found


def _has_ended(directories: list[Path]) -> bool:
    """Return whether the events in these directories say that the job is over."""
    from phalanx.watch._files import load_hub  # start-up

    return all(load_hub(directory).view.is_over for directory in directories)


def _print_line(line: str, stream: str, rank: int, args: Namespace) -> None:
    if args.json:
        print(json.dumps({"rank": rank, "stream": stream, "line": line}), flush=True)
    else:
        print(f"rank {rank}: {line}", flush=True)


# -- report, dashboard ----------------------------------------------------------------------------------------------


def _report(args: Namespace) -> int:
    from phalanx.watch._report import report_data, write_report  # start-up

    if args.log_dir:
        data = report_data([directory_of(args.log_dir)])
    else:
        job = find_job(args.rdzv_endpoint, args.rdzv_backend, args.rdzv_id)
        directories = log_dirs_here(job)
        with open_job(job) as (store, secret):
            page = page_of(store, secret)
        if page is not None:
            data = page.get("/api/v1/page?details=1") | {"live": False}
        elif directories:
            data = report_data([Path(directory) for directory in directories])
        else:
            raise UsageError(f"job {job.run_id!r} keeps no events: run it with --dashboard PORT or --log-dir DIR")
    if args.json:
        print(json.dumps(data))
        return 0
    out = Path(args.output)
    try:
        write_report(out, data)
    except OSError as error:
        print(f"phalanx report: the report cannot be written to {out}: {error}", file=sys.stderr)
        return 1
    print(f"{data['summary']['goodput']['text']}; the report is {out}")
    return 0


def _dashboard(args: Namespace) -> int:
    from phalanx.watch._access import PageAccess  # start-up
    from phalanx.watch._files import Tail
    from phalanx.watch._http import HttpServer, parse_address
    from phalanx.watch._hub import Hub
    from phalanx.watch._site import Site

    directory = directory_of(args.log_dir)
    host, port = parse_address(args.bind)
    hub, stopped = Hub(), threading.Event()
    access = PageAccess(host=host)
    site = Site(hub, access)
    server = HttpServer(site.answer, host, port)
    try:
        server.start()
    except OSError as error:
        raise UsageError(f"cannot listen at {args.bind}: {error}") from None
    suffix = "" if access.token is None else f"?token={access.token}"
    print(f"{directory} is shown at http://{host}:{server.port}/{suffix} (Ctrl-C ends it)", flush=True)
    try:
        Tail(hub, [directory]).follow(stopped)
    finally:
        site.close()
        server.stop()
    return 0
