"""The public names of the stores, frozen."""

from __future__ import annotations

import pytest

from phalanx.comm import stores

pytestmark = pytest.mark.fast


def test_public_names() -> None:
    assert sorted(stores.__all__) == [
        "Change",
        "EtcdStore",
        "FileStore",
        "Lease",
        "MemoryStore",
        "Store",
        "TCPStore",
        "Watch",
        "connect",
        "job_store",
        "wrap_c10d_store",
    ]
    assert all(hasattr(stores, name) for name in stores.__all__)
