"""The store keys by which the workers of a job find each other; those of their agents are in ``phalanx.protocol``.

Every key of a round or an evaluation belongs to one generation or number; nothing of an earlier one is ever read. A
script may make several jobs one after the other: each has keys of its own, by the order in which they were made, which
is the same in every worker because all run the same script. All hold records that one worker writes, none a counter: so
the job's secret covers them, and nobody else can ask for a regroup.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Keys:
    """The keys of the ``number``-th job that a script makes.

    >>> Keys().ready(3, "a"), Keys(1).done
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
        """How many steps are known to be committed, as decimal text; may be a moment late."""
        return f"{self.prefix}/committed"

    def ready(self, generation: int, worker: str) -> str:
        """``Ready``: the worker waits, or waited, for a seat in a generation."""
        return f"{self.prefix}/{generation}/ready/{worker}"

    def leaving(self, generation: int) -> str:
        """Present when some worker of a generation has said that it leaves."""
        return f"{self.prefix}/{generation}/leaving"

    def round(self, generation: int, round_: int) -> str:
        return f"{self.prefix}/{generation}/round/{round_}"

    def crossed(self, generation: int, round_: int, worker: str) -> str:
        """Present when the worker has committed the last step of a round."""
        return f"{self.prefix}/{generation}/crossed/{round_}/{worker}"

    def evaluation(self, number: int) -> str:
        """The result of an evaluation, for a worker that was cut off from it or came after it."""
        return f"{self.prefix}/evaluation/{number}"

    def keeps(self, generation: int, worker: str) -> str:
        """Present in every generation after the last step: the worker lives; ``b"1"`` if it keeps the final state."""
        return f"{self.prefix}/{generation}/keeps/{worker}"

    def claim(self, generation: int, rank: int) -> str:
        """Who has a rank of the job that finished in a generation, if not the worker that had it then."""
        return f"{self.prefix}/{generation}/claim/{rank}"

    def ask(self, generation: int, source: str, worker: str) -> str:
        """Present when a worker asks another one for the final state."""
        return f"{self.prefix}/{generation}/ask/{source}/{worker}"

    def group(self, round_: int) -> str:
        """Namespace, in the root of the store, of the groups of a round."""
        return f"job{self.number}/round/{round_}" if self.number else f"round/{round_}"

    def handover(self, source: str, worker: str) -> str:
        """The same for the group of two in which a final state is handed over."""
        return f"{self.prefix}/handover/{source}/{worker}"
