"""Asks a running job for more or fewer workers: ``phalanx scale``.

Owns the way from an endpoint and a job's name, or from neither when one job runs on this machine, to the wish in its
store; the agents do the rest (``Agent._resize``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from phalanx.launch.cli._flags import UsageError
from phalanx.launch.system._folders import RunningJob, running_jobs


def main(argv: Sequence[str]) -> int:
    """Run ``phalanx scale`` with these arguments; the exit code."""
    parser = argparse.ArgumentParser(prog="phalanx scale", description="Change the number of workers of a running job.")
    parser.add_argument(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        default="",
        help="as given to phalanx run; default: a job on this machine",
    )
    parser.add_argument("--rdzv-backend", "--rdzv_backend", default="c10d", choices=("c10d", "static", "etcd", "file"))
    parser.add_argument(
        "--rdzv-id",
        "--rdzv_id",
        default="",
        help="the job's name, as given to phalanx run; default: the only one",
    )
    parser.add_argument("--nproc", type=int, required=True, help="workers per node from now on")
    parser.add_argument(
        "--node", default="", help="only nodes whose id starts with this (host name first); default: all"
    )
    args = parser.parse_args(argv)
    try:
        if args.nproc < 1:
            raise UsageError(f"--nproc {args.nproc}; expected at least 1 (a job is ended by a signal to its agents)")
        job = find_job(args.rdzv_endpoint, args.rdzv_backend, args.rdzv_id)
        nodes = scale(job.store_url, job.run_id, args.nproc, args.node, secret_file=job.secret_file)
    except (ValueError, ConnectionError) as error:
        print(f"phalanx scale: {error}", file=sys.stderr)
        return 2
    print(f"asked {len(nodes)} node(s) for {args.nproc} worker(s) each: {', '.join(nodes)}")
    return 0


def find_job(endpoint: str, backend: str, run_id: str) -> RunningJob:
    """Return the job that the flags name; without an endpoint the one, of this name if there is one, that runs here."""
    if endpoint and not run_id:
        raise UsageError("--rdzv-endpoint without --rdzv-id; give the job's name too, as given to phalanx run")
    if endpoint:
        return RunningJob(run_id=run_id, store_url=store_url(backend, endpoint))
    here = running_jobs()
    found = [job for job in here if not run_id or job.run_id == run_id]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"{job.run_id} at {job.store_url}" for job in here)
    if not here:
        raise UsageError(
            "no job of yours runs on this machine (as this user); give --rdzv-endpoint and --rdzv-id of one elsewhere"
        )
    if not found:
        raise UsageError(f"no job {run_id!r} of yours runs on this machine, but {names}")
    raise UsageError(f"{len(found)} jobs of yours run on this machine: {names}; choose one with --rdzv-id")


def store_url(backend: str, endpoint: str) -> str:
    """Return the URL of a rendezvous endpoint's store.

    >>> store_url("c10d", "node0:29400"), store_url("file", "/shared/job")
    ('tcp://node0:29400', 'file:///shared/job')
    """
    if "://" in endpoint:
        return endpoint
    if backend == "file":
        return f"file://{endpoint}"
    if backend == "etcd":
        return f"etcd://{endpoint}"
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdigit():
        raise UsageError(f"endpoint {endpoint!r} has no port; expected host:port")
    return f"tcp://{host}:{port}"


def scale(url: str, run_id: str, size: int, node: str = "", *, secret_file: str = "") -> list[str]:
    """Ask the nodes of a job for ``size`` workers each; the ids of those that were asked."""
    from phalanx.comm.stores import connect  # start-up: wrong flags are answered before torch is imported
    from phalanx.comm.stores._sealed import SealedStore
    from phalanx.comm.stores._signing import Signer, read_secret
    from phalanx.launch.rendezvous._backends import secret_here
    from phalanx.launch.rendezvous._runs import find_run
    from phalanx.protocol import NODES, dump_count, job_prefix, wish_key

    store = connect(url)
    try:
        secret = read_secret(path=secret_file) if secret_file else read_secret() or secret_here(store, run_id)
        name, _ = find_run(store, run_id, secret)
        job = SealedStore(store.namespace(job_prefix(name)), Signer(name, secret))
        live = [key.removeprefix(NODES) for key in job.items(NODES)]  # verified: a wrong secret finds nobody
        nodes = sorted(node_id for node_id in live if node_id.startswith(node))  # an id starts with its host
        if not nodes:
            raise UsageError(f"no node of job {run_id!r} matches {node!r}" if node else f"no job {run_id!r} at {url}")
        for node_id in nodes:
            job.set(wish_key(node_id), dump_count(size))
        return nodes
    finally:
        store.close()
