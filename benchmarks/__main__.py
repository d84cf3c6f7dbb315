"""``make bench``: runs every benchmark, one process each, and stores the figures under ``benchmarks/results``.

python -m benchmarks [--quick] [name ...] [-- options of the benchmarks]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._results import VARIABLE, Figure, busy_with_others, read_figures, write

HERE = Path(__file__).parent
# Options under which a benchmark takes a minute or two; its figures are then less certain.
QUICK = {
    "checkpoint": ["--size", "64", "--rounds", "2"],
    "compile": ["--repeats", "20"],
    "comm": ["--quick", "--kills", "4", "--rounds", "500"],
    "ddp": ["--rounds", "8", "--no-memory"],
    "dtensor": ["--repeats", "7"],
    "elastic": [
        *("--kills", "4", "--torchrun-kills", "0", "--rounds", "8"),
        *("--sharded-rounds", "4", "--sharded-kills", "1"),
    ],
    "fsdp": ["--rounds", "6", "--ranks", "2", "--no-memory"],
    "goodput": ["--every", "5", "--of", "phalanx", "torchrun"],
    "launch": ["--rounds", "3", "--recoveries", "4", "--torchrun-recoveries", "0", "--workers", "2"],
    "rendezvous": ["--nodes", "64"],
    "sampler": ["--quick"],
    "scale": [
        *("--clients", "16", "--etcd-clients", "16", "--workers", "4", "16"),
        *("--model", "128", "1024", "--seconds", "1"),
    ],
    "shard": [],
    "watch": ["--steps", "6000", "--jobs", "1", "--seconds", "5", "--fed", "20000"],
    "stragglers": ["--rounds", "2", "--cost-rounds", "10", "--sharded-rounds", "1"],
    "trainers": ["--steps", "120", "--rounds", "1", "--workers", "0"],
    "streaming": ["--samples", "6000", "--shards", "60", "--rounds", "1"],
}


def known() -> list[str]:
    """The benchmarks that there are."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem[0] != "_" and path.stem != "compare")


def run(name: str, options: list[str], environment: dict[str, str], *, quiet: bool) -> dict[str, Figure] | None:
    """Run a benchmark; its figures, None if it failed."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        file = Path(folder) / "figures"
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *options],
            cwd=HERE.parent,
            env={**os.environ, **environment, VARIABLE: str(file)},
            stdout=subprocess.DEVNULL if quiet else None,
        )
        return None if done.returncode else read_figures(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a minute or two for each, less certain")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(known())}; default: all")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options, rest = parser.parse_args(words[:end]), words[end + 1 :]
    if unknown := sorted(set(options.names) - set(known())):
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known())}")
    figures, others = {}, {}
    failed = []
    for name in options.names or known():
        print(f"\n== {name}", flush=True)
        with busy_with_others() as said:
            found = run(name, [*(QUICK[name] if options.quick else []), *rest], {}, quiet=False)
        if found is None:
            failed.append(name)
        else:
            figures[name], others[name] = found, said["others"]
    if figures:
        print(f"\nstored in {write(figures, others, HERE.parent)}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
