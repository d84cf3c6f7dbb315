"""Says how a running job is: ``phalanx status``. What is known comes from the job's store, and from its page if it has
one."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from phalanx.launch.cli._flags import UsageError
from phalanx.launch.cli._jobs import CommandParser, find_job, job_parser, jobs_here, open_job, page_of
from phalanx.launch.system._folders import RunningJob

if TYPE_CHECKING:
    from phalanx.comm.stores._interface import Store
    from phalanx.protocol import ProgressReport


def parser() -> CommandParser:
    return job_parser("status", "Say how a running job is.")


def main(argv: Sequence[str]) -> int:
    """Run ``phalanx status`` with these arguments; the exit code."""
    try:
        args = parser().parse_args(argv)
        here = jobs_here()
        if not args.rdzv_endpoint and not args.rdzv_id and len(here) > 1:
            return _list(here, as_json=args.json)
        job = find_job(args.rdzv_endpoint, args.rdzv_backend, args.rdzv_id)
        status = status_of(job)
    except (ValueError, ConnectionError) as error:
        print(f"phalanx status: {error}", file=sys.stderr)
        return 2
    print(json.dumps(status) if args.json else in_lines(status))
    return 0


def _list(jobs: list[RunningJob], *, as_json: bool) -> int:
    rows = [{"job": job.run_id, "store": job.store_url} for job in jobs]
    if as_json:
        print(json.dumps({"jobs": rows}))
    else:
        print(f"{len(rows)} jobs of yours run on this machine; choose one with --rdzv-id:")
        for row in rows:
            print(f"  {row['job']}  at {row['store']}")
    return 0


def status_of(job: RunningJob) -> dict[str, Any]:
    """Return what is known about a job."""
    with open_job(job) as (store, secret):
        status = {"job": job.run_id, "store": job.store_url, "secret_file": job.secret_file, **_from_store(store)}
        page = page_of(store, secret)
        if page is None:
            return {**status, "page": None, "summary": None}
        try:
            return {**status, "page": page.url, "summary": page.get("/api/v1/summary")}
        except UsageError:
            return {**status, "page": page.url, "summary": None}


def _from_store(store: Store) -> dict[str, Any]:
    from phalanx.launch.recovery._asking import Asking  # start-up
    from phalanx.protocol import CLOSED, FORMED, SETBACKS, Closing, JobKeys, Setbacks, progress_key

    nodes = Asking(store).nodes()
    formed, closed, setbacks, committed = store.get_many([FORMED, CLOSED, SETBACKS, JobKeys().committed])
    generation = _count(formed)
    members = _members(store, generation)
    if members is None and not nodes:
        raise UsageError("no such job is there, or it has ended")
    workers = [] if members is None else list(members.workers)
    reports = store.get_many([progress_key(worker.id) for worker in workers])
    closing = None if closed is None else Closing.from_json(closed)
    told = [_report(report) for report in reports]
    paces = _paces({w.id: one for w, one in zip(workers, told, strict=True) if one is not None})
    return {
        "state": "running" if closing is None else closing.outcome or "closed",
        "reason": "" if closing is None else closing.reason,
        "generation": generation,
        "step": _count(committed),
        "setbacks": Setbacks.from_json(setbacks).count if setbacks else 0,
        "nodes": [
            {
                "id": node.id,
                "host": node.host,
                "addr": node.addr,
                "workers": node.local_size,
                "left_out": node.last_choice,
            }
            for node in nodes
        ],
        "workers": [
            {
                "rank": worker.rank,
                "id": worker.id,
                "host": worker.host,
                "step": None if report is None else report.step,
                "slots": None if report is None or report.slots < 0 else report.slots,
                "pace": paces.get(worker.id),
            }
            for worker, report in zip(workers, told, strict=True)
        ],
    }


def _members(store: Store, generation: int | None) -> Any:
    from phalanx.protocol import Members, RecordError, members_key  # start-up

    data = None if generation is None else store.get(members_key(generation))
    try:
        return None if data is None else Members.from_json(data)
    except RecordError:
        return None


def _count(data: bytes | None) -> int | None:
    return int(data) if data is not None and data.isdigit() and len(data) < 18 else None


def _report(data: bytes | None) -> ProgressReport | None:
    from phalanx.protocol import ProgressReport, RecordError  # start-up

    try:
        return None if data is None else ProgressReport.from_json(data)
    except RecordError:
        return None


def _paces(reports: dict[str, ProgressReport]) -> dict[str, dict[str, Any]]:
    """Return what workers spend on a step, side by side; only of those that say."""
    from phalanx.watch._paces import compare  # start-up

    times = {w: [one / 1e6 for one in report.times] for w, report in reports.items() if len(report.times) == 3}
    return compare(times) if times else {}


def _role(node: dict[str, Any]) -> str:
    if node["left_out"]:
        return "left out: workers failed or lied there; it is a spare, taken only if there are too few others"
    return f"{node['workers']} workers"


def in_lines(status: dict[str, Any]) -> str:
    """Return it for people."""
    from phalanx.watch._paces import in_words  # start-up

    summary = status["summary"] or {}
    step = summary.get("step") if summary.get("step") is not None else status["step"]
    words = [f"job {status['job']}: {summary.get('state', status['state'])}"]
    if status["generation"] is not None:
        words.append(f"generation {status['generation']}")
    if step is not None:
        total = summary.get("total_steps")
        words.append(f"step {step}" + (f" of {total}" if total is not None else ""))
    if summary.get("loss") is not None:
        words.append(f"loss {summary['loss']:.4g}")
    num_nodes = sum(not node["left_out"] for node in status["nodes"])
    lines = [", ".join(words) + f", {len(status['workers'])} workers on {num_nodes} node(s)"]
    if summary:
        lines.append(summary["goodput"]["text"])
        if summary["last_failure"]:
            lines.append(f"last failure: {summary['last_failure']['text']}")
    if status["setbacks"]:
        lines.append(f"all workers were lost {status['setbacks']} time(s), and steps repeated")
    if status["reason"]:
        lines.append(status["reason"])
    lines.append(f"page: {status['page']}" if status["page"] else "page: none (phalanx run --dashboard PORT)")
    if status["secret_file"]:
        lines.append(f"secret: {status['secret_file']}")
    lines += [f"  node {node['id']}  {_role(node)}" for node in status["nodes"]]
    for worker in status["workers"]:
        at = "" if worker["step"] is None or worker["step"] < 0 else f"  step {worker['step']}"
        slots = "" if worker["slots"] is None else f"  {worker['slots']} slots"
        pace = "" if worker["pace"] is None else f"  {in_words(worker['pace'])}"
        lines.append(f"  rank {worker['rank']}  {worker['id']} on {worker['host']}{at}{slots}{pace}")
    return "\n".join(lines)
