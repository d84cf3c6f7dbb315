"""Deaths in a row with nothing gained in between: when replacing the dead is no cure any more. Pure.

Owns ``Death`` (what counts about one), the counting and its limits; the ``Streak`` itself travels from recovery to
recovery, so that all agents count alike. A death counts only if it is that of a worker which was started after the last
one that counted: workers that die of the same cause one after the other, over several generations, are one wave. But
one that dies in the same place, computing the same samples for the same step, counts whenever it was started.
Progress is the furthest step that any worker of the job has reported: going back to a save and dying at the same step
again is none. Where no worker reports steps, a long life is taken for progress.

The limit is of failures after the first, which came after whatever progress there was. So a node on which workers die
(``_budget.NODE_FAILURES``) is left out before the job is given up for it; where one place has failed on several
machines no node is at fault, and there the first counts as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.protocol import Streak

MAX_ERRORS = 3
"""Replacements in a row that may die of an error of their own (``--max-failures-without-progress``)."""

MAX_KILLS = 10
"""Replacements in a row that may be killed: by a person, the cluster, or the kernel for want of memory."""

LONG_LIFE = 600.0
"""Seconds after which a worker of a script that reports no steps has got somewhere."""


@dataclass(frozen=True, kw_only=True)
class Death:
    """What matters about a worker that failed."""

    generation: int
    born: int
    """The generation that it was started for."""
    step: int = -1
    """The furthest step that any worker of the generation has reported; -1: none ever did."""
    took_part: bool = False
    """Whether it has reported a step itself; where all start anew, those of any worker are its own."""
    is_killed: bool = False
    """Whether the cause lies outside: a signal that others send, or a peer that went away."""
    lived: float = 0.0
    place: str = ""
    """What it was computing, if it has left a note: step, slot and samples."""
    worker: str = ""
    host: str = ""


def after(streak: Streak, death: Death) -> Streak:
    """Return the streak with one more death.

    >>> streak = Streak()
    >>> for generation in range(4):
    ...     streak = after(streak, Death(generation=generation, born=generation))
    >>> streak.errors, is_loop(streak)
    (4, True)
    >>> is_loop(after(streak, Death(generation=4, born=4, step=7, took_part=True)))
    False
    """
    is_same_place = bool(death.place) and death.place == streak.place  # then a report of the first came too late
    is_silent = max(streak.step, death.step) < 0
    has_gained = death.lived >= LONG_LIFE if is_silent else death.took_part and death.step > streak.step
    step = max(streak.step, death.step)
    if (has_gained and not is_same_place) or not streak.errors + streak.kills:
        kept = Streak(begin=step)
    elif death.born > streak.generation or (is_same_place and death.worker not in streak.workers):
        kept = streak
    else:
        return streak
    return Streak(
        errors=kept.errors + (not death.is_killed),
        kills=kept.kills + death.is_killed,
        generation=death.generation,
        begin=kept.begin,
        step=step,
        place=death.place,
        workers=(*(streak.workers if is_same_place else ()), death.worker),
        hosts=(*(streak.hosts if is_same_place else ()), death.host),
    )


def is_loop(streak: Streak, max_errors: int = MAX_ERRORS) -> bool:
    """Return whether the next replacement would fare no better. The first death is nobody's replacement."""
    return streak.errors > max(0, max_errors - _is_on_several_machines(streak)) or streak.kills > MAX_KILLS


def knows_progress(streak: Streak) -> bool:
    """Return whether workers tell how far they got: by steps that they report, or a note of what they compute."""
    return streak.step >= 0 or bool(streak.place)


def _is_on_several_machines(streak: Streak) -> bool:
    return bool(streak.place) and len(set(streak.hosts)) > 1


def others_go_on(streak: Streak) -> bool:
    """Return whether the job made steps meanwhile: then only the replacements are in trouble."""
    return streak.step > streak.begin


def describe(streak: Streak, *, starts_anew: bool = False) -> str:
    """Return why the job does not go on like that: in which place it fails, if it is one.

    ``starts_anew``: after each failure all workers of the job did.

    >>> describe(Streak(errors=4, place="step 812, slot 5, samples 3, 17", workers=("a", "b"), hosts=("x", "y")))
    'step 812, slot 5, samples 3, 17 failed on workers a, b: the code or the data, not the machine'
    """
    if streak.place and len(streak.workers) > 1:
        if _is_on_several_machines(streak):
            cause = "the code or the data, not the machine"
        else:
            cause = f"the code or the data (all of them ran on {streak.hosts[0]})"
        return f"{streak.place} failed on workers {', '.join(streak.workers)}: {cause}"
    count = streak.errors + streak.kills - 1
    if starts_anew:
        return f"{count} starts in a row failed without a step that the job had not reached before"
    return f"{count} replacements in a row died without a step of their own"
