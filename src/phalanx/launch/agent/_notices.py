"""Asks the sources of ``--notice`` in threads of their own, and takes signals that are notices.

Owns the asking: a source that cannot be asked, or talks nonsense, is named once, and once more when it works again; it
is asked on, at its interval, and is never taken for a notice. The first notice is passed on, from whichever source.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence

from phalanx.comm import _background as background
from phalanx.preemption import Notice, NoticeSource, SignalNotices, SourceProblem, parse_source

log = logging.getLogger(__name__)


class NoticeWatch:
    """Passes the first notice of some sources to ``post``, which any thread or signal handler may call."""

    def __init__(self, sources: Sequence[str | NoticeSource | SignalNotices], post: Callable[[Notice], None]) -> None:
        made = [parse_source(source) if isinstance(source, str) else source for source in sources]
        self._polled = [source for source in made if not isinstance(source, SignalNotices)]
        self._by_signal = {signum: source for source in made if isinstance(source, SignalNotices)
                           for signum in source.signals}  # fmt: skip
        self._post = post
        self._stopped = threading.Event()
        self.signum: signal.Signals | None = None
        """The signal that was a notice, if one was."""

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        return tuple(self._by_signal)

    def take_signal(self, signum: signal.Signals) -> bool:
        """Pass on the first signal that is a notice; False for one that means what it always does."""
        source = self._by_signal.get(signum)
        if source is None or self._stopped.is_set():
            return False
        self.signum = signum
        self._pass_on(source.notice(signum, time.time()))
        return True

    def start(self) -> None:
        for source in self._polled:
            watch = _SourceWatch(source, self._pass_on, self._stopped)
            background.Background(
                watch.run, f"phalanx-notice-{source.name}", on_failure=watch.fail, stop=self._stopped
            ).start()

    def stop(self) -> None:
        self._stopped.set()

    def _pass_on(self, notice: Notice) -> None:
        self._stopped.set()
        self._post(notice)


class _SourceWatch:
    """Asks one source until there is a notice, or somebody else has one."""

    def __init__(self, source: NoticeSource, tell: Callable[[Notice], None], stopped: threading.Event) -> None:
        self._source = source
        self._tell = tell
        self._stopped = stopped
        self._is_in_trouble = False

    def run(self) -> None:
        while not self._stopped.is_set():
            notice = self._look()
            if notice is not None and not self._stopped.is_set():
                self._tell(notice)
                return
            self._stopped.wait(self._source.interval)

    def _look(self) -> Notice | None:
        try:
            notice = self._source.look(time.time())
        except SourceProblem as problem:
            if not self._is_in_trouble:
                log.warning(
                    "no telling whether there is a notice from %s: %s. It is asked on", self._source.name, problem
                )
            self._is_in_trouble = True
            return None
        if self._is_in_trouble:
            log.warning("%s can be asked for notices again", self._source.name)
            self._is_in_trouble = False
        return notice

    def fail(self, error: BaseException) -> None:
        log.error("%s is asked for notices no more: %r", self._source.name, error)
