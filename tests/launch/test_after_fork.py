"""A forked worker starts with the state of a fresh interpreter: compared with one, field by field."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)  # some import torch anew, which takes a minute on a machine that is very busy

HERE = Path(__file__).parent / "workers"

OPTIONS = ("-W", "ignore::FutureWarning", "-X", "no_debug_ranges", "-q")
"""Of the agent's interpreter: its workers get them too, however they are started."""

IMPORTED_EARLIER = "torch is imported already; once a fresh interpreter has done so too, there is no difference"
NAMES_THE_JOB = "every job has its own ports, names and paths"

ALLOWED = {
    "interpreter/hash_of_text": "one seed for all workers that one process forked: fixed when an interpreter starts",
    "with_torch/interpreter/hash_of_text": "the same",
    "interpreter/meta_path": f"{IMPORTED_EARLIER}: phalanx waits for that import with a finder",
    "modules": IMPORTED_EARLIER,
    "atexit": IMPORTED_EARLIER,
    "logging/loggers": IMPORTED_EARLIER,
    "logging/num_handlers": IMPORTED_EARLIER,
    "warnings/filters": IMPORTED_EARLIER,
    "random": "numbers that nobody has seeded",
    "streams/stdin/write_through": "of a stream that is only read: whether the launcher runs under python -u",
    "interpreter/argv": "where the script shall write to",
    "interpreter/orig_argv": "the same",
    "with_torch/interpreter/argv": "the same",
    "with_torch/interpreter/orig_argv": "the same",
    "library/multiprocessing_main/sys_argv": "the same",
    "process/environ/MASTER_PORT": NAMES_THE_JOB,
    "process/environ/PHALANX_": NAMES_THE_JOB,
    "process/environ/TORCHELASTIC_ERROR_FILE": NAMES_THE_JOB,
    "process/fds/1": "the file that this test's agents print to",
    "process/fds/3": NAMES_THE_JOB,
}
"""Fields in which a forked worker may differ from an executed one, and why."""

ALLOWED_TO_LAUNCHED = {
    "process/environ": "what workers are told",
    "process/is_group_leader": "a worker and all that it starts are signalled together",
    "process/is_session_leader": "and are out of reach of a terminal's signals",
    "process/fds": "standard error passes through the agent; stacks are written to a file",
    "process/handlers": "the signal on which stacks are written",
    "process/kernel/SigCgt:": "the same",
    "process/kernel/SigIgn:": "the same",
    "streams/stdout/errors": "a print must not end a job",
    "streams/stdout/buffer": "nor must a full disk that it goes to",
    "streams/stderr/buffer": "the same",
    "library/multiprocessing": "its sockets lie in a folder that the agent removes",
    **ALLOWED,
}
"""The same for an executed worker and ``python script``, as far as phalanx has to do with it."""


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat(inner, f"{path}/{name}")
    else:
        yield path[1:], value


def differences(one: dict[str, Any], other: dict[str, Any], allowed: dict[str, str]) -> list[str]:
    ours, theirs = dict(flat(one)), dict(flat(other))
    return [
        f"{path}: {ours.get(path)} / {theirs.get(path)}"
        for path in sorted(ours.keys() | theirs.keys())
        if ours.get(path, "") != theirs.get(path, "") and not path.startswith(tuple(allowed))
    ]


def without_glibc(facts: dict[str, Any]) -> dict[str, Any]:
    """glibc catches signals 32 and 33 for itself as soon as a process has had a second thread."""
    masks = facts["process"]["kernel"]
    masks["SigCgt:"] = int(masks["SigCgt:"], 16) & ~(0b11 << 31)
    return facts


def test_a_forked_worker_has_the_state_of_a_fresh_interpreter(launcher, tmp_path):
    words = ("--rdzv-id", "state")
    agents = {
        method: launcher.run(
            *words, "--start-method", method, "state.py", tmp_path / method, cold=True, options=OPTIONS
        )
        for method in ("warm", "exec")
    }
    plainly = [sys.executable, *OPTIONS, "-u", str(HERE / "state.py"), str(tmp_path / "plain")]
    done = subprocess.run(
        plainly,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    for method, agent in agents.items():
        assert agent.wait() == 0, agent.output
        # The script has called logging.basicConfig(level=INFO): its lines are shown, and as its own.
        assert "INFO:script:line of rank 0\n" in agent.output, (method, agent.output)
        assert "WARNING:root:warning of rank 0\n" in agent.output, (method, agent.output)
    warm, fresh, plain = (
        without_glibc(json.loads((tmp_path / f"{name}.0").read_text())) for name in ("warm", "exec", "plain")
    )
    assert not differences(warm, fresh, ALLOWED)
    assert not differences(fresh, plain, ALLOWED_TO_LAUNCHED)
    # What is imported already is the whole of the difference in what follows from imports.
    assert set(fresh["modules"]) <= set(warm["modules"])
    for name in ("loggers", "num_handlers"):
        assert warm["logging"][name] == fresh["with_torch"]["logging"][name]


def test_a_script_finds_its_own_modules_though_others_of_their_name_are_loaded(launcher, tmp_path):
    (tmp_path / "colorsys.py").write_text("MINE = 'the file beside the script'\n")
    script = tmp_path / "train.py"
    script.write_text("import colorsys, sys\nprint(colorsys.MINE, 'torch' in sys.modules, flush=True)\n")
    agent = launcher.run("--preload", "colorsys", "--nproc-per-node", 2, "--console", "plain", script)
    assert agent.wait() == 0, agent.output
    assert agent.output.count("the file beside the script False") == 2, agent.output
    assert agent.output.count("colorsys.py in ") == 1, agent.output  # said once, not by every worker
