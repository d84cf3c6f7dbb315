"""Runs ``python -m phalanx.launch``: ``phalanx run`` for scripts that take their local rank as ``--local-rank``.

It has the flags of ``torch.distributed.launch``: those of ``phalanx run``, and ``--use-env``, with which it is the
same. Its start is also that of ``phalanx run``.
"""

from __future__ import annotations

import sys

from phalanx.launch.cli._run_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], gives_local_rank=True))
