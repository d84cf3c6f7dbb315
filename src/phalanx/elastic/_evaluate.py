"""Evaluation over a dataset, every sample exactly once, whatever happens to workers meanwhile.

The dataset is cut into numbered batches; each round, the workers share out those that nobody has a result for. Results
are numbers per batch, kept by all; a loss costs only the batches that the lost worker had not told about. The mean is
an exact sum, so it has the same bits for every number of workers. Newcomers wait until the evaluation is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from phalanx.elastic._loading import Fetcher, Ticket
from phalanx.elastic._rng import derive_seed, seed_everything
from phalanx.elastic._roster import EvaluationKnown
from phalanx.elastic._team import LOST
from phalanx.errors import CommError

if TYPE_CHECKING:
    from phalanx.elastic._job import Job

Results = dict[str, list[dict[str, float] | float]]
"""By batch number, as text for JSON: [values, number of samples]."""


def evaluate(
    job: Job, dataset: Any, function: Callable[[Any], Mapping[str, Any]], batch_size: int, collate_fn: Any
) -> dict[str, float]:
    number = job.num_evaluations
    fetcher = Fetcher(dataset, collate_fn, job.seed)
    num_batches = -(-len(dataset) // batch_size)
    known: Results = {}
    was_training = job.model.training
    job.model.eval()
    job.buffers.begin_step()  # a forward pass may change buffers even now; no batch may see what another did
    job.team.is_evaluating = True
    try:
        while job.num_evaluations == number:
            try:
                job.team.check()
                group = job.team.seat.group
                for told in group.all_gather_values(known) if group is not None else [known]:
                    known |= told
                missing = [b for b in range(num_batches) if str(b) not in known]
                if not missing:
                    job.last_evaluation = _mean(known)
                    job.num_evaluations += 1
                    job.team.roster.publish_evaluation(number, job.last_evaluation)
                    break
                seat = job.team.seat  # not the job's rank, which is another thing after the last step
                for b in missing[seat.rank :: len(seat.workers)]:
                    job.team.check()
                    indices = tuple(range(b * batch_size, min(len(dataset), (b + 1) * batch_size)))
                    batch = fetcher[Ticket(number, b, 0, indices)]
                    job.buffers.restore()
                    seed_everything(derive_seed(job.seed, "evaluate", number, b))
                    with torch.no_grad():
                        values = {name: float(value) for name, value in function(batch).items()}
                    known[str(b)] = [values, float(len(indices))]
                    job.team.roster.report(job.step)
            except LOST as error:
                _recover(job, error)
    finally:
        job.team.is_evaluating = False
        job.buffers.restore()
        job.model.train(was_training)
    return job.last_evaluation


def _recover(job: Job, cause: CommError) -> None:
    try:
        job.team.recover(cause)
    except EvaluationKnown as known:
        job.last_evaluation = known.result
        job.num_evaluations += 1


def _mean(known: Results) -> dict[str, float]:
    results: list[Any] = list(known.values())
    names = sorted({name for values, _ in results for name in values})
    means = {}
    for name in names:
        parts = [(values[name], weight) for values, weight in results if name in values]
        means[name] = math.fsum(value * weight for value, weight in parts) / math.fsum(
            weight for _, weight in parts
        )
    return means
