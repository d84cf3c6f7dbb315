"""The audit tool finds what it should, and only that."""

from __future__ import annotations

import json

import pytest
from elastic_training import make_job, train

from phalanx.comm import simulate
from phalanx.elastic import RunOptions
from phalanx.elastic._records import read_lines
from phalanx.elastic.audit import check, check_directory, main

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def records(tmp_path_factory):
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


def edit(records, kind, change, **where):
    """The records with one of them changed, or left out if ``change`` returns None."""
    target = next(
        r for r in records if r["kind"] == kind and all(r[key] == value for key, value in where.items())
    )
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
    lost = [dict(r) for r in records if r["kind"] != "job" and r["step"] == 0]
    later = [{**r, "lineage": [0, 1, 0]} for r in records if r["kind"] != "job"]
    jobs = [r for r in records if r["kind"] == "job"]
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


def test_an_empty_directory_proves_nothing(tmp_path):
    assert check_directory(tmp_path).problems == ["no job record: no worker began"]
