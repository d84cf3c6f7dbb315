"""The faults between hosts, what Phalanx promises for each, and what was seen: ``python -m tests.hosts.faults``.

One job of three hosts lives through all faults of a table, one after the other, with the same weights at the end as a
run that nothing happened to. Written to ``docs/clusters.json``, and as a table into ``docs/clusters.md``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.elastic.cluster import errors_of
from tests.hosts.box import Box, new_box
from tests.hosts.jobs import GROUP_TIMEOUT, LEASE, HostJob, etcd_on, undisturbed

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "docs" / "clusters.json", ROOT / "docs" / "clusters.md"
SPOT = re.compile(r"(<!-- faults -->\n).*?(<!-- end -->)", re.DOTALL)
EXPECTED = re.compile(r"phalanx\.elastic\.membership\._coordinator\.Ejected: worker \S+ is not among the members")
"""The last line of a worker that is well but whose agent has lost its lease: the others have gone on without it."""
CHAINED = re.compile(
    r"^(\S.*)\n\n(?:During handling of the above exception|The above exception was the direct cause)", re.M
)
"""The last line of an exception that another one was raised for."""
STORES = ("c10d", "etcd", "file")
PAST_LEASE = LEASE + 3.0
SETTLED = 8
"""Steps that the job makes between two faults, at most."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that happens to the hosts, how long it lasts, and what is promised.

    ``size`` is how many workers are in the group when it has lasted for a while; 0: that may be so or so.
    """

    name: str
    promise: str
    hurt: Callable[[Box], None]
    heal: Callable[[Box], None]
    lasts: float = PAST_LEASE
    size: int = 2
    loses: str = ""
    """The host whose power goes: its agent is started again afterwards."""
    stores: tuple[str, ...] = STORES
    """Where it is a fault at all: etcd has a member on every host, a directory is reached by everybody."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What happened: seconds to the next commit and until all hosts were in one group again, both from the fault's
    beginning and end."""

    store: str
    sharded: bool
    fault: str
    promise: str
    num_going_on: int
    """How many workers committed the next step."""
    next_commit: float
    all_again: float


def _cut(one: str, other: str, *, one_way: bool = False) -> tuple[Callable[[Box], None], Callable[[Box], None]]:
    """Cut and mend between two places, written ``host.place``."""

    def place(box: Box, text: str):
        host, _, which = text.partition(".")
        return getattr(box.hosts[int(host)], which)

    return (
        lambda box: box.cut(place(box, one), place(box, other), one_way=one_way),
        lambda box: box.mend(place(box, one), place(box, other), one_way=one_way),
    )


def _fault(name: str, promise: str, ways: tuple[Callable[[Box], None], Callable[[Box], None]], **more) -> Fault:
    return Fault(name=name, promise=promise, hurt=ways[0], heal=ways[1], **more)


FAULTS = (
    _fault(
        "an agent and the store apart, shorter than the lease", "nobody notices",
        _cut("1.main", "0.main"), lasts=LEASE / 4, size=3, stores=("c10d",),
    ),
    _fault(
        "an agent and the store apart, longer than the lease",
        "steps go on; then without the host, which stops its worker and joins again when it can",
        _cut("1.main", "0.main"), stores=("c10d",),
    ),
    _fault(
        "a worker and the store apart", "steps need no store: they go on, with it",
        _cut("1.workers", "0.main"), size=0, stores=("c10d",),
    ),
    _fault(
        "two workers apart, all others reach one another",
        "the step is dropped, and made again by who is in contact; the others are replaced",
        _cut("1.workers", "2.workers"), size=0,
    ),
    _fault(
        "a worker's packets to another are lost, one way", "as two workers apart",
        _cut("1.workers", "2.workers", one_way=True), size=0,
    ),
    _fault(
        "the link of a host goes down", "the others go on without it; it joins again",
        (lambda box: box.hosts[1].link_down(), lambda box: box.hosts[1].link_up()),
    ),
    _fault(
        "a host falls silent", "the others go on without it; it joins again",
        (lambda box: box.hosts[1].silence(), lambda box: box.hosts[1].restore()),
    ),
    _fault(
        "split in two", "the side that has the store goes on, the other stops and joins again",
        (lambda box: box.split(box.hosts[:2], box.hosts[2:]), lambda box: box.rejoin(box.hosts[:2], box.hosts[2:])),
        stores=("c10d", "etcd"),
    ),
    _fault(
        "a host loses its power, and returns", "the others go on without it; a new agent joins",
        (lambda box: box.hosts[1].power_off(), lambda box: box.hosts[1].power_on()), loses="host1",
    ),
    _fault(
        "the host that the endpoint names first loses its power, and returns",
        "with a store that has other members, as any other host",
        (lambda box: box.hosts[0].power_off(), lambda box: box.hosts[0].power_on()),
        loses="host0", stores=("etcd", "file"),
    ),
)  # fmt: skip


def expected_errors(text: str) -> list[str]:
    """The last lines of tracebacks that a worker may well end with, and of what led to them."""
    chained = set(CHAINED.findall(text))
    return [line for line in errors_of(text) if EXPECTED.match(line) or line in chained]


def live_through(job: HostJob, fault: Fault) -> tuple[int, float, float]:
    """Let a fault happen between two steps; how many went on, seconds to the next commit, and from its end to all hosts
    in one group."""
    job.wait_workers(3)
    fault.hurt(job.box)
    begun = time.monotonic()
    try:
        seconds = job.next_commit()
        size = len(job.newest_round())
        if fault.size:
            job.wait_workers(fault.size)
            job.next_commit()
        time.sleep(max(0.0, begun + fault.lasts - time.monotonic()))
    finally:
        fault.heal(job.box)
    healed = time.monotonic()
    for host in job.box.hosts:
        if host.name == fault.loses or job.agent_of[host.name].poll() is not None:
            print(f"    {host.name}: its agent ended with {job.forget(host)}", file=sys.stderr)
            job.start_on(host)
    job.wait_until(lambda: len(job.newest_round()) == 3 and job.is_level(), "all hosts in one group again")
    return size, seconds, time.monotonic() - healed


@contextmanager
def on_store(kind: str, directory: Path) -> Iterator[tuple[Box, str]]:
    """A box of three hosts and the endpoint of a store on them."""
    with ExitStack() as stack:
        box = stack.enter_context(new_box(3, split_workers=True))
        if kind == "etcd":
            yield box, stack.enter_context(etcd_on(box.hosts, directory / "etcd"))
        elif kind == "file":
            yield box, str(directory / "store")
        else:
            yield box, "host0:29400"


def run_table(directory: Path, *, store: str, sharded: bool, faults: Sequence[Fault]) -> list[Seen]:
    """Run one job through all of the faults; ``AssertionError`` where a promise does not hold."""
    flags = ("--copies=2",) if sharded else ("--counts",)
    num_steps = (len(faults) + 2) * SETTLED
    expected = undisturbed(directory / "quiet", num_steps, "--counts")
    seen = []
    with on_store(store, directory) as (box, endpoint):
        job = HostJob(
            directory / "job", box, num_steps=num_steps, nodes="2:3", store=endpoint, backend=store, hold=2,
            script_flag=" ".join(flags),
        )  # fmt: skip
        try:
            job.wait_until(lambda: job.step() >= 2, "step 2", timeout=600)
            for fault in faults:
                print(f"{store}, {'sharded' if sharded else 'unsharded'}: {fault.name}", file=sys.stderr, flush=True)
                times = live_through(job, fault)
                print(
                    "    {} went on; next commit {:.2f} s, all again {:.2f} s".format(*times),
                    file=sys.stderr,
                    flush=True,
                )
                assert job.committed_twice() == {}, f"{fault.name}: two sides both committed"
                seen.append((fault, times))
            job.release()
            verdict = job.finish(timeout=600, tracebacks=expected_errors(job.text()))
            assert verdict.num_steps == num_steps
            assert job.committed_twice() == {}
            assert job.digests() == {expected}, f"{job.digests()}; undisturbed it is {expected}"
        except BaseException:
            print(job.text()[-6000:], file=sys.stderr)
            raise
        finally:
            job.close()
    return [
        Seen(store=store, sharded=sharded, fault=fault.name, promise=fault.promise, num_going_on=size,
             next_commit=round(next_commit, 2), all_again=round(all_again, 2))
        for fault, (size, next_commit, all_again) in seen
    ]  # fmt: skip


def table(seen: Sequence[Seen]) -> str:
    """The rows of the page: one for each fault, the slowest of its runs."""
    lines = [
        "| fault | promise | stores | runs | next commit, at most | all hosts in one group after its end, at most |",
        "|---|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        runs = [each for each in seen if each.fault == fault.name]
        if not runs:
            continue
        stores = ", ".join(dict.fromkeys(f"`{run.store}`" for run in runs))
        commit, again = max(run.next_commit for run in runs), max(run.all_again for run in runs)
        lines.append(f"| {fault.name} | {fault.promise} | {stores} | {len(runs)} | {commit:.1f} s | {again:.1f} s |")
    return "\n".join([*lines, ""])


def stored() -> list[Seen]:
    return [Seen(**each) for each in json.loads(RESULTS.read_text())["seen"]] if RESULTS.exists() else []


def write(seen: Sequence[Seen]) -> None:
    """Put these runs in the place of those on the same store and of the same kind."""
    anew = {(each.store, each.sharded) for each in seen}
    together = [*(each for each in stored() if (each.store, each.sharded) not in anew), *seen]
    times = {"lease": LEASE, "group_timeout": GROUP_TIMEOUT}
    RESULTS.write_text(json.dumps({**times, "seen": [asdict(each) for each in together]}, indent=1) + "\n")
    PAGE.write_text(SPOT.sub(lambda spot: f"{spot[1]}{table(together)}{spot[2]}", PAGE.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Run the faults between hosts and write the table of docs/clusters.md."
    )
    parser.add_argument("--store", action="append", choices=STORES)
    parser.add_argument("--only", default="", help="faults whose name has this in it")
    parser.add_argument("--sharded", action="store_true", help="sharded jobs only")
    parser.add_argument("--unsharded", action="store_true", help="unsharded jobs only")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    args = parser.parse_args()
    kinds = [kind for kind, asked in ((False, args.unsharded), (True, args.sharded)) if asked] or [False, True]
    seen: list[Seen] = []
    for store in args.store or STORES:
        faults = [fault for fault in FAULTS if args.only in fault.name and store in fault.stores]
        for sharded in kinds:
            with tempfile.TemporaryDirectory(prefix="phalanx-faults-") as folder:
                seen += run_table(Path(folder), store=store, sharded=sharded, faults=faults)
    print(table(seen))  # what was run just now
    if not args.dry:
        write(seen)


if __name__ == "__main__":
    main()
