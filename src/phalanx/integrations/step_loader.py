"""The loader that a trainer iterates over in the place of the user's: steps, asked of the job one by one.

Owns what the user's loader says about samples, batches and order (``LoaderPlan``), and the refusal of what a job cannot
do. It needs no optimizer: trainers ask for the loader before there is one. The samples themselves are read by the job,
by slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from phalanx.data import ShardTable
from phalanx.elastic import DataOptions

KNOWN_SAMPLERS = ("RandomSampler", "SequentialSampler", "SeedableRandomSampler")
"""Those that mean "all samples in any order" or "in their own": the last is accelerate's."""


def check_options(num_slots: int, evaluate: str) -> None:
    """Refuse what no trainer on a job can be told."""
    if evaluate not in ("everywhere", "shared"):
        raise ValueError(f"evaluate is {evaluate!r}; expected 'everywhere' or 'shared'")
    if num_slots < 1:
        raise ValueError(f"num_slots is {num_slots}; expected at least 1")


@dataclass(frozen=True, kw_only=True)
class LoaderPlan:
    """What a ``DataLoader`` of a user's means for a job: the batch size is that of a slot."""

    dataset: Any
    slot_batch_size: int
    data: DataOptions

    @classmethod
    def of(cls, loader: Any) -> LoaderPlan:
        """Read a user's loader; ``ValueError`` names what a job has no answer to, and the alternative."""
        if not isinstance(loader, DataLoader):
            raise ValueError(
                f"the training loader is a {type(loader).__name__}; expected one torch.utils.data.DataLoader over a "
                "map-style dataset. For other kinds write the loop with phalanx.elastic.Job"
            )
        if isinstance(loader.dataset, IterableDataset):
            raise ValueError(
                "the training dataset is iterable; expected a map-style one, which every worker can read at any place: "
                "use phalanx.data.ShardedDataset for files that stream"
            )
        batches = loader.batch_sampler
        sampler = getattr(batches, "sampler", loader.sampler)
        if type(batches) is not BatchSampler or type(sampler).__name__ not in KNOWN_SAMPLERS:
            raise ValueError(
                f"the training loader has a {type(batches).__name__} over a {type(sampler).__name__}; "
                "expected shuffle=True or shuffle=False: the order is the job's, so that it does not depend on the "
                "number of workers. For another order write the loop with phalanx.elastic.Job(data=DataOptions("
                "order=...))"
            )
        if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(loader.dataset)):  # type: ignore[arg-type]  # map-style
            raise ValueError(
                "the training loader's RandomSampler repeats samples or leaves some out; expected each once per epoch"
            )
        options = DataOptions(
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            shuffle=_shuffle_of(loader.dataset, sampler),
            tail="drop" if batches.drop_last else "uneven",
        )
        return cls(dataset=loader.dataset, slot_batch_size=batches.batch_size, data=options)

    def steps_per_epoch(self, num_slots: int) -> int:
        """Return how many steps an epoch has.

        >>> from torch.utils.data import DataLoader
        >>> LoaderPlan.of(DataLoader(range(100), batch_size=4)).steps_per_epoch(num_slots=8)
        4
        """
        size = num_slots * self.slot_batch_size
        count = len(self.dataset)
        return count // size if self.data.tail == "drop" else -(-count // size)


def _shuffle_of(dataset: Any, sampler: Any) -> bool | Literal["shards"]:
    """Return how a job shuffles where the user's loader does: a dataset of shards within a few of them at a time."""
    if not isinstance(sampler, RandomSampler):
        return False
    return "shards" if isinstance(getattr(dataset, "shards", None), ShardTable) else True


class StepLoader:
    """A loader whose batches are what ``next_step`` returns."""

    def __init__(self, plan: LoaderPlan, num_slots: int, next_step: Callable[[], Any]) -> None:
        self.plan = plan
        self.dataset = plan.dataset
        self.length = plan.steps_per_epoch(num_slots)
        self._next_step = next_step

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._next_step()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: where the job is follows from the trainer's counters. Trainers ask loaders that can resume."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See ``state_dict``."""


class SharedBatches:
    """A validation loader of one batch, which is the user's loader: a job shares its batches out among the workers."""

    def __init__(self, loader: Any) -> None:
        if not isinstance(loader, DataLoader) or loader.batch_size is None or isinstance(loader.sampler, RandomSampler):
            raise ValueError(
                f"evaluate='shared' with a validation loader of {type(loader).__name__}; expected a DataLoader with a "
                "batch_size and without shuffling. evaluate='everywhere' takes any"
            )
        self.loader = loader

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        yield self.loader
