"""Wraps the few Linux process calls that Python does not, each with what happens elsewhere.

Owns ``prctl``. On other systems the calls do nothing and say so by returning False: what they guard is then done by
socket end-of-file alone, which covers every case but a zygote that is killed together with its agent.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import sys
from dataclasses import dataclass

IS_LINUX = sys.platform.startswith("linux")

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_F_SETSIG = 10


def die_with_parent(signum: int, parent: int) -> bool:
    """Ask the kernel for ``signum`` when the parent dies; False when ``parent`` is gone already.

    The parent may have died before the call, and then no signal ever comes: so its pid is checked afterwards.
    """
    if IS_LINUX:
        _prctl(_PR_SET_PDEATHSIG, signum)
    return os.getppid() == parent


def adopt_orphans(wanted: bool = True) -> bool:
    """Become the parent of grandchildren whose parent dies, so that they can be found and reaped; or do so no more."""
    return IS_LINUX and _prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))


def adopts_orphans() -> bool:
    """Return whether this process adopts orphans."""
    answer = ctypes.c_int(0)
    return IS_LINUX and bool(
        ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0) == 0 and answer.value
    )


def die_with_peer(sock: socket.socket) -> bool:
    """Have the kernel kill this process's group when the other end of a Unix socket is closed, or anything is sent.

    It works through ``exec``, if the descriptor is kept, and whoever the parent is. False when the other end is closed
    already: then no signal ever comes. Elsewhere than on Linux nothing is done.
    """
    if not IS_LINUX:
        return True
    fcntl.fcntl(sock, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(sock, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) | os.O_ASYNC)
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


def set_process_name(name: str) -> bool:
    """Set the name that ``ps -o comm`` and ``top`` show (15 characters)."""
    if not IS_LINUX:
        return False
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    return bool(ctypes.CDLL(None).prctl(_PR_SET_NAME, buffer, 0, 0, 0) == 0)


def children_of(pid: int) -> list[int]:
    """Return direct children of a process; empty where the kernel does not tell."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found: list[int] = []
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(word) for word in file.read().split()]
        except OSError:
            continue
    return found


def listener_on(port: int) -> str:
    """Return the process that listens on a TCP port, as "pid 7 (its command line)"; "" when that is not known.

    A process of another user is not known: its open files are not shown.
    """
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        listening = "0A"
        sockets |= {f"socket:[{r[9]}]" for r in rows if r[3] == listening and int(r[1][-4:], 16) == port}
    for name in os.listdir("/proc") if sockets else ():
        try:
            if not name.isdigit() or sockets.isdisjoint(map(os.readlink, _descriptors(name))):
                continue
            with open(f"/proc/{name}/cmdline", errors="replace") as file:
                return f"pid {name} ({file.read().replace(chr(0), ' ').strip()[:200]})"
        except OSError:
            continue  # it has ended, or is another user's
    return ""


def _descriptors(pid: str) -> list[str]:
    return [entry.path for entry in os.scandir(f"/proc/{pid}/fd")]


def process_state(pid: int) -> str:
    """Return the kernel's one-letter state: R running, S sleeping, D uninterruptible, T stopped, Z zombie; ""
    unknown."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


@dataclass(frozen=True)
class SignalState:
    """Holds what the kernel says of one signal in a process."""

    is_caught: bool
    """It has a handler."""
    blocking: frozenset[int]
    """Threads that do not take it now; one that runs its handler is among them."""


def signal_state(pid: int, signum: int) -> SignalState | None:
    """Ask the kernel about a signal; None where it does not tell, or the process is gone."""
    bit, masks = 1 << (signum - 1), {}
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/status") as file:
                words = [line.split() for line in file if line.startswith(("SigBlk", "SigCgt"))]
            masks[int(task)] = {name: bool(int(mask, 16) & bit) for name, mask in words}
    except (OSError, ValueError):
        return None  # a thread has just ended, or all have: ask again
    return SignalState(
        is_caught=any(mask["SigCgt:"] for mask in masks.values()),
        blocking=frozenset(task for task, mask in masks.items() if mask["SigBlk:"]),
    )


def signal_group(pid: int, signum: int) -> bool:
    """Signal the process group that ``pid`` leads; False when nobody is left in it."""
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def stack_signal() -> int:
    """Return the signal on which Python workers write their stacks: one that neither users nor schedulers send."""
    return signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


def _prctl(option: int, value: int) -> bool:
    zero = ctypes.c_ulong(0)
    return bool(ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), zero, zero, zero) == 0)
