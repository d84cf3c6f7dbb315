"""Elastic training: workers die, leave and join; the result has the bits of an undisturbed run."""

from __future__ import annotations

from phalanx.elastic._fingerprint import Fingerprint
from phalanx.elastic._guard import Guard, LossSpike, NonFinite
from phalanx.elastic._job import Job
from phalanx.elastic._job_mesh import job_mesh
from phalanx.elastic._materialise import materialise
from phalanx.elastic._options import Callbacks, DataOptions, Regrouped, RunOptions, Saves
from phalanx.elastic._step import Micro, Outcome, Step
from phalanx.elastic._tracking import Tracker
from phalanx.elastic._verify_slots import NobodyDecides, VerifySlots
from phalanx.elastic.checkpoint._saves import NoReadableSave, NotSaved, SaveError
from phalanx.elastic.checkpoint._state_codec import StateTypeError
from phalanx.elastic.membership._committed_steps import StepsLost
from phalanx.elastic.membership._coordinator import Ejected, RegroupTimeout, ResultLost
from phalanx.elastic.membership._sync import BitsWarning, WorkersDiffer
from phalanx.elastic.membership._write_once import write_once

__all__ = [
    "BitsWarning",
    "Callbacks",
    "DataOptions",
    "Ejected",
    "Fingerprint",
    "Guard",
    "Job",
    "LossSpike",
    "Micro",
    "NoReadableSave",
    "NobodyDecides",
    "NonFinite",
    "NotSaved",
    "Outcome",
    "RegroupTimeout",
    "Regrouped",
    "ResultLost",
    "RunOptions",
    "SaveError",
    "Saves",
    "StateTypeError",
    "Step",
    "StepsLost",
    "Tracker",
    "VerifySlots",
    "WorkersDiffer",
    "job_mesh",
    "materialise",
    "write_once",
]
