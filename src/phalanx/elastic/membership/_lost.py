"""Names the errors that end a group and not the job."""

from __future__ import annotations

from phalanx.errors import GroupAborted, PeerLost, PeerTimeout

LOST = (PeerLost, PeerTimeout, GroupAborted)
"""Errors after which the group is gone but the job goes on in the next generation."""
