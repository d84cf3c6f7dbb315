"""Describes a failed worker to its agent, and writes the report that a person reads in the end.

Owns ``ProcessFailure`` (a value that travels between agents as JSON) and ``ChildFailedError``. The root cause is the
earliest failure of all nodes; the others mostly follow from it. One that only complains of a lost peer comes after all
that do not: when a process was killed is known only from when it was noticed, and peers may notice it sooner than its
agent. What agents stopped themselves is no failure.
"""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.launch.failures._error_file import (
    EXIT_DO_NOT_RETRY,
    EXIT_ENDS_JOB,
    EXIT_INCURABLE,
    read_error_file,
)

NO_SIGNAL = "<N/A>"

TAIL_LINES = 20
"""How many of the last stderr lines the report shows."""

_COMPLAINT = re.compile(
    r"^(PeerLost|PeerTimeout|GroupAborted|([\w.]+\.)?(DistNetworkError|DistStoreError))\b"
    r"|(closed|reset) by peer|broken pipe|remote process exited",
    re.I,
)
"""What the transports say of a peer that went away: ours, c10d's store, gloo's, the system's, nccl's."""

_FROM_OUTSIDE = {-getattr(signal, name, 0) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")}
"""Exit codes of a process that another one ended (or the kernel, which wanted its memory)."""


@dataclass
class ProcessFailure:
    """Describes one worker that died. ``exitcode`` is negative for a signal, as in ``subprocess``.

    What the worker wrote to its ``error_file`` is read, unless the caller knows it already (``message``).

    >>> ProcessFailure(0, 4711, -9, "").message
    "killed by SIGKILL (often the kernel's out-of-memory killer)"
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str = ""
    _: KW_ONLY
    error_file_data: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    traceback: str = ""
    timestamp: float = 0.0
    host: str = field(default_factory=socket.gethostname)
    rank: int = -1
    worker_id: str = ""
    generation: int = 0
    stderr_tail: tuple[str, ...] = ()
    is_incurable: bool = False
    ends_job: bool = False
    """Whether the worker stopped the whole job on purpose: the survivors would come to the same point."""
    has_wrong_bits: bool = False
    """Whether the worker found that its node cannot be trusted."""
    note: str = ""
    """What the agent knows beyond the exit code: a hang, a missed heartbeat."""
    exception: BaseException | None = None
    """The exception itself, for function workers on this machine; never sent to other agents."""

    def __post_init__(self) -> None:
        if self.message:
            return
        data = self.error_file_data = read_error_file(self.error_file) or {}
        self.message, self.traceback, written_at = _read(data)
        self.timestamp = written_at or self.timestamp or time.time()
        if not data:
            self.error_file = ""
            self.is_incurable |= self.exitcode in (EXIT_INCURABLE, EXIT_ENDS_JOB)
            self.ends_job |= self.exitcode == EXIT_ENDS_JOB
        self.is_incurable |= _part(data, "phalanx").get("is_incurable") is True
        self.ends_job |= _part(data, "phalanx").get("ends_job") is True
        self.has_wrong_bits |= _part(data, "phalanx").get("has_wrong_bits") is True
        self.is_incurable |= self.is_not_to_be_retried
        self.ends_job |= self.is_not_to_be_retried
        self.message = self.message or self.describe_exit()

    def signal_name(self) -> str:
        """Name the signal, such as ``SIGKILL``; ``<N/A>`` when the worker ended by itself."""
        if self.exitcode >= 0:
            return NO_SIGNAL
        try:
            return signal.Signals(-self.exitcode).name
        except ValueError:
            return f"signal {-self.exitcode}"

    @property
    def precedence(self) -> tuple[bool, float]:
        """The smallest is the cause of the others.

        >>> killed = ProcessFailure(local_rank=1, pid=7, exitcode=-9, message="killed by SIGKILL", timestamp=2.0)
        >>> said = "RuntimeError: Connection closed by peer [127.0.0.1]:4711"
        >>> complains = ProcessFailure(local_rank=0, pid=8, exitcode=1, message=said, timestamp=1.0)
        >>> min(killed, complains, key=lambda failure: failure.precedence).local_rank
        1
        """
        return self.is_complaint, self.timestamp

    @property
    def is_complaint(self) -> bool:
        """Whether it died of a peer that went away."""
        return bool(_COMPLAINT.search(self.message))

    @property
    def cause(self) -> str:
        """One of few words, to count failures by.

        >>> ProcessFailure(0, 7, -9, message="killed").cause, ProcessFailure(0, 7, 1, message="KeyError: 'x'").cause
        ('SIGKILL', 'KeyError')
        """
        if "made no progress" in self.note:
            return "hang"
        if self.is_complaint:
            return "lost contact"
        if self.exitcode < 0:
            return self.signal_name()
        named = re.match(r"([A-Za-z_][\w.]{0,80}):", self.message)
        return named[1].rpartition(".")[2] if named else f"exit {self.exitcode}"

    @property
    def is_from_outside(self) -> bool:
        """Whether it did not fail by itself: it was killed, but not for a fault that the agent has noted, or it only
        complains of another."""
        return self.is_complaint or (self.exitcode in _FROM_OUTSIDE and not self.note)

    @property
    def is_not_to_be_retried(self) -> bool:
        """Whether the script itself said so: see ``phalanx.DoNotRetry``."""
        return self.exitcode == EXIT_DO_NOT_RETRY

    def timestamp_isoformat(self) -> str:
        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_", timespec="milliseconds")

    def describe_exit(self) -> str:
        if self.exitcode in (EXIT_INCURABLE, EXIT_ENDS_JOB):
            return f"exit code {self.exitcode} (it would fail again, and could not write its error file)"
        if self.is_not_to_be_retried:
            return f"exit code {self.exitcode} (do not retry)"
        if self.exitcode >= 0:
            return f"exit code {self.exitcode}"
        hints = {"SIGKILL": "often the kernel's out-of-memory killer", "SIGSEGV": "a crash in native code"}
        hint = hints.get(self.signal_name(), "")
        return f"killed by {self.signal_name()}" + (f" ({hint})" if hint else "")

    def to_record(self) -> dict[str, Any]:
        """Return the fields as JSON for other agents."""
        # Not dataclasses.asdict: it would deep-copy the exception, which may not be possible.
        record = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "exception"}
        record["stderr_tail"] = list(self.stderr_tail)
        return record


def _read(data: Mapping[str, Any]) -> tuple[str, str, float]:
    """Message, traceback and time of an error file; files of torch's own tools are understood too."""
    message: Any = data.get("message", "")
    stack, seconds = "", readable_time(data.get("timestamp"))
    if isinstance(message, Mapping):
        extra = _part(message, "extraInfo")
        stack = str(extra.get("py_callstack") or "")
        seconds = readable_time(extra.get("timestamp"))
        message = message.get("message") or ""
    exact = readable_time(_part(data, "phalanx").get("time"))
    return str(message), stack, exact or seconds


def _part(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = data.get(name)
    return part if isinstance(part, Mapping) else {}


def readable_time(value: Any) -> float:
    """Return seconds since 1970 as somebody else wrote them, maybe as text; 0 for what is no time that a date can be
    made of.

    >>> readable_time("1700000000"), readable_time("soon"), readable_time(1e300)
    (1700000000.0, 0.0, 0.0)
    """
    try:
        seconds = float(value or 0)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return seconds if 0 <= seconds < 1e11 else 0.0


class ChildFailedError(PhalanxError, RuntimeError):
    """The job failed: workers died and nothing was left to try. ``failures`` maps global ranks to what is known.

    >>> error = ChildFailedError("train.py", {1: ProcessFailure(local_rank=1, pid=77, exitcode=-9, rank=1)})
    >>> error.get_first_failure()[0]
    1
    """

    def __init__(self, name: str, failures: Mapping[int, ProcessFailure]) -> None:
        if not failures:
            raise ValueError("a ChildFailedError needs at least one failure")
        self.name = name
        self.failures = dict(failures)
        super().__init__(self.format_msg())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.failures)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the root cause: the global rank that failed first, and its failure."""
        return min(self.failures.items(), key=lambda item: (item[1].precedence, item[0]))

    def format_msg(self) -> str:
        """Return the report: root cause in full, then one line for each other failure."""
        root_rank, root = self.get_first_failure()
        others = sorted((f.timestamp, rank) for rank, f in self.failures.items() if rank != root_rank)
        lines = [
            "",
            f"{self.name} FAILED",
            "=" * 72,
            "Root cause (the earliest failure):",
            *_paragraph(root_rank, root),
        ]
        if others:
            lines += ["-" * 72, "Other failures (mostly consequences), in order:"]
            lines += [_line(rank, self.failures[rank]) for _, rank in others]
        return "\n".join([*lines, "=" * 72])


def _paragraph(rank: int, failure: ProcessFailure) -> list[str]:
    signal_name = f" ({failure.signal_name()})" if failure.exitcode < 0 else ""
    lines = [
        f"  time      : {failure.timestamp_isoformat()}",
        f"  host      : {failure.host}",
        f"  rank      : {rank} (local_rank: {failure.local_rank}, generation: {failure.generation})",
        f"  exitcode  : {failure.exitcode}{signal_name} (pid: {failure.pid})",
        f"  error_file: {failure.error_file or '-'}",
        f"  error     : {failure.message}",
    ]
    if failure.note:
        lines.append(f"  note      : {failure.note}")
    if failure.traceback:
        lines += ["  traceback :", *("    " + line for line in failure.traceback.rstrip().splitlines())]
    if failure.stderr_tail:
        lines += ["  last lines of stderr:", *("    " + line for line in failure.stderr_tail[-TAIL_LINES:])]
    return lines


def _line(rank: int, failure: ProcessFailure) -> str:
    how = failure.describe_exit()
    detail = "" if failure.message == how else f": {failure.message}"
    who = f"rank {rank} (local {failure.local_rank}, pid {failure.pid})"
    return f"  {failure.timestamp_isoformat()}  {failure.host}  {who}  {how}{detail}"
