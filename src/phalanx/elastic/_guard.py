"""Decides what a job does about a step that is not finite, or out of proportion: the choice, the decision, the words.

Owns ``decide``, a pure function of ``StepFacts`` that have the same bits on all workers, so that all decide alike
without asking each other, and the words of the error. What the facts are is measured in ``_guarding``, which also
carries the decision out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from phalanx.elastic._guard_record import WARM_UP
from phalanx.errors import JobStopped

NAN_LOSS, INF_LOSS, BAD_GRADIENT = 1, 2, 4
"""What is wrong with a slot, as numbers that can be added up; they ride along in the reduction, one place per slot."""

AT_FAULT = NAN_LOSS | INF_LOSS | BAD_GRADIENT
"""Any of these. A module whose output is infinite is no fault by itself: scores that are masked are."""

MIN_SCALE = 2.0**-24
"""A loss scale below which a gradient scaler no longer looks for a scale: the gradient itself is not finite."""

GRADIENT = "the gradient of "
"""How the name of a place in the backward pass begins."""

MAX_NAMED = 8
"""How many slots, samples or parameters an error names before it only counts them."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """When the job leaves an update out, goes back, or stops by itself.

    ``nonfinite="stop"``: before an update from a loss or gradient that is nan or infinite, and before a state with such
    values is saved or returned from the loop. ``"skip"``: such an update is left out, the step counts as committed;
    after ``max_skips`` of them in a row the next one stops the job. ``"raise"``: it is left out as well, and ``commit``
    raises ``NonFinite``, on all workers alike; a loop that catches it goes on with the next step.
    ``"ignore"``: all is applied.

    ``spike=10``: a loss, or a gradient norm, of more than ten times the median of the last ``window`` steps is one too
    many. ``on_spike="skip"`` leaves its update out, ``"stop"`` stops, ``"rollback"`` goes back to the weights of the
    last good save and leaves the samples since then out; ``max_rollbacks`` times to one save, then it stops. A save
    that the disk was too slow for is not there to go back to (``Saves``): then it is an earlier one.

    >>> Guard(nonfinite="skip", spike=10).on_spike
    'skip'
    """

    nonfinite: Literal["stop", "skip", "raise", "ignore"] = "stop"
    max_skips: int = 3
    spike: float | None = None
    on_spike: Literal["skip", "stop", "rollback"] = "skip"
    window: int = 64
    max_rollbacks: int = 3

    def __post_init__(self) -> None:
        if self.nonfinite not in ("stop", "skip", "raise", "ignore"):
            raise ValueError(f"nonfinite is {self.nonfinite!r}; expected 'stop', 'skip', 'raise' or 'ignore'")
        if self.on_spike not in ("skip", "stop", "rollback"):
            raise ValueError(f"on_spike is {self.on_spike!r}; expected 'skip', 'stop' or 'rollback'")
        if self.spike is not None and not 1 < self.spike < math.inf:
            raise ValueError(f"spike is {self.spike}; expected None, or a factor above 1")
        if self.max_skips < 0 or self.max_rollbacks < 0:
            raise ValueError(f"max_skips is {self.max_skips}, max_rollbacks {self.max_rollbacks}; expected 0 or more")
        if self.window < WARM_UP:
            raise ValueError(f"window is {self.window}; expected at least {WARM_UP} steps")


class NonFinite(JobStopped):
    """A step, or the state after it, is not finite; the job stopped before it was applied or saved.

    ``step`` is its number, ``slots`` maps each slot that is known to be at fault to the indices of its samples.
    """

    def __init__(self, message: str, *, step: int = -1, slots: dict[int, tuple[int, ...]] | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.slots = dict(slots or {})


class LossSpike(JobStopped):
    """The loss, or the gradient's norm, of a step is out of all proportion; the job stopped before it was applied."""

    def __init__(self, message: str, *, step: int = -1) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """A reduced step, before the update; equal on all workers."""

    loss: float | None
    grads: tuple[str, ...] = ()
    """Parameters whose reduced gradient is not finite."""
    buffers: tuple[str, ...] = ()
    """Buffers that this step would make not finite."""
    grad_norm: float | None = None
    is_again: bool = False
    """Whether the step was computed before, and found wanting."""
    scale: float | None = None
    """The loss scale, where a gradient scaler is at work."""
    spike: str = ""
    """What is out of all proportion, in words."""
    skips_in_row: int = 0
    rollbacks: int = 0
    """To the last good save, without a better one since."""


class Reaction(Enum):
    GO_ON = "go on"
    LEAVE_TO_SCALER = "leave it to the scaler"
    """It skips the update and lowers the scale; non-finite buffers of the step are not taken either."""
    COMPUTE_AGAIN = "compute again"
    """Drop the step and look at every slot when it comes again: the sum does not tell whose it was, nor a loss where in
    the model it began."""
    SKIP = "skip"
    """Commit the step without its update."""
    ROLL_BACK = "roll back"
    """Commit the step without its update, after the weights have become those of the last good save."""
    RAISE = "raise"
    """Commit the step without its update, and raise."""
    STOP = "stop"


def decide(guard: Guard, facts: StepFacts) -> Reaction:
    """Return what to do with a step.

    >>> decide(Guard(), StepFacts(loss=0.3))
    <Reaction.GO_ON: 'go on'>
    >>> decide(Guard(), StepFacts(loss=float("nan"), grads=("weight",)))
    <Reaction.COMPUTE_AGAIN: 'compute again'>
    >>> decide(Guard(), StepFacts(loss=float("nan"), grads=("weight",), is_again=True))
    <Reaction.STOP: 'stop'>
    """
    bad_loss = facts.loss is not None and not math.isfinite(facts.loss)
    bad_norm = facts.grad_norm is not None and not math.isfinite(facts.grad_norm)
    if not (bad_loss or bad_norm or facts.grads or facts.buffers):
        return _about_spike(guard, facts)
    if guard.nonfinite == "ignore":
        return Reaction.GO_ON
    if facts.grads and facts.scale is not None and facts.scale >= MIN_SCALE:
        return Reaction.LEAVE_TO_SCALER
    if guard.nonfinite == "skip" and facts.skips_in_row < guard.max_skips:
        return Reaction.SKIP
    if (facts.grads or bad_loss) and not facts.is_again:
        return Reaction.COMPUTE_AGAIN
    return Reaction.RAISE if guard.nonfinite == "raise" else Reaction.STOP


def _about_spike(guard: Guard, facts: StepFacts) -> Reaction:
    if not facts.spike:
        return Reaction.GO_ON
    if guard.on_spike == "skip" and facts.skips_in_row < guard.max_skips:
        return Reaction.SKIP
    if guard.on_spike == "rollback" and facts.rollbacks < guard.max_rollbacks:
        return Reaction.ROLL_BACK
    return Reaction.STOP


@dataclass(frozen=True)
class SlotReport:
    """One slot at fault."""

    slot: int
    worker: str
    samples: tuple[int, ...]
    note: int
    """Which of ``NAN_LOSS``, ``INF_LOSS`` and ``BAD_GRADIENT`` it is."""
    origin: str = ""
    """The first module or parameter that is not finite, if one was found."""


def explain(step: int, epoch: int, facts: StepFacts, slots: Sequence[SlotReport], weights: Sequence[str]) -> str:
    """Return the error's words. ``weights`` are what was not finite in the state before the step.

    >>> told = explain(5, 0, StepFacts(loss=float("nan")), [SlotReport(2, "w1", (7, 3), NAN_LOSS)], ())
    >>> told.splitlines()[1]
    '  slot 2 (worker w1): loss is nan; samples 7, 3'
    """
    lines = [f"step {step} of epoch {epoch} is not finite: {what_is_wrong(facts)}. Nothing of it was applied"]
    lines += [_slot_line(report) for report in slots[:MAX_NAMED]]
    if len(slots) > MAX_NAMED:
        lines.append(f"  and {len(slots) - MAX_NAMED} more slots")
    if weights:
        lines.append(
            f"  before the step the state was not finite already: {_listed(weights)}. An earlier update did that"
        )
    elif not slots and not facts.buffers:
        lines.append("  every slot for itself is finite: what overflows is their sum or its norm")
    lines.append(
        "  Look at these samples and at the loss for them; a smaller learning rate, commit(max_grad_norm=...), or "
        "weight=0 for a batch that should not count may help. The newest save is from before this step. "
        'Guard(nonfinite="skip") leaves such updates out, Guard(nonfinite="ignore") trains on all the same'
    )
    return "\n".join(lines)


def explain_spike(guard: Guard, step: int, epoch: int, facts: StepFacts) -> str:
    """Return the words for a step that is out of all proportion and was not to be skipped, or not once more."""
    tried = {
        "skip": f"{facts.skips_in_row} steps in a row were skipped already",
        "rollback": f"the job went back to the last good save {facts.rollbacks} times already",
    }.get(guard.on_spike, "")
    return (
        f"step {step} of epoch {epoch} is out of all proportion: {facts.spike}, and Guard(spike={guard.spike:g}) "
        f"allows no more{'; ' + tried if tried else ''}. Nothing of it was applied. Look at its samples, or lower the "
        "learning rate; commit(max_grad_norm=...) limits what one step can do"
    )


def explain_state(step: int, names: Sequence[str]) -> str:
    """Return the words for a state that became non-finite by the update of a step whose gradient was finite."""
    return (
        f"after the update of step {step - 1} the state is not finite: {_listed(names)}. It is not saved; the newest "
        "save is from before. The gradient was finite, so the update itself overflowed: lower the learning rate or use "
        'commit(max_grad_norm=...). Job(guard=Guard(nonfinite="ignore")) trains and saves all the same'
    )


def what_is_wrong(facts: StepFacts) -> str:
    """Return what of a step is not finite, as a part of a sentence."""
    found = []
    if facts.loss is not None and not math.isfinite(facts.loss):
        found.append(f"the loss is {facts.loss}")
    if facts.grads:
        found.append(f"the gradient of {_listed(facts.grads)} has nan or infinite values")
    elif facts.grad_norm is not None and not math.isfinite(facts.grad_norm):
        found.append(f"the gradient's norm is {facts.grad_norm}")
    if facts.buffers:
        found.append(f"slot 0 made the buffer {_listed(facts.buffers)} nan or infinite")
    if facts.scale is not None and facts.scale < MIN_SCALE:
        found.append(f"the gradient scaler has lowered its scale to {facts.scale:g} in vain")
    return ", ".join(found)


def _slot_line(report: SlotReport) -> str:
    found = {NAN_LOSS: "loss is nan", INF_LOSS: "loss is infinite", BAD_GRADIENT: "gradient is not finite"}
    notes = report.note & (NAN_LOSS | INF_LOSS) or report.note  # with a bad loss the gradient says nothing new
    what = " and ".join(text for bit, text in found.items() if notes & bit) or "buffers are not finite"
    line = f"  slot {report.slot} (worker {report.worker}): {what}; samples {_listed(report.samples)}"
    if report.origin.startswith(GRADIENT) and report.note & (NAN_LOSS | INF_LOSS):
        return f"{line}; the output of every module is finite: it begins in the loss"
    return f"{line}; the first that is not finite is {report.origin}" if report.origin else line


def _listed(names: Sequence[object]) -> str:
    text = ", ".join(map(str, names[:MAX_NAMED]))
    return text + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
