"""One server for all tests of storage; each test has a bucket of its own."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from s3_server import S3Server  # beside this file

ELASTIC = str(Path(__file__).parent.parent / "elastic")
if ELASTIC not in sys.path:
    sys.path.append(ELASTIC)


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    made = S3Server()
    yield made
    made.stop()


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server as the environment of a test names it, without faults."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.calm()


@pytest.fixture
def bucket(s3: S3Server) -> str:
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    s3.make_bucket(name)
    return name
