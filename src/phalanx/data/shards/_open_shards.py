"""Keeps the readers of a few shards open in one process, and has those that come next brought near.

Owns which readers are open. With expectations (``expect``) these are the shards of the windows that this process reads,
and no others; without, the last ``max_open`` used. A process that was forked begins with none: readers belong to the
process that opened them.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Sequence

from phalanx.comm._background import Background
from phalanx.data.shards._shard_source import Expectation, ShardReader, ShardSource


class OpenShards:
    def __init__(self, source: ShardSource, max_open: int) -> None:
        self.source = source
        self.max_open = max_open
        self.num_opened = 0
        """How many times this process has opened a shard."""
        self._readers: dict[int, ShardReader] = {}
        self._expected: dict[int, Expectation] = {}
        self._kept: frozenset[int] = frozenset()
        self._pid = os.getpid()
        self._ahead: Preparation | None = None

    def reader(self, shard: int) -> ShardReader:
        """Return the reader of a shard, opened if need be; valid until the next call."""
        self._begin_in_this_process()
        found = self._readers.pop(shard, None)
        if found is None:
            others = [known for known in self._readers if known not in self._kept]
            if len(others) >= self.max_open:
                self._close(others[0])
            found = self.source.open(shard)
            self.num_opened += 1
        self._readers[shard] = found  # the last used stands last
        return found

    def expect(self, expectation: Expectation) -> None:
        """Keep open what is read now for the slots of this process; close the rest, and have what is next prepared."""
        self._begin_in_this_process()
        if self._expected.get(expectation.slot) == expectation:
            return
        self._expected = {slot: known for slot, known in self._expected.items() if slot in expectation.slots}
        self._expected[expectation.slot] = expectation
        shards = {shard for known in self._expected.values() for shard in known.shards}
        upcoming = {shard for known in self._expected.values() for shard in known.upcoming} - shards
        self._kept = frozenset(shards)
        for shard in [shard for shard in self._readers if shard not in shards]:
            self._close(shard)
        self.source.expect(sorted(shards), sorted(upcoming))
        if self._ahead is None and upcoming:
            self._ahead = Preparation(self.source)
        if self._ahead is not None:
            self._ahead.want(sorted(upcoming))

    def close(self) -> None:
        for shard in list(self._readers):
            self._close(shard)
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _close(self, shard: int) -> None:
        self._readers.pop(shard).close()

    def _begin_in_this_process(self) -> None:
        if self._pid != os.getpid():
            # What the parent opened is the parent's: closing would flush or unmap nothing of ours, so it is dropped.
            self._readers, self._expected, self._kept, self._ahead = {}, {}, frozenset(), None
            self._pid, self.num_opened = os.getpid(), 0

    def __del__(self) -> None:
        if self._ahead is not None and self._pid == os.getpid():
            self._ahead.stop()

    def __getstate__(self) -> dict[str, object]:
        return {"source": self.source, "max_open": self.max_open}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # as it was made, in the process that unpickles


class Preparation:
    """A thread that has a source prepare shards, each once as long as it is wanted.

    What it cannot prepare it leaves: whoever reads the shard meets the error, and the caller that can be told.
    """

    def __init__(self, source: ShardSource) -> None:
        self._source = source
        self._todo: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        self._wanted: frozenset[int] = frozenset()
        self._thread = Background(self._run, "phalanx-prefetch", on_failure=lambda error: None)
        self._thread.start()

    def want(self, shards: Sequence[int]) -> None:
        new = tuple(shard for shard in shards if shard not in self._wanted)
        self._wanted = frozenset(shards)
        if new:
            self._todo.put(new)

    def stop(self) -> None:
        """Have the thread end; it may still be in its last shard."""
        self._wanted = frozenset()
        self._todo.put(None)

    def close(self) -> None:
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        while (shards := self._todo.get()) is not None:
            for shard in shards:
                if shard in self._wanted:
                    try:
                        self._source.prepare(shard)
                    except Exception:  # the reader will meet it, in a thread that can raise it
                        continue
