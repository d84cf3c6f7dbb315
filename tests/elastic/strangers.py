"""A stranger at a job's store: knows no secret, can write, writes what hurts.

Owns the garbage and where it goes: every key that is there, of every kind, and the store's own book-keeping. It also
writes signed records of one key to another, and old ones of other generations. It deletes nothing unless told to.
"""

from __future__ import annotations

import base64
import json
import random
import re
import threading
from pathlib import Path
from typing import Any

from phalanx.comm.stores import EtcdStore, FileStore, TCPStore, connect
from phalanx.comm.stores._signing import Signer
from phalanx.errors import StoreError

GARBAGE = [
    b"", b"garbage", b"\xff\xfe\x00", b"999999", b"-7", b"9" * 400, b"1e9", b"[]", b"{}", b"null", b"NaN", b"[" * 3000,
    b'{"v":1}', b'{"v":2,"record":{}}', b'{"v":1,"record":{}}', b'{"v":1,"mac":"","record":{}}',
    b'{"v":1,"mac":"' + b"0" * 64 + b'","record":1}', b'{"reason":"stranger","workers":["x"],"v":1}',
]  # fmt: skip


class Stranger:
    """Writes garbage at ``url`` until ``stop``; the same ``seed`` gives the same choices."""

    def __init__(self, url: str, *, pause: float, seed: int = 1) -> None:
        self.store: Any = connect(url)
        self.num_writes = 0
        self.kinds: set[str] = set()
        self._chance = random.Random(seed)
        self._pause = pause
        self._stop = threading.Event()
        self._seen: list[bytes] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.store.close()

    def _run(self) -> None:
        while not self._stop.wait(self._pause):
            try:
                key, value = self._choose()
                if key:
                    self._write(key, value)
                    self.num_writes += 1
                    name = key if not isinstance(self.store, EtcdStore) else base64.b64decode(key).decode()
                    self.kinds.add(re.sub(r"\d+|vm[\w.]*", "*", name))
            except StoreError:
                return  # the job is over

    def _choose(self) -> tuple[str, bytes]:
        keys = self._keys()
        if not keys:
            return "", b""
        key = self._chance.choice(keys)
        value = self._read(key)
        if value:
            self._seen.append(value)
        kind = self._chance.randrange(5)
        if kind == 0 and self._seen:
            return key, self._chance.choice(self._seen[:50])  # signed, of another key
        if kind == 1 and value:
            return key, value[: self._chance.randrange(len(value))]
        if kind == 2:
            return key, Signer("two", b"guessed").seal(key, b'{"v":1}')
        return key, self._chance.choice(GARBAGE)

    # -- below the operations that a well-behaved client has ------------------------------------------------------

    def _keys(self) -> list[str]:
        if isinstance(self.store, TCPStore):
            own = ["p/new", "p/new", "p/reaper", "p/tick"]
            return [*own, *(key for key in self.store._link.list_keys() if not key.startswith("p/keys"))]
        if isinstance(self.store, FileStore):
            return [str(path) for path in sorted(self.store._files.root.glob("**/keys/k*"))]
        assert isinstance(self.store, EtcdStore)
        found = self.store._gateway.call("/v3/kv/range", {"key": "AA==", "range_end": "AA=="}).get("kvs", [])
        return [kv["key"] for kv in found]

    def _read(self, key: str) -> bytes | None:
        if isinstance(self.store, TCPStore):
            return self.store._link.read(key)
        if isinstance(self.store, FileStore):
            try:
                return Path(key).read_bytes()
            except OSError:
                return None
        return None

    def _write(self, key: str, value: bytes) -> None:
        if isinstance(self.store, TCPStore):
            native = self.store._link.native
            if key == "p/new":
                item = self._chance.choice([value, b"[1,1e999]", json.dumps([2**70, -1]).encode()])
                self.store._link.call(lambda: native.queue_push(key, item))
            elif key.startswith("p/beat"):
                self.store._link.call(lambda: native.set(key, b"stranger"))
            else:
                self.store._link.call(lambda: native.set(key, value))
        elif isinstance(self.store, FileStore):
            Path(key).write_bytes(value)
        else:
            body = {"key": key, "value": base64.b64encode(value).decode()}
            self.store._gateway.call("/v3/kv/put", body)
