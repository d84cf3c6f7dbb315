"""Catches the signals that end an agent, tells its loop, and puts the handlers back afterwards.

Owns ``SignalException`` and the handlers' lifetime. Python delivers signals to the main thread only: an agent in
another thread (a notebook, a test) runs without handlers, and its caller keeps control.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

log = logging.getLogger(__name__)

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
ENV_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class SignalException(Exception):
    """The agent was told to end by a signal and has stopped its workers. ``sigval`` says which."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


def parse_signals(names: str) -> tuple[signal.Signals, ...]:
    """Read a comma-separated list of names.

    >>> parse_signals("SIGTERM, SIGINT") == (signal.SIGTERM, signal.SIGINT)
    True
    """
    found = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            found.append(signal.Signals[name.upper()])
        except KeyError:
            raise ValueError(f"unknown signal {name!r}; expected names such as {DEFAULT_SIGNALS}") from None
    for signum in found:
        if signum in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"{signum.name} cannot be handled by any process; remove it from the list")
    return tuple(found)


def choose_signals(names: str | None, environ: Mapping[str, str]) -> tuple[signal.Signals, ...]:
    """Return what was asked for, else what the environment says, else the default.

    >>> choose_signals(None, {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGUSR1"}) == (signal.SIGUSR1,)
    True
    """
    return parse_signals(names or environ.get(ENV_SIGNALS) or DEFAULT_SIGNALS)


@contextmanager
def handled(signals: tuple[signal.Signals, ...], tell: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call ``tell`` for each of the signals instead of their default, until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        log.warning("not in the main thread: signals are not handled by the agent")
        yield
        return
    previous = {signum: signal.signal(signum, lambda number, _: tell(signal.Signals(number))) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
