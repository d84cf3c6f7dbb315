"""One generation as this node's agent sees it: who is in it, how it is ended, the store that its workers start from.

Owns the workers' bootstrap store (served by the first node, a new one for every generation) and the order in which a
generation is ended: first the verdict, so that all agents will do the same, then the news that it is over.
"""

from __future__ import annotations

import logging

from phalanx.comm import stores
from phalanx.launch._addresses import bind_address
from phalanx.launch._environment import JobFacts, Place
from phalanx.launch._journal import Journal
from phalanx.launch._policy import Situation, Verdict
from phalanx.launch._spec import WorkerSpec
from phalanx.launch.rendezvous._interface import RendezvousHandler, RendezvousInfo
from phalanx.membership import Broken

log = logging.getLogger(__name__)


class Generation:
    """A formed generation."""

    def __init__(self, info: RendezvousInfo, handler: RendezvousHandler) -> None:
        self.info = info
        self.number = info.generation
        self.journal = Journal(info.store)
        self.restarts = self.journal.restarts_before(info.generation)
        self._handler = handler
        self._bootstrap: stores.TCPStore | None = None

    def serve_bootstrap(self, master_addr: str | None = None) -> bool:
        """On the first node: serve the store for ``init_process_group("env://")``. False when its port is taken.

        It listens where workers will look for it: at ``master_addr``, or at this node's own address.
        torchrun keeps one store for all restarts, so that the keys of dead ranks are read by living ones.
        """
        if self.info.rank != 0 or self._handler.use_agent_store:
            return True
        port = self.info.bootstrap_store_info.master_port
        told = master_addr or ("localhost" if self.info.world_size == 1 else self.info.node.addr)
        try:
            self._bootstrap = stores.TCPStore.serve(bind_address(told), port)
        except OSError as error:
            log.warning("port %d for the workers' store is taken: %s", port, error)
            return False
        return True

    def close(self) -> None:
        """Stop serving."""
        if self._bootstrap is not None:
            self._bootstrap.close()
            self._bootstrap = None

    def places(self, master_addr: str | None) -> list[Place]:
        """Where the workers of this node stand. ``master_addr`` overrides the first node's own address."""
        info, store = self.info, self.info.bootstrap_store_info
        role_base, role_size = info.role_place()
        return [
            Place(
                worker_id=worker_id,
                rank=info.node.base_rank + local_rank,
                local_rank=local_rank,
                world_size=info.num_workers,
                local_size=info.node.local_size,
                node_rank=info.rank,
                num_nodes=info.world_size,
                generation=self.number,
                master_addr=master_addr or store.master_addr,
                master_port=store.master_port,
                store_url=self._handler.store_url,
                role_rank=role_base + local_rank,
                role_size=role_size,
            )
            for local_rank, worker_id in enumerate(info.node.worker_ids)
        ]

    def job_facts(self, spec: WorkerSpec, on_failure: str) -> JobFacts:
        return JobFacts(
            run_id=self._handler.get_run_id(),
            role=spec.role,
            restarts=self.restarts,
            max_restarts=spec.max_restarts,
            on_failure=on_failure,
            use_agent_store=True,
            virtual_local_rank=spec.virtual_local_rank,
            secret_file=self._handler.secret_file,
        )

    def situation(self, spec: WorkerSpec, on_failure: str, survivors: int) -> Situation:
        return Situation(
            heals=on_failure == "heal",
            restarts=self.restarts,
            max_restarts=spec.max_restarts,
            num_nodes=self.info.world_size,
            min_nodes=spec.min_nodes,
            survivors=survivors,
            is_under_way=self.number > 0,
        )

    def end(self, verdict: Verdict, lost: tuple[str, ...] = (), also: int = -1) -> Verdict:
        """Propose a verdict and tell everybody that the generation is over; the standing verdict is returned.

        ``also`` is the generation before, when workers may still be on their way out of it.
        """
        verdict = self.journal.decide(self.number, verdict)
        broken = Broken(reason=verdict.reason, workers=lost)
        self._handler.break_generation(self.number, broken)
        if also >= 0:
            self._handler.break_generation(also, broken)
        return verdict
