"""Checks a communication hook before it is registered."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def check_comm_hook(hook: Callable[..., Any]) -> None:
    """``TypeError`` if it cannot be called with (state, bucket); ``ValueError`` if its annotations say otherwise.

    Hooks written for PyTorch annotate PyTorch's bucket class; its name is what counts.
    """
    if not callable(hook):
        raise TypeError(f"a communication hook must be callable, got {type(hook).__name__}")
    signature = inspect.signature(hook)
    if "bucket" in signature.parameters:
        annotation = signature.parameters["bucket"].annotation
        if annotation is not inspect.Parameter.empty and "GradBucket" not in _text(annotation):
            raise ValueError(f"the communication hook takes a bucket of {_text(annotation)}; expected GradBucket")
    else:
        try:
            signature.bind(None, None)
        except TypeError as error:
            raise TypeError(
                f"a communication hook is called as hook(state, bucket); {hook!r} is not: {error}"
            ) from None
    returns = signature.return_annotation
    if returns is not inspect.Signature.empty and "Future" not in _text(returns):
        raise ValueError(f"the communication hook returns {_text(returns)}; expected Future[Tensor]")


def _text(annotation: object) -> str:
    if isinstance(annotation, str):
        return annotation
    return f"{annotation} {getattr(annotation, '__name__', '')}"
