"""Checks at import that another framework is there, in a release that is known to work, with the names that are used.

The adapters of ``phalanx.lightning`` and ``phalanx.transformers`` touch some private names of those frameworks. A
release that has moved one of them is refused here, by name, instead of failing in the middle of a run. Attributes that
an object only has once it is made are looked for in the code of the function that sets them.
"""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from phalanx.errors import PhalanxError


class FrameworkError(PhalanxError, ImportError):
    """Another framework is missing, or in a release that Phalanx does not know."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A distribution, the releases that are known to work, and the names of it that are used besides public ones."""

    distribution: str
    extra: str
    first: tuple[int, ...]
    before: tuple[int, ...]
    names: tuple[str, ...] = ()
    """Each ``module:Name.attribute``, or ``module:Name.function=attribute``, which that function sets on an object."""

    def check(self) -> None:
        """Raise ``FrameworkError`` unless it is there and as expected."""
        wanted = f"{self.distribution}>={_text(self.first)},<{_text(self.before)}"
        try:
            found = metadata.version(self.distribution)
        except metadata.PackageNotFoundError as error:
            raise FrameworkError(
                f"{self.distribution} is not installed; expected {wanted}: pip install phalanx-train[{self.extra}]"
            ) from error
        if not self.first <= release(found) < self.before:
            raise FrameworkError(
                f"{self.distribution} {found} is installed; Phalanx knows {wanted}: pip install '{wanted}'"
            )
        missing = [name for name in self.names if not _exists(name)]
        if missing:
            raise FrameworkError(
                f"{self.distribution} {found} has no {', '.join(missing)}, which Phalanx needs; install a release that "
                f"has, such as {self.distribution}=={_text(self.first)}, and report this"
            )


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version.

    >>> release("2.6.6"), release("5.23.0rc1")
    ((2, 6, 6), (5, 23, 0))
    """
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _exists(name: str) -> bool:
    module, _, rest = name.partition(":")
    path, _, attribute = rest.partition("=")
    try:
        found: object = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return not attribute or (callable(found) and _sets(inspect.unwrap(found), attribute))


def _sets(function: Callable[..., object], attribute: str) -> bool:
    """Return whether a function assigns to an attribute of this name."""
    steps = dis.get_instructions(function)
    return any(step.opname == "STORE_ATTR" and step.argval == attribute for step in steps)
