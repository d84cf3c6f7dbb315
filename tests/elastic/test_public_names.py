"""What users import from ``phalanx.elastic`` is frozen here."""

from __future__ import annotations

import pytest

import phalanx.elastic

pytestmark = pytest.mark.fast


def test_public_names():
    assert phalanx.elastic.__all__ == [
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
    assert all(hasattr(phalanx.elastic, name) for name in phalanx.elastic.__all__)
