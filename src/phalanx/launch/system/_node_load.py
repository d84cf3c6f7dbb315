"""Reads what this machine is busy with, from ``/proc``. What cannot be read is zero."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Load:
    """Since the last reading."""

    cpu: float
    memory_used: int
    memory_total: int
    received: float
    sent: float


class LoadMeter:
    """Gives the load between two readings; ``proc`` is for tests."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last = self._counters()

    def read(self) -> Load:
        """Return the load since the last call."""
        before, self._last = self._last, self._counters()
        now = self._last
        total, used = self._memory()
        seconds = max(1e-3, now[0] - before[0])
        ticks = now[1] - before[1]
        return Load(
            cpu=min(1.0, max(0.0, (now[2] - before[2]) / ticks)) if ticks > 0 else 0.0,
            memory_used=used,
            memory_total=total,
            received=max(0.0, (now[3] - before[3]) / seconds),
            sent=max(0.0, (now[4] - before[4]) / seconds),
        )

    def _counters(self) -> tuple[float, int, int, int, int]:
        """Return the time, ticks in all, busy ticks, bytes received and sent."""
        values = [int(word) for word in self._first_line("stat").split()[1:9] if word.isdecimal()]
        idle = sum(values[3:5])
        received = sent = 0
        for line in self._text("net/dev").splitlines()[2:]:
            name, _, numbers = line.partition(":")
            fields = numbers.split()
            if name.strip() != "lo" and len(fields) >= 9:
                received += int(fields[0])
                sent += int(fields[8])
        return time.monotonic(), sum(values), sum(values) - idle, received, sent

    def _memory(self) -> tuple[int, int]:
        found = {}
        for line in self._text("meminfo").splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if words and words[0].isdecimal():
                found[name] = int(words[0]) * 1024
        total = found.get("MemTotal", 0)
        if not total and hasattr(os, "sysconf"):
            try:
                total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            except (ValueError, OSError):
                total = 0
        return total, max(0, total - found.get("MemAvailable", total))

    def _first_line(self, name: str) -> str:
        return self._text(name).partition("\n")[0]

    def _text(self, name: str) -> str:
        try:
            return (self._proc / name).read_text()
        except (OSError, UnicodeDecodeError):
            return ""
