"""Makes the handlers of the ``etcd`` backend: on a cluster that somebody runs, or on one of the job's own.

Owns how a job's own etcd is found. Where ``--rdzv-conf embedded=N`` is said, the endpoint (or each of several, with
commas between them) is a *door*: a small TCP store that the agent on that machine serves and that holds one record,
where the members are. The agent at the first door begins the cluster; whichever agent looks after the members writes
the record to every door that is open, again and again. So an agent whose machine was lost and returns finds the record
in its own door, and a newcomer at any other.

Assumptions: the first door stays without a record for ``GRACE`` seconds only if no cluster of the job lives. An agent
that returns to the first door while it is cut off from all others would begin a second cluster; it has no majority of a
job with ``min_nodes`` above half of ``max_nodes``.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx._reach import reach
from phalanx.comm import stores
from phalanx.comm.stores._etcd import EtcdStore
from phalanx.comm.stores._etcd_access import etcd_url, parse_etcd_url
from phalanx.comm.stores._interface import Store
from phalanx.comm.stores._signing import Signer
from phalanx.errors import StoreError, StoreTimeout
from phalanx.launch.rendezvous._backends import (
    DEFAULT_PORT,
    OpenStore,
    connect,
    create_c10d_handler,
    describe_node,
    is_this_machine,
    make_handler,
    open_tcp,
    secret_of,
    split_endpoint,
)
from phalanx.launch.rendezvous._etcd_certificates import CertificateFiles, write_certificates
from phalanx.launch.rendezvous._etcd_keeper import EtcdKeeper
from phalanx.launch.rendezvous._etcd_process import MemberProcess, find_program
from phalanx.launch.rendezvous._handler import StoreRendezvousHandler
from phalanx.launch.rendezvous._interface import RendezvousConnectionError, RendezvousParameters
from phalanx.launch.rendezvous._waiting import saying
from phalanx.launch.system._folders import OwnedFolder, open_agent_folder
from phalanx.launch.system._listen_address import LOOPBACK
from phalanx.protocol import RecordError, timeouts

log = logging.getLogger(__name__)

GRACE = 3.0
"""Seconds for a cluster that lives to say so at a door that has been opened anew."""
_DOOR = "phalanx/door"
_MEMBERS = "phalanx/etcd"
_KNOCK = 1.0
"""Seconds for a machine with a door to answer."""


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
    doors = [split_endpoint(each, DEFAULT_PORT) for each in params.endpoint.split(",")]
    secret = secret_of(params)[1]
    signer = Signer(params.run_id, secret)
    node = describe_node(params, loopback=doors[0][0] in LOOPBACK)
    folder = open_agent_folder()
    process: MemberProcess | None = None
    board: MemberBoard | None = None
    try:
        files = None if secret is None else write_certificates(Path(folder.path), secret, params.run_id, [node.addr])
        process = MemberProcess(node.id, node.addr, folder.path, files)
        board = MemberBoard(doors, signer)
        endpoints = _find(params, doors, board)
        if not endpoints:
            endpoints = [process.endpoint]
            process.start(f"{node.id}={process.offer.peer}", is_new=True)
        url = _url(endpoints, files)
        store = _connect(url, params, process)
        board.publish(endpoints)
        keeper = EtcdKeeper(
            process,
            store.clone(),
            params.run_id,
            signer,
            size=size,
            endpoint=params.endpoint,
            publish=board.publish,
            close=lambda: _put_away(process, board, folder),
        )
    except BaseException as error:
        _put_away(process, board, folder)
        if isinstance(error, FileNotFoundError | ImportError):
            raise RendezvousConnectionError(f"node {node.id} cannot run an etcd of the job's own: {error}") from error
        raise
    try:
        keeper.start(offers=bool(find_program()))
        return make_handler(params, OpenStore(store=store, url=url, keeper=keeper), node=node)
    except BaseException:
        keeper.close()
        store.close()
        raise


def _find(params: RendezvousParameters, doors: Sequence[tuple[str, int]], board: MemberBoard) -> list[str]:
    """Return where the members of the job's etcd are; nowhere when it is for this node to begin it."""
    timeout = params.get_as_float("read_timeout", timeouts.REACH_STORE)
    is_host = params.get_as_bool("is_host")
    own = [door for door in doors if is_this_machine(door[0])] if is_host is None else list(doors[:1]) * is_host
    if own:
        opened = open_tcp(*own[0], serve=True, timeout=timeout, mark=_DOOR)
        if opened.is_host:
            board.serve(opened.store)
            is_first = own[0] == doors[0]
            return board.wait_here(GRACE if is_first else timeout, doors, is_needed=not is_first)
        opened.store.close()  # another agent of this machine has opened it
    line = f"waiting up to {timeout:g} s for the agents that know the job's etcd, at {params.endpoint}"
    with saying(line):
        return board.wait_anywhere(timeout)


def _connect(url: str, params: RendezvousParameters, process: MemberProcess) -> EtcdStore:
    endpoints, access = parse_etcd_url(url)
    try:
        return EtcdStore(endpoints, access=access, timeout=params.get_as_float("read_timeout", timeouts.REACH_STORE))
    except StoreError as error:
        said = f"; its own member says: {process.last_words()}" if process.is_started else ""
        raise RendezvousConnectionError(f"cannot reach the job's etcd: {error}{said}") from error


def _url(endpoints: Sequence[str], files: CertificateFiles | None) -> str:
    known = {} if files is None else {"ca": files.ca, "cert": files.client, "key": files.client_key}
    url = etcd_url(",".join(endpoints), encrypted=files is not None, **known)
    return f"{url}{'&' if known else '?'}follow=1"


def _put_away(process: MemberProcess | None, board: MemberBoard | None, folder: OwnedFolder) -> None:
    if process is not None:
        process.close()
    if board is not None:
        board.close()
    folder.remove()


class MemberBoard:
    """Writes where the members are to every door of a job, and reads it there. Not for several threads at once."""

    def __init__(self, doors: Sequence[tuple[str, int]], signer: Signer) -> None:
        self._doors = list(doors)
        self._signer = signer
        self._clients: dict[tuple[str, int], Store] = {}
        self._served: Store | None = None

    def serve(self, store: Store) -> None:
        """Keep the door that this agent has opened open."""
        self._served = store

    def wait_here(self, timeout: float, doors: Sequence[tuple[str, int]], *, is_needed: bool) -> list[str]:
        """Wait until a cluster that lives has written to this agent's own door."""
        assert self._served is not None, "it is open"
        try:
            self._served.wait([_MEMBERS], timeout)
        except StoreTimeout as error:
            if is_needed:
                raise RendezvousConnectionError(
                    f"no agent has begun the job's etcd within {timeout:g} s; the one on {doors[0][0]} does that: is "
                    "it started?"
                ) from error
            return []
        return self._read(self._served)

    def wait_anywhere(self, timeout: float) -> list[str]:
        """Ask all doors until one knows."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for door in self._doors:
                client = self._client(door)
                found = [] if client is None else self._ask(door, client)
                if found:
                    return found
            time.sleep(0.1)
        shown = ", ".join(f"{host}:{port}" for host, port in self._doors)
        raise RendezvousConnectionError(
            f"nobody at {shown} has said within {timeout:g} s where the job's etcd is. Do the agents of those machines "
            "run with the same --rdzv-conf embedded=N, and are the ports open?"
        )

    def publish(self, endpoints: Sequence[str]) -> None:
        """Write where the members are to every door that is open and does not say so."""
        for door in self._doors:
            client = self._client(door)
            if client is not None and self._ask(door, client) != list(endpoints):
                self._tell(door, client, endpoints)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        if self._served is not None:
            self._served.close()
            self._served = None

    def _client(self, door: tuple[str, int]) -> Store | None:
        """Return a client of the store at a door, if it is open. torch's client would wait for it: knock first."""
        if door not in self._clients:
            try:
                reach(*door, _KNOCK)[0].close()
                self._clients[door] = stores.TCPStore(*door, timeout=5.0)
            except (OSError, StoreError):
                return None
        return self._clients[door]

    def _ask(self, door: tuple[str, int], client: Store) -> list[str]:
        try:
            return self._read(client)
        except StoreError:
            self._drop(door)
            return []

    def _tell(self, door: tuple[str, int], client: Store, endpoints: Sequence[str]) -> None:
        record = json.dumps({"v": 1, "members": list(endpoints)}).encode()
        try:
            client.set(_MEMBERS, self._signer.seal(_MEMBERS, record))
        except StoreError:
            self._drop(door)

    def _drop(self, door: tuple[str, int]) -> None:
        if door in self._clients:
            self._clients.pop(door).close()

    def _read(self, store: Store) -> list[str]:
        raw = store.get(_MEMBERS)
        try:
            found = None if raw is None else json.loads(self._signer.open(_MEMBERS, raw)).get("members")
        except (RecordError, ValueError, AttributeError) as error:
            self._signer.complain(_MEMBERS, f"refused a record: {error}")
            return []
        return [str(each) for each in found] if isinstance(found, list) else []
