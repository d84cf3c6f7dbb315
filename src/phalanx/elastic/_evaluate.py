"""Evaluates over a dataset, every sample exactly once, whatever happens to workers meanwhile.

The dataset is cut into numbered batches; each round, the workers share out those that nobody has a result for. Results
are numbers per batch, kept by all; a loss costs only the batches that the lost worker had not told about. The mean is
an exact sum, so it has the same bits for every number of workers. Newcomers wait until the evaluation is over. What is
random in it depends on the step that it follows, not on how many were made before: a job that all workers left during
one resumes behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.data._source import length_of
from phalanx.elastic._loading import Fetcher, Ticket
from phalanx.elastic._rng import derive_seed, seed_everything
from phalanx.elastic.membership._coordinator import EvaluationKnown
from phalanx.elastic.membership._lost import LOST
from phalanx.errors import CommError

if TYPE_CHECKING:
    from phalanx.elastic._job import Job

Results = dict[str, list[dict[str, float] | float]]
"""By batch number, as text for JSON: [values, number of samples]."""


def evaluate(
    job: Job, dataset: Any, function: Callable[[Any], Mapping[str, Any]], batch_size: int, collate_fn: Any
) -> dict[str, float]:
    length = _checked_length(dataset, batch_size, function)
    boundary = job.boundary
    job.take_held_objects(at_evaluation=True)
    known_result = boundary.recorded()
    if known_result is not None:
        boundary.num_calls += 1
        return known_result
    if boundary.is_past:
        raise RuntimeError(
            f"worker {job.worker_id} asks for evaluation {boundary.num_calls + 1} after step {job.step - 1}, which it "
            f"took over; the others made {len(boundary.results)} there. Call evaluate on every worker alike"
        )
    number, step, call = job.num_evaluations, job.step, boundary.num_calls
    fetcher = Fetcher(dataset, collate_fn, derive_seed(job.seed, "evaluate", step, call))
    num_batches = -(-length // batch_size)
    known: Results = {}
    was_training = job.model.training
    job.model.eval()
    job.buffers.begin_step()  # a forward pass may change buffers even now; no batch may see what another did
    job.regrouping.is_evaluating = True
    try:
        while job.num_evaluations == number:
            try:
                job.regrouping.check()
                group = job.regrouping.membership.group
                for told in group.all_gather_values(known) if group is not None else [known]:
                    known |= told
                missing = [b for b in range(num_batches) if str(b) not in known]
                if not missing:
                    job.count_evaluation(_mean(known))
                    job.regrouping.coordinator.publish_evaluation(number, job.last_evaluation)
                    break
                for b in _share(job, missing):
                    job.regrouping.check()
                    indices = tuple(range(b * batch_size, min(length, (b + 1) * batch_size)))
                    batch = fetcher[Ticket(step, b, 0, indices)]
                    job.buffers.restore()
                    seed_everything(derive_seed(job.seed, "evaluate", step, call, b))
                    with torch.no_grad():
                        values = _numbers(function(batch))
                    known[str(b)] = [values, float(len(indices))]
                    job.regrouping.coordinator.report(job.step)
            except LOST as error:
                if job.sharding is not None:
                    job.sharding.abandon_pass()
                job.buffers.restore()  # the regroup compares states and hands them on
                _recover(job, error)
    finally:
        job.regrouping.is_evaluating = False
        job.buffers.restore()
        job.model.train(was_training)
    boundary.num_calls += 1
    return job.last_evaluation


def _share(job: Job, missing: list[int]) -> Iterable[int]:
    """Return which batches this worker computes."""
    if job.sharding is not None:
        return job.sharding.share_out(missing)
    membership = job.regrouping.membership  # not the job's rank, which is another thing after the last step
    return missing[membership.rank :: len(membership.workers)]


def _recover(job: Job, cause: CommError) -> None:
    try:
        job.regrouping.recover(cause)
    except EvaluationKnown as known:
        job.count_evaluation(known.result)


def _checked_length(dataset: Any, batch_size: int, function: Any) -> int:
    if not callable(function):
        raise TypeError(
            f"evaluate: function is a {type(function).__name__}; expected a function of a batch that returns means by "
            'name, such as lambda batch: {"loss": loss_fn(model(batch[0]), batch[1])}'
        )
    if batch_size < 1:
        raise ValueError(f"evaluate: batch_size is {batch_size}; expected at least 1")
    if isinstance(dataset, Tensor) and not dataset.dim():
        raise TypeError(f"evaluate: dataset is a tensor of one number ({dataset.item():g}); expected a dataset")
    return length_of(dataset)


def _numbers(found: Any) -> dict[str, float]:
    """Return what the user's function returned, as numbers by name."""
    if not isinstance(found, Mapping):
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(
            f"evaluate: function returned {what}; expected means over the batch by name, such as "
            '{"loss": loss, "accuracy": (outputs.argmax(1) == targets).float().mean()}'
        )
    numbers = {}
    for name, value in found.items():
        if not isinstance(name, str):
            raise TypeError(f"evaluate: function returned the name {name!r}; expected text")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise TypeError(
                f"evaluate: function returned a tensor of shape {tuple(value.shape)} as {name!r}; expected its mean "
                f"over the batch: {name}.mean()"
            )
        numbers[name] = float(value)
    return numbers


def _mean(known: Results) -> dict[str, float]:
    results: list[Any] = list(known.values())
    names = sorted({name for values, _ in results for name in values})
    means = {}
    for name in names:
        parts = [(values[name], weight) for values, weight in results if name in values]
        means[name] = math.fsum(value * weight for value, weight in parts) / math.fsum(weight for _, weight in parts)
    return means
