"""Decides where the output of workers goes: which streams to files, which to the console, under which names.

Owns ``Std``, the paths of a run (``<log_dir>/<run_id>_<unique>/attempt_<generation>/<local_rank>/stdout.log``) and the
public ``LogsSpecs`` interface. Moves no bytes: that is ``_pump``. A directory that cannot be made (a full or read-only
disk) does not keep workers from starting: their files go to a temporary one then, and the log says where.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntFlag

from phalanx.launch.system._folders import TEMPORARY_LOGS, OwnedFolder

log = logging.getLogger(__name__)


class Std(IntFlag):
    """Chooses standard streams.

    >>> Std.from_str("3") == Std.ALL, Std.from_str("0:1,1:2") == {0: Std.OUT, 1: Std.ERR}
    (True, True)
    """

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3

    @classmethod
    def from_str(cls, text: str) -> Std | dict[int, Std]:
        """Read ``0`` to ``3`` for all local ranks, or ``rank:value,rank:value``."""
        if re.fullmatch(r"[0-3]", text):
            return cls(int(text))
        if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
            pairs = (pair.split(":") for pair in text.split(","))
            return {int(rank): cls(int(value)) for rank, value in pairs}
        raise ValueError(f"streams are {text!r}; expected 0, 1, 2 or 3, or pairs such as 0:1,1:3 (local rank:value)")


def to_map(streams: Std | Mapping[int, Std], local_ranks: int) -> dict[int, Std]:
    """Return the choice of every local rank; a rank that a mapping does not name keeps its streams on the console."""
    if isinstance(streams, Std):
        return dict.fromkeys(range(local_ranks), streams)
    return {rank: streams.get(rank, Std.NONE) for rank in range(local_ranks)}


@dataclass
class LogsDest:
    """Holds paths by local rank. An empty path is the console, ``os.devnull`` nowhere."""

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class LogsSpecs(ABC):
    """Decides where each worker's streams and error file go. Derive from it to use a scheme of your own."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the destinations of the workers whose environments these are, by local rank."""

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """The directory that holds all runs."""


class DefaultLogsSpecs(LogsSpecs):
    """Makes one directory per run, generation and local rank. Nothing is created before the first worker starts.

    >>> specs = DefaultLogsSpecs(log_dir="/var/log/job", redirects=Std.ALL, tee={0: Std.ERR})  # doctest: +SKIP
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        if log_dir and log_dir != os.devnull and os.path.isfile(log_dir):
            raise NotADirectoryError(f"log_dir is {log_dir!r}, which is a file; expected a directory or a new path")
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        self._run_log_dir = ""
        self._owned: OwnedFolder | None = None

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir or "")

    @property
    def is_temporary(self) -> bool:
        """Whether nobody asked for logs: the directory then only lives as long as the run."""
        return not self._root_log_dir

    def run_log_dir(self, run_id: str) -> str:
        """Return this run's own directory, made at the first call."""
        if not self._run_log_dir:
            readable = re.sub(r"[^\w.-]+", "_", run_id)[:64]
            try:
                if self._root_log_dir:
                    os.makedirs(self._root_log_dir, exist_ok=True)
                    self._run_log_dir = tempfile.mkdtemp(prefix=f"{readable}_", dir=self._root_log_dir)
                else:
                    self._owned = OwnedFolder(f"{TEMPORARY_LOGS}{readable}_")
                    self._run_log_dir = self._owned.path
            except OSError as error:
                self._run_log_dir = self._elsewhere(error)
        return self._run_log_dir

    def _elsewhere(self, error: OSError) -> str:
        """Return a directory in place of one that cannot be made; nowhere if there is none."""
        for root in (tempfile.gettempdir, lambda: "/dev/shm", lambda: os.curdir):
            try:
                found = tempfile.mkdtemp(prefix="phalanx_logs_", dir=root())
            except OSError:
                continue
            log.error("logs cannot be kept in %r: %s; they go to %s", self.root_log_dir, error, found)
            return found
        log.error("logs cannot be kept in %r: %s; nor anywhere else: there are none", self.root_log_dir, error)
        return os.devnull

    def close(self, *, keep: bool) -> None:
        """End the run: remove the directory if nobody asked for it, or keep it for who reads the report."""
        if self._owned is not None:
            self._owned.keep() if keep else self._owned.remove()
            self._owned = None

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        if not envs:
            return LogsDest()
        dest = LogsDest()
        any_env = next(iter(envs.values()))
        if self._root_log_dir == os.devnull:
            attempt = ""
        else:
            number = any_env.get("PHALANX_GENERATION") or any_env.get("TORCHELASTIC_RESTART_COUNT", "0")
            attempt = self._make_attempt(any_env.get("TORCHELASTIC_RUN_ID", "run"), f"attempt_{number}", envs)
        if attempt:
            dest.filtered_stdout = os.path.join(attempt, "filtered_stdout.log")
            dest.filtered_stderr = os.path.join(attempt, "filtered_stderr.log")
        count = max(envs) + 1
        redirects, tees = to_map(self._redirects, count), to_map(self._tee, count)
        for rank, env in envs.items():
            self._reify_rank(dest, rank, attempt, redirects[rank], tees[rank])
            env["TORCHELASTIC_ERROR_FILE"] = dest.error_files[rank] if attempt else ""
        return dest

    def _make_attempt(self, run_id: str, name: str, ranks: Iterable[int]) -> str:
        """Return the directory of an attempt, with one in it for each rank; empty when nothing can be kept anywhere."""
        for _ in range(2):
            root = self.run_log_dir(run_id)
            if root == os.devnull:
                break
            try:
                for rank in ranks:
                    os.makedirs(os.path.join(root, name, str(rank)), exist_ok=True)
                return os.path.join(root, name)
            except OSError as error:  # it could be made when the job began: the disk has filled up since
                self._run_log_dir = self._elsewhere(error)
        return ""

    def _reify_rank(self, dest: LogsDest, rank: int, attempt: str, redirect: Std, tee: Std) -> None:
        is_shown = not self._local_ranks_filter or rank in self._local_ranks_filter
        console = "" if is_shown else os.devnull
        if not attempt:
            dest.stdouts[rank] = os.devnull if redirect & Std.OUT else console
            dest.stderrs[rank] = os.devnull if redirect & Std.ERR else console
            dest.error_files[rank] = os.devnull
            return
        directory = os.path.join(attempt, str(rank))
        streams = (
            (Std.OUT, "stdout.log", dest.stdouts, dest.tee_stdouts),
            (Std.ERR, "stderr.log", dest.stderrs, dest.tee_stderrs),
        )
        for std, name, files, tees in streams:
            path = os.path.join(directory, name)
            files[rank] = path if (redirect | tee) & std else console
            if tee & std and is_shown:
                tees[rank] = path
        dest.error_files[rank] = os.path.join(directory, "error.json")

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(log_dir={self._root_log_dir!r}, redirects={self._redirects!r}, tee={self._tee!r}, "
            f"local_ranks_filter={self._local_ranks_filter!r})"
        )


def open_log(path: str) -> int:
    """Return a descriptor; -1, and a line in the log, when the disk does not take another file."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        log.error("a worker's log file cannot be opened: %s; its output goes to the console", error)
        return -1
