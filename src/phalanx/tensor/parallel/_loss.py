"""The switch for cross entropy on cut classes; the computation is in ``_class_loss.py``.

Owns ``loss_parallel``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.tensor._modes import settings


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, ``F.cross_entropy`` of logits cut along the class dim keeps them so, forward and backward.

    >>> with loss_parallel():                          # doctest: +SKIP
    ...     F.cross_entropy(logits, targets).backward()
    """
    previous, settings.loss_parallel = settings.loss_parallel, True
    try:
        yield
    finally:
        settings.loss_parallel = previous
