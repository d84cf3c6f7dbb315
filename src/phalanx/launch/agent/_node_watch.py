"""Shows a job from the agent of a node: collects what happens, serves it, and tells the others where.

Owns the hub, the thread that reads the workers' event files, the server, and the records of addresses in the store. The
agent of the first node writes the job's own address; it and those of the second and the last node, one of which would
be the next, follow the events of all others. Nothing here can fail a job: what does not work is said, and the job goes
on without it.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.comm import _background as background
from phalanx.comm.stores._signing import read_secret
from phalanx.errors import StoreError
from phalanx.events._agent_events import GoodputTold
from phalanx.events._lines import to_json
from phalanx.events._troubles import say
from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.events import ActionAsked, AnyEvent, NodeLoad
from phalanx.launch.recovery._asking import Asking
from phalanx.launch.rendezvous._interface import GenerationHandler, RendezvousInfo
from phalanx.launch.system._node_load import LoadMeter
from phalanx.launch.telemetry._terminal import Terminal, logging_above
from phalanx.protocol import PAGE, PAGES, PageAddress, RecordError, pages_key
from phalanx.watch._access import PageAccess
from phalanx.watch._audit import audit_record
from phalanx.watch._files import LOOK_EVERY, Tail, read_job_events
from phalanx.watch._goodput import Goodput, goodput
from phalanx.watch._http import HttpServer, is_loopback, parse_address
from phalanx.watch._hub import Hub
from phalanx.watch._log_files import lines_since
from phalanx.watch._peer_agents import PeerAgents
from phalanx.watch._site import Site
from phalanx.watch._view import live_block

if TYPE_CHECKING:
    from phalanx.watch._otel import MetricPusher

log = logging.getLogger(__name__)

LOAD_EVERY = 5.0
PUSH_EVERY = 10.0
LINE_EVERY = 0.25
UNWATCHED_EVERY = 5.0
"""Seconds between two looks at the workers' events while nobody follows: many lines at once cost less each. Whoever
asks is told what is known at that moment all the same."""
PAGE_EVERY = 1.0
"""Seconds between two looks while a page is open and nobody sits at the terminal; news of the agent wake it at once."""
LOOK_AGAIN = 1.0
"""Seconds between two looks for the addresses of other agents, while some are missing."""
MAX_READ_AT_END = 64 << 20
"""Bytes of events that are read at the end for one line; of more, the commands tell."""


class NodeWatch:
    """Watches one node; ``events_file`` is the agent's own, if it writes one."""

    def __init__(self, config: LaunchConfig, handler: GenerationHandler, events_file: str | None) -> None:
        self.hub = Hub(config.run_id)
        self.url = ""
        self.tail_of: Callable[[str], tuple[str, ...]] = lambda worker: ()
        self.alive: Callable[[], float] = lambda: 0.0
        self.write: Callable[[AnyEvent], None] = lambda event: None
        self.exposition: Callable[[], str] = lambda: ""
        """Gives what the agent's own metrics are, where they are kept for Prometheus."""
        self.terminal = Terminal(2) if config.shows_line else None
        self._config = config
        self._handler = handler
        self._file = events_file
        self._directory: Path | None = Path(events_file).parent if events_file else None
        self._info: RendezvousInfo | None = None
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._heard: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Events of this agent, as lines, that are not in the hub yet."""
        self._adding = threading.Lock()
        self._news = threading.Event()
        self._pause = UNWATCHED_EVERY
        """What the thread that looks at the events waits for now."""
        self._threads: list[background.Background] = []
        self._server: HttpServer | None = None
        self._site: Site | None = None
        self._peers: PeerAgents | None = None
        self._tail: Tail | None = None
        self._pusher: MetricPusher | None = None

    @property
    def is_collecting(self) -> bool:
        """Whether events are put together here while the job runs: for the page, a collector, or a person."""
        return bool(self._config.dashboard or self._config.otel) or self.terminal is not None

    @property
    def is_on(self) -> bool:
        return self.is_collecting or self._directory is not None

    def hear(self, event: AnyEvent) -> None:
        """Take an event of this agent. At once: it may be the death of a worker, for which a heal does not wait."""
        if self.is_collecting:
            self._heard.put(to_json(event))
            self._news.set()

    def start(self, folder: str) -> str:
        """Begin; where workers shall write their events ("": nowhere). ``folder`` is this agent's own."""
        if self._directory is None and self.is_collecting and folder:
            self._directory = Path(folder) / "events"
            self._directory.mkdir(exist_ok=True)
        if not self.is_on or self._directory is None:
            return ""
        if self.is_collecting:
            self._collect(self._directory)
        if self._config.dashboard:
            self._serve()
        if self._config.otel:
            self._begin_pushing()
        return str(self._directory)

    def _collect(self, directory: Path) -> None:
        but = [Path(self._file)] if self._file else []  # the agent's own events come by themselves
        self._tail = Tail(self.hub, [directory], but=but, depth=0)
        self._run(self._follow_files, "phalanx-events")
        if self.terminal is not None:
            self._run(self._show_line, "phalanx-line")

    def _show_line(self) -> None:
        assert self.terminal is not None, "the caller has looked"
        with logging_above(self.terminal):
            while not self._stopped.wait(LINE_EVERY):
                self.terminal.show(self.hub.read(live_block))
            self.terminal.show("")

    def _serve(self) -> None:
        self._run(self._measure_load, "phalanx-load")
        host, port = parse_address(self._config.dashboard)
        secret = self._secret()
        access = PageAccess(host=host, secret=secret)
        self._site = Site(self.hub, access, self)
        self._server = self._listen(host, port)
        if self._server is None:
            return
        self._peers = PeerAgents(self.hub, access.token)
        shown = self._config.local_addr or socket.gethostname() if host in ("0.0.0.0", "::") else host
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{self._server.port}/"
        say(f"the job is shown at {self.url}{'' if access.token is None else f'?token={access.token}'}")
        self._run(self._tell_address, "phalanx-address")

    def _listen(self, host: str, port: int) -> HttpServer | None:
        """Return the server; on another port when another agent of this machine has this one."""
        assert self._site is not None, "made by the caller"
        for number in dict.fromkeys((port, 0)):
            server = HttpServer(self._site.answer, host, number)
            try:
                server.start()
            except OSError as error:
                log.warning("the job cannot be shown at port %d of %s: %s", number, host, error)
            else:
                return server
        return None

    def _run(self, body: Callable[[], None], name: str) -> None:
        """Run a thread; what ends it is said, and the job goes on."""
        failed = f"the thread {name} ended, and the page of the job is incomplete"
        self._threads.append(
            background.start(body, name, on_failure=lambda error: log.error("%s: %r", failed, error), attempts=3)
        )

    def _secret(self) -> bytes | None:
        try:
            return read_secret(path=self._handler.secret_file or None)
        except ValueError as error:
            log.warning("the page cannot change the job: %s", error)
            return None

    def _look_every(self) -> float:
        """Return the seconds until the next look: fewer while somebody sees it, at the terminal or on an open page."""
        if self.terminal is not None:
            return LOOK_EVERY
        return PAGE_EVERY if self._site is not None and self._site.num_streams > 0 else UNWATCHED_EVERY

    def _follow_files(self) -> None:
        while not self._stopped.is_set():
            self._pause = self._look_every()
            self._news.wait(self._pause)
            self._news.clear()
            self._add_news()

    def _add_news(self) -> None:
        """Add what is new: what workers wrote before it, then what this agent has told."""
        with self._adding:
            told = [self._heard.get_nowait() for _ in range(self._heard.qsize())]
            if self._tail is not None:
                self._tail.look()
            self.hub.add_records([(json.loads(line), line) for line in told])

    def _measure_load(self) -> None:
        meter, node = LoadMeter(), socket.gethostname()
        while not self._stopped.wait(LOAD_EVERY):
            info, load = self._info, meter.read()
            self.write(
                NodeLoad(
                    job=self._config.run_id,
                    node=info.node.id if info else node,
                    node_rank=info.rank if info else -1,
                    **vars(load),
                )
            )

    def _begin_pushing(self) -> None:
        from phalanx.watch._otel import MetricPusher  # start-up: few agents push

        try:
            self._pusher = MetricPusher(self._config.otel)
        except RuntimeError as error:
            say(str(error))
        else:
            self._run(self._push_metrics, "phalanx-otel")

    def _push_metrics(self) -> None:
        while not self._stopped.wait(PUSH_EVERY):
            self._push()

    def _push(self) -> None:
        """Send the metrics of the job to the collector; the first node's agent knows all of them."""
        pusher = self._pusher
        if pusher is not None and self._info is not None and self._info.rank == 0:
            self._add_news()
            pusher.send(self.hub.read(lambda view: pusher.made(view, self.hub.now())))

    # -- the store -------------------------------------------------------------------------------------------------

    def formed(self, info: RendezvousInfo) -> None:
        """Note the generation that this node is in. The addresses are written by a thread: a heal waits for nobody."""
        self._info = info
        self._wake.set()

    def _tell_address(self) -> None:
        host = parse_address(self._config.dashboard)[0]
        mine = PageAddress(url=self.url, host=socket.gethostname(), is_local=is_loopback(host)).to_json()
        pause: float | None = None
        while True:
            self._wake.wait(pause)
            self._wake.clear()
            again, pause = pause or LOOK_AGAIN, None
            if self._stopped.is_set():
                return
            info = self._info
            if info is None or not hasattr(info.store, "clone"):
                continue  # a rendezvous of the user's own: its store is not ours
            try:
                with info.store.clone() as store:
                    store.set(pages_key(info.node.id), mine)
                    if info.rank == 0:
                        store.set(PAGE, mine)
                    if info.world_size > 1 and info.rank in (0, 1, info.world_size - 1):
                        # Whoever may come to serve: when the first node is lost and no other comes, the last one of a
                        # larger group takes its rank, and of two the second.
                        found = store.items(PAGES)
                        self._follow_peers(found)
                        if not {pages_key(node.id) for node in info.nodes} <= set(found):
                            pause = again = min(2 * again, LOAD_EVERY)  # some agent has not told its address yet
            except StoreError as error:
                log.info("the address of the page is not in the store: %s", error)

    def _follow_peers(self, told: dict[str, bytes]) -> None:
        urls = set()
        for data in told.values():
            try:
                address = PageAddress.from_json(data)
            except RecordError:
                continue
            if address.url != self.url and (not address.is_local or address.host == socket.gethostname()):
                urls.add(address.url.rstrip("/"))
        assert self._peers is not None, "made with the server"
        self._peers.follow(urls)

    # -- what the site asks of its host ----------------------------------------------------------------------------

    def catch_up(self) -> None:
        self._add_news()
        if self._look_every() < self._pause:
            self._news.set()  # from now on more often

    def alive_at(self) -> float:
        return self.alive()

    def tail(self, worker: str) -> list[str]:
        return list(self.tail_of(worker))

    def logs(self, rank: str, node: str, since: str) -> dict[str, Any]:
        if self._file is None:
            raise ValueError("this node keeps no log files: run the job with --log-dir DIR --tee 3 (or --redirects 3)")
        return lines_since(Path(self._file), rank, node, since)

    def audit(self) -> dict[str, Any]:
        if self._directory is None:
            return {}
        return audit_record(self._directory, self.hub.read(lambda view: list(view.lifelines.lives)))

    def metrics(self) -> str:
        return self.exposition()

    def act(self, action: str, wish: dict[str, Any], by: str) -> str:
        """Do what was asked for with the job's secret; in words."""
        info = self._info
        if info is None or not hasattr(info.store, "clone"):
            raise ValueError("the job has not begun, or its rendezvous is not one of ours")
        with info.store.clone() as store:
            done, detail = _ask(Asking(store), action, wish)
        self.write(
            ActionAsked(
                job=self._config.run_id,
                generation=info.generation,
                node_rank=info.rank,
                action=action,
                detail=detail,
                by=by,
            )
        )
        return done

    # -- the end ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End threads and server, and say where the time went."""
        if not self.is_on:
            return
        self._stopped.set()
        self._wake.set()
        self._news.set()
        for thread in self._threads:
            thread.join(5.0)
        self._add_news()
        account = self._account()
        if account is not None and account.total and account.parts["untold"] < account.total:
            say(str(account))
            self.write(GoodputTold(job=self._config.run_id, **account.to_record()))
            self._add_news()
        if self._pusher is not None:
            self._push()
            self._pusher.close()
        if self._peers is not None:
            self._peers.stop()
        if self._site is not None:
            self._site.close()
        if self._server is not None:
            self._server.stop()

    def _account(self) -> Goodput | None:
        if self.is_collecting:
            account: Goodput = self.hub.read(lambda view: view.accounts.result())
            return account
        directory = self._directory
        if directory is None:
            return None
        try:
            size = sum(entry.stat().st_size for entry in os.scandir(directory) if entry.is_file())
        except OSError:
            return None
        return goodput(read_job_events(directory)) if size <= MAX_READ_AT_END else None


def _ask(asking: Asking, action: str, wish: dict[str, Any]) -> tuple[str, str]:
    """Return what was asked for, in words, and its detail."""
    if action == "scale":
        size, node = wish.get("nproc"), wish.get("node", "")
        if type(size) is not int or not isinstance(node, str):
            raise ValueError(f"nproc is {size!r}; expected a number of workers")
        nodes = asking.scale(size, node)
        return f"asked {len(nodes)} node(s) for {size} worker(s) each", f"to {size}: {', '.join(nodes)}"
    if action == "drain":
        drained = asking.drain(str(wish.get("node", "")))
        return f"node {drained} is to be drained", drained
    if action == "save":
        number = asking.save()
        return "asked for a save after the next step", f"request {number}"
    if action == "stop":
        asking.stop("asked on the page")
        return "asked all agents to stop", ""
    raise ValueError(f"no action {action[:50]!r}; there are scale, drain, save and stop")
