"""The fault storm: every kind of fault at every moment of a job, one after the other, until three hundred have struck.

Unlike ``test_storms``, which hurts workers at random times, each fault here is laid out for a moment (see
``storm_script``): a start, a join, a state on its way, a save, an evaluation, the last step, what follows the loop.
Some jobs run over gloo, some have a stranger who writes garbage, some run on two machines that lose their network.
Each must end by itself with exit code 0, the result written, the bits of the undisturbed run, a clean audit and no
traceback of anybody, and leave nothing behind.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import Cluster, Node
from strangers import Stranger
from tests.networks import Link, Namespace, new_namespace

pytestmark = pytest.mark.timeout(900)

SCRIPT = Path(__file__).parent / "storm_script.py"
NUM_STEPS = 90
AHEAD = 5
"""Steps that a job may go on while it waits for a fault: there is a save and the end of an epoch among them."""
STRIKE_LIMIT = 150.0
"""Seconds within which a strike has happened and a step was committed since; a job that takes longer hangs."""
END_LIMIT = 300.0
"""Seconds within which a job ends when nobody holds it back any more."""
LEASE = 12.0
"""Half of it, in seconds, is how long a machine may be cut off before the others go on without it."""

Strike = tuple[str, ...]
"""Faults as ``POINT.KIND`` that belong together: the first brings about the moment of the second."""

STRIKES: tuple[Strike, ...] = (
    ("micro.kill",),
    ("commit.kill",),
    ("save.kill",),
    ("evaluate.kill",),
    ("micro.kill", "start.kill"),
    ("commit.kill", "join.kill"),
    ("micro.kill", "send.kill"),
    ("micro.kill", "receive.kill"),
    ("micro.kill", "commit.kill"),
    ("micro.reset",),
    ("commit.reset",),
    ("evaluate.reset",),
    ("micro.kill", "receive.reset"),
    ("micro.stop",),
    ("commit.stop",),
    ("evaluate.stop",),
    ("micro.kill", "join.stop"),
)
AT_ANY_STEP = ("start", "join", "send", "receive")
"""Points of workers that have no step yet, and of whoever gives them one."""
ENDINGS: tuple[Strike, ...] = (
    ("last.kill", "after.kill"),
    ("after.kill", "end.kill"),
    ("last.reset", "after.kill"),
    ("last.kill", "end.kill"),
    ("last.stop", "end.kill"),
)
ON_NETWORKS: tuple[Strike, ...] = (
    ("data.cut",),
    ("data.silence",),
    ("all.cut",),
    ("all.silence",),
    ("data.silence", "micro.kill"),
    ("all.cut", "commit.kill"),
    ("all.lease",),
)
"""What happens to the links between two machines: ``data`` carries what workers exchange, ``all`` is that one and the
one over which store and agents are reached. ``cut`` and ``silence`` (see ``Link``) last longer than a collective waits,
``lease`` is a cut that lasts until the others have given the machine up."""

SAMPLE: tuple[Strike, ...] = (
    ("micro.kill", "start.kill"),
    ("commit.kill", "join.kill"),
    ("micro.kill", "send.kill"),
    ("save.kill",),
    ("evaluate.kill",),
    ("micro.reset",),
    ("commit.stop",),
)
MOMENTS = {"start", "join", "send", "save", "evaluate", "last", "after"}
KINDS = {"kill", "stop", "reset"}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One job and what it has to bear."""

    strikes: tuple[Strike, ...]
    ending: Strike
    num_workers: int = 3
    gloo: bool = False
    has_stranger: bool = False
    seed: int = 0

    def faults(self) -> list[str]:
        return [fault for strike in (*self.strikes, self.ending) for fault in strike]


def plan(num_faults: int, strikes_per_scene: int, *, networks: bool = False) -> list[Scene]:
    """Scenes with at least so many faults: every strike comes before any comes again, each time in another order."""
    chance = random.Random(16)
    strikes, endings = deck(STRIKES, chance), deck(ENDINGS, chance)
    between = deck(ON_NETWORKS, chance)
    scenes: list[Scene] = []
    while sum(len(scene.faults()) for scene in scenes) < num_faults:
        seed = len(scenes)
        chosen = [next(between if networks and i % 2 else strikes) for i in range(strikes_per_scene)]
        scenes.append(
            Scene(
                strikes=tuple(chosen),
                ending=next(endings),
                num_workers=2 if networks else chance.randint(2, 4),
                gloo=not networks and seed % 2 == 0,
                has_stranger=seed % 3 == 0,
                seed=seed,
            )
        )
    return scenes


def deck(strikes: Sequence[Strike], chance: random.Random) -> Iterator[Strike]:
    while True:
        yield from chance.sample(strikes, len(strikes))


def covered(scenes: Sequence[Scene]) -> tuple[set[str], set[str]]:
    """The moments and the kinds of all faults."""
    faults = [fault.split(".") for scene in scenes for fault in scene.faults()]
    return {at for at, _ in faults}, {kind for _, kind in faults}


class Storm:
    """One job, and the faults that are laid out for it."""

    def __init__(self, directory: Path, scene: Scene, namespace: Namespace | None = None) -> None:
        self.faults, self.struck = directory / "faults", directory / "struck"
        for folder in (self.faults, self.struck):
            folder.mkdir(parents=True)
        self.num_laid = 0
        self.num_workers = scene.num_workers * (1 if namespace is None else 2)
        self.links = {} if namespace is None else links_of(namespace)
        options = {
            "hang_timeout": "60",
            "max_restarts": "1000",
            "script_flag": "--gloo" if scene.gloo else "",
        }
        nodes = (Node(),) if namespace is None else two_nodes(directory, namespace)
        self.cluster = Cluster(directory, scene.num_workers, NUM_STEPS, hold=1, script=SCRIPT, nodes=nodes, **options)
        self.stranger: Stranger | None = None

    def lay_out(self, strike: Strike, step: int) -> None:
        for fault in strike:
            at, kind = fault.split(".")
            if at not in self.links:
                self.num_laid += 1
                step_of = 0 if at in AT_ANY_STEP else step
                (self.faults / f"{self.num_laid:03d}.{at}.{step_of}.{kind}").touch()

    def let_stranger_in(self, seed: int) -> None:
        """Somebody without the job's secret writes garbage over every key of its store, until the end."""
        self.wait_all_there()
        self.stranger = Stranger((self.cluster.directory / "store").read_text(), pause=0.1, seed=seed)

    def close(self) -> None:
        if self.stranger is not None:
            self.stranger.stop()
        self.cluster.close()

    def has_struck(self) -> bool:
        return len(list(self.struck.iterdir())) == self.num_laid

    def wait_all_there(self) -> None:
        """Until all workers sit in one round, and none of them is dead or stopped by now."""

        def are_there() -> bool:
            pids = {record["worker"]: record["pid"] for record in self.cluster.events("started")}
            seated = self.cluster.newest_round()
            return len(seated) == self.num_workers and all(runs(pids[worker]) for worker in seated)

        self.cluster.wait_until(are_there, f"a round of {self.num_workers} workers", STRIKE_LIMIT)

    def strike(self, strike: Strike) -> None:
        """Let it happen soon, and wait until all of it has, a step was committed since, and all workers are there."""
        step = self.cluster.step()
        with self.hurt_network(strike):
            self.lay_out(strike, step)
            self.cluster.hold(step + AHEAD)
        self.cluster.wait_until(self.has_struck, f"{strike} at step {step}", STRIKE_LIMIT)
        step = self.cluster.step()
        self.cluster.hold(step + 2)
        self.cluster.wait_until(lambda: self.cluster.step() > step, f"a step after {strike} at {step}", STRIKE_LIMIT)
        self.wait_all_there()

    @contextlib.contextmanager
    def hurt_network(self, strike: Strike) -> Iterator[None]:
        """The first fault of a strike, if it is one of the links: it is there before the job may go on, for a while."""
        at, kind = strike[0].split(".")
        links = self.links.get(at, ())
        for link in links:
            link.silence() if kind == "silence" else link.cut()
        yield
        if links:
            time.sleep(LEASE * 0.8 if kind == "lease" else 6.0)
        for link in links:
            link.restore()


def runs(pid: int) -> bool:
    """Whether there is such a process, and it is neither dead nor stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZXTt"
    except OSError:
        return False


def links_of(namespace: Namespace) -> dict[str, tuple[Link, ...]]:
    return {"data": namespace.links[1:], "all": namespace.links}


def two_nodes(directory: Path, namespace: Namespace) -> tuple[Node, Node]:
    """One agent here and one in the namespace. Both machines are this one, but their workers are not to know."""
    control, data = namespace.links
    secret = directory / "secret"
    secret.write_text(secrets.token_hex(16))
    secret.chmod(0o600)
    with socket.create_server((control.here, 0)) as free:
        endpoint = f"{control.here}:{free.getsockname()[1]}"
    flags = (
        "--nnodes=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        "--rdzv-id=storm",
        f"--rdzv-conf=lease={LEASE:g},secret_file={secret},join_timeout=300",
    )
    here = Node(
        flags=(*flags, f"--local-addr={control.here}"),
        script_flags=("--machine=here", f"--over={data.device}"),
    )
    there = Node(
        prefix=tuple(namespace.inside("env", "RES_OPTIONS=timeout:1 attempts:1")),  # no name server there
        flags=(*flags, f"--local-addr={control.there}"),
        script_flags=("--machine=there", f"--over={data.device_there}"),
    )
    return here, there


@dataclass(frozen=True, kw_only=True)
class Survived:
    """What a job has lived through: its faults, and how long each regroup took on the slowest worker."""

    faults: list[str]
    regroups: list[float]
    num_garbage: int


def run_storm(directory: Path, undisturbed: str, scene: Scene, namespace: Namespace | None = None) -> Survived:
    storm = Storm(directory, scene, namespace)
    try:
        if scene.has_stranger:
            storm.let_stranger_in(scene.seed)
        else:
            storm.wait_all_there()
        for strike in scene.strikes:
            storm.strike(strike)
        assert storm.cluster.step() < NUM_STEPS - 1, "the job was nearly over before the last fault"
        storm.lay_out(scene.ending, NUM_STEPS - 1)
        storm.cluster.release()
        verdict = storm.cluster.finish(timeout=END_LIMIT)
        assert verdict.num_steps == NUM_STEPS
        assert storm.has_struck(), f"of {scene} not all came: {sorted(storm.faults.iterdir())}"
        assert (directory / "result").exists(), f"after {scene} the result is missing"
        assert {(directory / "result").read_text(), *storm.cluster.digests()} == {undisturbed}, f"after {scene}"
        if storm.num_workers > 2:  # else a strike may have hit all of them
            assert storm.cluster.events("went_back") == [], f"after {scene} steps were computed again"
        if storm.stranger is not None:
            storm.stranger.stop()
        assert storm.cluster.left_behind() == [], f"after {scene}"
        return Survived(
            faults=scene.faults(),
            regroups=regroup_times(storm.cluster),
            num_garbage=0 if storm.stranger is None else storm.stranger.num_writes,
        )
    except AssertionError as error:
        raise AssertionError(f"{scene}: {error}") from error
    finally:
        storm.close()


def regroup_times(cluster: Cluster) -> list[float]:
    """Seconds until all who stayed had a place and a state again, by round."""
    slowest: Counter[tuple[int, int]] = Counter()
    for record in cluster.events("regrouped"):
        if record["worker"] not in record["joined"]:
            key = (record["generation"], record["round"])
            slowest[key] = max(slowest[key], record["seconds"])
    return list(slowest.values())


def tell(survived: Sequence[Survived]) -> None:
    """For whoever runs the soak: pytest's ``-rP`` shows it."""
    faults = Counter(fault for one in survived for fault in one.faults)
    times = sorted(seconds for one in survived for seconds in one.regroups)
    print(f"{sum(faults.values())} faults in {len(survived)} jobs; {sum(s.num_garbage for s in survived)} x garbage")
    print(", ".join(f"{count} {fault}" for fault, count in sorted(faults.items())))
    print(f"{len(times)} regroups: median {statistics.median(times):.2f} s, longest {times[-1]:.2f} s")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Steps, digest and score of the storm's script in one process, without a launcher."""
    directory = tmp_path_factory.mktemp("quiet")
    for folder in ("faults", "struck"):
        (directory / folder).mkdir()
    subprocess.run([sys.executable, str(SCRIPT), str(directory), str(NUM_STEPS), "0"], check=True, timeout=300)
    return (directory / "result").read_text()


def test_a_sample_of_the_storm(tmp_path, undisturbed):
    scene = Scene(strikes=SAMPLE, ending=("last.kill", "after.kill"), gloo=True, has_stranger=True)
    moments, kinds = covered([scene])
    assert moments >= MOMENTS
    assert kinds >= KINDS
    run_storm(tmp_path / "job", undisturbed, scene)


def test_a_sample_of_the_storm_on_two_machines(tmp_path, undisturbed):
    scene = Scene(strikes=(("data.silence", "micro.kill"),), ending=("last.kill", "after.kill"), num_workers=1)
    with new_namespace(2) as namespace:
        run_storm(tmp_path / "job", undisturbed, scene, namespace)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_three_hundred_faults_lose_nothing(tmp_path, undisturbed):
    scenes = plan(300, 9)
    moments, kinds = covered(scenes)
    assert moments >= {fault.split(".")[0] for strike in (*STRIKES, *ENDINGS) for fault in strike} >= MOMENTS
    assert kinds >= KINDS
    assert any(s.gloo and s.has_stranger for s in scenes)
    assert any(not s.gloo and s.has_stranger for s in scenes)
    tell([run_storm(tmp_path / str(scene.seed), undisturbed, scene) for scene in scenes])


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_sixty_faults_on_two_machines_lose_nothing(tmp_path, undisturbed):
    scenes = plan(60, 6, networks=True)
    moments, kinds = covered(scenes)
    assert moments >= {"data", "all", "last", "after"}
    assert kinds >= {*KINDS, "cut", "silence", "lease"}
    survived = []
    for scene in scenes:
        with new_namespace(2) as namespace:
            survived.append(run_storm(tmp_path / str(scene.seed), undisturbed, scene, namespace))
    tell(survived)
