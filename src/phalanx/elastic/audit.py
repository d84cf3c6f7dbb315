"""Checks the audit log of a job: ``python -m phalanx.elastic.audit DIR``.

The checker is ``phalanx.watch``'s, which needs no torch; this is the name that users know.
"""

from __future__ import annotations

import sys

from phalanx.watch._audit import MAX_LISTED, Verdict, check, check_directory, main

__all__ = ["MAX_LISTED", "Verdict", "check", "check_directory", "main"]

if __name__ == "__main__":
    sys.exit(main())
