"""An agent that does not wait for the others when its own worker is done.

``early_leaver.py BACKEND ENDPOINT DIRECTORY``: its worker
runs ``until.py``. The exit code is 0 when it succeeded, 1 when it failed, and the report is printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from phalanx.launch import ChildFailedError, LocalElasticAgent, RendezvousParameters, WorkerSpec
from phalanx.launch.rendezvous import get_rendezvous_handler


def main(backend: str, endpoint: str, directory: str) -> int:
    parameters = RendezvousParameters(backend, endpoint, "early", 2, 2, lease=40, join_timeout=90)
    handler = get_rendezvous_handler(parameters)
    script = str(Path(__file__).parent / "until.py")
    spec = WorkerSpec(
        role="default",
        local_world_size=1,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        args=(script, directory),
        max_restarts=1,
        min_nodes=2,
    )
    try:
        result = LocalElasticAgent(spec, exit_barrier_timeout=0).run()
    finally:
        handler.shutdown()
    if result.is_failed():
        print(ChildFailedError("until.py", result.failures))
    return int(result.is_failed())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
