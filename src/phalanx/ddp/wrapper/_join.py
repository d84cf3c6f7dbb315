"""Joins ranks with uneven inputs: those that ran out of data mirror the collectives of those that have not.

``Join`` is general: it works for any set of ``Joinable`` objects on one group. The protocol, per iteration:
1. The first joinable of an active rank announces it with an all-reduce of 1; a rank that is done contributes 0 and
   so learns how many are still active.
2. With ``throw_on_early_termination`` a second all-reduce tells whether anyone is done; then all ranks raise.
3. Ranks that are done run every joinable's ``main_hook``, which mirrors that joinable's collectives of one iteration.
When nobody is active any more, each joinable's ``post_hook`` runs once.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import Group, current_group

WARN_AFTER = 1000


class JoinHook:
    """What a rank without data does for one joinable; override what is needed."""

    def main_hook(self) -> None:
        """Mirror the collectives of one iteration; called as long as any rank is active."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Called once when all ranks are done. ``is_last_joiner``: this rank was among the last to finish."""


@dataclass(frozen=True)
class JoinConfig:
    """What a joinable must know of the context it is in."""

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False


class Joinable(ABC):
    """Something with per-iteration collectives that can be mirrored. Call ``Joinable.__init__`` in the constructor."""

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()
        self._join_config = JoinConfig()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for this object; all joinables of a context get the same ``kwargs``."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Where the context's own collectives run."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The group of the context's own collectives."""


class Announcement:
    """An active rank's announcement under way; ``count`` waits for the number of active ranks."""

    def __init__(self, tensor: Tensor, work: Any) -> None:
        self._tensor = tensor
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def count(self) -> int:
        self._work.wait()
        return round(self._tensor.item())


def group_of(process_group: Any) -> Group:
    """Our group for whatever a joinable calls its group: ours, PyTorch's, or None for the current one."""
    if isinstance(process_group, Group):
        return process_group
    return current_group() if process_group is None else Group.wrap(process_group)


class Join:
    """Context in which ranks may have different numbers of iterations.

    >>> with Join([model, optimizer]):                       # doctest: +SKIP
    ...     for batch in batches_of_this_rank:
    ...         model(batch).sum().backward()
    ...         optimizer.step()

    Raises ``ValueError`` without joinables or with joinables of different groups, and ``RuntimeError`` on all ranks
    as soon as one is done if ``throw_on_early_termination``.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        if not joinables:
            raise ValueError("Join needs at least one joinable")
        groups = [joinable.join_process_group for joinable in joinables]
        if any(other is not groups[0] and other != groups[0] for other in groups[1:]):
            raise ValueError("all joinables of one Join must use the same process group")
        self._joinables = list(joinables)
        self._hooks = [joinable.join_hook(**kwargs) for joinable in joinables]
        self._enable = enable
        self._throw = throw_on_early_termination
        self._group = group_of(groups[0])
        self._device = joinables[0].join_device
        for place, joinable in enumerate(joinables):
            joinable._join_config = JoinConfig(enable, throw_on_early_termination, place == 0)

    def __enter__(self) -> Join:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._enable and exc_type is None:
                self._mirror_others()
        finally:
            # Outside the context a joinable trains alone again.
            for joinable in self._joinables:
                joinable._join_config = JoinConfig()

    def _mirror_others(self) -> None:
        rounds = 0
        while self._sum(0.0):
            if self._throw:
                self._sum(1.0)
                raise RuntimeError(f"rank {self._group.rank} has no more inputs while other ranks still train")
            if rounds == WARN_AFTER:
                warnings.warn(
                    f"rank {self._group.rank} has had no input for {WARN_AFTER} iterations while other ranks still "
                    "train; such a skew wastes its time",
                    stacklevel=3,
                )
            for hook in self._hooks:
                hook.main_hook()
            rounds += 1
        for hook in self._hooks:
            hook.post_hook(rounds == 0)

    def _sum(self, value: float) -> float:
        tensor = torch.full((1,), value, device=self._device)
        self._group.all_reduce(tensor)
        return float(tensor.item())

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Announcement | None:
        """Announce that this rank is active; joinables call it before their collectives of an iteration.

        Does something for the first joinable of a context only, and returns its announcement.
        """
        config = getattr(joinable, "_join_config", None)
        if config is None:
            raise AssertionError(f"{type(joinable).__name__} must call Joinable.__init__ in its constructor")
        if not (config.enable and config.is_first_joinable):
            return None
        group, device = group_of(joinable.join_process_group), joinable.join_device
        ones = torch.ones(1, device=device)
        work = group.all_reduce(ones, async_op=True)
        if config.throw_on_early_termination:
            someone_done = torch.zeros(1, device=device)
            group.all_reduce(someone_done)
            if someone_done.item():
                raise RuntimeError(
                    f"rank {group.rank} stops: another rank has no more inputs, and throw_on_early_termination is set"
                )
        return Announcement(ones, work)
