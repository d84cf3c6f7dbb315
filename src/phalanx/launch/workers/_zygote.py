"""Forks workers, in a process that has imported what they need and never has a thread.

Guarantees: one message for every fork and every exit; a worker's whole process group is killed before the worker is
reaped, so its number cannot have been given to anybody else; when the agent's end of the socket closes, however the
agent died, every worker and everything that they started is killed, then the zygote ends. When the zygote itself is
killed, its workers live on (``_processes``), and die with the agent all the same (``_linux.die_with_peer``).
Assumptions: single-threaded (a fork copies locks that other threads hold); a worker that is forked but has no order
yet is *parked* and waits on its own socket (see ``_child``).
Rejected: forking from the agent (its store and log threads may hold locks: seen to deadlock); PR_SET_PDEATHSIG with
SIGKILL for the zygote (it could not kill its workers' children any more), and for workers (a killed zygote would take
all of them, and with them the state of the job).
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from phalanx.launch.system import _linux
from phalanx.launch.workers._child import FunctionTable, run_parked
from phalanx.launch.workers._messages import receive_message, send_message

LATER_IMPORTS = (
    "phalanx.comm.group._init",
    "phalanx.comm.transports._creation",
    "phalanx.comm.mesh._mesh",
    "phalanx.comm.stores._tcp",
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
)
"""Imported once nothing has been asked for during ``IDLE`` seconds, beside torch: workers that are forked later, to
replace others, need not do it. The first ones do it themselves if they want it, so that nobody else waits for it. The
last three are half as much again as torch itself, and every optimizer imports them when it is made; one by one, so that
a worker that is wanted meanwhile waits for one of them at most."""

IDLE = 1.0


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Keep things quiet: in here ``import torch`` starts no thread and collects no garbage (it leaves next to none).

    What was imported is then kept from the collector: its first look at all of it, the moment it is switched on again,
    would take a tenth of a second, and in a forked process write to every page that it shares with its parent.
    numpy's OpenBLAS would start its pool the moment it is loaded: the one extra thread after the import. A worker's
    numpy then computes on one thread unless the user sets OPENBLAS_NUM_THREADS; torch's own threads are not touched.
    """
    name = "OPENBLAS_NUM_THREADS"
    is_ours, collects = name not in os.environ, gc.isenabled()
    if is_ours:
        os.environ[name] = "1"
    gc.disable()
    try:
        yield
    finally:
        if is_ours:
            del os.environ[name]
        if collects:
            gc.freeze()
            gc.enable()


def serve(
    sock: socket.socket, functions: FunctionTable, preload: tuple[str, ...], parent: int, error: str = ""
) -> NoReturn:
    """Fork workers on demand until the agent is gone. Never returns."""
    try:
        os.setsid()
    except PermissionError:
        pass  # already a session leader (started by exec in a new session)
    _linux.adopt_orphans()
    _linux.set_process_name("phalanx-zygote")
    server = _Server(sock, functions)
    # The kernel sends it when the thread that started this process ends; only the process counts. From others it is no
    # order: whoever ends a whole job sends it to the agent too, which gives the workers the time to leave.
    signal.signal(signal.SIGTERM, lambda *_: server.end() if os.getppid() != parent else None)
    # Slurm sends the signal before a time limit to every process of a step. It is the agent's to act upon.
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    if not _linux.die_with_parent(signal.SIGTERM, parent):
        server.end()
    with quiet_imports():
        error = error or _import_all(preload)
    server.say({"kind": "ready", "error": error})
    server.loop()


def _import_all(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:  # any failing import is reported, whatever it raised
            return f"--preload {name}: {type(error).__name__}: {error}"
    return ""


class _Server:
    def __init__(self, sock: socket.socket, functions: FunctionTable) -> None:
        self._sock = sock
        self._functions = functions
        self._pid = os.getpid()
        self._workers: set[int] = set()

    def loop(self) -> NoReturn:
        wake_read, wake_write = socket.socketpair()
        for end in (wake_read, wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler must exist for the wakeup to be written
        selector = selectors.DefaultSelector()
        selector.register(self._sock, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        self._not_for_children = (self._sock.fileno(), wake_read.fileno(), wake_write.fileno(), selector)
        later: list[str] | None = list(LATER_IMPORTS) if "torch" in sys.modules else []
        patience: float | None = IDLE
        while True:
            ready = {key.fileobj for key, _ in selector.select(patience)}
            if later is not None:
                patience = IDLE if ready else 0.0
            if later and not ready:
                with quiet_imports():
                    _import_all((later.pop(0),))  # should it fail, whoever needs it will say so
            elif later is not None and not ready:
                later = patience = None
                self.say({"kind": "idle"})
            if wake_read in ready:
                try:
                    wake_read.recv(4096)
                except BlockingIOError:
                    pass
            self._reap()
            if self._sock in ready:
                self._handle()

    def _handle(self) -> None:
        received = receive_message(self._sock)
        if received is None:
            self.end()
        message, fds = received
        if message["kind"] == "fork":
            self._fork(message["token"], fds)
        elif message["kind"] == "end":
            self.end()

    def _fork(self, token: str, fds: list[int]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # A SIGTERM that comes to the fork before it has its own disposition waits: our handler would end all workers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        except OSError as error:
            _close_all(fds)
            self.say({"kind": "fork_failed", "token": token, "error": str(error)})
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if pid == 0:
            self._become_worker(*fds)
        _close_all(fds)
        self._workers.add(pid)
        self.say({"kind": "forked", "token": token, "pid": pid})

    def _become_worker(self, order_fd: int, lifeline_fd: int) -> NoReturn:
        signal.set_wakeup_fd(-1)
        *fds, selector = self._not_for_children
        selector.close()
        _close_all(fds)
        os.setsid()
        run_parked(socket.socket(fileno=order_fd), socket.socket(fileno=lifeline_fd), self._functions)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = self._next_exit()
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._workers:
                self._workers.discard(pid)
                code = os.waitstatus_to_exitcode(status)
                self.say({"kind": "exited", "pid": pid, "code": code, "time": time.time()})

    def _next_exit(self) -> tuple[int, int]:
        """Reap one child that has ended, its process group killed; pid 0 when there is none."""
        if not hasattr(os, "waitid"):  # macOS: the group can only be killed once its leader is reaped
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in self._workers:
                _linux.signal_group(pid, signal.SIGKILL)
            return pid, status
        # Leave the zombie for a moment: as long as it is there, its pid names its group and no other.
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return 0, 0
        if found.si_pid in self._workers:
            _linux.signal_group(found.si_pid, signal.SIGKILL)
        return os.waitpid(found.si_pid, 0)

    def say(self, message: dict[str, object]) -> None:
        try:
            send_message(self._sock, message)
        except OSError:
            self.end()

    def end(self) -> NoReturn:
        """Kill all that was ever started here, also what workers left behind, and exit."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for pid in self._workers:
            _linux.signal_group(pid, signal.SIGKILL)
        for _ in range(100):  # a killed worker's own children become ours (adopt_orphans), some rounds deep
            remaining = _linux.children_of(self._pid)
            if not remaining:
                break
            for pid in remaining:
                _linux.signal_group(pid, signal.SIGKILL)
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
            _reap_for(0.05)
        os._exit(0)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _reap_for(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
        except ChildProcessError:
            return


def main() -> None:
    """Run a zygote in a fresh interpreter: ``python -m phalanx.launch.workers._zygote FD PARENT [PRELOAD...]``."""
    fd, parent, *preload = sys.argv[1:]
    with quiet_imports():
        error = _import_all(tuple(preload))
    serve(socket.socket(fileno=int(fd)), FunctionTable(), (), int(parent), error)


if __name__ == "__main__":
    main()
