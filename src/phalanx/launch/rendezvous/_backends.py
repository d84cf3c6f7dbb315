"""Makes the handlers of the built-in backends: from parameters to a handler on the right store.

Owns who serves and who connects, addresses, and the reading of configuration. ``c10d`` and ``static`` keep
their store in the agent whose machine the endpoint names; ``file`` uses one that outlives all agents; ``etcd`` is
``_etcd_backend``'s.

Configuration keys (``--rdzv-conf``), as torch's users write them: ``join_timeout`` (or ``timeout``),
``last_call_timeout``, ``close_timeout``, ``keep_alive_interval``, ``keep_alive_max_attempt``, ``is_host``,
``store_type=file``, ``rank``; and our own: ``lease`` (how long a vanished node may go unnoticed),
``rejoin_timeout``, ``admit_delay``, ``topology``, ``secret_file``; for etcd ``embedded``, ``protocol``, ``ca_cert``,
``ssl_cert``, ``ssl_cert_key`` (torch's words), ``user`` and ``password_file``.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx._reach import split_host_port
from phalanx.comm import _background as background
from phalanx.comm import stores
from phalanx.comm.stores._interface import Store
from phalanx.comm.stores._signing import Signer, read_secret
from phalanx.errors import StoreError, StoreTimeout
from phalanx.launch.rendezvous._decide import Rules
from phalanx.launch.rendezvous._etcd_process import find_program
from phalanx.launch.rendezvous._handler import HandlerOptions, StoreRendezvousHandler
from phalanx.launch.rendezvous._interface import RendezvousConnectionError, RendezvousParameters
from phalanx.launch.rendezvous._own_secret import OwnSecret, known_secrets
from phalanx.launch.rendezvous._runs import join_run
from phalanx.launch.rendezvous._waiting import saying
from phalanx.launch.system import _linux
from phalanx.launch.system._addresses import advertised_address
from phalanx.launch.system._listen_address import LOOPBACK, bind_address
from phalanx.protocol import NODES, PRESENT, PROOF, SERVED, NodeRecord, job_prefix, timeouts

if TYPE_CHECKING:
    from phalanx.launch.rendezvous._etcd_keeper import EtcdKeeper

log = logging.getLogger(__name__)

DEFAULT_PORT = 29400
STATIC_PORT = 29500
_SERVED_PATIENCE = 10.0
"""Seconds for whoever has the port on this machine to show that it is an agent: it says so as soon as it serves."""


@dataclass(frozen=True, kw_only=True)
class OpenStore:
    """A connected store, where it is, whether it ends with this process, and whether it stays when all agents end."""

    store: Store
    url: str
    is_host: bool = False
    outlives_agents: bool = False
    keeper: EtcdKeeper | None = None
    """Who runs it, when the agents do so among themselves."""


def create_c10d_handler(params: RendezvousParameters) -> StoreRendezvousHandler:
    """Rendezvous on a TCP store that the agent on the endpoint's machine serves."""
    if str(params.get("store_type", "tcp")) == "file":
        return create_file_handler(params)
    host, port = split_endpoint(params.endpoint, DEFAULT_PORT)
    is_host = params.get_as_bool("is_host")
    if is_host is None:
        is_host = is_this_machine(host)
    opened = open_tcp(host, port, serve=is_host, timeout=params.get_as_float("read_timeout", timeouts.REACH_STORE))
    return make_handler(params, opened, loopback=host in LOOPBACK)


def create_static_handler(params: RendezvousParameters) -> StoreRendezvousHandler:
    """Make the handler of nodes that were told their ranks: nothing is elected but the moment to start.

    Rank 0 serves the store at the endpoint; ``rank`` is this node's. A single node serves on loopback, because nobody
    else will come, and takes the endpoint's port for its workers, as with torchrun; several share it for the rendezvous
    and the workers' port is chosen. Restarts, leases and closing work as everywhere.
    """
    if params.min_nodes != params.max_nodes:
        raise ValueError(
            f"the static rendezvous has a fixed number of nodes; got {params.min_nodes}:{params.max_nodes}"
        )
    rank = params.get_as_int("rank", 0 if params.max_nodes == 1 else None)
    if rank is None:
        raise ValueError("the static rendezvous needs the rank of this node: --node-rank")
    if not 0 <= rank < params.max_nodes:
        raise ValueError(f"node rank {rank} is outside [0, {params.max_nodes})")
    host, port = split_endpoint(params.endpoint, STATIC_PORT)
    timeout = params.get_as_float("timeout", 600.0)
    if params.max_nodes == 1:
        opened = open_tcp("localhost", 0, serve=True, timeout=timeout)
        handler = make_handler(params, opened, loopback=True, fixed_rank=0)
        handler.set_bootstrap_port(port or None)
        return handler
    opened = open_tcp(host, port, serve=rank == 0, timeout=timeout)
    return make_handler(params, opened, loopback=host in ("localhost", "127.0.0.1"), fixed_rank=rank)


def create_file_handler(params: RendezvousParameters) -> StoreRendezvousHandler:
    """Rendezvous in a directory that all nodes share."""
    directory = Path(params.endpoint.removeprefix("file://")).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    url = directory.as_uri()
    return make_handler(params, OpenStore(store=connect(url, params), url=url, outlives_agents=True))


def make_handler(
    params: RendezvousParameters,
    opened: OpenStore,
    *,
    loopback: bool = False,
    fixed_rank: int = -1,
    node: NodeRecord | None = None,
) -> StoreRendezvousHandler:
    """Return the handler of this node on a store that is open already. ``loopback``: all nodes are on this
    machine. ``node``: its record, if it was made before."""
    secret_file, secret = secret_of(params)
    options = options_of(params)
    own: OwnSecret | None = None
    if secret is None and params.max_nodes == 1 and opened.is_host:
        own = OwnSecret(params.run_id)
        secret = own.value
        proof = Signer(params.run_id, secret).seal(PROOF, PRESENT)
        opened.store.namespace(job_prefix(params.run_id)).set(PROOF, proof)
    elif secret is None:
        secret = secret_here(opened.store, params.run_id)
    if secret is None and params.max_nodes > 1:
        log.warning(
            "job %s has no secret: whoever reaches its store at %s can change it; give every node the same "
            "--rdzv-conf secret_file=FILE, or PHALANX_JOB_SECRET",
            params.run_id,
            opened.store.address,
        )
    if params.max_nodes > 1:
        log.warning("%s", store_line(opened, could_be_own_etcd=params.max_nodes >= 3 and bool(find_program())))
    job = params.run_id
    if opened.outlives_agents:
        job = join_run(opened.store, params.run_id, secret, grace=options.close_timeout)
    return StoreRendezvousHandler(
        params.backend,
        params.run_id,
        opened.store.namespace(job_prefix(job)),
        rules_of(params),
        node or describe_node(params, loopback=loopback, fixed_rank=fixed_rank),
        options=options,
        signer=Signer(job, secret),
        store_url=opened.url,
        is_host=opened.is_host,
        close_store=opened.store.close,
        secret_file=secret_file,
        own_secret=own,
        job=job,
        keeper=opened.keeper,
    )


def store_line(opened: OpenStore, *, could_be_own_etcd: bool = False) -> str:
    """Say which store a job of several nodes uses, and what its loss would mean. ``could_be_own_etcd``: it has three
    nodes, and a program on this one, with which that loss could be survived.

    >>> store_line(OpenStore(store=stores.MemoryStore(), url="tcp://node0:29400"))
    "the job's store is at tcp://node0:29400, on one node: the loss of that node ends the job"
    """
    where = opened.url.partition("?")[0]
    if opened.keeper is not None:
        return f"the job's store is an etcd of its own, {opened.keeper.describe()}"
    if opened.outlives_agents:
        return f"the job's store is at {where}, outside of the job: it survives the loss of any node of the job"
    remedy = " (not with --rdzv-backend etcd --rdzv-conf embedded=3)" if could_be_own_etcd else ""
    return f"the job's store is at {where}, on one node: the loss of that node ends the job{remedy}"


def secret_of(params: RendezvousParameters) -> tuple[str, bytes | None]:
    """Return the file of the job's secret, if the configuration names one, and the secret, if there is any."""
    path = os.path.abspath(str(params.get("secret_file"))) if params.get("secret_file") else ""
    return path, read_secret(path=path or None)


def secret_here(store: Store, job: str) -> bytes | None:
    """Return the secret of a running job of this user on this machine, if the records in ``store`` are signed with
    one."""
    known = known_secrets(job)
    if not known:
        return None
    space = store.namespace(job_prefix(job))
    signed = {PROOF: space.get(PROOF) or b"", **space.items(NODES)}
    for secret in known:
        if any(Signer(job, secret).opens(key, value) for key, value in signed.items()):
            return secret
    return None


def rules_of(params: RendezvousParameters) -> Rules:
    return Rules(
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        last_call=params.get_as_float("last_call_timeout", timeouts.LAST_CALL),
        rejoin=params.get_as_float("rejoin_timeout", timeouts.REJOIN),
        admit_delay=params.get_as_float("admit_delay", timeouts.ADMIT_DELAY),
    )


def options_of(params: RendezvousParameters) -> HandlerOptions:
    interval = params.get_as_float("keep_alive_interval", 5.0)
    attempts = params.get_as_float("keep_alive_max_attempt", 3.0)
    return HandlerOptions(
        join_timeout=params.get_as_float("join_timeout", params.get_as_float("timeout", timeouts.JOIN)),
        close_timeout=params.get_as_float("close_timeout", timeouts.CLOSE),
        lease=params.get_as_float("lease", interval * attempts),
    )


def describe_node(params: RendezvousParameters, *, loopback: bool = False, fixed_rank: int = -1) -> NodeRecord:
    """Return this node's record before it has joined."""
    host = socket.gethostname()
    addr = params.local_addr or ("127.0.0.1" if loopback else own_address(params.backend, params.endpoint))
    return NodeRecord(
        id=f"{host}_{os.getpid()}_{uuid.uuid4().hex[:8]}",
        ticket=0,
        host=host,
        addr=addr,
        port=0,
        local_size=1,
        topology=str(params.get("topology", os.environ.get("PHALANX_TOPOLOGY", ""))),
        fixed_rank=fixed_rank,
    )


def own_address(backend: str, endpoint: str) -> str:
    """Return what the other nodes are told that this one is called, if nobody has said it."""
    if backend in ("c10d", "static"):
        where = split_endpoint(endpoint, DEFAULT_PORT)
    elif backend.startswith("etcd"):
        where = split_endpoint(
            endpoint.rpartition("@")[2].rpartition("//")[2].partition(",")[0].partition("/")[0], 2379
        )
    else:
        where = ("", 0)
    return advertised_address(socket.getfqdn(), *where)


def split_endpoint(endpoint: str, default_port: int) -> tuple[str, int]:
    """Host and port of ``host``, ``host:port`` or ``[v6]:port``; an empty endpoint is this machine.

    >>> split_endpoint("node0", 29400), split_endpoint("[::1]:80", 29400)
    (('node0', 29400), ('::1', 80))
    """
    text = endpoint.strip()
    if not text:
        return "localhost", default_port
    found = split_host_port(text, default_port)
    if found is None:
        raise ValueError(f"rendezvous endpoint {endpoint!r}; expected host or host:port")
    return found


def is_this_machine(host: str) -> bool:
    """Return whether ``host`` names an address of this machine: one that can be bound to."""
    if host in (*LOOPBACK, socket.gethostname(), socket.getfqdn()):
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def open_tcp(host: str, port: int, *, serve: bool, timeout: float, mark: str = SERVED) -> OpenStore:
    """Serve at ``host:port``, or connect. Of several agents that want to serve, one wins and the others
    connect. ``mark``: the key by which a store is known to be one for this purpose."""
    if serve:
        try:
            store = stores.TCPStore.serve(bind_address(host), port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RendezvousConnectionError(f"cannot serve a store at {host}:{port}: {error}") from error
            if not _is_served(host, port, mark):
                holder = _linux.listener_on(port) or "another process"
                raise RendezvousConnectionError(
                    f"port {port} of {host}, where this node should serve the rendezvous, is taken by {holder}, which "
                    "is no agent of this release; end it, or choose another port on all nodes"
                ) from error
        else:
            port = int(store.address.rsplit(":", 1)[1])
            store.set(mark, b"{}")
            return OpenStore(store=store, url=_tcp_url(host, port), is_host=True)
    if port == 0:
        raise ValueError(f"rendezvous endpoint {host}:0; only the machine that serves may leave the port open")
    url = _tcp_url(host, port)
    line = f"waiting up to {timeout:g} s for the agent that serves the rendezvous at {host}:{port}; is it started?"
    try:
        with saying(line):
            store = stores.TCPStore(host, port, timeout=timeout)
            store.wait([mark], timeout)
    except StoreTimeout as error:
        raise RendezvousConnectionError(
            f"{host}:{port} answers, but no agent of this release serves a rendezvous there: {error}"
        ) from error
    except StoreError as error:
        raise RendezvousConnectionError(
            f"cannot reach the rendezvous at {host}:{port} within {timeout:g} s: {error}. Is the agent of "
            "that machine running, and the port open?"
        ) from error
    return OpenStore(store=store, url=url)


def _is_served(host: str, port: int, mark: str) -> bool:
    """Ask whether an agent serves a rendezvous there, in a thread that is left behind if need be: torch's
    client waits without a limit for the greeting of a server that accepts and says nothing."""
    found = threading.Event()

    def ask() -> None:
        with stores.TCPStore(host, port, timeout=_SERVED_PATIENCE) as store:
            store.wait([mark], _SERVED_PATIENCE)
            found.set()

    def failed(error: BaseException) -> None:
        log.debug("%s:%d serves no rendezvous: %s", host, port, error)

    background.start(ask, "phalanx-ask-port", on_failure=failed).join(_SERVED_PATIENCE)
    return found.is_set()


def _tcp_url(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def connect(url: str, params: RendezvousParameters) -> Store:
    try:
        return stores.connect(url, params.get_as_float("read_timeout", timeouts.REACH_STORE))
    except StoreError as error:
        raise RendezvousConnectionError(f"cannot reach the rendezvous store: {error}") from error
