"""What ``make demo`` runs: train on three workers, kill one, add one, and compare with an undisturbed run.

The training is ``examples/char_lm.py`` under ``phalanx run --on-failure heal``. At a third of the steps one worker gets
SIGKILL; at two thirds ``phalanx scale`` asks for a fourth. That is done twice: with the model on every worker, and with
a sharded one that no worker holds. Then the same script runs in one process. All three must end with the same sha256
over weights, optimizer state and data position. Both can be watched in a browser while they run, at the address that
is printed; afterwards a report of the first is written as one HTML file.
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
from phalanx.launch.cli._scale import scale
from phalanx.launch.events import read_events
from phalanx.watch._files import Tail, load_hub
from phalanx.watch._hub import Hub
from phalanx.watch._report import report_data, write_report
from phalanx.watch._view import JobView

SCRIPT = Path(__file__).parent / "char_lm.py"
console = Console()


def start_elastic(out: Path, steps: int, port: int, page: int, *, sharded: bool) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "phalanx", "run", "--nproc-per-node=3", "--on-failure=heal", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=demo", f"--dashboard={page}", f"--log-dir={out / 'logs'}",
        "--preload=torch._dynamo,phalanx.elastic",
        str(SCRIPT), f"--steps={steps}", f"--out={out}", *(["--shard"] if sharded else []),
    ]  # fmt: skip
    with (out / "console.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def watch(process: subprocess.Popen[bytes], out: Path, steps: int, port: int) -> list[str]:
    """Show the job live, and do to it what the demo promises; returns what was done."""
    done: list[str] = []
    hub = Hub()
    tail, has_shown = Tail(hub, [out / "logs"]), False
    with console.status("starting three workers") as status:
        while process.poll() is None:
            time.sleep(0.1)
            tail.look()
            view, last = hub.view, hub.view.last_step
            has_shown = has_shown or show_address(out, steps)
            if last is None:
                continue
            status.update(
                f"step {last.step + 1}/{steps}  loss {last.loss:.3f}  generation {last.generation}.{last.round}  "
                f"[bold]{len(view.lifelines.members)} workers[/]  {view.curve.rate() or 0.0:.0f} samples/s"
            )
            if not done and last.step >= steps // 3:
                done.append(kill_one(out, view.lifelines.members[1]))
            elif len(done) == 1 and last.step >= 2 * steps // 3:
                done.append(add_one(port))
    return done


def show_address(out: Path, steps: int) -> bool:
    """Print where the job is shown, once the agent has said it; whether it has."""
    found = [word for word in (out / "console.log").read_text(errors="replace").split() if word.startswith("http://")]
    if found:
        console.print(f"open [bold]{found[0]}[/] to watch: a worker dies at step {steps // 3}, one joins at "
                      f"step {2 * steps // 3}")  # fmt: skip
    return bool(found)


def kill_one(out: Path, worker: str) -> str:
    (started,) = [e for e in read_events(out / "logs" / f"events-{worker}.jsonl") if e.kind == "started"]
    os.kill(started.pid, signal.SIGKILL)
    console.print(f"[red]killed[/] worker {worker} (pid {started.pid}) with SIGKILL")
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


def show(view: JobView, title: str) -> None:
    table = Table(title=f"generations, {title}")
    for name in ("generation", "at step", "workers", "joined", "lost", "regroup took"):
        table.add_column(name, justify="right")
    for mark in view.lifelines.rounds:
        joined, left = (", ".join(w.rpartition(".")[2] for w in mark[name]) for name in ("joined", "left"))
        name = f"{mark['generation']}.{mark['round']}"
        table.add_row(name, str(mark["step"]), str(mark["workers"]), joined, left, f"{mark['seconds'] * 1000:.0f} ms")
    console.print(table)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def train_elastic(out: Path, steps: int, page: int, *, sharded: bool) -> bool:
    """Train on three workers, kill one, add one; whether the job went through it."""
    port = free_port()
    process = start_elastic(out, steps, port, page, sharded=sharded)
    try:
        done = watch(process, out, steps, port)
    finally:
        if process.poll() is None:
            process.terminate()
        code = process.wait()
    if code != 0 or len(done) != 2:
        console.print(f"[red]the elastic run ended with code {code} after {done}[/]; see {out / 'console.log'}")
    return code == 0 and len(done) == 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("demo_out"))
    args = parser.parse_args()
    elastic, sharded, alone = (args.out.resolve() / name for name in ("elastic", "sharded", "alone"))
    for directory in (elastic, sharded, alone):
        shutil.rmtree(directory, ignore_errors=True)
        (directory / "logs").mkdir(parents=True)

    page = free_port()  # one for both, so that a page that is open goes on with the second
    console.print("[bold]every worker holds the model[/]")
    if not train_elastic(elastic, args.steps, page, sharded=False):
        return 1
    console.print("[bold]no worker holds it: every part of it is on two of them[/]")
    if not train_elastic(sharded, args.steps, page, sharded=True):
        return 1
    run_alone(alone, args.steps)

    results = {path.name: (path / "result").read_text().split() for path in (elastic, sharded, alone)}
    verdicts = [check_directory(path / "logs") for path in (elastic, sharded)]
    for path in (elastic, sharded):
        show(load_hub(path / "logs").view, path.name)
    for name, (loss, digest) in results.items():
        console.print(f"{name + ':':9}loss {loss}  sha256 {digest}", soft_wrap=True)
    for verdict in verdicts:
        console.print(str(verdict))
    digests = [digest for _, digest in results.values()]
    facts = [
        ("what was done", "one worker killed, one added"),
        ("steps", str(args.steps)),
        ("loss", results["elastic"][0]),
        ("audit", str(verdicts[0])),
        ("sharded", str(verdicts[1])),
    ]
    report = args.out.resolve() / "report.html"
    same = len(set(digests)) == 1 and not any(verdict.problems for verdict in verdicts)
    facts += [(f"sha256 {name}", digest) for name, (_, digest) in results.items()]
    facts += [("verdict", "the same bits" if same else "DIFFERENT")]
    write_report(report, report_data([elastic / "logs"], facts=facts))
    console.print(
        f"[bold {'green' if same else 'red'}]{'the same bits' if same else 'DIFFERENT'}[/]   report: {report}"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
