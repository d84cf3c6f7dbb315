"""Finds the job that a command is about: by endpoint and name, or by itself where it runs on this machine.

Owns the flags that all such commands share, how they fail, the way into a job's store, and the way to its page.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from phalanx.launch.cli._flags import UsageError
from phalanx.launch.system._folders import RunningJob, running_jobs

if TYPE_CHECKING:
    from phalanx.comm.stores._interface import Store

BACKENDS = ("c10d", "static", "etcd", "file")
PATIENCE = 10.0


class CommandParser(argparse.ArgumentParser):
    """The parser of a command: a mistake is ``UsageError``, one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def job_parser(name: str, description: str) -> CommandParser:
    """Return the parser of a command about a running job, with the flags that say which."""
    parser = CommandParser(prog=f"phalanx {name}", description=description)
    parser.add_argument(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        default="",
        help="as given to phalanx run; default: a job on this machine",
    )
    parser.add_argument("--rdzv-backend", "--rdzv_backend", default="c10d", choices=BACKENDS)
    parser.add_argument(
        "--rdzv-id",
        "--rdzv_id",
        default="",
        help="the job's name, as given to phalanx run; default: the only one",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def guarded(name: str, parser: CommandParser, argv: Sequence[str], run: Callable[[argparse.Namespace], int]) -> int:
    """Run a command; its exit code. A mistake, or a job that does not answer, is said in one line."""
    try:
        return run(parser.parse_args(argv))
    except (ValueError, ConnectionError) as error:
        print(f"phalanx {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # `| head` has seen enough
        return 0


def directory_of(text: str) -> Path:
    """Return the log directory that the user named."""
    directory = Path(text)
    if not directory.is_dir():
        raise UsageError(f"{text!r} is no directory; expected the log directory of a job")
    return directory


def find_job(endpoint: str, backend: str, run_id: str) -> RunningJob:
    """Return the job that the flags name; without an endpoint the one, of this name if there is one, that runs here."""
    if endpoint and not run_id:
        raise UsageError("--rdzv-endpoint without --rdzv-id; give the job's name too, as given to phalanx run")
    if endpoint:
        return RunningJob(run_id=run_id, store_url=store_url(backend, endpoint))
    here = jobs_here()
    found = [job for job in here if not run_id or job.run_id == run_id]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"{job.run_id} at {job.store_url}" for job in here)
    if not here:
        raise UsageError(
            "no job of yours runs on this machine (as this user); give --rdzv-endpoint and --rdzv-id of one elsewhere"
        )
    if not found:
        raise UsageError(f"no job {run_id!r} of yours runs on this machine, but {names}")
    raise UsageError(f"{len(found)} jobs of yours run on this machine: {names}; choose one with --rdzv-id")


def jobs_here() -> list[RunningJob]:
    """Return the jobs of this user on this machine; one with several agents here once."""
    found: dict[tuple[str, str], RunningJob] = {}
    for job in running_jobs():
        found.setdefault((job.run_id, job.store_url), job)
    return list(found.values())


def log_dirs_here(job: RunningJob) -> list[str]:
    """Return the log directories of a job's agents on this machine."""
    return [one.log_dir for one in running_jobs() if one.log_dir and one.run_id == job.run_id]


def store_url(backend: str, endpoint: str) -> str:
    """Return the URL of a rendezvous endpoint's store.

    >>> store_url("c10d", "node0:29400"), store_url("file", "/shared/job")
    ('tcp://node0:29400', 'file:///shared/job')
    """
    if "://" in endpoint:
        return endpoint
    if backend == "file":
        return f"file://{endpoint}"
    if backend == "etcd":
        return f"etcd://{endpoint}"
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdigit():
        raise UsageError(f"endpoint {endpoint!r} has no port; expected host:port")
    return f"tcp://{host}:{port}"


@contextmanager
def open_job(job: RunningJob) -> Iterator[tuple[Store, bytes | None]]:
    """Open the store of a job, in its namespace and signed with its secret; and give the secret.

    ``UsageError`` when it cannot be reached.
    """
    from phalanx.comm.stores import connect  # start-up: wrong flags are answered before torch is imported
    from phalanx.comm.stores._sealed import SealedStore
    from phalanx.comm.stores._signing import Signer, read_secret
    from phalanx.errors import StoreError
    from phalanx.launch.rendezvous._backends import secret_here
    from phalanx.launch.rendezvous._runs import find_run
    from phalanx.protocol import job_prefix

    try:
        store = connect(job.store_url, timeout=PATIENCE)
    except StoreError as error:
        raise UsageError(f"the job's store at {job.store_url} cannot be reached: {error}") from error
    try:
        path = job.secret_file
        secret = read_secret(path=path) if path else read_secret() or secret_here(store, job.run_id)
        name, _ = find_run(store, job.run_id, secret)
        yield SealedStore(store.namespace(job_prefix(name)), Signer(name, secret)), secret
    except StoreError as error:
        raise UsageError(f"the job's store at {job.store_url} does not answer: {error}") from error
    finally:
        store.close()


class PageClient:
    """Asks the page of a job, as its secret allows."""

    def __init__(self, url: str, secret: bytes | None) -> None:
        from phalanx.watch._access import token_of  # start-up

        self.url = url
        self._headers = {"Authorization": f"Bearer {token_of(secret)}"} if secret else {}

    def get(self, path: str) -> Any:
        """Return what the API answers; ``UsageError`` when it does not."""
        try:
            with self._open(path) as answer:
                return json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UsageError(f"the page of the job at {self.url} does not answer: {error}") from error

    def lines(self, path: str) -> Iterator[bytes]:
        """Yield the lines of a stream, until it ends."""
        try:
            with self._open(path) as answer:
                yield from iter(answer.readline, b"")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UsageError(f"the page of the job at {self.url} does not answer: {error}") from error

    @contextmanager
    def _open(self, path: str) -> Iterator[http.client.HTTPResponse]:
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE + 20)
        try:
            connection.request("GET", path, headers=self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"{answer.status}: {answer.read(500).decode(errors='replace')}")
            yield answer
        finally:
            connection.close()


def page_of(store: Store, secret: bytes | None) -> PageClient | None:
    """Return the way to the page of a job, if it has one."""
    from phalanx.protocol import PAGE, PageAddress, RecordError  # start-up

    data = store.get(PAGE)
    try:
        return None if data is None else PageClient(PageAddress.from_json(data).url, secret)
    except RecordError:
        return None


def pages_elsewhere(store: Store, secret: bytes | None, *, is_here: bool) -> list[PageClient]:
    """Return the ways to the pages of a job's agents that can be reached; ``is_here``: but for those of this machine,
    whose files are read themselves."""
    from phalanx.protocol import PAGES, PageAddress, RecordError  # start-up

    found: list[PageClient] = []
    for data in store.items(PAGES).values():
        try:
            address = PageAddress.from_json(data)
        except RecordError:
            continue
        is_own = address.host == socket.gethostname()
        if not (is_own and is_here) and (is_own or not address.is_local):
            found.append(PageClient(address.url, secret))
    return found
