"""The audit tool finds what it should, and only that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from elastic_training import make_job, train

from log_lines import read_lines
from phalanx.comm import observe, simulate
from phalanx.elastic import RunOptions, Saves
from phalanx.elastic.audit import check, check_directory, main
from phalanx.elastic.tools._audit_log import Audit
from phalanx.watch._audit import audit_record

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("audit")

    def run(group):
        train(make_job(length=70, run=RunOptions(progress=False, log_dir=directory, group=group)), epochs=2)

    simulate(2).run(run)
    return [record for path in sorted(directory.glob("audit-*")) for record in read_lines(path)]


def test_a_clean_log_is_clean(records):
    verdict = check(records)
    assert verdict.problems == []
    assert (verdict.num_steps, verdict.num_epochs, verdict.num_samples, verdict.num_dropped) == (6, 2, 140, 0)
    assert "each exactly once" in str(verdict)


def test_the_slots_of_a_step_are_written_at_once_and_before_others_hear_of_them(tmp_path, monkeypatch):
    writes: dict[int, list[list[str]]] = {0: [], 1: []}
    append = Audit.append

    def count(audit, *records):
        writes[int(audit.path.stem[-1])].append([record["kind"] for record in records])
        append(audit, *records)

    monkeypatch.setattr(Audit, "append", count)
    missing = []

    def look(event):
        if event.name == "all_to_all":
            (path,) = tmp_path.glob(f"audit-*{event.group.rank}.jsonl")
            lines = read_lines(path)
            step = sum(line["kind"] == "commit" for line in lines)
            missing.append(4 - sum((line["kind"], line.get("step")) == ("slot", step) for line in lines))

    def run(group):
        train(make_job(length=70, run=RunOptions(progress=False, log_dir=tmp_path, group=group)), epochs=1)

    with observe(look):
        simulate(2).run(run)
    for kinds in writes.values():
        assert [one for one in kinds if one[0] in ("slot", "commit")] == [["slot"] * 4, ["commit"]] * 3
    assert set(missing) == {0}
    assert check_directory(tmp_path).problems == []


def test_what_was_computed_of_a_step_that_nobody_reduced_is_written_all_the_same(tmp_path):
    job = make_job(length=70, run=RunOptions(progress=False, log_dir=tmp_path))
    for step in job.steps(epochs=1):
        for micro in step:
            micro.backward(job.model(micro.inputs).square().mean())
            if micro.slot == 2:
                break
        break
    job.close()
    (path,) = tmp_path.glob("audit-*")
    assert [line["slot"] for line in read_lines(path) if line["kind"] == "slot"] == [0, 1]


def edit(records, kind, change, **where):
    """The records with one of them changed, or left out if ``change`` returns None."""
    target = next(r for r in records if r["kind"] == kind and all(r[key] == value for key, value in where.items()))
    out = [change(dict(r)) if r is target else r for r in records]
    return [r for r in out if r is not None]


@pytest.mark.parametrize(
    ("kind", "change", "where", "problem"),
    [
        ("slot", lambda r: None, {"step": 3, "slot": 2}, "step 3 slot 2 was computed by 0 workers"),
        (
            "slot",
            lambda r: {**r, "indices": [0, *r["indices"][1:]]},
            {"step": 0, "slot": 0},
            "never committed|twice",
        ),
        (
            "slot",
            lambda r: {**r, "lineage": [0, 0, 1]},
            {"step": 1, "slot": 1},
            "computed by 0 workers in lineage",
        ),
        ("job", lambda r: {**r, "num_slots": 4}, {}, "different jobs"),
    ],
)
def test_damage_is_found(records, kind, change, where, problem):
    verdict = check(edit(records, kind, change, **where))
    assert any(__import__("re").search(problem, text) for text in verdict.problems), verdict.problems


def test_a_missing_step_is_found(records):
    verdict = check(r for r in records if not (r["kind"] == "commit" and r["step"] == 2))
    assert "steps [2] were never committed but later ones were" in verdict.problems


def test_a_repeated_computation_of_the_same_lineage_is_found(records):
    again = next(r for r in records if r["kind"] == "slot")
    assert any("by 2 workers" in text for text in check([*records, again]).problems)


def test_of_two_commits_the_later_lineage_counts(records):
    """A worker that committed step 0 died with it; the others computed it again in the next generation."""
    told = [r for r in records if "lineage" in r]
    lost = [dict(r) for r in told if r["step"] == 0]
    later = [{**r, "lineage": [r["lineage"][0], 1, 0]} for r in told]
    jobs = [r for r in records if "lineage" not in r]
    verdict = check([*jobs, *lost, *later])
    assert verdict.problems == []
    assert verdict.num_dropped == 8


def test_the_command(tmp_path, records, capsys):
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "audit-a.jsonl").write_text(lines + '{"kind": "sl')  # cut short by a kill
    assert main([str(tmp_path)]) == 0
    assert "audit clean: 6 steps" in capsys.readouterr().out
    (tmp_path / "audit-a.jsonl").write_text(lines.replace('"slot": 3', '"slot": 2'))
    assert main([str(tmp_path)]) == 1
    assert "AUDIT FAILED" in capsys.readouterr().out
    assert main([]) == 2


def attempt(number, steps, num_slots=2, per_epoch=4):
    """The records of an attempt that committed these steps of a job with two slots of one sample."""
    lineage = [number, 0, 0]
    for step in steps:
        for slot in range(num_slots):
            indices = [step % per_epoch * num_slots + slot]
            yield {"kind": "slot", "lineage": lineage, "epoch": step // per_epoch, "step": step, "slot": slot,
                   "indices": indices}  # fmt: skip
        yield {"kind": "commit", "lineage": lineage, "epoch": step // per_epoch, "step": step}


JOB = {"kind": "job", "num_slots": 2, "steps_per_epoch": 4, "num_samples_per_epoch": 8}


def test_a_job_that_went_back_to_an_earlier_save_twice():
    """The newest saves were thrown away each time: what counts of each attempt ends where the next one began."""
    records = [
        JOB,
        {"kind": "attempt", "attempt": 100, "step": 0, "parent": None},
        *attempt(100, range(20)),
        {"kind": "attempt", "attempt": 200, "step": 8, "parent": 100},
        *attempt(200, range(8, 14)),
        {"kind": "attempt", "attempt": 300, "step": 8, "parent": 100},
        *attempt(300, range(8, 12)),
    ]
    verdict = check(records)
    assert verdict.problems == []
    assert (verdict.num_steps, verdict.num_epochs, verdict.num_dropped) == (12, 3, 2 * (12 + 6))
    without_notes = check(record for record in records if record["kind"] != "attempt")
    assert (without_notes.problems, without_notes.num_steps) == ([], 12)


def test_a_log_that_begins_with_a_save_from_elsewhere_proves_what_it_has():
    verdict = check([JOB, {"kind": "attempt", "attempt": 9, "step": 6, "parent": 5}, *attempt(9, range(6, 12))])
    assert verdict.problems == []
    assert (verdict.first_step, verdict.num_steps, verdict.num_epochs) == (6, 6, 1)
    assert not verdict.is_complete
    assert "6 steps from step 6 on (what was before is not in this log)" in str(verdict)


def test_a_log_that_lacks_its_last_lines_is_not_complete():
    end = {"kind": "end", "lineage": [9, 0, 0], "step": 12}
    whole = [JOB, *attempt(9, range(12)), end]
    assert check(whole).is_complete
    cut = check([JOB, *attempt(9, range(8)), end])
    assert cut.problems == ["the log is incomplete: the job ended after step 11, the last commit here is of step 7"]
    lost = check([*whole, {"kind": "lost", "lines": 3}])
    assert lost.problems == ["the log is incomplete: 3 lines could not be written"]


def test_a_job_resumed_from_its_saves_is_clean(tmp_path):
    def run(steps, **keywords):
        saves = Saves(directory=tmp_path / "saves", every=2, keep=9)
        options = RunOptions(progress=False, log_dir=tmp_path / "logs")
        train(make_job(length=70, saves=saves, run=options), wait_for_saves=True, max_steps=steps)

    run(5)
    shutil.rmtree(tmp_path / "saves" / "step-000000000004")
    run(4)
    shutil.rmtree(tmp_path / "saves" / "step-000000000004")
    run(6)
    verdict = check_directory(tmp_path / "logs")
    assert verdict.problems == []
    assert verdict.is_complete
    assert (verdict.num_steps, verdict.num_dropped) == (6, 8 * (3 + 2))


def test_torn_lines_are_survived(tmp_path, records):
    lines = [json.dumps(record) for record in records]
    torn = "\n".join([*lines[:3], lines[3][:20], "7", "[" * 100_000, "\x00\xff", *lines[3:]]) + "\n"
    (tmp_path / "audit-a.jsonl").write_bytes(torn.encode("latin-1") + b'{"kind')
    verdict = check_directory(tmp_path)
    assert verdict.problems == []
    assert verdict.num_torn == 5
    assert "5 torn lines were left out" in str(verdict)
    assert check([*records, {"kind": "commit"}, 7, {"kind": []}]).problems == [
        "3 records are not ones that a job writes"
    ]


def test_an_empty_directory_proves_nothing(tmp_path):
    assert check_directory(tmp_path).problems == ["no job record: no worker began"]


def write_log(folder: Path, records: list[dict[str, Any]], worker: str = "a") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"events-{worker}.jsonl").touch()
    (folder / f"audit-{worker}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_run_that_fails_beside_one_that_holds_is_told(tmp_path, records):
    write_log(tmp_path / "run_1", records)
    write_log(tmp_path / "run_2", records)
    assert audit_record(tmp_path)["holds"] is True
    assert audit_record(tmp_path)["steps"] == 12
    write_log(tmp_path / "run_2", edit(records, "slot", lambda record: None, step=1))
    found = audit_record(tmp_path)
    assert found["holds"] is False
    first, second = found["text"].split("; ", 1)[0], found["text"].partition(f"{tmp_path / 'run_2'}: ")[2]
    assert first.startswith(f"{tmp_path / 'run_1'}: audit clean")
    assert second.startswith("AUDIT FAILED")
    assert "step 1 slot" in second


def test_a_job_whose_workers_wrote_to_several_folders_is_checked_as_one(tmp_path, records):
    """Each node of its own disk: neither folder holds every slot."""
    own = [[record for record in records if record.get("slot", half) % 2 == half] for half in (0, 1)]
    for number, half in enumerate(own):
        write_log(tmp_path / f"node_{number}", half, f"n{number}.0")
    assert check(own[0]).problems
    assert audit_record(tmp_path)["holds"] is True
    (tmp_path / "node_1" / "audit-n1.0.jsonl").unlink()
    assert audit_record(tmp_path)["holds"] is False
    found = audit_record(tmp_path, ["n0.0", "n1.0"])
    assert "holds" not in found, "it has not been checked"
    assert "the logs of 1 worker(s) (n1.0) are not in" in found["text"]
