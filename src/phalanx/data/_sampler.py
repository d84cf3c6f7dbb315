"""ElasticDistributedSampler: each replica's indices of an epoch, exactly once at any world size.

Owns the position in the training run: (epoch, start) where the current pass began, and a cursor over
it. Everything else is pure: the order (``_order``), the split (``_partition``), the format (``_sampler_state``).

Assumption: replicas are in step. Then one number, how many positions of the epoch are done, is the
whole state, the same on all ranks, and valid for every other number of replicas.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DistributedSampler

from phalanx.data import _ranks
from phalanx.data._cursor import Cursor
from phalanx.data._order import Sequential
from phalanx.data._padding import draw
from phalanx.data._partition import Share, checked_tail
from phalanx.data._sampler_state import SamplerState, parameters_of
from phalanx.data._source import DEFAULT_LANES, Shuffle, adjust_cache, checked_seed, length_of, order_over
from phalanx.data._wrapped_orders import OrderLike

if TYPE_CHECKING:
    from phalanx.comm import Group


class ElasticDistributedSampler(DistributedSampler[Any]):
    """Split a dataset over replicas such that every sample is used once, also when their number changes.

    ``num_replicas`` and ``rank`` default to the current group's. ``start_index`` is how many samples of
    the first epoch are already done. ``tail`` says what happens when the rest does not divide: "pad"
    (default), "drop" (the same as ``drop_last=True``), "uneven", or "mask" (see ``WithWeights``).
    ``shuffle="block"`` keeps reads local in blocks of ``block_size``, ``"shards"`` in the shards of a
    ``ShardedDataset``; ``order`` brings any other order.

    >>> sampler = ElasticDistributedSampler(range(10), num_replicas=2, rank=0, shuffle=False)
    >>> indices = iter(sampler)
    >>> next(indices), next(indices), sampler.state_dict()["position"]
    (0, 2, 4)
    >>> sampler.resize(num_replicas=3, rank=0)
    >>> list(indices)
    [4, 7]

    Raises ``TypeError`` for a dataset without length, ``ValueError`` for an empty one, a start index
    outside [0, length), a rank outside [0, num_replicas), and contradicting options.
    """

    # The base class is there for isinstance checks of trainers; all of its behaviour is replaced, so
    # its __init__, which sets plain attributes, is not called.
    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        start_index: int = 0,
        *,
        shuffle: Shuffle = True,
        seed: int | torch.Generator = 0,
        drop_last: bool = False,
        tail: str | None = None,
        order: OrderLike | None = None,
        block_size: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.shuffle = shuffle  # type: ignore[assignment]  # wider than the base's bool
        self.seed = checked_seed(seed)
        self.tail = checked_tail(tail, drop_last)
        self.drop_last = self.tail == "drop"
        self.start_index = start_index
        self._dataset_length = length_of(dataset)
        self._order = order_over(dataset, shuffle, order, block_size).settle(DEFAULT_LANES, 1)
        adjust_cache(dataset, self._order)
        if not 0 <= start_index < self._order.length:
            raise ValueError(f"start_index is {start_index}; expected one in [0, {self._order.length})")
        self.num_replicas, self.rank = _ranks.place(num_replicas, rank)
        self._epoch = 0
        self._start = start_index
        self._cursor: Cursor | None = None
        self._untouched = True  # nothing was iterated or loaded: set_epoch keeps start_index
        self._epoch_was_set = False  # set_epoch was called since the last pass began
        self._warned = False
        self._share()  # checks the numbers

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self._blocks_of_a_pass())

    def __len__(self) -> int:
        """Return how many indices a pass gives this replica: of the rest of the epoch, after a resume."""
        return self._share().count

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # computed, since a resize changes it
        """As ``len``."""
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]  # computed, since a resize changes it
        """How many indices a pass gives all replicas together, padding included."""
        if self.tail == "uneven":
            return self._order.length - self._start
        return self._share().rounds * self.num_replicas

    @property
    def epoch(self) -> int:
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch, from its beginning.

        Naming the epoch that is under way changes nothing: a resumed or resized epoch goes on where it
        was, so the usual loop over epochs can simply be entered again. Naming an epoch that a pass
        has just gone through to its end starts it once more.
        """
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}; expected 0 or more")
        is_exhausted = self._cursor is not None and self._is_over()
        if not self._untouched and (epoch != self._epoch or is_exhausted):
            self._start, self._cursor = 0, None
        self._epoch = epoch
        self._epoch_was_set = True

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return where the run stands, as JSON-able values that any rank of any world size can load.

        By default all that this replica has yielded counts as used. A loader that prefetches has taken
        more than was used: then say how many samples this replica really used, since this pass, or the
        last ``resize`` in it, began: ``state_dict(consumed=n)``. A pass begins with its first index; until
        then, and until ``set_epoch`` names another epoch, n counts in the pass before.
        """
        return self._state(self._position(consumed)).to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on after the samples that are done in ``state_dict``, whatever world size saved it.

        Iterators made before are closed. Raises ``ValueError`` for a state of another dataset length or
        another order.
        """
        order = self._order.adopt(parameters_of(state_dict))
        state = SamplerState.checked(state_dict, length=self._dataset_length, order=order.name, last=order.length)
        self._close_pass("a state was loaded into the sampler")
        # A loader may load its state after set_epoch: who named this very epoch gets the rest of it, even
        # if nothing is left, and names the next one then.
        self._epoch_was_set = self._epoch_was_set and state.epoch == self._epoch
        self._order, self.seed, self._epoch, self._start = order, state.seed, state.epoch, state.position
        self._untouched = False

    def resize(self, num_replicas: int, rank: int, *, consumed: int | None = None) -> None:
        """Split what is left of the epoch over another number of replicas, in place.

        A pass under way goes on with its new share. With ``consumed`` (see ``state_dict``), samples that
        were taken but not used are issued again, and iterators made before, which a loader may have
        read ahead, are closed: make new ones.
        """
        position = self._position(consumed)
        moved = self._share(start=position, num_replicas=num_replicas, rank=rank)  # checks before changing
        cursor = self._cursor
        if cursor is not None and not cursor.finished and consumed in (None, cursor.rounds_done):
            cursor.move(moved)
            if not moved.rounds:  # the epoch is over, as after loading its end: naming it again is no replay
                self._cursor = None
        else:
            self._close_pass("samples were given back by resize(consumed=...)")
        self.num_replicas, self.rank, self._start = num_replicas, rank, position

    def check_agreement(self, group: Group | None = None) -> None:
        """Make sure that all ranks agree on seed, epoch and position; collective over the group.

        Raises ``SamplerMismatch`` on every rank, naming who differs in what.
        """
        mine = {**self.state_dict(), "num_replicas": self.num_replicas, "tail": self.tail}
        _ranks.check_agreement(mine, (self.rank,), self.num_replicas, group)

    def _blocks_of_a_pass(self) -> Iterator[Iterator[int]]:
        # A generator, so that a pass begins with its first index and not when a loader prepares it.
        yield from self._begin_pass().blocks()

    def _begin_pass(self) -> Cursor:
        if self._is_over() and not self._epoch_was_set:
            if self._cursor is not None and not isinstance(self._order, Sequential):
                self._warn_once()
            self._epoch, self._start = self._epoch + 1, 0
        self._untouched = self._epoch_was_set = False
        indices = functools.partial(draw, self._order, self.seed, self._epoch, tail=self.tail)
        self._cursor = Cursor(self._share(), indices)
        return self._cursor

    def _is_over(self) -> bool:
        """Return whether all replicas are through the epoch.

        Asked by rounds, not by this replica's own count: all must give the same answer, also those that
        have less than others.
        """
        if self._cursor is None:
            return self._share().rounds == 0
        return self._cursor.finished or self._cursor.taken >= self._cursor.share.rounds

    def _position(self, consumed: int | None) -> int:
        """Return how many positions of the epoch are done, if ``consumed`` of those that were taken were used."""
        cursor = self._cursor
        done = 0 if cursor is None else cursor.rounds_done
        if consumed is not None and not 0 <= consumed <= done:
            raise ValueError(
                f"consumed is {consumed} on rank {self.rank}, but this replica was given {done} samples "
                f"since the pass began; expected one in [0, {done}]"
            )
        return self._start if cursor is None else cursor.position_after(consumed)

    def _state(self, position: int) -> SamplerState:
        return SamplerState(
            seed=self.seed,
            epoch=self._epoch,
            position=position,
            length=self._dataset_length,
            order=self._order.name,
            parameters=self._order.parameters(),
        )

    def _share(self, start: int | None = None, num_replicas: int | None = None, rank: int | None = None) -> Share:
        return Share(
            length=self._order.length,
            start=self._start if start is None else start,
            num_replicas=self.num_replicas if num_replicas is None else num_replicas,
            rank=self.rank if rank is None else rank,
            tail=self.tail,
        )

    def _close_pass(self, reason: str) -> None:
        if self._cursor is not None:
            self._cursor.close(f"this iterator is out of date: {reason}; make a new one with iter()")
        self._cursor = None

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"epoch {self._epoch} is over and set_epoch was not called: going on with epoch "
                f"{self._epoch + 1}. Call set_epoch(epoch) before each epoch to choose it yourself",
                stacklevel=3,
            )
