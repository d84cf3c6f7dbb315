"""Reads and writes the records of a rendezvous in a store, through the job's signature.

What cannot be trusted or read is named in the log, once a minute for each key, and counts as absent; whoever has the
right to write it then writes over it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from phalanx.comm.stores._interface import Store
from phalanx.comm.stores._sealed import SealedStore
from phalanx.comm.stores._signing import Signer
from phalanx.protocol import (
    BELLS,
    PRESENT,
    Broken,
    RecordError,
    StoreRecord,
    bell_key,
    broken_key,
    parse_count,
    wanted_key,
)

KEEP = 8
"""How many past generations keep their records, for agents and workers that are slow to move on."""

END_KEYS: dict[str, Callable[[int], str]] = {"broken": broken_key, "wanted": wanted_key}
"""By the kind of a generation's end; the gravest first."""

R = TypeVar("R", bound=StoreRecord)


def open_record(signer: Signer, key: str, value: bytes | None, kind: type[R]) -> R | None:
    """Return the record that a key was found to hold, or None."""
    if value is None:
        return None
    try:
        return kind.from_json(signer.open(key, value))
    except RecordError as error:
        signer.complain(key, f"refused a record: {error}")
        return None


def read_record(store: Store, signer: Signer, key: str, kind: type[R]) -> R | None:
    """Return the record of a key, or None."""
    return open_record(signer, key, store.get(key), kind)


def read_count(store: Store, signer: Signer, key: str) -> int | None:
    """Return the count of a key, or None."""
    value = store.get(key)
    try:
        return None if value is None else parse_count(signer.open(key, value), key)
    except RecordError as error:
        signer.complain(key, f"refused a record: {error}")
        return None


def write_once(store: Store, signer: Signer, key: str, record: StoreRecord) -> bool:
    """Write a record unless one is there already; what is none is written over."""
    sealed = signer.seal(key, record.to_json())
    expected = None
    while not store.compare_and_set(key, expected, sealed):
        expected = store.get(key)
        if open_record(signer, key, expected, type(record)) is not None:
            return False
    return True


def ring(store: Store, signer: Signer) -> None:
    """Wake all nodes; call it after the write that they shall see."""
    number = SealedStore(store, signer).add(BELLS)
    store.set(bell_key(number), PRESENT)
    store.delete(bell_key(number - KEEP))


def end_generation(store: Store, signer: Signer, generation: int, kind: str, cause: Broken) -> None:
    """Tell workers and agents that a generation is over. The first reason stays."""
    if write_once(store, signer, END_KEYS[kind](generation), cause):
        ring(store, signer)
