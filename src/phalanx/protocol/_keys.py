"""Names every key that agents and workers write to the job's store, and says what each holds.

All keys lie in the namespace ``job_prefix(job)``. What belongs to a generation, a round or an evaluation has its number
in the key, so that nothing of an earlier one is ever read. Under ``rdzv/`` lies what only agents read:

==================== ========================================================================================
``tickets``          counter; every registration of a node takes the next number
``live/node/<id>``   ``NodeRecord``, bound to the node's lease; only its node writes it
``formed``           number of the newest generation, a hint: readers also look at the one after it
``leader``           ``LeaderRecord``: the node that decides
``waiting``          how many nodes could be admitted now
``closed``           ``Closing``: the job is over, how it ended, and when
``runs``             how often a job of this id was run anew; see ``phalanx.launch.rendezvous._runs``
``proof``            empty, signed by the agent that made the job's secret: which of several it is
``etcd/offer/<id>``  ``EtcdOffer``: where a node would run a member of the job's own etcd
``etcd/asked/<id>``  ``EtcdRequest``: which member of it a node is asked to run
``bells``            counter; see below
``live/bell/<n>``    the n-th ring
==================== ========================================================================================

Who changes something that all nodes want to know (formed, ended, leader, closed) then *rings*: takes the next number of
``bells`` and writes that bell. Nodes wait for the next bell, one key each, and on hearing it read the records: what
counts is their state, never the sequence of rings, so a ring that is lost or doubled does no harm; nor does one of a
stranger, who can only make nodes look. Only the leader watches ``live/``: nodes that come and go wake nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass

# -- the job ------------------------------------------------------------------------------------------------------

FINISHING = "finishing"
"""A count, present and not empty when the workers have done all steps and only run what their scripts do after them:
which of the script's jobs it is."""

SETBACKS = "setbacks"
"""``Setbacks``: how often the job went back to an earlier step."""

SAVE_ASKED = "asked/save"
"""A count: how often somebody asked for a save. The first worker saves after its next step."""

STOP_ASKED = "asked/stop"
"""``StopRequest``: every agent is to stop its workers, as a signal to it would."""

PAGE = "watch/page"
"""``PageAddress``: where the agent of the first node shows the job."""


def pages_key(node_id: str) -> str:
    """``PageAddress``: where the agent of a node serves what it knows."""
    return f"{PAGES}{node_id}"


PAGES = "watch/node/"


def job_prefix(job: str) -> str:
    return f"phalanx/{job}"


def group_prefix(job: str, generation: int) -> str:
    """Namespace of the process group of one generation."""
    return f"{job_prefix(job)}/gen/{generation}/group"


# -- a generation: written by agents, read by agents and workers --------------------------------------------------


def members_key(generation: int) -> str:
    """``Members``: who is in a generation. Written once, by compare-and-set from absent: that write decides."""
    return f"gen/{generation}/members"


def broken_key(generation: int) -> str:
    """``Broken``: the generation is over, stop what is in flight."""
    return f"gen/{generation}/broken"


def wanted_key(generation: int) -> str:
    """``Broken``: someone would like a new generation at the next step boundary."""
    return f"gen/{generation}/wanted"


def recovery_key(generation: int) -> str:
    """``phalanx.launch.recovery._policy.Recovery``: what all agents do about the end of a generation. Written once."""
    return f"agents/recovery/{generation}"


def failures_prefix(generation: int) -> str:
    """Under it, by worker: what a worker of the generation died of."""
    return f"agents/failures/{generation}/"


def stage_key(stage: str, generation: int, rank: int) -> str:
    """Present when the node at ``rank`` has come to a stage of its end: ``done`` (all its workers have succeeded),
    ``left`` (and it did not wait for the others) or ``failed``."""
    return f"agents/{stage}/{generation}/{rank}"


def stacks_key(generation: int) -> str:
    """``StacksRequest``: every agent is to write its workers' stacks to the logs."""
    return f"agents/stacks/{generation}"


def agents_prefix(generation: int) -> str:
    """Return where agents of a user's own kind keep what they tell each other in a generation."""
    return f"agents/{generation}"


def wish_key(node_id: str) -> str:
    """Return a count: how many workers a node should run; its agent grows or shrinks the node accordingly."""
    return f"wish/{node_id}"


# -- what workers tell agents -------------------------------------------------------------------------------------


def regroups_key(worker_id: str) -> str:
    """Present when the worker follows ``members_key`` from generation to generation, and so can outlive its peers."""
    return f"regroups/{worker_id}"


def leaving_key(generation: int, worker_id: str) -> str:
    """Present when the worker will exit with code 0 at its next step boundary."""
    return f"gen/{generation}/leaving/{worker_id}"


def contact_key(generation: int, worker_id: str) -> str:
    """``LostContact``: what the worker saw when it lost contact with others of the generation."""
    return f"gen/{generation}/contact/by/{worker_id}"


def any_contact_key(generation: int) -> str:
    """Present when some worker of the generation has written ``contact_key``; the one key that agents look at."""
    return f"gen/{generation}/contact/any"


def progress_key(worker_id: str) -> str:
    """``ProgressReport``, rewritten by a worker when it gets on. Agents tell by it who hangs, and whether workers die
    again and again without a step in between."""
    return f"progress/{worker_id}"


def ended_key(worker_id: str) -> str:
    """Present when a worker's script has ended well; the process may stay for a while to hand over its state."""
    return f"ended/{worker_id}"


def value_key(name: str) -> str:
    """Return a text that a script has named (``phalanx.elastic.write_once``). Written once; stays with the job."""
    return f"values/{name}"


# -- the rendezvous: agents among themselves ----------------------------------------------------------------------

TICKETS = "rdzv/tickets"
LIVE = "rdzv/live/"
NODES = "rdzv/live/node/"
FORMED = "rdzv/formed"
LEADER = "rdzv/leader"
WAITING = "rdzv/waiting"
CLOSED = "rdzv/closed"
PROOF = "rdzv/proof"
BELLS = "rdzv/bells"
RUNS = "rdzv/runs"


def node_key(node_id: str) -> str:
    return f"{NODES}{node_id}"


def etcd_offer_key(node_id: str) -> str:
    return f"rdzv/etcd/offer/{node_id}"


def etcd_request_key(node_id: str) -> str:
    return f"rdzv/etcd/asked/{node_id}"


def bell_key(number: int) -> str:
    return f"rdzv/live/bell/{number}"


# -- outside of any job: what a store at an endpoint says of itself -------------------------------------------------

SERVED = "phalanx/served"
"""Present in a store that an agent serves for rendezvous."""

ADAPTED_ENDPOINT = "phalanx/endpoint"
"""A text: where the agents of a rendezvous of others find the store of ours."""

ETCD_ENDPOINT = "phalanx/etcd-endpoint"
"""Present in a store that an agent serves so that the job's own etcd is found."""

ETCD_CLUSTER = "phalanx/etcd"
"""``ClusterRecord``: the job's own etcd."""

ETCD_WAITING = "phalanx/waiting/"

UNUSED = "phalanx/doctor"
"""Never written; reading it shows that a store answers."""


def etcd_waiting_key(node_id: str) -> str:
    """Present, by a lease, as long as a node waits for the job's own etcd and knows of none."""
    return f"{ETCD_WAITING}{node_id}"


# -- an elastic job: workers among themselves ---------------------------------------------------------------------


@dataclass(frozen=True)
class JobKeys:
    """The keys of the ``number``-th job that a script makes.

    A script may make several jobs one after the other: each has keys of its own, by the order in which they were made,
    which is the same in every worker because all run the same script. One worker writes each of them and none is a
    counter: so the job's secret covers them, and nobody else can ask for a regroup.

    >>> JobKeys().ready(3, "a"), JobKeys(1).done
    ('elastic/3/ready/a', 'elastic/job1/done')
    """

    number: int = 0

    @property
    def prefix(self) -> str:
        return f"elastic/job{self.number}" if self.number else "elastic"

    @property
    def done(self) -> str:
        """``Finish``: all workers of a round have committed the last step."""
        return f"{self.prefix}/done"

    @property
    def committed(self) -> str:
        """Return a count: how many steps are known to be committed; may be a moment late."""
        return f"{self.prefix}/committed"

    def ready(self, generation: int, worker: str) -> str:
        """``Ready``: the worker waits, or waited, for a place in a round of the generation."""
        return f"{self.prefix}/{generation}/ready/{worker}"

    def leaving(self, generation: int) -> str:
        """Present when some worker of a generation has said that it leaves."""
        return f"{self.prefix}/{generation}/leaving"

    def round(self, generation: int, round_: int) -> str:
        """``Round``: who computes together. Written once."""
        return f"{self.prefix}/{generation}/round/{round_}"

    def crossed(self, generation: int, round_: int, worker: str) -> str:
        """Present when the worker has committed the last step of a round."""
        return f"{self.prefix}/{generation}/crossed/{round_}/{worker}"

    def evaluation(self, number: int) -> str:
        """``Evaluation``: its result, for a worker that was cut off from it or came after it."""
        return f"{self.prefix}/evaluation/{number}"

    def keeps(self, generation: int, worker: str) -> str:
        """In every generation after the last step, a count: the worker lives; 1 if it keeps the final state, else 0."""
        return f"{self.prefix}/{generation}/keeps/{worker}"

    def claim(self, generation: int, rank: int) -> str:
        """Return the id of the worker that has a rank of the job that finished in a generation, if not the one that had
        it then."""
        return f"{self.prefix}/{generation}/claim/{rank}"

    def ask(self, generation: int, source: str, worker: str) -> str:
        """Present when a worker asks another one for the final state."""
        return f"{self.prefix}/{generation}/ask/{source}/{worker}"

    def group(self, round_: int) -> str:
        """Namespace, in the root of the store, of the groups of a round."""
        return f"job{self.number}/round/{round_}" if self.number else f"round/{round_}"

    def handover(self, source: str, worker: str) -> str:
        """Namespace, in the root of the store, of the group of two in which a final state is handed over."""
        return f"{self.prefix}/handover/{source}/{worker}"
