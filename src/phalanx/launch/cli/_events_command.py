"""Shows what happens to a job, a line for each event: ``phalanx events``.

From a log directory, from the page of a running job, or from the log directories of its agents on this machine. Who
follows a page goes on at the next agent when the one that serves is gone: that one has numbers of its own and tells
again what it keeps, so events are known by what they say, and each is shown once.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
)
from phalanx.launch.system._folders import RunningJob

LOOK_EVERY = 0.3
PATIENCE = 60.0
"""Seconds without an agent that answers after which who follows is told that it ends."""
PER_ANSWER = 10_000
"""Events that are asked for at once: as many as an agent gives."""
MAX_SEEN = 100_000
"""Events that are known again when another agent tells them."""
TOO_MANY = ("step", "times", "node_load")
"""Kinds that are shown with ``--all`` only."""


def events_parser() -> CommandParser:
    parser = job_parser("events", "Show what happens to a job: one line for each event.")
    parser.add_argument("log_dir", nargs="?", default="", help="of a job that ended, or runs elsewhere")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as long as the job does")
    parser.add_argument("--all", action="store_true", help="also each step, and the load of nodes")
    return parser


def main_events(argv: Sequence[str]) -> int:
    """Run ``phalanx events`` with these arguments; the exit code."""
    return guarded("events", events_parser(), argv, _events)


def _events(args: Namespace) -> int:
    if args.log_dir:
        return _events_of_files([directory_of(args.log_dir)], args)
    job = find_job(args.rdzv_endpoint, args.rdzv_backend, args.rdzv_id)
    with open_job(job) as (store, secret):
        page = page_of(store, secret)
    if page is not None:
        if args.follow:
            return Follower(page, lambda: _whereabouts(job), args).run()
        return _events_of_page(page, args)
    directories = log_dirs_here(job)
    if not directories:
        raise UsageError(f"job {job.run_id!r} keeps no events: run it with --dashboard PORT or --log-dir DIR")
    return _events_of_files([Path(directory) for directory in directories], args)


# -- from a page ----------------------------------------------------------------------------------------------------


def _wish(args: Namespace) -> str:
    return "bulk=1" if args.all else f"without={','.join(TOO_MANY)}"


def _events_of_page(page: PageClient, args: Namespace) -> int:
    since = 0
    while True:
        answer = page.get(f"/api/v1/events?since={since}&limit={PER_ANSWER}&{_wish(args)}")
        if not since:
            _say_forgotten(answer)
        for one in answer["events"]:
            _print_event(one["event"], args)
            since = one["number"]
        if len(answer["events"]) < PER_ANSWER:
            return 0


def _say_forgotten(answer: dict[str, Any]) -> None:
    if count := answer.get("forgotten", 0):
        print(
            f"phalanx events: {count} earlier events are not kept by the agent that serves; "
            "phalanx events LOG_DIR has them, of a job with --log-dir",
            file=sys.stderr,
        )


def _whereabouts(job: RunningJob) -> tuple[PageClient | None, bool]:
    """Return the way to the page of a job, as its store says now, and whether the job is over."""
    from phalanx.protocol import CLOSED  # start-up

    with open_job(job) as (store, secret):
        return page_of(store, secret), store.get(CLOSED) is not None


class Follower:
    """Shows the events of a job from whichever agent serves them, until the job is over.

    ``look`` says what the store does: which page the job has, if any, and whether it is over.
    """

    def __init__(self, page: PageClient, look: Callable[[], tuple[PageClient | None, bool]], args: Namespace) -> None:
        from phalanx.watch._running_nodes import RunningNodes  # start-up

        self._page: PageClient | None = page
        self._look = look
        self._args = args
        self._nodes = RunningNodes()
        self._position = ""
        """The id of the last event: an agent's name, and its number there."""
        self._seen: dict[str, float] = {}
        """The last events, by what they say, with their times."""
        self._horizon = -1.0
        """Of what another agent tells and is older nobody knows any more whether it was shown: it was."""
        self._has_moved = False
        """Whether another agent tells now than at the beginning."""
        self._heard = time.monotonic()

    def run(self) -> int:
        """Return the exit code: 0 once the job is over; ``UsageError`` when nobody says how it goes on."""
        _say_forgotten(self._ask_forgotten())
        is_over = False
        while True:
            problem = self._follow_one()
            if self._nodes.is_over or (problem and is_over):
                return 0
            is_over = self._find_next() or (self._page is None and self._nodes.has_lost)
            if is_over and self._page is None:
                return 0
            if time.monotonic() - self._heard >= PATIENCE:
                raise UsageError(
                    f"no agent has told of the job for {PATIENCE:.0f} s, and none has told of its end; the last: "
                    f"{problem or 'its stream ended'}"
                )
            time.sleep(LOOK_EVERY)

    def _ask_forgotten(self) -> dict[str, Any]:
        assert self._page is not None, "the caller gave it"
        answer: dict[str, Any] = self._page.get(f"/api/v1/events?limit=0&{_wish(self._args)}")
        return answer

    def _follow_one(self) -> str:
        """Follow an agent until its stream or the job ends; what was wrong with it."""
        if self._page is None:
            return "the job has no page just now"
        try:
            for line in self._page.lines(f"/events?since={self._position}&{_wish(self._args)}"):
                self._heard = time.monotonic()
                if line.startswith(b"id: "):
                    self._enter(line[4:].strip().decode(errors="replace"))
                elif line.startswith(b"data: "):
                    self._take(json.loads(line[6:]))
                    if self._nodes.is_over:
                        break
        except (UsageError, ValueError) as error:
            return str(error)
        return ""

    def _find_next(self) -> bool:
        """Find out where the job is shown now; whether it is over."""
        try:
            self._page, is_over = self._look()
        except (UsageError, ConnectionError):
            self._page, is_over = None, False  # a store may end with its job, or be elsewhere in a moment
        return is_over

    def _enter(self, position: str) -> None:
        if self._position and position.rpartition("-")[0] != self._position.rpartition("-")[0]:
            self._has_moved = True
        self._position = position

    def _take(self, record: dict[str, Any]) -> None:
        from phalanx.events._lines import from_record  # start-up

        said, moment = json.dumps(record, sort_keys=True), _time_of(record)
        if said in self._seen or (self._has_moved and moment < self._horizon):
            return
        self._seen[said] = moment
        if len(self._seen) > MAX_SEEN:
            self._horizon = self._seen.pop(next(iter(self._seen)))
        _print_event(record, self._args)
        try:
            self._nodes.ends(from_record(record))
        except ValueError:
            pass  # of another release: shown as it is


# -- from files -----------------------------------------------------------------------------------------------------


class _Printer:
    """Shows what lines of event files say, all of them, and knows when the job is over."""

    def __init__(self, args: Namespace) -> None:
        from phalanx.watch._running_nodes import RunningNodes  # start-up

        self._args = args
        self.nodes = RunningNodes()

    def add_records(self, lines: Sequence[tuple[Any, str]]) -> None:
        from phalanx.events._lines import from_record  # start-up

        for record, _ in lines:
            try:
                event = from_record(record)
            except ValueError:
                continue  # torn, or written by something else
            self.nodes.ends(event)
            _print_event(record, self._args)


def _events_of_files(directories: list[Path], args: Namespace) -> int:
    from phalanx.watch._files import Tail  # start-up

    printer = _Printer(args)
    tail = Tail(printer, directories)
    while True:
        tail.look()
        if not args.follow or printer.nodes.is_over:
            return 0
        time.sleep(LOOK_EVERY)


# -- in words -------------------------------------------------------------------------------------------------------


def _time_of(record: dict[str, Any]) -> float:
    from phalanx.watch._files import time_of_record  # start-up

    return time_of_record(record)


def _print_event(record: dict[str, Any], args: Namespace) -> None:
    from phalanx.events._lines import from_record  # start-up
    from phalanx.watch._in_words import in_words

    kind = record.get("event", record.get("kind", ""))
    if not args.all and kind in TOO_MANY:
        return
    if args.json:
        print(json.dumps(record), flush=True)
        return
    try:
        text = in_words(from_record(record))
    except ValueError:
        text = json.dumps(record)
    moment = time.strftime("%H:%M:%S", time.localtime(_time_of(record)))
    print(f"{moment}  {kind:18}  {text}", flush=True)
