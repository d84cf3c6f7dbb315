"""CommDebugMode: which collectives a piece of code runs, how many bytes, in which module, forward or backward, at
which line.

Owns the recording and its renderings (table, JSON, HTML). The events are those of ``comm.observe``; modules are
followed by torch's global module hooks while a mode is active. Modes nest: each sees what happens inside it.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from phalanx.comm import CommEvent, observe
from phalanx.comm._context import rank_token
from phalanx.tensor._modes import user_line
from phalanx.tensor.debug._html import render_html


@dataclass(frozen=True)
class Record:
    """One collective."""

    name: str
    nbytes: int
    op: str
    module: str
    backward: bool
    line: str


class CommDebugMode:
    """Records every collective inside the block.

    >>> with CommDebugMode() as mode:                    # doctest: +SKIP
    ...     model(x).sum().backward()
    >>> mode.get_total_counts(), mode.get_total_bytes()   # doctest: +SKIP
    >>> print(mode.table(noise_level=2))                  # doctest: +SKIP
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.records: list[Record] = []
        self._names: dict[int, str] = {}
        self._path: list[str] = []
        self._stack = ExitStack()
        self._root = module

    def __enter__(self) -> CommDebugMode:
        self.records = []
        if self._root is not None:
            self._names = {id(part): name or type(part).__name__ for name, part in self._root.named_modules()}
        token = rank_token()
        stack = ExitStack()
        stack.enter_context(observe(self._on_event))
        before = register_module_forward_pre_hook(
            lambda mod, args: self._enter(mod) if rank_token() is token else None
        )
        after = register_module_forward_hook(
            lambda mod, args, out: self._leave() if rank_token() is token else None, always_call=True
        )
        stack.callback(before.remove)
        stack.callback(after.remove)
        self._stack = stack
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._path = []

    def _enter(self, module: nn.Module) -> None:
        own = self._names.get(id(module))
        if own is None:
            parent = self._path[-1] if self._path else ""
            own = f"{parent}.{type(module).__name__}".lstrip(".")
        self._path.append(own)

    def _leave(self) -> None:
        if self._path:
            self._path.pop()

    def _on_event(self, event: CommEvent) -> None:
        backward = torch._C._current_graph_task_id() != -1
        module = self._path[-1] if self._path else ""
        self.records.append(Record(event.name, event.nbytes, event.op, module, backward, user_line()))

    # ---- what was seen

    def get_comm_counts(self) -> dict[str, int]:
        """How often each collective ran."""
        return dict(Counter(r.name for r in self.records))

    def get_total_counts(self) -> int:
        return len(self.records)

    def get_total_bytes(self) -> int:
        return sum(r.nbytes for r in self.records)

    def get_bytes(self) -> dict[str, int]:
        """Bytes by collective."""
        total: Counter[str] = Counter()
        for r in self.records:
            total[r.name] += r.nbytes
        return dict(total)

    def by_module(self) -> dict[str, dict[str, Any]]:
        """For each module: counts and bytes, forward and backward (backward belongs to no module but to its phase)."""
        result: dict[str, dict[str, Any]] = {}
        for r in self.records:
            entry = result.setdefault(
                r.module or "(outside of modules)", {"forward": {}, "backward": {}, "bytes": 0}
            )
            phase = entry["backward" if r.backward else "forward"]
            phase[r.name] = phase.get(r.name, 0) + 1
            entry["bytes"] += r.nbytes
        return result

    def table(self, noise_level: int = 1) -> str:
        """Text: 0 totals, 1 by module, 2 also by line, 3 every collective."""
        lines = [f"{self.get_total_counts()} collectives, {self.get_total_bytes()} B"]
        lines += [
            f"  {name}: {count}x, {self.get_bytes()[name]} B"
            for name, count in sorted(self.get_comm_counts().items())
        ]
        if noise_level >= 1:
            for module, entry in self.by_module().items():
                lines.append(f"{module}: {entry['bytes']} B")
                lines += [
                    f"    {phase} {name}: {count}x"
                    for phase in ("forward", "backward")
                    for name, count in sorted(entry[phase].items())
                ]
        if noise_level == 2:
            by_line = Counter((r.line, r.name) for r in self.records)
            lines += [f"{line}: {name} {count}x" for (line, name), count in sorted(by_line.items())]
        if noise_level >= 3:
            lines += [
                f"{i}: {r.name} {r.op} {r.nbytes} B {'backward' if r.backward else 'forward'} {r.module} at {r.line}"
                for i, r in enumerate(self.records)
            ]
        return "\n".join(lines)

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """torch's name of ``table``."""
        return self.table(noise_level)

    def to_json(self) -> str:
        return json.dumps(
            {"records": [asdict(r) for r in self.records], "by_module": self.by_module()}, indent=1
        )

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write ``to_json`` to a file."""
        with open(file_name, "w") as file:
            file.write(self.to_json())

    def to_html(self) -> str:
        """One page that folds by module."""
        return render_html(self.records)
