"""Makes the handlers of the ``etcd`` backend: on a cluster that somebody runs, or on one of the job's own.

Owns how a job's own etcd is found or begun. Where ``--rdzv-conf embedded=N`` is said, the agent at the
endpoint (or at each of several, with commas between them) serves a small store there (``_etcd_discovery``). The agent
at the first one begins the cluster when ``_etcd_founding`` says so. What an endpoint says of a cluster that does not
answer is forgotten: its members are gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from phalanx.comm.stores._etcd import EtcdStore
from phalanx.comm.stores._etcd_access import etcd_url, parse_etcd_url
from phalanx.comm.stores._signing import Signer
from phalanx.errors import StoreError
from phalanx.launch.rendezvous._backends import (
    DEFAULT_PORT,
    OpenStore,
    connect,
    create_c10d_handler,
    describe_node,
    is_this_machine,
    make_handler,
    open_tcp,
    options_of,
    secret_of,
    split_endpoint,
)
from phalanx.launch.rendezvous._etcd_certificates import CertificateFiles, write_certificates
from phalanx.launch.rendezvous._etcd_discovery import DiscoveryBoard, Herald
from phalanx.launch.rendezvous._etcd_keeper import EtcdKeeper
from phalanx.launch.rendezvous._etcd_process import MemberProcess, find_program
from phalanx.launch.rendezvous._handler import StoreRendezvousHandler
from phalanx.launch.rendezvous._interface import RendezvousConnectionError, RendezvousParameters
from phalanx.launch.rendezvous._waiting import saying
from phalanx.launch.system._folders import open_agent_folder
from phalanx.launch.system._listen_address import LOOPBACK
from phalanx.protocol import ETCD_ENDPOINT, ClusterRecord, timeouts

log = logging.getLogger(__name__)

_ANSWER = 20.0
"""Seconds for a cluster that is known to answer: it may elect a leader, or its first member may be starting."""
_ANSWER_NOW = 2.0


def create_etcd_handler(params: RendezvousParameters) -> StoreRendezvousHandler:
    """Rendezvous on an etcd v3 cluster; the endpoint may list several members, comma-separated, or be an address. With
    ``embedded=N`` the agents run it among themselves, on up to N nodes."""
    size = params.get_as_int("embedded", 0) or 0
    if size:
        return _create_embedded(params, size)
    protocol = str(params.get("protocol", "http"))
    if protocol not in ("http", "https"):
        raise ValueError(f"rendezvous configuration protocol={protocol!r}; expected http or https")
    url = etcd_url(
        params.endpoint,
        encrypted=protocol == "https",
        user=str(params.get("user", "")),
        ca=str(params.get("ca_cert", "")),
        cert=str(params.get("ssl_cert", "")),
        key=str(params.get("ssl_cert_key", "")),
        password_file=str(params.get("password_file", "")),
    )
    return make_handler(params, OpenStore(store=connect(url, params), url=url, outlives_agents=True))


def create_etcd_v2_handler(params: RendezvousParameters) -> StoreRendezvousHandler:
    """Make the handler for who asks, in torch's words, for etcd by its old interface: etcd has dropped that one."""
    log.warning("the rendezvous backend etcd-v2 is served by etcd's v3 interface; all nodes of the job must be ours")
    return create_etcd_handler(params)


def _create_embedded(params: RendezvousParameters, size: int) -> StoreRendezvousHandler:
    """Join the job's own etcd, or begin it. One node alone has the TCP store: nobody could take a member over."""
    if size < 0 or size % 2 == 0:
        raise ValueError(f"rendezvous configuration embedded={size}; expected an odd number of members, such as 3")
    if params.max_nodes == 1:
        return create_c10d_handler(params)
    endpoints = [split_endpoint(each, DEFAULT_PORT) for each in params.endpoint.split(",")]
    secret = secret_of(params)[1]
    signer = Signer(params.run_id, secret)
    node = describe_node(params, loopback=endpoints[0][0] in LOOPBACK)
    parts = ExitStack()  # what this node runs for its etcd, in the order in which it was begun
    try:
        folder = open_agent_folder()
        parts.callback(folder.remove)
        files = None if secret is None else write_certificates(Path(folder.path), secret, params.run_id, [node.addr])
        process = MemberProcess(node.id, node.addr, folder.path, files)
        parts.callback(process.close)
        board = DiscoveryBoard(endpoints, signer, node.id)
        parts.callback(board.close)
        record, store = _open_cluster(params, endpoints, board, process, files)
        keeper = EtcdKeeper(
            process, store.clone(), params.run_id, signer, size=size, endpoint=params.endpoint, close=parts.close
        )
        herald = Herald(
            board,
            lambda: (replace(record, members=keeper.endpoints) if keeper.is_member else None, keeper.acts),
            answers=lambda other: _answers(other, files),
            give_up=keeper.give_up,
        )
        parts.callback(herald.close)
    except BaseException as error:
        parts.close()
        if isinstance(error, FileNotFoundError | ImportError):
            raise RendezvousConnectionError(f"node {node.id} cannot run an etcd of the job's own: {error}") from error
        raise
    try:
        keeper.start(offers=bool(find_program()))
        herald.start()
        return make_handler(params, OpenStore(store=store, url=_url(record, files), keeper=keeper), node=node)
    except BaseException:
        keeper.close()
        store.close()
        raise


def _open_cluster(
    params: RendezvousParameters,
    endpoints: Sequence[tuple[str, int]],
    board: DiscoveryBoard,
    process: MemberProcess,
    files: CertificateFiles | None,
) -> tuple[ClusterRecord, EtcdStore]:
    """Return which cluster the job has, and a client of it; it is begun here when that is for this node to do."""
    reach = params.get_as_float("read_timeout", timeouts.REACH_STORE)
    patience = options_of(params).join_timeout
    is_first = _serve_discovery(params, endpoints, board, reach)
    deadline = time.monotonic() + patience
    line = (
        f"waiting up to {patience:g} s at {params.endpoint} for the {params.min_nodes} nodes with which the job's etcd "
        "begins, or for one that knows of it"
        if is_first
        else f"waiting for the agents that know the job's etcd, at {params.endpoint}"
    )
    while True:
        left = max(0.0, deadline - time.monotonic())
        offer = ClusterRecord(founder=process.offer.node, began=time.time(), members=(process.endpoint,))
        with saying(line):
            if is_first:
                record = board.wait_as_first(offer, min_nodes=params.min_nodes, timeout=left)
            else:
                record = board.wait_anywhere(reach=min(reach, left), timeout=left)
        if record is offer:
            process.start(f"{process.offer.node}={process.offer.peer}", is_new=True)
        try:
            return record, _connect(record, files, reach if record is offer else min(reach, _ANSWER))
        except StoreError as error:
            said = f"; its own member says: {process.last_words()}" if process.is_started else ""
            if process.is_started or time.monotonic() >= deadline:
                raise RendezvousConnectionError(f"cannot reach the job's etcd: {error}{said}") from error
            log.warning("the job's etcd does not answer: %s; waiting for it, or another", error)
            board.forget(record)


def _serve_discovery(
    params: RendezvousParameters, endpoints: Sequence[tuple[str, int]], board: DiscoveryBoard, reach: float
) -> bool:
    """Serve at the endpoint of this machine, if there is one and no other agent does; whether it is the first."""
    is_host = params.get_as_bool("is_host")
    here = [each for each in endpoints if is_this_machine(each[0])]
    own = here if is_host is None else list(endpoints[:1]) * is_host
    if not own:
        return False
    opened = open_tcp(*own[0], serve=True, timeout=reach, mark=ETCD_ENDPOINT)
    if not opened.is_host:
        opened.store.close()
        return False
    board.serve(opened.store)
    return own[0] == endpoints[0]


def _connect(record: ClusterRecord, files: CertificateFiles | None, timeout: float) -> EtcdStore:
    endpoints, access = parse_etcd_url(_url(record, files))
    return EtcdStore(endpoints, access=access, timeout=timeout)


def _answers(record: ClusterRecord, files: CertificateFiles | None) -> bool:
    """Ask whether a cluster lives: whether it has a majority, and so can be read from."""
    try:
        _connect(record, files, _ANSWER_NOW).close()
    except StoreError:
        return False
    return True


def _url(record: ClusterRecord, files: CertificateFiles | None) -> str:
    known = {} if files is None else {"ca": files.ca, "cert": files.client, "key": files.client_key}
    url = etcd_url(",".join(record.members), encrypted=files is not None, **known)
    return f"{url}{'&' if known else '?'}follow=1"
