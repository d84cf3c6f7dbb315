"""Shows how it was started: writes a JSON object per worker to the file in the first argument, and prints a little."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading

if __name__ == "__main__":
    facts = {
        "rank": int(os.environ["RANK"]),
        "argv": sys.argv,
        "path0": sys.path[0],
        "cwd": os.getcwd(),
        "name": __name__,
        "file": __file__,
        "modules": [name for name in ("torch", "numpy", "colorsys") if name in sys.modules],
        "threads": threading.active_count(),
        "os_threads": len(os.listdir("/proc/self/task")),
        "environ": {
            key: value for key, value in os.environ.items() if key.startswith(("OMP", "OPENBLAS", "PHALANX", "ROLE"))
        },
    }
    if "numpy" in facts["modules"]:
        import numpy

        facts["random"] = [float(numpy.random.rand())]
        facts["random"] += [random.random(), multiprocessing.current_process().authkey.hex()]
    os.environ["TMPDIR"] = os.path.dirname(sys.argv[1])
    facts["temporary"] = tempfile.gettempdir()
    if "torch" in facts["modules"]:
        import torch

        facts["random"].append(torch.initial_seed())
    with open(f"{sys.argv[1]}.{facts['rank']}", "w") as file:
        json.dump(facts, file)
    # Not print: it writes the end of a line by itself, and what another worker writes may come in between.
    sys.stdout.write(f"out {facts['rank']}\n")
    sys.stderr.write(f"err {facts['rank']}\n")
