"""Nodes of one rendezvous that are threads of this process, beside those of other processes.

    python -m benchmarks._nodes_of_a_process URL NAME FIRST COUNT OF

Says ``ready``, meets the others when told to by a line, writes as a line of JSON the seconds that it took, the ranks
and what each node has asked of the store, and ends when told to by another line. One process for all of a thousand
nodes would be busy with nothing but taking turns.
"""

from __future__ import annotations

import gc
import json
import logging
import resource
import sys

from benchmarks._counted_store import CountedStore, Requests
from benchmarks.rendezvous import end_ours, meet_others
from phalanx.comm.stores import Store, connect
from phalanx.launch.rendezvous import RendezvousHandler, RendezvousParameters
from phalanx.launch.rendezvous._backends import OpenStore, make_handler


def main() -> None:
    url, name, first, count, of = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    logging.getLogger("phalanx").setLevel(logging.ERROR)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    requests = [Requests() for _ in range(first, first + count)]
    parameters = RendezvousParameters("c10d", "", name, of, of, join_timeout=600, lease=300)

    def handler(one: Requests) -> RendezvousHandler:
        store: Store = CountedStore(connect(url), one, clones=True)
        return make_handler(parameters, OpenStore(store=store, url=url), loopback=True)

    handlers = [handler(one) for one in requests]
    for one in requests:
        one.clear()
    print("ready", flush=True)
    sys.stdin.readline()
    seconds, ranks = meet_others(handlers)
    print(json.dumps([seconds, ranks, [(one.total, one.num_bytes) for one in requests]]), flush=True)
    sys.stdin.readline()
    end_ours(handlers)
    gc.collect()


if __name__ == "__main__":
    main()
