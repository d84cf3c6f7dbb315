"""Runs a job by ``phalanx.integrations.ray`` on a Ray cluster of this host, whose nodes come and go as a file says.

``ray_driver.py DIR MAX ARGUMENTS...``: ``DIR/nodes`` holds how many nodes with one processor each there are to be; one
that is too many is gone without a word.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from phalanx.integrations.ray import run


def follow(cluster: Any, file: Path, job: Future[None]) -> None:
    """Have as many nodes as the file says, until the job is over. Only a main thread can start nodes."""
    nodes: list[Any] = []
    while not job.done():
        wanted = int(file.read_text())
        while len(nodes) < wanted:
            nodes.append(cluster.add_node(num_cpus=1))
        while len(nodes) > wanted:
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        time.sleep(0.05)


def main() -> None:
    directory, most = Path(sys.argv[1]), int(sys.argv[2])
    # In a folder of its own, with a short name: it has sockets in it.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        os.environ |= {"RAY_TMPDIR": scratch, "RAY_USAGE_STATS_ENABLED": "0"}
        import ray  # it looks at these variables then
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            ray.init(address=cluster.address)
            with ThreadPoolExecutor(1) as pool:
                job = pool.submit(run, sys.argv[3:], nodes=(1, most))
                follow(cluster, directory / "nodes", job)
            job.result()
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    main()
