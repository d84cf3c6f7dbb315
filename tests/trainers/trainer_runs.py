"""Starts the trainers' scripts, alone or under ``phalanx run``, and compares what their workers have at the end."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from killing import Deed

HERE = Path(__file__).parent
PRELOAD = {
    "lightning_script.py": "lightning.pytorch,phalanx.lightning,torch._dynamo",
    "hf_script.py": "transformers.trainer,transformers.models.llama.modeling_llama,accelerate,torch._dynamo",
}


TIMED = ("runtime", "per_second")
"""How the names end of what no two runs have alike."""


class Run:
    """One run of a script, with everything that it wrote under ``directory``."""

    def __init__(self, script: str, directory: Path, *flags: str, workers: int = 0) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        launcher = ["-m", "phalanx", "run", f"--nproc-per-node={workers}", "--on-failure=heal",
                    f"--preload={PRELOAD.get(script, 'torch._dynamo')}"]  # fmt: skip
        size = [f"--size={workers}"] if workers and script in PRELOAD else []
        command = [sys.executable, *(launcher if workers else []), str(HERE / script), str(directory), *size, *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PHALANX_JOB_SECRET": "s" * 32}
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=directory, env=environment)
        self.console = done.stdout + done.stderr
        assert done.returncode == 0, self.console[-6000:]
        assert "Traceback" not in self.console, f"a worker that nobody killed has failed:\n{self.console[-6000:]}"

    def results(self) -> dict[str, dict]:
        found = {path.stem: json.loads(path.read_text()) for path in self.directory.glob("result-*.json")}
        assert found, "no worker came to the end"
        return found

    def undone(self, kill: str, num_steps: int = 1000) -> list[str]:
        """Which deeds of ``--kill`` nobody did, of those up to the last step: without them, nothing was tested."""
        deeds = [Deed.parse(one) for one in kill.removeprefix("--kill=").split(",")]
        return [
            str(deed)
            for number, deed in enumerate(deeds)
            if deed.step <= num_steps and not (self.directory / f"done-{number}").exists()
        ]

    def num_steps(self) -> int:
        """How many steps it came to; it is the run of one worker."""
        ((_, result),) = self.results().items()
        return int(result["step"])

    def checkpoints(self) -> dict[str, str]:
        """What Lightning has saved: by its name, what it is a link to, or all that is in it."""
        return {
            path.name: str(path.readlink()) if path.is_symlink() else _describe(path, self.directory)
            for path in sorted((self.directory / "checkpoints").iterdir())
        }

    def rows(self) -> list[dict[str, str]]:
        """What the CSV logger wrote, in the order of the steps."""
        with (self.directory / "csv" / "version_0" / "metrics.csv").open(newline="") as file:
            rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
        return sorted(rows, key=lambda row: (int(row["step"]), sorted(row)))

    def scalars(self) -> dict[tuple[str, int], float]:
        """What TensorBoard shows: the last value of each tag and step, over the files of all writers."""
        paths = list(self.directory.rglob("events.out.tfevents.*"))
        if not paths:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        found = []
        for path in paths:
            events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
            found += [(one.wall_time, tag, one.step, one.value) for tag in events.Tags()["scalars"]
                      for one in events.Scalars(tag) if not tag.endswith(TIMED)]  # fmt: skip
        return {(tag, step): value for _, tag, step, value in sorted(found)}

    def outcomes(self) -> set[str]:
        paths = (self.directory / "logs").glob("events-*.jsonl")
        return {json.loads(line)["event"] for path in paths for line in path.read_text().splitlines()}


def _describe(path: Path, directory: Path) -> str:
    """Everything in a file of Lightning's, in words: a tensor by its digest."""
    content = torch.load(path, weights_only=False)  # the test itself has had it written
    return json.dumps(content, default=_digest, sort_keys=True).replace(str(directory), "DIRECTORY")


def _digest(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(value.numpy().tobytes()).hexdigest()}"
    return repr(value)


def assert_equal_everywhere(run: Run, alone: Run) -> None:
    """Every worker that came to the end has what one undisturbed process has."""
    (expected,) = alone.results().values()
    for name, found in run.results().items():
        assert found == expected, f"{name}: {[key for key in expected if found[key] != expected[key]]}"
