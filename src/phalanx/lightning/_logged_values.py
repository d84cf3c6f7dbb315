"""Turns what ``self.log`` is told in each slot into one mean per step, the same on all workers.

While a slot is computed, what is logged goes to ``micro.log`` (``SlotLog``) and not to Lightning's collection, under a
key that says everything the collection has to know (``encode_entry``). When the step is committed, the means go into
the collection as if one batch had logged them, also on workers that had no slot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from phalanx.elastic import Micro

Record = Callable[[str, float, float], None]
"""Takes a key, a mean over a batch and the number of its samples."""

KEPT = ("prog_bar", "logger", "on_step", "on_epoch", "rank_zero_only")
"""What ``self.log`` is told besides the value, and matters here."""


def encode_entry(fx: str, name: str, options: Mapping[str, Any]) -> str:
    """Return a key of a logged value from which ``self.log`` can be repeated.

    >>> encode_entry("training_step", "loss", {"prog_bar": True, "enable_graph": False})
    '["training_step", "loss", {"prog_bar": true}]'
    """
    return _encoded(fx, name, tuple((option, options[option]) for option in KEPT if option in options))


@lru_cache(maxsize=1024)
def _encoded(fx: str, name: str, options: tuple[tuple[str, Any], ...]) -> str:
    return json.dumps([fx, name, dict(options)])


@lru_cache(maxsize=1024)
def _decoded(key: str) -> tuple[str, str, dict[str, Any]]:
    fx, name, options = json.loads(key)
    return fx, name, options


@contextmanager
def recording(results: Any, batch: Any, num_samples: int, record: Record) -> Iterator[None]:
    """Give what is logged meanwhile to ``record`` instead of to the collection."""

    def log(fx: str, name: str, value: Any, *, batch_size: int | None = None, **options: Any) -> None:
        record(*entry_of(fx, name, value, batch_size or num_samples, options))

    before = results.batch
    results.batch, results.log = batch, log
    try:
        yield
    finally:
        results.batch = before
        del results.log  # the method of its class again


def entry_of(fx: str, name: str, value: Any, batch_size: int, options: Mapping[str, Any]) -> tuple[str, float, float]:
    """Return the key, value and weight of what a slot logs; ``ValueError`` for what has no mean over slots."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"self.log({name!r}) in {fx} was given a {type(value).__name__}, whose state would differ between workers; "
            "log its value as a number here, or log the metric in validation_step"
        )
    reduce_fx = options.get("reduce_fx", torch.mean)
    if reduce_fx not in (torch.mean, "mean", "avg"):
        raise ValueError(
            f"self.log({name!r}, reduce_fx={reduce_fx}) in {fx}; expected the mean: values of a step are means over "
            "its slots. Log others in validation_step"
        )
    return encode_entry(fx, name, options), float(value), float(batch_size)


class SlotLog:
    """Stands in the place of a module's ``log`` while a worker's slots are computed.

    A call goes through Lightning's own ``log`` the first time, with all that it checks. What it was told is remembered,
    and the same call with another value only records that: there is one per slot.
    """

    def __init__(self, module: Any, connector: Any) -> None:
        """``connector`` knows where a value was logged last; for another hook Lightning may reset its results."""
        self._module, self._connector = module, connector
        self._log = module.log
        self._is_own = type(module).log is LightningModule.log and "log" not in vars(module)
        """Whether it is Lightning's: a ``log`` of the user's is called each time."""
        self._entries: dict[tuple[Any, ...], str] = {}
        self._entry = ""
        self._metrics: dict[str, Any] = {}
        self._record: Record = lambda key, value, weight: None
        self._num_samples = 0

    @contextmanager
    def recording(self, results: Any, slots: Iterable[Micro]) -> Iterator[Iterator[Micro]]:
        """Give slots one after the other; what is logged while one is computed goes to its ``log``."""
        batch = results.batch
        results.log = self._take
        if self._is_own:
            vars(self._module)["log"] = self._log_again
        try:
            yield self._begin_each(results, slots)
        finally:
            results.batch = batch
            del results.log  # the method of its class again
            if self._is_own:
                del vars(self._module)["log"]

    def _begin_each(self, results: Any, slots: Iterable[Micro]) -> Iterator[Micro]:
        for micro in slots:
            results.batch, self._record, self._num_samples = micro.batch, micro.log, micro.num_samples
            yield micro

    def _take(self, fx: str, name: str, value: Any, *, batch_size: int | None = None, **options: Any) -> None:
        self._entry, mean, weight = entry_of(fx, name, value, batch_size or self._num_samples, options)
        self._record(self._entry, mean, weight)

    def _log_again(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **options: Any) -> None:
        fx = self._module._current_fx_name
        call = (fx, name, *options.items())
        is_plain = not args and type(value) is Tensor and value.numel() == 1 and self._connector._current_fx == fx
        if is_plain and (entry := self._find(call)):
            self._record(entry, float(value), float(batch_size or self._num_samples))
            return
        self._entry = ""
        self._log(name, value, *args, batch_size=batch_size, **options)
        if is_plain and self._entry:
            self._entries[call] = self._entry

    def _find(self, call: tuple[Any, ...]) -> str:
        try:
            return self._entries.get(call, "")
        except TypeError:  # an option that has no hash: say nothing, and remember nothing
            return ""

    def replay(self, results: Any, logs: Mapping[str, float], num_samples: int) -> None:
        """Log the means of a step."""
        for key, mean in logs.items():
            fx, name, options = _decoded(key)
            metric = results.get(f"{fx}.{name}")
            if metric is not None and metric is self._metrics.get(key):  # as below, without what was checked there
                results.update_metrics(f"{fx}.{name}", torch.tensor(mean), num_samples)
                continue
            results.log(fx, name, torch.tensor(mean), batch_size=num_samples, **options)
            self._metrics[key] = results[f"{fx}.{name}"]


def replay(results: Any, logs: Mapping[str, float], num_samples: int) -> None:
    """Log the means of a validation."""
    for key, mean in logs.items():
        fx, name, options = _decoded(key)
        results.log(fx, name, torch.tensor(mean), batch_size=num_samples, **options)
