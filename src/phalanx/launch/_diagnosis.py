"""Workers that hang: which one, and the stacks of all of them in the logs.

Owns ``HangWatch`` (the rule is ``_hang``'s) and the dump: every Python worker writes its stacks to ``stacks.log``
beside its other logs when it gets a signal (``_child`` arranged that), also when it is stuck in native code; the
agent copies them to its own log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from phalanx.errors import StoreError
from phalanx.launch import _linux
from phalanx.launch._crew import Crew, CrewMember
from phalanx.launch._generation import Generation
from phalanx.launch._hang import HangDetector
from phalanx.launch._journal import Journal

log = logging.getLogger(__name__)

_PATIENCE = 2.0
_OTHERS_PATIENCE = 5.0


class HangWatch:
    """Finds the worker of this node that has been silent for longest, once that is too long."""

    def __init__(self, crew: Crew, timeout: float) -> None:
        self._crew = crew
        self._detector = HangDetector(timeout)

    def reset(self, now: float) -> None:
        self._detector.reset(now)

    def check(self, progress: Mapping[str, bytes | None], now: float) -> tuple[CrewMember, str] | None:
        """The worker to blame and why. Everybody then gets the full time again."""
        self._detector.observe(progress, now)
        for worker_id in self._detector.hanging(now):
            member = self._crew.members.get(worker_id)
            if member is not None and member.is_running:
                self._detector.reset(now)
                return member, f"rank {member.place.rank} made no progress for {self._detector.timeout:g} s"
        return None


def write_stacks(crew: Crew, generation: Generation, reason: str) -> None:
    """Write the stacks of this node's workers and say that it is done."""
    dump_stacks(crew, reason)
    generation.journal.say_done(generation.number, generation.info.rank, "stacks")


def write_stacks_everywhere(crew: Crew, generation: Generation, reason: str) -> None:
    """The same on all nodes. Returns when all have: what follows, a kill, changes what the others' workers do."""
    generation.journal.request_stacks(generation.number, reason)
    write_stacks(crew, generation, reason)
    store = generation.info.store.clone()
    try:
        Journal(store).wait_done(generation.number, generation.info.world_size, "stacks", _OTHERS_PATIENCE)
    except StoreError as error:
        log.warning("not every node has written its stacks: %s", error)
    finally:
        store.close()


def dump_stacks(crew: Crew, reason: str) -> dict[str, str]:
    """Collect the Python stacks of all running workers, log them, and return them by worker id."""
    asked = [member for member in crew.running if member.stacks_file]
    before = {member.id: _read(member) for member in asked}
    for member in asked:
        member.process.send_signal(_linux.stack_signal(), to_group=False)
    found: dict[str, str] = {}
    for member in asked:
        found[member.id] = _wait_for_dump(member, before[member.id])
        log.error(
            "stacks of rank %d (pid %d), because %s:\n%s",
            member.place.rank,
            member.process.pid,
            reason,
            found[member.id]
            or f"(no answer; process state: {_linux.process_state(member.process.pid) or 'gone'})",
        )
    return found


def _wait_for_dump(member: CrewMember, before: str) -> str:
    """What the worker has added to its file; complete once it stops growing."""
    until = time.monotonic() + _PATIENCE
    text = before
    while time.monotonic() < until and member.is_running:
        now = _read(member)
        if now != before and now == text:
            break
        text = now
        time.sleep(0.02)  # written by a signal handler in another process: nothing tells when it is done
    return text[len(before) :]


def _read(member: CrewMember) -> str:
    try:
        with open(member.stacks_file, errors="replace") as file:
            return file.read()
    except OSError:
        return ""
