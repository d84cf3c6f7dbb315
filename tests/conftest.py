"""What every test process shares."""

from __future__ import annotations

import os

# torch looks the peer's name up for every connection; a question that a name server drops costs a second, not five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
