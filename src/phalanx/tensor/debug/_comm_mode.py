"""``CommDebugMode``: which collectives ran, how many bytes, and on whose behalf.

Owns the mode that users enter and the files it writes. It sees what this rank starts through ``phalanx.comm``; modes
nest, and each sees everything inside its own block.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from phalanx.comm import CommEvent, observe
from phalanx.tensor.debug._attribution import Attribution
from phalanx.tensor.debug._page import html_page
from phalanx.tensor.debug._report import as_json, as_table
from phalanx.tensor.debug._trace import ModuleTree, Record, build_tree


class CommDebugMode:
    """Count the communication of a block, by collective, module, phase, operation and line.

    >>> with CommDebugMode() as seen:                                   # doctest: +SKIP
    ...     model(x).sum().backward()
    >>> seen.get_comm_counts()                                          # doctest: +SKIP
    {'all_reduce': 2}
    >>> print(seen.generate_comm_debug_tracing_table(noise_level=0))    # doctest: +SKIP

    Entering it again starts from zero. What is asked for after the block is what the block did. Modes nest, but not one
    in itself (``RuntimeError``): make another.
    """

    def __init__(self) -> None:
        self._record = Record()
        self._stack = ExitStack()
        self._entered = False

    def __enter__(self) -> CommDebugMode:
        if self._entered:
            raise RuntimeError("this CommDebugMode is entered already and counts for that block: make another")
        self._entered = True
        self._record = record = Record()
        following = self._stack.enter_context(Attribution(record))

        def note(event: CommEvent) -> None:
            record.note(following.place(), event.name, event.nbytes)

        self._stack.enter_context(observe(note))
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered = False
        self._stack.__exit__(*error)

    # ---- numbers

    def get_total_counts(self) -> int:
        """Say how many collectives ran."""
        return sum(traffic.count for traffic in self._record.by_collective().values())

    def get_comm_counts(self) -> dict[str, int]:
        """Say how many of each collective ran."""
        return {name: traffic.count for name, traffic in self._record.by_collective().items()}

    def get_total_bytes(self) -> int:
        """Bytes of all collectives on this rank: of each, the larger of what goes in and what comes out."""
        return sum(traffic.nbytes for traffic in self._record.by_collective().values())

    def get_comm_bytes(self) -> dict[str, int]:
        """Bytes by collective."""
        return {name: traffic.nbytes for name, traffic in self._record.by_collective().items()}

    def get_line_counts(self) -> dict[str, dict[str, int]]:
        """Counts by the user's line (for backward: the line whose operation it is the backward of)."""
        lines: dict[str, dict[str, int]] = {}
        for (place, collective), traffic in self._record.traffic.items():
            counts = lines.setdefault(place.line, {})
            counts[collective] = counts.get(collective, 0) + traffic.count
        return lines

    def get_module_counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """module -> phase -> collective -> count, children included; ``Global`` is everything."""
        return {
            node.name: {
                phase: {name: traffic.count for name, traffic in total.items()} for phase, total in node.total.items()
            }
            for _, node in self._tree().walk()
        }

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """module -> its own parameters, of the modules that ran."""
        return {name: dict(parameters) for name, parameters in self._record.parameters.items()}

    def get_sharding_info(self) -> dict[str, Any]:
        """Parameter name -> placements, for the parameters that are DTensors."""
        return {
            f"{module}.{name}": parameter.placements
            for module, parameters in self._record.parameters.items()
            for name, parameter in parameters.items()
            if hasattr(parameter, "placements")
        }

    # ---- reports

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Return the modules as indented text.

        Noise level 0: counts and bytes by module; 1: also each collective with its operation and line, and the layouts
        of parameters; 2: also the operations on DTensors; 3: also those on plain tensors.
        """
        return as_table(self._tree(), noise_level)

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str | Path = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the text of the table into a file."""
        Path(file_name).write_text(self.generate_comm_debug_tracing_table(noise_level) + "\n")

    def generate_json_dump(self, file_name: str | Path = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write the table as nested JSON objects into a file."""
        Path(file_name).write_text(json.dumps(as_json(self._tree(), noise_level), indent=1) + "\n")

    def generate_html(self, file_name: str | Path = "comm_mode_log.html", noise_level: int = 3) -> None:
        """Write the table as one self-contained page whose modules fold."""
        Path(file_name).write_text(html_page(self._tree(), noise_level))

    def _tree(self) -> ModuleTree:
        return build_tree(self._record)
