"""Hears that this machine is about to be taken away, from clouds, Slurm, Kubernetes, a file, a function.

A source is asked now and then (``NoticeSource.look``), or is a signal. An agent asks those of ``phalanx run --notice``
and has the workers of its node leave at their next step boundary. Nothing here starts a thread or knows of a job.
"""

from __future__ import annotations

from phalanx.preemption._aws import AwsNotices
from phalanx.preemption._azure import AzureNotices
from phalanx.preemption._gcp import GcpNotices
from phalanx.preemption._local_notices import FileNotices, FunctionNotices, SignalNotices
from phalanx.preemption._named_source import parse_source
from phalanx.preemption._notice import Notice, NoticeSource, SourceProblem

__all__ = [
    "AwsNotices",
    "AzureNotices",
    "FileNotices",
    "FunctionNotices",
    "GcpNotices",
    "Notice",
    "NoticeSource",
    "SignalNotices",
    "SourceProblem",
    "parse_source",
]
