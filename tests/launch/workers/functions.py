"""Functions that tests launch; a module of its own, so that fresh interpreters can import it."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist


def add(a: int, b: int) -> tuple[int, int]:
    return int(os.environ["RANK"]), a + b


def all_reduced(value: float) -> float:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item()


def large(count: int) -> torch.Tensor:
    return torch.arange(count)


class Custom(Exception):
    pass


def raising() -> None:
    raise Custom("with this text", 17)


def unpicklable() -> object:
    return lambda: None


class OneWay(Exception):
    """Can be pickled but not unpickled: pickle calls it with one argument."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(f"{text} ({code})")


def returning_one_way() -> object:
    return OneWay("a value", 5)


def raising_one_way() -> None:
    raise OneWay("an exception", 5)


def raising_unpicklable() -> None:
    error = Custom("holds a function")
    error.held = lambda: None  # type: ignore[attr-defined]
    raise error


def raising_large(count: int) -> None:
    raise Custom("x" * count)


def ending(code: object) -> None:
    raise SystemExit(code)


def killed_once(victim: int) -> int:
    """In the first generation one worker is killed, and the others wait until they are stopped."""
    rank = int(os.environ["RANK"])
    if os.environ["PHALANX_GENERATION"] == "0":
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    return rank


def waiting(path: str) -> int:
    while not os.path.exists(path):
        time.sleep(0.01)
    return int(os.environ["RANK"])
