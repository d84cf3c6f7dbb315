"""Holds every default time that agents and workers wait for one another, in seconds, in one table.

Values only: who waits takes its number from here, or the one that a user gave in its place. Times that concern one
process alone (how often a status line is drawn, how long a socket may take to open) stay where they are used.
"""

from __future__ import annotations

from typing import Final

# -- forming a generation -----------------------------------------------------------------------------------------

JOIN: Final = 900.0
"""How long an agent waits to be in a generation (``--rdzv-conf join_timeout``). The one value that users set: what its
workers wait follows from it, see ``regroup_timeout``."""
_SHARE_OF_WORKERS: Final = 2 / 3
"""So that a worker which waits in vain says so while its agent is there to hear it."""
LEASE: Final = 15.0
"""How long a node may be silent; a process that was killed with it is noticed sooner."""
LAST_CALL: Final = 30.0
"""From the moment that the minimum of nodes is there until the first generation forms with fewer than the maximum."""
REJOIN: Final = 60.0
"""How long a later generation waits for live members of the last one that have yet to stop their workers."""
ADMIT_DELAY: Final = 1.0
"""How long newcomers must have been quiet before a running generation is disturbed for them."""
CLOSE: Final = 30.0
"""How long the agent that serves the store stays for others to read that the job is over."""
REACH_STORE: Final = 60.0
"""How long to try to reach the job's store at the start."""

# -- noticing a loss ----------------------------------------------------------------------------------------------

COLLECTIVE: Final = 300.0
"""How long a collective of an elastic job may wait for a peer that lives but does not come."""
TELL_AFTER: Final = 0.1
"""After which a worker tells the agents of a loss that none of them has explained: a death is noticed sooner."""
BREAK_AFTER: Final = 3.0
"""After which, should the agents not have done so, a worker breaks the generation for the others."""
UNFINISHED_STEP: Final = 10.0
"""How long a step may go on when its generation was ended although no worker is gone."""
CONTACT_INTERVAL: Final = 0.2
"""Between two looks of an agent at the one key that says that workers lost contact."""
CONTACT_SETTLE: Final = 0.4
"""In which the others of a group, whose connections end with the first one's, say the same."""
CONTACT_AGAIN: Final = 2.0
"""Until the same is reported once more, should the generation still stand."""

CONVENE_AFTER: Final = 0.25
"""After which a second worker reads what all have declared, should the one that is to write their round not do so."""
STALE_AFTER: Final = 10.0
"""After which a generation that has a successor is over for a worker without a place, though no record says so."""
REPAIR: Final = 0.2
"""In which workers that live put a record of theirs right that somebody has written over."""

OTHER_AGENTS: Final = 30.0
"""How long an agent waits for the others to say what failed, or to write their workers' stacks."""

# -- watching and reporting ---------------------------------------------------------------------------------------

WATCH_INTERVAL: Final = 0.05
"""Between two looks of a worker at the keys that can end or question its round, see ``watch_interval``."""
_NUM_WATCHERS: Final = 16
"""How many workers of a round look that often: what one sees all hear, with the next step or the group's end."""
_LOOKS_PER_SECOND: Final = 1000.0
"""What the other workers of a round together ask of the store in a second, at most."""
_BELLS_PER_SECOND: Final = 4000
"""How often the nodes of a job together ask whether there is news, at most."""
PROGRESS_INTERVAL: Final = 0.25
"""Between two reports of a worker's progress, see ``progress_interval``."""
COMMITTED_INTERVAL: Final = 0.25
"""Between two records of how many steps are committed, at least."""
REQUEST_INTERVAL: Final = 0.5
"""Between two looks of an agent at what the store asks of it."""
WORKER_START: Final = 600.0
"""How long a worker may take to its first step before it counts as hanging (``--start-timeout``)."""

# -- leaving and ending -------------------------------------------------------------------------------------------

LEAVE_AFTER: Final = 2.0
"""How long a worker with a state waits on for its place when it was told to leave: there it could leave politely, but
when all workers were told to, no place comes any more."""
KEEPS_AFTER: Final = 5.0
"""In which a worker whose script has ended, if its process lives, says that it keeps the final state."""
STEP_ASIDE: Final = 20.0
"""How long a worker that leaves waits for the others to commit the step that it has committed."""
HOLD: Final = 3600.0
"""How long a worker whose script has ended keeps the final state for the scripts of the others to end."""
SHUTDOWN: Final = 30.0
"""Between the signal that stops a worker and SIGKILL."""
EXIT_BARRIER: Final = 300.0
"""How long a node whose workers have succeeded waits for those of the others."""


def watch_interval(rank: int, num_workers: int) -> float:
    """Return the seconds between two looks of a worker at the store while it computes.

    >>> watch_interval(0, 1024), watch_interval(40, 48), watch_interval(1000, 1024)
    (0.05, 0.05, 1.024)
    """
    return WATCH_INTERVAL if rank < _NUM_WATCHERS else max(WATCH_INTERVAL, num_workers / _LOOKS_PER_SECOND)


def progress_interval(num_workers: int) -> float:
    """Return the seconds between two reports of a worker's progress: of all together some thousand a second at most.

    >>> progress_interval(128), progress_interval(1024)
    (0.25, 1.024)
    """
    return max(PROGRESS_INTERVAL, num_workers / _LOOKS_PER_SECOND)


def bell_interval(num_nodes: int) -> float:
    """Return how often a node asks a store that cannot push whether there is news, at most: the nodes of a large job
    together, so that they leave a server with one thread time for other things.

    >>> [bell_interval(num_nodes) for num_nodes in (4, 64, 1000)]
    [0.02, 0.02, 0.25]
    """
    return max(0.02, num_nodes / _BELLS_PER_SECOND)


def regroup_timeout(join: float = JOIN) -> float:
    """Return how long a worker waits for its place in the next group; its agent waits for ``join`` seconds, which is
    longer.

    >>> regroup_timeout(), regroup_timeout(90.0)
    (600.0, 60.0)
    """
    return join * _SHARE_OF_WORKERS
