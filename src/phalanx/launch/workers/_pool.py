"""Starts, signals and stops the workers of one node, and keeps what each of them left behind.

Owns the processes (through the zygote), their log destinations and results. Knows nothing of rendezvous or policy:
the agent tells it who should run where. Guarantees: after ``stop`` no process of a worker runs, except one that the
kernel itself will not let die (uninterruptible sleep), which is named in the log and left behind.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from string import Template

from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.failures._process_failure import TAIL_LINES, ProcessFailure
from phalanx.launch.system import _linux
from phalanx.launch.system._signals import parse_signals
from phalanx.launch.telemetry._logs import LogsDest, open_log
from phalanx.launch.telemetry._pump import LogPump, Sinks, tail_of_file, tail_of_sinks
from phalanx.launch.telemetry._terminal import Terminal
from phalanx.launch.workers._call import open_anonymous, read_result
from phalanx.launch.workers._processes import WorkerProcess
from phalanx.launch.workers._start import WorkerStart
from phalanx.launch.workers._worker_environment import JobFacts, RankAssignment, worker_environment
from phalanx.launch.workers._worker_handle import WorkerHandle
from phalanx.launch.workers._zygotes import Zygotes
from phalanx.protocol import ENV_POSITION_FILE

log = logging.getLogger(__name__)

KILL_PATIENCE = 20.0
"""Seconds after SIGKILL before a worker counts as stuck in the kernel."""

CAUSE_PATIENCE = 2.0
"""Seconds in which the worker that others complain of ends too: it has left the group, and its interpreter closes."""

SETTLED = 0.5
"""Seconds after which workers have started, or gone on, and a fork disturbs nobody."""


class WorkerPool:
    """Holds all workers of the node by worker id, in the order of their local ranks."""

    def __init__(
        self,
        config: LaunchConfig,
        start: WorkerStart,
        zygotes: Zygotes,
        on_exit: Callable[[WorkerHandle], None],
    ) -> None:
        self.config = config
        self.workers: dict[str, WorkerHandle] = {}
        self._start = start
        self._zygotes = zygotes
        self._tell = on_exit
        self._pump = LogPump()
        self._parked: list[tuple[WorkerProcess, bool]] = []
        """Each with whether it is warm."""
        self._changed = threading.Condition()
        self._hurry = threading.Event()
        self._scratch = ""
        self._env: dict[str, str] = {}
        self._ignored: list[int] = []
        self._started_at = -SETTLED

    def show_on(self, terminal: Terminal) -> None:
        """Write the workers' output above the live line of a terminal."""
        self._pump.terminal = terminal

    # -- starting ------------------------------------------------------------------------------------------------

    def prepare(self, count: int) -> None:
        """Fork ahead of time, so that giving the orders is all that is left to do."""
        self._parked = [(process, is_warm) for process, is_warm in self._parked if process.waits]
        while len(self._parked) < count:
            self._parked.append(self._zygotes.park())

    def refill(self) -> None:
        """Fork what is to stand by, while nobody waits: a fork takes a core for as long as a whole regroup."""
        if (
            len(self._parked) < (self.config.standby or 0)
            and self._zygotes.is_idle
            and time.monotonic() - self._started_at > SETTLED
        ):
            self._parked.append(self._zygotes.park())

    def open(
        self, scratch: str = "", env: Mapping[str, str] | None = None, ignored: Sequence[signal.Signals] = ()
    ) -> None:
        """Start listening. From now on this process has threads. ``scratch``: a folder for what workers leave;
        ``env``: variables for all of them; ``ignored``: signals that are not meant for them."""
        self._scratch = scratch
        asks = parse_signals(self.config.leave_signal)
        self._ignored = [int(signum) for signum in ignored if signum not in (*asks, signal.SIGTERM)]
        self._env = dict(env or {})
        self._zygotes.start(self._on_exit)
        self._pump.start()

    def start(self, assignments: Sequence[RankAssignment], job: JobFacts) -> list[WorkerHandle]:
        """Start a worker on each of the assignments."""
        self.prepare(len(assignments))
        self._started_at = time.monotonic()
        envs = {
            assignment.local_rank: worker_environment(assignment, job, self.config, os.environ) | self._env
            for assignment in assignments
        }
        dest = self._reify(envs)
        return [self.start_one(assignment, envs[assignment.local_rank], dest) for assignment in assignments]

    def _reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Find where the output goes: to the console when a full disk keeps the user's own scheme from finding a
        place."""
        assert self.config.logs_specs is not None, "a resolved config has logs_specs"
        try:
            return self.config.logs_specs.reify(envs)
        except OSError as error:
            log.error("workers' logs cannot be kept: %s; their output goes to the console", error)
            for env in envs.values():
                env["TORCHELASTIC_ERROR_FILE"] = ""
            return LogsDest()

    def start_one(
        self, assignment: RankAssignment, env: Mapping[str, str], dest: LogsDest, start: WorkerStart | None = None
    ) -> WorkerHandle:
        """Start one worker with the variables and log files that it is to have; ``start``: what it alone runs."""
        rank = assignment.local_rank
        start = start or self._start
        process, is_warm = self._take_parked()
        error_file = dest.error_files.get(rank, "")
        has_directory = bool(error_file) and error_file != os.devnull
        stacks = os.path.join(os.path.dirname(error_file), "stacks.log") if has_directory else ""
        position = os.path.join(os.path.dirname(error_file), "position.json") if has_directory else ""
        worker = WorkerHandle(
            assignment=assignment,
            process=process,
            error_file=error_file if has_directory else "",
            stacks_file=stacks,
            position_file=position,
            stderr_path=dest.stderrs.get(rank, ""),
            started_at=time.monotonic(),
            born=assignment.generation,
        )
        for old in (error_file, position) if has_directory else ():
            with suppress(OSError):
                os.unlink(old)
        env = {**env, ENV_POSITION_FILE: position}
        order, fds = (start if is_warm else start.cold()).order(env, rank, stacks, self._scratch)
        order["cpus"] = self._cpus_of(assignment)
        order["ignored"] = self._ignored
        prefix = self._prefix(assignment)
        fds |= self._stream("stdout", 1, dest.stdouts, dest.tee_stdouts, dest.filtered_stdout, worker, prefix)
        fds |= self._stream("stderr", 2, dest.stderrs, dest.tee_stderrs, dest.filtered_stderr, worker, prefix)
        if start.is_function:
            worker.result_fd = open_anonymous()
            fds["result"] = worker.result_fd
        with self._changed:
            self.workers[assignment.worker_id] = worker
        process.order(order, fds)
        for name, fd in fds.items():
            if name != "result":
                os.close(fd)
        if process.exit_code is not None:  # it died before it had its order, so nobody could know whose it was
            self._on_exit(process)
        return worker

    def _take_parked(self) -> tuple[WorkerProcess, bool]:
        while True:
            process, is_warm = self._parked.pop(0) if self._parked else self._zygotes.park()
            if process.waits:
                return process, is_warm

    def _stream(
        self,
        name: str,
        console: int,
        files: Mapping[int, str],
        tees: Mapping[int, str],
        filtered_path: str,
        worker: WorkerHandle,
        prefix: bytes,
    ) -> dict[str, int]:
        rank = worker.assignment.local_rank
        path, is_tee = files.get(rank, ""), rank in tees
        config = self.config
        filters = (config.duplicate_stdout_filters if name == "stdout" else config.duplicate_stderr_filters) or ()
        if path == os.devnull:
            return {name: os.open(os.devnull, os.O_WRONLY)}
        file_fd = open_log(path) if path else -1
        if file_fd >= 0 and not is_tee:
            return {name: file_fd}
        if file_fd < 0 and path and name == "stderr":
            worker.stderr_path = ""
        path = path if file_fd >= 0 else ""
        is_merged = not path and config.merges_lines
        if not path and name == "stdout" and not is_merged:
            return {}  # the agent's own stdout, inherited
        sinks = Sinks(
            console_fd=console,
            file_fd=file_fd,
            prefix=prefix if is_tee else b"",
            filters=tuple(text.encode() for text in filters) if is_tee else (),
            filtered_path=filtered_path,
            rank=worker.assignment.rank,
            merger=self._pump.merger if is_merged else None,
            terminal=self._pump.terminal,
        )
        if name == "stderr":
            worker.stderr_sinks = sinks
        return {name: self._pump.add(sinks)}

    def _cpus_of(self, assignment: RankAssignment) -> list[int]:
        """List the CPUs that a worker is bound to; empty: all."""
        if self.config.numa_options is None:
            return []
        from phalanx.launch import numa  # start-up speed: few ask for it

        return sorted(numa.cpus_for(self.config.numa_options, assignment.local_rank, assignment.local_size))

    def _prefix(self, assignment: RankAssignment) -> bytes:
        template = self.config.log_line_prefix_template or "[${role_name}${local_rank}]:"
        values = {
            "role_name": self.config.role,
            "rank": assignment.rank,
            "local_rank": assignment.local_rank,
            "host": socket.gethostname(),
        }
        return Template(template).safe_substitute(values).encode()

    # -- watching ------------------------------------------------------------------------------------------------

    def _on_exit(self, process: WorkerProcess) -> None:
        with self._changed:
            worker = next((m for m in self.workers.values() if m.process is process and not m.is_told), None)
            if worker is not None:
                worker.is_told = True
            self._changed.notify_all()
        if worker is not None:
            self._tell(worker)

    @property
    def running(self) -> list[WorkerHandle]:
        return [worker for worker in self.workers.values() if worker.is_running]

    def fetch_value(self, worker: WorkerHandle) -> bool:
        """Read the return value of a worker that ended well; False, and it has failed, when that is not possible."""
        outcome = read_result(worker.result_fd) if worker.result_fd >= 0 else None
        if outcome and outcome[0] == "unreadable":
            worker.problem = f"the worker function ended well, but its return value cannot be unpickled: {outcome[1]}"
            return False
        worker.value = outcome[1] if outcome else None
        return True

    def failure_of(self, worker: WorkerHandle) -> ProcessFailure:
        """Return what is known about a worker that died."""
        exit_code = worker.process.exit_code
        assert exit_code is not None, f"worker {worker.id} (pid {worker.process.pid}) still runs"
        failure = ProcessFailure(
            exitcode=exit_code,
            error_file=worker.error_file,
            timestamp=worker.process.ended_at,
            local_rank=worker.assignment.local_rank,
            pid=worker.process.pid,
            rank=worker.assignment.rank,
            worker_id=worker.id,
            generation=worker.assignment.generation,
            note=worker.note,
            stderr_tail=self._stderr_tail(worker),
        )
        outcome = read_result(worker.result_fd) if worker.result_fd >= 0 else None
        if outcome and outcome[0] == "error":
            failure.exception = outcome[1]
        if worker.problem:
            failure.message, failure.is_incurable = worker.problem, True
        return failure

    def _failures_before(self, moment: float) -> list[ProcessFailure]:
        """Of those who were stopped or whose end nobody has dealt with: who had failed by itself before ``moment``.

        Its end may have been on its way here when it was told to stop because of another's.
        """
        ended = [m for m in self.workers.values() if not (m.is_running or m.has_succeeded or m.is_judged)]
        found = [(self.failure_of(worker), worker) for worker in ended]
        return [
            failure
            for failure, worker in found
            if (failure.error_file and failure.timestamp < moment)
            or (failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and not worker.is_killed)
        ]

    def stderr_tail_of(self, worker_id: str) -> tuple[str, ...]:
        """Return the last lines that a worker wrote to stderr, as far as they pass by here or lie in a file."""
        worker = self.workers.get(worker_id)
        return () if worker is None else self._stderr_tail(worker)

    def _stderr_tail(self, worker: WorkerHandle) -> tuple[str, ...]:
        if worker.stderr_sinks is not None:
            self._pump.drain()
            return tail_of_sinks(worker.stderr_sinks, TAIL_LINES)
        if worker.stderr_path and worker.stderr_path != os.devnull:
            return tail_of_file(worker.stderr_path, TAIL_LINES)
        return ()

    # -- stopping ------------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Make a ``stop`` that is under way kill at once. Safe in a signal handler."""
        self._hurry.set()

    def stop(self, signum: int = signal.SIGTERM, patience: float | None = None) -> None:
        """Stop all workers: the signal to their process groups, after ``shutdown_timeout`` seconds SIGKILL."""
        assert self.config.shutdown_timeout is not None, "a resolved config has a shutdown_timeout"
        self._stop(self.running, signum, self.config.shutdown_timeout if patience is None else patience)

    def end_all(self) -> list[ProcessFailure]:
        """Stop and forget all workers; return the failures of those that had failed before, which nobody has told."""
        told_at = time.time()
        self.stop()
        unheard = self._failures_before(told_at)
        for worker_id in list(self.workers):
            self.forget(worker_id)
        return unheard

    def failures_among(self, worker_ids: Sequence[str]) -> list[ProcessFailure]:
        """Return the failures of those of these workers that have ended otherwise than well.

        Where they only complain of another one, which may be about to end here, it is waited for a moment.
        """
        workers = [self.workers[worker_id] for worker_id in worker_ids]
        until = time.monotonic() + CAUSE_PATIENCE
        while True:
            failures = [self.failure_of(m) for m in workers if not m.is_running and not m.has_succeeded]
            running = [m for m in workers if m.is_running]
            left = until - time.monotonic()
            if not running or left <= 0 or not all(failure.is_complaint for failure in failures):
                return failures
            self._wait(running, left, can_hurry=False, for_all=False)

    def ask_to_leave(self, worker_ids: Collection[str]) -> None:
        """Ask those of these workers that run, and have not been asked yet, to leave at their next step boundary."""
        for worker in [m for m in self.running if m.id in worker_ids and not m.is_asked_to_leave]:
            worker.is_asked_to_leave = True
            worker.process.send_signal(parse_signals(self.config.leave_signal)[0], to_group=False)

    def stopped_ids(self) -> list[str]:
        """Return workers that SIGSTOP or a debugger holds."""
        return [m.id for m in self.running if _linux.process_state(m.process.pid) in ("T", "t")]

    def kill_all(self, worker_ids: Collection[str], reason: str) -> list[ProcessFailure]:
        """End those of these workers that run here at once; the failures of those that the kernel lets die."""
        ended = []
        for worker in [m for m in self.running if m.id in worker_ids]:
            log.error("worker %s (rank %d) is killed: %s", worker.id, worker.assignment.rank, reason)
            worker.is_judged, worker.note, worker.is_killed = True, reason, True
            worker.process.send_signal(signal.SIGKILL)
            if self._wait([worker], KILL_PATIENCE, can_hurry=False):
                ended.append(self.failure_of(worker))
        return ended

    def _stop(self, workers: Sequence[WorkerHandle], signum: int, patience: float) -> None:
        for worker in workers:
            worker.process.send_signal(signum)
            worker.process.send_signal(signal.SIGCONT)
        if not self._wait(workers, patience, can_hurry=True):
            for worker in workers:
                worker.is_killed = worker.is_running
                worker.process.send_signal(signal.SIGKILL)
            self._wait(workers, KILL_PATIENCE, can_hurry=False)
        for worker in workers:
            if worker.is_running:
                pid = worker.process.pid
                log.error(
                    "worker %s (pid %d, state %s) does not die; the kernel holds it (a device or a network file "
                    "system that does not answer?). It is left behind.",
                    worker.id, pid, _linux.process_state(pid) or "unknown",
                )  # fmt: skip

    def wait_for_exit(self, num_running: int, seconds: float) -> None:
        """Block until fewer than ``num_running`` workers run, ``seconds`` at most."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.running) < num_running, seconds)

    def _wait(self, workers: Sequence[WorkerHandle], seconds: float, *, can_hurry: bool, for_all: bool = True) -> bool:
        """Return whether these workers, or one of them, have ended within the time."""
        until = time.monotonic() + seconds
        with self._changed:
            while (any if for_all else all)(worker.is_running for worker in workers):
                left = until - time.monotonic()
                if left <= 0 or (can_hurry and self._hurry.is_set()):
                    return False
                self._changed.wait(min(left, 0.05))  # short: a signal handler may only set an event
        return True

    def forget(self, worker_id: str) -> None:
        """Drop a worker that has ended from the table."""
        with self._changed:
            worker = self.workers.pop(worker_id)
        worker.process.let_go()
        if worker.result_fd >= 0:
            os.close(worker.result_fd)

    def close(self) -> None:
        """Kill what is left, flush the logs, end the zygote."""
        for process, _ in self._parked:
            process.discard()
        self._zygotes.close()
        self._pump.close()
        for worker_id in list(self.workers):
            self.forget(worker_id)
