"""A two-tower recommender whose embedding tables are sharded: trained and saved on 4 workers, loaded on 2 and on 3.

Run it with ``python examples/recommender.py``: it starts the workers itself. The tables are planned by ``auto_plan``;
each worker looks up its own batch, and after loading on another number of workers the model answers exactly as before.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx import shard
from phalanx.comm import Group, init_device_mesh, use_group
from phalanx.comm.stores import TCPStore, connect

NUM_USERS, NUM_ITEMS, WIDTH, STEPS = 2000, 1200, 16, 60


class TwoTowers(nn.Module):
    """Scores a user against an item by the product of two vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(NUM_USERS, WIDTH)
        self.items = nn.EmbeddingBag(NUM_ITEMS, WIDTH, mode="mean")
        self.user_tower = nn.Linear(WIDTH, WIDTH)
        self.item_tower = nn.Linear(WIDTH, WIDTH)

    def forward(self, users: Tensor, history: Tensor) -> Tensor:
        return (self.user_tower(self.users(users)) * self.item_tower(self.items(history))).sum(-1)


def build(group: Group) -> TwoTowers:
    """The model with its tables sharded over the group; the small towers stay on every worker."""
    torch.manual_seed(0)
    model = TwoTowers()
    plan = shard.auto_plan(model, init_device_mesh("cpu", (group.size,)), memory_budget=240_000 // group.size)
    shard.shard_module(model, plan)
    if group.rank == 0:
        print(f"{group.size} workers:\n{plan.report}", flush=True)
    return model


def batch(seed: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Users, what they saw, and whether they liked it: like-minded users and items share their number's parity."""
    generator = torch.Generator().manual_seed(seed)
    users = torch.randint(0, NUM_USERS, (size,), generator=generator)
    history = torch.randint(0, NUM_ITEMS, (size, 3), generator=generator)
    history = history - history % 2 + torch.randint(0, 2, (size, 1), generator=generator)
    return users, history, (users % 2 == history[:, 0] % 2).float()


def train(model: TwoTowers, group: Group) -> list[float]:
    """Data parallel: every worker its own batch. Tables sum gradients at their owners; towers are averaged here."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.2)
    losses = []
    for step in range(STEPS):
        users, history, liked = batch(step * group.size + group.rank, 64)
        loss = functional.binary_cross_entropy_with_logits(model(users, history), liked)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if not isinstance(parameter, shard.ShardedTensor) and parameter.grad is not None:
                group.all_reduce(parameter.grad, "avg")
        optimizer.step()
        shown = loss.detach().clone()
        group.all_reduce(shown, "avg")
        losses.append(float(shown))
    return losses


def worker(rank: int, size: int, store: str, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    with (
        Group.create(connect(store), rank, size, job=f"recommender-{size}", timeout=120) as group,
        use_group(group),
    ):
        model = build(group)
        if size == 4:
            losses = train(model, group)
            shard.save(model.state_dict(), Path(folder) / "model", process_group=group)
            if rank == 0:
                print(f"trained: loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
            assert losses[-1] < 0.9 * losses[0], losses
        else:
            shard.load(Path(folder) / "model", model.state_dict())
        users, history, _ = batch(12345, 8)  # the same questions on every worker
        with torch.no_grad():
            results.put((size, rank, model(users, history).tolist()))
        group.barrier()


def run(size: int, folder: str) -> list[float]:
    """Start ``size`` workers; their answers to the common questions, which must agree."""
    context = multiprocessing.get_context("spawn")
    results, store = context.Queue(), TCPStore.serve()
    workers = [
        context.Process(target=worker, args=(rank, size, store.address, folder, results)) for rank in range(size)
    ]
    for process in workers:
        process.start()
    answers: list[list[float]] = [results.get(timeout=240)[2] for _ in workers]
    for process in workers:
        process.join()
    store.close()
    codes = [process.exitcode for process in workers]
    if codes != [0] * size:
        raise SystemExit(f"workers ended with exit codes {codes}")
    assert all(answer == answers[0] for answer in answers), "all workers see one model"
    return answers[0]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trained = run(4, folder)
        for size in (2, 3):
            assert run(size, folder) == trained, f"the model loaded on {size} workers answers differently"
            print(f"saved on 4 workers, loaded on {size}: the same answers, bit for bit", flush=True)


if __name__ == "__main__":
    main()
