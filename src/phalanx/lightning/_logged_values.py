"""Turns what ``self.log`` is told in each slot into one mean per step, the same on all workers.

While a slot is computed, a ``SlotRecorder`` stands in the place of Lightning's collection of results: what is logged
goes to ``micro.log``, under a key that says everything the collection has to know (``encode_entry``). When the step is
committed, the means go into the collection as if one batch had logged them, also on workers that had no slot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

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


def replay(results: Any, logs: Mapping[str, float], num_samples: int) -> None:
    """Log the means of a step."""
    for key, mean in logs.items():
        fx, name, options = _decoded(key)
        results.log(fx, name, torch.tensor(mean), batch_size=num_samples, **options)
