"""Defines every error that Phalanx raises on purpose, in one tree.

::

    PhalanxError
    ├── CommError (RuntimeError)         something about talking to other ranks
    │   ├── PeerLost                     a peer died; regroup and go on
    │   ├── PeerTimeout (TimeoutError)   a peer did not answer in time
    │   ├── GroupAborted                 this group was aborted on purpose
    │   └── CollectiveMismatch           ranks called different collectives
    ├── StoreError
    │   ├── StoreLost (ConnectionError)  the store cannot be reached any more
    │   └── StoreTimeout (TimeoutError)  a key did not appear in time
    ├── JobStopped                       the job itself stops: another try would end alike
    │   └── DoNotRetry                   the same, raised by users' scripts; exit code 93
    ├── WrongBits (RuntimeError)         this worker has other bits than the others; its node is left out
    ├── SimulationError
    │   ├── RankFailed                   a simulated rank raised
    │   └── SimulatedDeadlock            every simulated rank waits for another
    └── (each package adds its own branch beside its code, derived from PhalanxError)

Mistakes in arguments are plain ``ValueError`` and ``TypeError``.
"""

from __future__ import annotations


class PhalanxError(Exception):
    """Root of all errors that Phalanx raises on purpose."""


class CommError(PhalanxError, RuntimeError):
    """Something went wrong between ranks."""


class PeerLost(CommError):
    """A peer of the group is gone. ``ranks`` holds those known to be dead (group ranks; may be empty), ``suspects``
    those whose connection ended although nobody is known to be dead."""

    def __init__(
        self,
        message: str,
        *,
        generation: int = 0,
        ranks: tuple[int, ...] = (),
        suspects: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.generation = generation
        self.ranks = ranks
        self.suspects = suspects


class PeerTimeout(CommError, TimeoutError):
    """A peer of the group did not take part in time; it may hang. ``ranks`` holds those known to be late."""

    def __init__(self, message: str, *, generation: int = 0, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.generation = generation
        self.ranks = ranks


class GroupAborted(CommError):
    """The group was aborted or closed by this process; form the next generation's group to go on."""


class CollectiveMismatch(CommError):
    """Ranks called different collectives, or the same one with different shapes."""


class StoreError(PhalanxError):
    """Something went wrong with a key-value store."""


class StoreLost(StoreError, ConnectionError):
    """The store cannot be reached. ``address`` says which one."""

    def __init__(self, message: str, *, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class StoreTimeout(StoreError, TimeoutError):
    """What was waited for did not appear in the store in time."""


class JobStopped(PhalanxError, RuntimeError):
    """The job stops on purpose, all of it: a replacement or a restart would only come to the same point again.

    An agent that finds it in a worker ends the job with a non-zero exit code and starts nothing in its place.
    """


class DoNotRetry(JobStopped):
    """Raise it in a script whose failure no other try can cure: wrong arguments, a missing file, a data set of another
    version. No worker is replaced or started anew; ``phalanx run`` ends with exit code 93, which means the same.
    """


class WrongBits(PhalanxError, RuntimeError):
    """This worker computed, holds or received other bits than the others (``VerifySlots``): it ends.

    An agent that finds it in a worker leaves its node out, if the job can go on without, and counts no restart.
    """


class SimulationError(PhalanxError, RuntimeError):
    """A run on simulated ranks did not finish."""


class RankFailed(SimulationError):
    """A simulated rank raised; the original error is ``__cause__``."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class SimulatedDeadlock(SimulationError):
    """All simulated ranks wait for one another; the message says for what."""
