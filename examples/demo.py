"""What ``make demo`` runs: train on three workers, kill one, add one, and compare with an undisturbed run.

The training is ``examples/char_lm.py`` under ``phalanx run --on-failure heal``. At a third of the steps one worker gets
SIGKILL; at two thirds ``phalanx scale`` asks for a fourth. Then the same script runs in one process. Both must end with
the same sha256 over weights, optimizer state and data position. A report is written as one HTML file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from phalanx.elastic.audit import check_directory
from phalanx.elastic.tools._history import History, read_history
from phalanx.elastic.tools._report import render
from phalanx.events._writer import read_lines
from phalanx.launch.cli._scale import scale

SCRIPT = Path(__file__).parent / "char_lm.py"
console = Console()


def start_elastic(out: Path, steps: int, port: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "phalanx", "run", "--nproc-per-node=3", "--on-failure=heal", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=demo", "--preload=torch._dynamo,phalanx.elastic",
        str(SCRIPT), f"--steps={steps}", f"--out={out}",
    ]  # fmt: skip
    with (out / "console.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def watch(process: subprocess.Popen[bytes], out: Path, steps: int, port: int) -> list[str]:
    """Show the job live, and do to it what the demo promises; returns what was done."""
    done: list[str] = []
    with console.status("starting three workers") as status:
        while process.poll() is None:
            time.sleep(0.1)
            history = read_history(out / "logs")
            if not history.steps:
                continue
            last, formed = history.steps[-1], history.rounds[-1]
            status.update(
                f"step {last.step + 1}/{steps}  loss {last.loss:.3f}  generation {formed.round[0]}.{formed.round[1]}  "
                f"[bold]{len(formed.workers)} workers[/]  {_rate(history):.0f} samples/s"
            )
            if not done and last.step >= steps // 3:
                done.append(kill_one(out, formed.workers[1]))
            elif len(done) == 1 and last.step >= 2 * steps // 3:
                done.append(add_one(port))
    return done


def kill_one(out: Path, worker: str) -> str:
    (started,) = [e for e in read_lines(out / "logs" / f"events-{worker}.jsonl") if e["event"] == "started"]
    os.kill(started["pid"], signal.SIGKILL)
    console.print(f"[red]killed[/] worker {worker} (pid {started['pid']}) with SIGKILL")
    return "killed one worker"


def add_one(port: int) -> str:
    scale(f"tcp://127.0.0.1:{port}", "demo", 4)
    console.print("[green]asked for a fourth worker[/], as `phalanx scale --nproc 4` does")
    return "added a fourth worker"


def run_alone(out: Path, steps: int) -> None:
    with (
        console.status("the same training on one worker, undisturbed"),
        (out / "console.log").open("wb") as log,
    ):
        command = [sys.executable, str(SCRIPT), f"--steps={steps}", f"--out={out}"]
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)


def show(history: History) -> None:
    table = Table(title="generations")
    for name in ("generation", "at step", "workers", "joined", "lost", "regroup took"):
        table.add_column(name, justify="right")
    for mark in history.rounds:
        joined, left = (", ".join(w.rpartition(".")[2] for w in workers) for workers in (mark.joined, mark.left))
        name = f"{mark.round[0]}.{mark.round[1]}"
        table.add_row(name, str(mark.step), str(len(mark.workers)), joined, left, f"{mark.seconds * 1000:.0f} ms")
    console.print(table)


def _rate(history: History) -> float:
    points = history.throughput()
    return points[-1][1] if points else 0.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("demo_out"))
    args = parser.parse_args()
    elastic, alone = args.out.resolve() / "elastic", args.out.resolve() / "alone"
    for directory in (elastic, alone):
        shutil.rmtree(directory, ignore_errors=True)
        (directory / "logs").mkdir(parents=True)

    port = free_port()
    process = start_elastic(elastic, args.steps, port)
    try:
        done = watch(process, elastic, args.steps, port)
    finally:
        if process.poll() is None:
            process.terminate()
        code = process.wait()
    if code != 0 or len(done) != 2:
        console.print(f"[red]the elastic run ended with code {code} after {done}[/]; see {elastic / 'console.log'}")
        return 1
    run_alone(alone, args.steps)

    history = read_history(elastic / "logs")
    (loss, digest), (loss_alone, digest_alone) = ((d / "result").read_text().split() for d in (elastic, alone))
    verdict = check_directory(elastic / "logs")
    show(history)
    console.print(f"elastic: loss {loss}  sha256 {digest}", soft_wrap=True)
    console.print(f"alone:   loss {loss_alone}  sha256 {digest_alone}", soft_wrap=True)
    console.print(str(verdict))
    facts = [
        ("what was done", ", ".join(done)),
        ("steps", str(args.steps)),
        ("loss", loss),
        ("audit", str(verdict)),
    ]
    report = args.out.resolve() / "report.html"
    title = "Phalanx demo: one worker killed, one added"
    report.write_text(render(history, title=title, facts=facts, digests=[digest, digest_alone]))
    same = digest == digest_alone and not verdict.problems
    console.print(
        f"[bold {'green' if same else 'red'}]{'the same bits' if same else 'DIFFERENT'}[/]   report: {report}"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
