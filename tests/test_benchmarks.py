"""What benchmarks record is stored, read back and compared; every benchmark has a quick form."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import time
from pathlib import Path

import pytest
from benchmarks import _results, checkpoint, compare, elastic, goodput, trainers
from benchmarks.__main__ import QUICK, known
from benchmarks._processor_shares import NoShares, ProcessorShare
from benchmarks._results import Figure, Stored, read_figures, record, write
from benchmarks.compare import Change, changes, compare_files, compare_trees, source_of
from tools import tables

pytestmark = pytest.mark.fast


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_results, "FOLDER", tmp_path / "results")
    monkeypatch.setenv(_results.VARIABLE, str(tmp_path / "figures"))
    return tmp_path


def test_every_benchmark_has_a_quick_form() -> None:
    assert set(QUICK) == set(known())


def test_a_run_is_stored_with_its_ratios_machine_and_commit(folder: Path) -> None:
    record("dtensor/forward/add", "us", 4.0, 13.0)
    record("dtensor/block", "us", 1000.0, 5000.0, low=990.0, high=1100.0)
    path = write({"dtensor": read_figures(folder / "figures")}, {"dtensor": 0.1}, Path(__file__).parent)
    content = json.loads(path.read_text())
    assert content["figures"]["dtensor"]["dtensor/forward/add"]["ratio"] == 3.25
    assert content["machine"]["cores"] >= 1
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert head.stdout.startswith(content["commit"].rstrip("+")) or content["commit"] == "unknown"
    assert Stored.read(path).figures("dtensor")["dtensor/block"].high == 1100.0


def test_nobody_collects_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_results.VARIABLE, raising=False)
    record("dtensor/forward/add", "us", 4.0)
    assert not list(tmp_path.iterdir())


def figures(ours: float, theirs: float | None = None) -> dict[str, Figure]:
    return {"a": Figure(name="a", unit="s", ours=ours, theirs=theirs)}


def test_what_moved_is_told_from_what_the_machine_did() -> None:
    [slower] = changes([(figures(1.0, 3.0), figures(1.3, 3.0)), (figures(1.0, 3.0), figures(1.4, 3.1))])
    assert slower.moved
    assert slower.median == pytest.approx(1.35)
    [busy] = changes([(figures(1.0, 3.0), figures(1.5, 4.5)), (figures(1.0, 3.0), figures(1.4, 4.2))])
    assert not busy.moved
    assert busy.normalized == pytest.approx(1.0)
    assert not Change("a", [1.2, 0.9]).moved  # the rounds do not agree


def test_two_files_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = []
    for number, seconds in enumerate((1.0, 2.0)):
        path = write({"elastic": figures(seconds, 10.0)}, {}, Path(__file__).parent)
        stored.append(Stored.read(path.rename(folder / f"{number}.json")))
    assert compare_files(*stored) == 0
    assert "MOVED" in capsys.readouterr().out


def test_a_comparison_of_trees_is_stored_beside_the_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = write({"elastic": figures(1.0)}, {}, Path(__file__).parent)
    monkeypatch.setattr(compare, "in_turns", lambda *_: [(figures(1.0, 3.0), figures(1.5, 3.0))] * 2)
    here = str(Path(__file__).parent.parent)
    options = argparse.Namespace(old=here, new=here, rounds=2, full=False, names=["elastic"])
    assert compare_trees(options) == 0
    [path] = (folder / "results").glob("compare-*.json")
    content = json.loads(path.read_text())
    assert content["rows"]["elastic"]["a"] == {"ours": [1.5, 1.5], "theirs": [1.0, 1.0], "median": 1.5, "moved": True}
    assert content["others"].keys() == {"elastic"}
    assert content["machine"]["cores"] >= 1
    assert _results.runs() == [stored], "it is no run"


def test_a_tree_is_a_folder_or_a_commit() -> None:
    root = Path(__file__).parent.parent
    with source_of(str(root)) as source:
        assert source == (root / "src").resolve()
    with (
        pytest.raises(SystemExit, match="neither a folder with src nor a commit"),
        source_of("no-such-commit"),
    ):
        pass


def test_a_checkpoint_run_fills_every_column_of_its_table(folder: Path) -> None:
    found = {f"{kind}_{way}": seconds for kind, seconds in (("save", 2.0), ("load", 1.0)) for way in ("ours", "dcp")}
    found |= {"save_safetensors": 4.0, "load_safetensors": 0.5, "stall_ours": 0.1, "stall_dcp": 0.4}
    checkpoint.show(found, 64)
    rows = list(tables.checkpoint(read_figures(folder / "figures")))
    assert rows[1:] == [
        ("save, 64 MB", "2.0 s", "2.0 s", "1.00", "0.6", "4.0 s"),
        ("load, 64 MB", "1.0 s", "1.0 s", "1.00", "0.6", "500 ms"),
        ("stall of a step, saved in the background, 64 MB", "100 ms", "400 ms", "0.25", "0.5", ""),
    ]


def test_a_run_of_the_trainers_fills_their_table(folder: Path) -> None:
    trainers.show({"plain": [(0.002, 0.002)], "lightning": [(0.003, 0.003)], "hf": [(0.0024, 0.003)]}, 2)
    assert list(tables.trainers(read_figures(folder / "figures")))[1:] == [
        ("Lightning, two workers", "2.0 ms", "3.0 ms", "1.50", "1.30"),
        ("Hugging Face, two workers", "2.0 ms", "2.4 ms", "1.20", "1.30"),
    ]


def test_kills_after_which_nothing_arrived_are_no_figures_of_what_moved(folder: Path, capsys) -> None:
    """Of three kills one was the end of the job, and after the others cells were still on their way at the limit."""
    found = elastic.Kills(num_kills={"sharded": 3, "replicas": 3}, why_lost=["sharded: it ended with 1: StepsLost"])
    found.raw["sharded"], found.took["sharded"] = [0.5, 0.6], [0.1, 0.2]
    found.raw["replicas"], found.took["replicas"] = [0.5, 0.6, 0.7], [0.1, 0.2, 0.3]
    elastic.tell_recovery("1 GB", found, parameters=3000)
    told = read_figures(folder / "figures")
    assert not [name for name in told if "moved" in name or "while cells move" in name]
    recovered, settled = told["elastic/sharded/recovered/sharded/1 GB"], told["elastic/sharded/settled/1 GB"]
    assert (recovered.ours, recovered.theirs, recovered.note) == (2, 3, "sharded: it ended with 1: StepsLost")
    assert (settled.ours, settled.theirs) == (0, 3)
    assert told["elastic/sharded/kill/1 GB"].note == "recovered 2 of 3; unsharded recovered 3 of 3"
    assert "StepsLost" in capsys.readouterr().out


def test_what_moved_is_told_of_the_kills_that_settled(folder: Path) -> None:
    found = elastic.Kills(num_kills={"sharded": 2, "replicas": 2})
    found.unprotected, found.to_survivors, found.to_newcomers = [4.0, 6.0], [1000, 2000], [2000, 2000]
    found.mean, found.median = [1.2, 1.1], [1.0, 1.1]
    elastic.tell_moves("1 GB", found, parameters=3000)
    told = read_figures(folder / "figures")
    assert told["elastic/sharded/unprotected/1 GB"].ours == 5.0
    moved = told["elastic/sharded/moved between survivors/1 GB"]
    assert (moved.ours, moved.theirs, moved.note) == (2000, 2000, "settled 2 of 2")


class NeverOver:
    """Cells that are still on their way."""

    since = 0.0

    def are_over(self) -> bool:
        return False

    def last(self) -> float:
        return 0.0


def test_a_job_whose_cells_do_not_settle_is_begun_anew_before_the_next_kill(monkeypatch) -> None:
    one, anew = elastic.Contender("sharded", []), []
    monkeypatch.setattr(one, "_wait", lambda *args, **options: False)
    monkeypatch.setattr(one, "_marks_of_workers", list)
    monkeypatch.setattr(one, "go_on", lambda: None)
    monkeypatch.setattr(one, "pause", lambda: None)
    monkeypatch.setattr(one, "step_seconds", lambda count: 0.1)
    monkeypatch.setattr(one, "strike", lambda chance: one.to_any.append(0.4) or True)
    monkeypatch.setattr(one, "start_anew", lambda: anew.append(True))
    monkeypatch.setattr(one, "directory", Path(), raising=False)
    monkeypatch.setattr(elastic.sharded, "Moves", lambda directory: NeverOver())
    found = elastic.Kills(steps={("sharded", 2): 0.1})
    elastic.strike_once(one, random.Random(0), found, limit=0.0)
    assert anew == [True]
    assert (found.num_kills["sharded"], len(found.raw["sharded"]), found.unprotected) == (1, 1, [])


def test_goodput_of_several_turns_is_the_median_with_its_extremes(folder: Path) -> None:
    ours = [goodput.Window(share, 0.1, 3, 0) for share in (0.97, 0.99, 0.98)]
    theirs = [goodput.Window(share, 0.1, 3, 1) for share in (0.3, 0.1, 0.2)]
    goodput.keep({"phalanx": ours, "torchrun": theirs, "torchft": [goodput.Window(0.5, 0.2, 3, 0)]}, 15.0)
    found = read_figures(folder / "figures")
    figure = found["goodput/lost/15 s/torchrun"]
    assert (figure.ours, figure.theirs) == (pytest.approx(0.02), pytest.approx(0.8))
    assert (figure.low, figure.high) == (pytest.approx(0.01), pytest.approx(0.03))
    assert "kills 9, 9; started anew 3 times" in figure.note
    head, row = tables.goodput(found)
    assert list(head) == ["a failure every", "phalanx", "torchrun", "torchft", "goal"]
    assert list(row)[:4] == ["15 s", "98.0% (97.0 to 99.0%)", "20.0%", "50.0%"]


def test_every_distance_has_three_failures_and_time_to_start_a_job_that_hangs_anew() -> None:
    for every in (5.0, 15.0, 60.0):
        assert goodput.window_of(every) >= max(goodput.MIN_FAILURES * every, 3 * goodput.LIMIT)


def test_who_may_give_no_shares_of_a_processor_is_told_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(NoShares, match=r"none under .*expected a writable one with the cpu controller"):
        ProcessorShare("mine", tmp_path)
    (tmp_path / "cgroup.procs").touch()  # a hierarchy without the controller
    with pytest.raises(NoShares, match=r"its groups have no cpu\.max"):
        ProcessorShare(f"phalanx-test-{os.getpid()}", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.procs"]


def test_a_share_of_a_processor_is_held_and_leaves_nothing_behind() -> None:
    name = f"phalanx-test-{os.getpid()}"
    try:
        share = ProcessorShare(name)
    except NoShares as error:
        pytest.skip(str(error))
    try:
        share.set(0.1)
        until = time.thread_time() + 0.02  # of which a period of 10 ms gives 1 ms
        while time.thread_time() < until:
            pass
        counts = dict(line.split() for line in (share.path / "cpu.stat").read_text().splitlines())
        assert int(counts["nr_throttled"]) >= 5, counts
        assert str(os.getpid()) in (share.path / "cgroup.procs").read_text().split()
    finally:
        share.close()
    assert not share.path.exists()
