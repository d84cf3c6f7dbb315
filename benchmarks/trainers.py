"""What a step of Lightning's and of Hugging Face's loop costs over the plain loop over a job's steps.

The same small model, optimizer and data in each, with logging of the loss and clipping on, no files, no progress bar.
Each way runs in processes of its own, by turns, alone and on two workers under ``phalanx run``. Counted is the
processor time of a worker's main thread from one step's beginning to the next, the median over the steps: what other
processes do, and waiting for the other worker, is not in it; wall time stands beside it. Ratios are the trainer's time
over the plain loop's: the goal is 1.3.

    python -m benchmarks.trainers [--steps 300] [--rounds 3] [--workers 0 2]
    python -m benchmarks.trainers --profile lightning        # where the time goes, by function
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from benchmarks._results import busy_with_others, record

SLOTS, BATCH, WIDTH, SEED = 4, 16, 256, 0
WARM_UP = 50
GOAL = 1.3
Mark = Callable[[], None]


class Rows(Dataset[dict[str, torch.Tensor]]):
    """As many samples as a run has, so that no epoch ends in it."""

    def __init__(self, steps: int) -> None:
        self._length = (steps + 1) * SLOTS * BATCH
        generator = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(64, 128, generator=generator)
        self._labels = torch.randint(0, 10, (64,), generator=generator)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self._inputs[index % 64], "labels": self._labels[index % 64]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.layers = nn.Sequential(
            nn.Linear(128, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, 10)
        )

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(inputs), labels)}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# -- the ways: each marks the beginning of every step ------------------------------------------------------------


def plain(steps: int, mark: Mark) -> None:
    from phalanx.elastic import Job, RunOptions

    model = Net()
    job = Job(
        model,
        optimizer_of(model),
        Rows(steps),
        num_slots=SLOTS,
        slot_batch_size=BATCH,
        seed=SEED,
        run=RunOptions(progress=False, threads=1),
    )
    for step in job.steps(max_steps=steps):
        mark()
        for micro in step:
            micro.backward(model(**micro.batch)["loss"])
        step.commit(max_grad_norm=1.0)


def lightning(steps: int, mark: Mark) -> None:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    from phalanx.elastic import RunOptions
    from phalanx.lightning import ElasticStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    class Marks(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            mark()

    pl.Trainer(
        strategy=ElasticStrategy(SLOTS, SEED, run=RunOptions(progress=False, threads=1)),
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=[Marks()],
    ).fit(Module(), DataLoader(Rows(steps), batch_size=BATCH, shuffle=True))


def hf(steps: int, mark: Mark) -> None:
    from transformers import TrainerCallback, TrainingArguments, get_constant_schedule

    from phalanx.elastic import RunOptions
    from phalanx.transformers import ElasticTrainer  # before TrainingArguments are made

    class Marks(TrainerCallback):  # type: ignore[misc]  # an extra: mypy sees no types of it
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            mark()

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            max_grad_norm=1.0,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=SEED,
        )
        model = Net()
        optimizer = optimizer_of(model)
        ElasticTrainer(
            model=model,
            args=args,
            train_dataset=Rows(steps),
            callbacks=[Marks()],
            optimizers=(optimizer, get_constant_schedule(optimizer)),
            num_slots=SLOTS,
            run=RunOptions(progress=False, threads=1),
        ).train()


WAYS = {"plain": plain, "lightning": lightning, "hf": hf}


# -- measuring ------------------------------------------------------------------------------------------------


def run_one(way: str, steps: int, folder: Path) -> None:
    """Run a way as one worker, and leave the medians of its steps."""
    times: list[tuple[float, float]] = []
    WAYS[way](steps, lambda: times.append((time.thread_time(), time.perf_counter())))
    taken = [
        [after[i] - before[i] for before, after in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False)]
        for i in range(2)
    ]
    (folder / f"{os.getpid()}.json").write_text(json.dumps([statistics.median(each) for each in taken]))


def measure(way: str, steps: int, workers: int) -> tuple[float, float]:
    """(processor, wall) seconds of a step, the mean over the workers."""
    with tempfile.TemporaryDirectory() as folder:
        script = ["-m", "benchmarks.trainers", "--one", way, "--steps", str(steps), "--folder", folder]
        launcher = ["-m", "phalanx", "run", f"--nproc-per-node={workers}", "--on-failure=heal"]
        done = subprocess.run(
            [sys.executable, *(launcher if workers else []), *script],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=900,
            cwd=Path(__file__).parent.parent,
        )
        if done.returncode:
            raise RuntimeError(f"{way} on {workers} workers failed:\n{done.stdout}{done.stderr}")
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    assert len(found) == max(1, workers), f"{len(found)} of {workers} workers came to the end"
    processor, wall = (statistics.mean(each) for each in zip(*found, strict=True))
    return processor, wall


def profile(way: str, steps: int) -> None:
    """Print the functions of a way by the time spent in themselves, per step."""
    profiler = cProfile.Profile()
    count = [0]

    def mark() -> None:
        count[0] += 1
        if count[0] == WARM_UP:
            profiler.enable()

    WAYS[way](steps, mark)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="0: one process without a launcher")
    parser.add_argument("--profile", choices=WAYS, help="print where the time of one way goes, and measure nothing")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        run_one(options.one, options.steps, options.folder)
        return
    if options.profile:
        profile(options.profile, options.steps)
        return
    with busy_with_others() as busy:
        for workers in options.workers:
            found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
            for number in range(options.rounds):
                for way in WAYS if number % 2 else reversed(WAYS):
                    found[way].append(measure(way, options.steps, workers))
            show(found, workers)
    print(f"others used {busy.get('others', 0.0)} cores")


def show(found: dict[str, list[tuple[float, float]]], workers: int) -> None:
    where = f"{workers}workers" if workers else "alone"
    ours = {way: [statistics.median(each) for each in zip(*times, strict=True)] for way, times in found.items()}
    for way, (processor, wall) in ours.items():
        ratio = processor / ours["plain"][0]
        low, high = (best(time for time, _ in found[way]) * 1e3 for best in (min, max))
        record(f"trainers/{way}/{where}", "ms", processor * 1e3, ours["plain"][0] * 1e3, low=low, high=high)
        verdict = (
            "" if way == "plain" else f"   ratio {ratio:.2f} (goal {GOAL}: {'met' if ratio <= GOAL else 'missed'})"
        )
        print(f"{way:10} {where:9} {processor * 1e3:7.3f} ms of the thread, {wall * 1e3:7.3f} ms wall{verdict}")


if __name__ == "__main__":
    main()
