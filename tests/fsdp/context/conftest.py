from __future__ import annotations

from collections.abc import Iterator

import pytest

from phalanx.fsdp.context import set_rotate_method


@pytest.fixture(autouse=True)
def the_default_method() -> Iterator[None]:
    """A test that fails leaves no other method to those behind it."""
    yield
    set_rotate_method("allgather")
