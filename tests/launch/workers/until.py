"""A worker that ends when it is told to: ``until.py DIRECTORY`` writes its rank to ``starts``, then waits for a file.

``end-RANK`` or ``end``: it ends with code 0 and notes that in ``ends``; ``fail-RANK``: with code 3, once.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main(directory: Path) -> None:
    rank = os.environ["RANK"]
    with (directory / "starts").open("a") as file:
        file.write(f"{rank} {os.getpid()} {os.environ['PHALANX_GENERATION']}\n")
    fault = directory / f"fail-{rank}"
    while fault.exists() or not ((directory / "end").exists() or (directory / f"end-{rank}").exists()):
        if fault.exists():
            fault.unlink()
            os._exit(3)
        time.sleep(0.01)
    with (directory / "ends").open("a") as file:
        file.write(f"{rank}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
