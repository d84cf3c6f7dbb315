"""Stands for one generation on this node: who is in it, how it is ended, the store that its workers start from.

Owns the workers' bootstrap store (served by the first node, a new one for every generation) and the order in which a
generation is ended: first the recovery, so that all agents will do the same, then the news that it is over.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from phalanx.comm import stores
from phalanx.errors import StoreError
from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.failures._process_failure import ProcessFailure
from phalanx.launch.hang._detector import parse_report
from phalanx.launch.recovery import _streak
from phalanx.launch.recovery._agent_channel import AgentChannel
from phalanx.launch.recovery._budget import parse_failures
from phalanx.launch.recovery._contact import Judgement, judge
from phalanx.launch.recovery._policy import Situation, all_can_regroup
from phalanx.launch.recovery._streak import Death
from phalanx.launch.rendezvous._interface import GenerationHandler, RendezvousInfo
from phalanx.launch.system import _linux
from phalanx.launch.system._listen_address import bind_address
from phalanx.launch.workers._worker_environment import JobFacts, RankAssignment
from phalanx.launch.workers._worker_handle import WorkerHandle
from phalanx.protocol import Broken, LostContact, Recovery, Streak, timeouts

log = logging.getLogger(__name__)

REBIND_PATIENCE = 5.0
"""Seconds that a port which the generation before has used may need to come free."""


class PortTaken(Exception):
    """The workers' store cannot be served; the message names the port and who has it."""


class Generation:
    """Stands for a formed generation; ``lasting`` collects what this node says to the others for good."""

    def __init__(
        self,
        config: LaunchConfig,
        info: RendezvousInfo,
        handler: GenerationHandler,
        lasting: dict[str, bytes],
    ) -> None:
        self.config = config
        self.info = info
        self.number = info.generation
        self.channel = AgentChannel(info.store, lasting)
        self._before = self.channel.recovery_before(info.generation)
        self.restarts = self._before.restarts
        self.worker_ids = tuple(worker_id for node in info.nodes for worker_id in node.worker_ids)
        self._handler = handler
        self._bootstrap: stores.TCPStore | None = None

    def serve_bootstrap(self) -> None:
        """Serve, on the first node, the store for ``init_process_group("env://")``, or raise ``PortTaken``.

        It listens where workers will look for it: at ``master_addr``, or at this node's own address.
        torchrun keeps one store for all restarts, so that the keys of dead ranks are read by living ones.
        """
        if self.info.rank != 0 or self._handler.use_agent_store:
            return
        port = self.info.bootstrap_store_info.master_port
        told = self.config.master_addr or ("localhost" if self.info.world_size == 1 else self.info.node.addr)
        host = bind_address(told)
        until = time.monotonic() + (REBIND_PATIENCE if self.number and self._handler.has_fixed_port else 0.0)
        while self._bootstrap is None:
            try:
                self._bootstrap = stores.TCPStore.serve(host, port)
            except OSError as error:
                if time.monotonic() >= until:
                    raise PortTaken(self._explain(host, port, error)) from error
                time.sleep(0.1)

    def _explain(self, host: str, port: int, error: OSError) -> str:
        if error.errno != errno.EADDRINUSE:
            return f"port {port} of {host} cannot be used for the workers' store: {error}"
        holder = _linux.listener_on(port)
        who = f"by {holder}" if holder else f"(`ss -ltnp sport = :{port}` as root shows by whom)"
        text = f"port {port} of {host}, where the workers' store should be, is taken {who}"
        if self._handler.has_fixed_port:
            text += "; end that process, choose another --master-port, or leave it out: then a free port is found"
        return text

    @property
    def is_serving(self) -> bool:
        """Whether workers of other nodes may need a store of this process."""
        return self.info.world_size > 1 and (self._handler.is_host or self._bootstrap is not None)

    def why_not_drained(self, situation: Situation) -> str:
        """Return why this node's workers cannot all leave while the others go on; "": they can."""
        if self.info.world_size == 1:
            return "this node is the only one; phalanx stop ends the job"
        if self._handler.is_host:
            return "this node serves the store that the others need"
        if not situation.keeps_survivors:
            return "workers of this job cannot leave one by one (that needs --on-failure heal and an elastic job)"
        return ""

    def close(self) -> None:
        """Stop serving."""
        if self._bootstrap is not None:
            self._bootstrap.close()
            self._bootstrap = None

    def assignments(self) -> list[RankAssignment]:
        """Say which ranks the workers of this node have."""
        info, store = self.info, self.info.bootstrap_store_info
        role_base, role_size = info.role_place()
        return [
            RankAssignment(
                worker_id=worker_id,
                rank=info.node.base_rank + local_rank,
                local_rank=local_rank,
                world_size=info.num_workers,
                local_size=info.node.local_size,
                node_rank=info.rank,
                num_nodes=info.world_size,
                generation=self.number,
                master_addr=self.config.master_addr or store.master_addr,
                master_port=store.master_port,
                store_url=self._handler.store_url,
                role_rank=role_base + local_rank,
                role_size=role_size,
            )
            for local_rank, worker_id in enumerate(info.node.worker_ids)
        ]

    def job_facts(self) -> JobFacts:
        return JobFacts(
            run_id=self._handler.get_run_id(),
            job=self._handler.job,
            restarts=self.restarts,
            secret_file=self._handler.secret_file,
            regroup_timeout=timeouts.regroup_timeout(self._handler.join_timeout),
        )

    def situation(self, survivors: int) -> Situation:
        """Gather what the policy decides by."""
        heals = self.config.on_failure == "heal"
        return Situation(
            heals=heals,
            restarts=self.restarts,
            max_restarts=self.config.max_restarts,
            num_nodes=self.info.world_size,
            min_nodes=self.config.min_nodes,
            survivors=survivors,
            is_under_way=self.number > 0,
            num_left=self.channel.num_left(self.number, self.info.world_size) if self.info.world_size > 1 else 0,
            is_finishing=heals and self.channel.is_finishing(),
            can_regroup=heals and self.can_regroup(),
            streak=self._before.streak,
            ports_taken=self._before.ports_taken,
            max_failures=self.config.max_failures_without_progress,
            window=self.config.restart_window,
            failures=parse_failures(self._before.failures),
            node=self.info.node.id,
            time=time.time(),
        )

    def can_regroup(self) -> bool:
        """Return whether the scripts of all roles have said, through some worker, that they can."""
        by_role: dict[str, list[str]] = {}
        for node in self.info.nodes:
            by_role.setdefault(node.role, []).extend(node.worker_ids)
        ids = list(self.worker_ids)
        if all_can_regroup(by_role, self.channel.read_regrouping(ids)):
            return True
        time.sleep(timeouts.REPAIR)
        return all_can_regroup(by_role, self.channel.read_regrouping(ids))

    def say_done(self, stage: str) -> None:
        """Tell the other nodes that this one has come to a stage of its end; see ``stage_key``."""
        self.channel.say_done(self.number, self.info.rank, stage)

    def leave_early(self) -> None:
        """Tell the nodes that are still at work not to count on this one."""
        with suppress(StoreError):  # it is gone, and with it what the others could be told
            self.say_done("left")

    def has_left(self, worker: WorkerHandle) -> bool:
        """Return whether the end of a worker was agreed: it was asked to go, or said that it would."""
        return worker.is_asked_to_leave or (worker.has_succeeded and self._is_leaving(worker))

    def others_follow(self, running: Sequence[WorkerHandle]) -> bool:
        """Return whether workers of this node that still run leave at the boundary at which one has just left.

        A worker says that it leaves before the reduction that counts it, so those of this boundary have said so.
        """
        return any(worker.is_asked_to_leave and self._is_leaving(worker) for worker in running)

    def _is_leaving(self, worker: WorkerHandle) -> bool:
        return self.config.on_failure == "heal" and self.channel.is_leaving(self.number, worker.id)

    def streak_after(self, worker: WorkerHandle, failure: ProcessFailure, *, anew: bool) -> Streak:
        """Return the deaths in a row, with that of this worker; ``anew``: all workers start anew after it."""
        steps = {w: parse_report(data).step for w, data in self.channel.read_progress(list(self.worker_ids)).items()}
        death = Death(
            generation=self.number,
            born=worker.born,
            step=max(steps.values()),
            took_part=anew or steps.get(worker.id, -1) >= 0,
            is_killed=failure.is_from_outside,
            lived=time.monotonic() - worker.started_at,
            place=worker.place(),
            worker=worker.id,
            host=self.info.node.host,
        )
        return _streak.after(self._before.streak, death)

    def judge_lost_contact(self, words: Sequence[LostContact], stopped: Collection[str]) -> Judgement:
        """Return whose fault it is that workers lost contact; ``stopped`` are those of this node that are."""
        return judge(words, self.worker_ids, before=self._before.lost_contact, stopped=stopped)

    def propose(self, recovery: Recovery) -> Recovery:
        """Propose what to do about the end of this generation, once; the recovery that counts is returned."""
        return self.channel.decide(self.number, recovery)

    def agreed(self, proposal: Callable[[], Recovery]) -> Recovery:
        """Return what was agreed on before this node heard that the generation is over; propose, where nothing was."""
        return self.channel.recovery(self.number) or self.propose(proposal())

    def break_up(self, recovery: Recovery, lost: tuple[str, ...] = (), also: int = -1) -> None:
        """Tell everybody that the generation is over; what all agents do about it is agreed on.

        ``also`` is the generation before, when workers may still be on their way out of it.
        """
        broken = Broken(reason=recovery.reason, workers=lost, at_once=recovery.lost_contact is not None)
        self._handler.break_generation(self.number, broken)
        if also >= 0:
            self._handler.break_generation(also, broken)
