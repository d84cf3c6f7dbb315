"""Reads what ``--notice`` names: one word per source, with what it needs after a colon.

================================= ==============================================================================
``aws``, ``aws:URL``              spot interruptions and rebalance advice; ``aws-spot``: interruptions only
``gcp``, ``gcp:URL``              preemption, host maintenance
``azure``, ``azure:URL``          scheduled events
``slurm``, ``slurm:SIGUSR1``      the signal of ``--signal``; without a name SIGUSR1 or SIGUSR2
``kubernetes``, ``kubernetes:60`` SIGTERM, with so many seconds left (30)
``signal:SIGUSR1``                any signal to the agent
``file:PATH``                     a file that appears
``call:MODULE:FUNCTION``          a function that is called every second
================================= ==============================================================================
"""

from __future__ import annotations

import importlib
import math
import os
import signal
import sys

from phalanx.preemption import _aws, _azure, _gcp
from phalanx.preemption._aws import AwsNotices
from phalanx.preemption._azure import AzureNotices
from phalanx.preemption._gcp import GcpNotices
from phalanx.preemption._local_notices import KUBERNETES_GRACE, FileNotices, FunctionNotices, SignalNotices
from phalanx.preemption._notice import NoticeSource

NAMES = ("aws", "aws-spot", "gcp", "azure", "slurm", "kubernetes", "signal", "file", "call")


def parse_source(text: str) -> NoticeSource | SignalNotices:
    """Return the source that a word names. ``ValueError`` in one line for one that makes no sense.

    >>> parse_source("file:/tmp/leave")
    FileNotices(path='/tmp/leave', interval=0.25, name='file')
    """
    name, _, rest = text.partition(":")
    if name in ("aws", "aws-spot", "gcp", "azure"):
        return _cloud(name, rest)
    if name == "slurm":
        signals = (_signal(rest),) if rest else (signal.SIGUSR1, signal.SIGUSR2)
        return SignalNotices(signals=signals, name=name)
    if name == "kubernetes":
        return SignalNotices(signals=(signal.SIGTERM,), grace=_seconds(rest), name=name)
    if name == "signal":
        return SignalNotices(signals=(_signal(rest),))
    if name == "file" and rest:
        return FileNotices(path=rest)
    if name == "call" and rest:
        return _function(rest)
    raise ValueError(f"{text!r} is no source of notices; expected {', '.join(NAMES[:6])}, signal:NAME, file:PATH or "
                     "call:MODULE:FUNCTION")  # fmt: skip


def _cloud(name: str, url: str) -> NoticeSource:
    if url and not url.startswith("http://"):
        raise ValueError(f"{name}:{url} names no metadata service; expected an address such as http://169.254.169.254")
    url = url.rstrip("/")
    if name == "gcp":
        return GcpNotices(endpoint=url or _gcp.ENDPOINT)
    if name == "azure":
        return AzureNotices(endpoint=url or _azure.ENDPOINT)
    return AwsNotices(endpoint=url or _aws.ENDPOINT, rebalance=name == "aws", name=name)


def _signal(name: str) -> signal.Signals:
    try:
        found = signal.Signals[name.upper()]
    except KeyError:
        raise ValueError(f"unknown signal {name!r}; expected a name such as SIGUSR1") from None
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"{found.name} cannot be handled by any process; expected a name such as SIGUSR1")
    return found


def _seconds(text: str) -> float:
    if not text:
        return KUBERNETES_GRACE
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ValueError(f"kubernetes:{text}; expected the seconds of terminationGracePeriodSeconds, such as 60")
    return seconds


def _function(name: str) -> FunctionNotices:
    module, _, attribute = name.partition(":")
    sys.path.append(os.getcwd())  # where a script is, a function for it may be
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"call:{name} cannot be found ({error}); expected call:MODULE:FUNCTION") from None
    finally:
        sys.path.pop()
    if not callable(found):
        raise ValueError(f"call:{name} is a {type(found).__name__}; expected a function")
    return FunctionNotices(function=found, name=f"call:{name}")
