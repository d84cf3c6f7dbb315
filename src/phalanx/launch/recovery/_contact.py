"""Contact lost while nobody died: whose fault it is, by who names whom. Pure decisions over what workers wrote.

A worker whose group failed writes ``membership.LostContact``. One agent's judgement counts, for all nodes (it becomes
the generation's recovery). Rules, the first that fits:

1. Workers that are stopped (SIGSTOP, a debugger), as their own agent sees, are replaced: no group can form with them.
2. Somebody waited for the whole timeout, and others of the same group have not said a word since: they hang or are cut
   off, and are replaced. They have had the time that the job's owner gives a peer that does not come.
3. Contact was lost for the first time since a step was committed: all regroup with everybody, nobody is replaced.
   Connections are reset by routers, firewalls and laptops that wake up, and that is over when it is noticed.
4. The second time in a row: the worker that most others cannot reach is replaced. Of a lone pair that cannot reach each
   other it is the later in the order of ranks.
5. Nobody is named: all regroup. A worker that alone says so ``MAX_ALONE`` times in a row is the one that is cut off: it
   notices at once that it reaches nobody, where the others wait for it. It is replaced. Else the job fails after
   ``MAX_UNNAMED`` times in a row, and says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from phalanx.protocol import ContactLosses, LostContact

MAX_UNNAMED = 5
"""How often in a row all may regroup because of lost contact, without a step in between and without a suspect."""
MAX_ALONE = 3
"""How often in a row one and the same worker may lose contact with whom it cannot say, while nobody else does."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Who is to be replaced (nobody: all regroup), why, and whether it is hopeless."""

    reason: str
    row: ContactLosses
    replace: tuple[str, ...] = ()
    is_hopeless: bool = False


def judge(
    words: Sequence[LostContact],
    members: Sequence[str],
    *,
    before: ContactLosses | None = None,
    stopped: Collection[str] = (),
) -> Judgement:
    """Return what follows from the words of workers; ``members`` are the generation's, in the order of ranks.

    >>> peers = ("a", "b", "c")
    >>> words = [LostContact(by=w, of=("c",), peers=peers, reason="closed", step=7) for w in "ab"]
    >>> first = judge(words, peers)
    >>> first.replace, judge(words, peers, before=first.row).replace
    ((), ('c',))
    """
    words = [word for word in words if word.by in members]
    step = max((word.step for word in words), default=-1)
    last = before if before is not None and step <= before.step else ContactLosses()
    speakers = {word.by for word in words}
    alone = next(iter(speakers)) if len(speakers) == 1 and not any(word.of for word in words) else ""
    is_again = last.count == 0 or alone == last.alone
    row = ContactLosses(count=last.count + 1, step=step, alone=alone if is_again else "")
    first = min(words, key=lambda word: (not word.of, not word.late, word.by), default=None)  # the one that says most
    reason = f"{len(words)} workers lost contact" + (f" ({first.by}: {first.reason})" if first else "")

    def culprits(ids: Sequence[str], why: str) -> Judgement:
        return Judgement(reason=f"{reason}; {', '.join(ids)} {why}", row=ContactLosses(step=step), replace=tuple(ids))

    if halted := [worker for worker in members if worker in stopped]:
        return culprits(halted, "is stopped and is replaced")
    if any(word.late for word in words) and (silent := _silent(words, members)):
        return culprits(silent, "did not come in time, nor say why, and is replaced")
    if row.count == 1:
        return Judgement(reason=f"{reason}; all regroup", row=row)
    if (suspect := most_named(words, members)) is not None:
        return culprits([suspect], f"cannot be reached, {row.count} times in a row, and is replaced")
    if row.alone and row.count >= MAX_ALONE:
        return culprits([row.alone], f"alone says so, {row.count} times in a row, and is replaced")
    if row.count <= MAX_UNNAMED:
        return Judgement(reason=f"{reason}; {row.count} times in a row; all regroup", row=row)
    return Judgement(
        reason=f"{reason}; {row.count} times in a row at step {step}, and nobody can tell with whom. "
        "Look at the network between the nodes",
        row=row,
        is_hopeless=True,
    )


def _silent(words: Sequence[LostContact], members: Sequence[str]) -> list[str]:
    """Return those of the groups that lost contact who wrote nothing. One that has no place yet is in no group."""
    seated = {peer for word in words for peer in word.peers}
    spoke = {word.by for word in words}
    return [worker for worker in members if worker in seated and worker not in spoke]


def most_named(words: Sequence[LostContact], members: Sequence[str]) -> str | None:
    """Whom most others cannot reach; the later in the order of ranks among equals, None when nobody is named.

    Not being reached and not reaching are the same loss: of two that name each other, the one that a third names too.

    >>> pair = [LostContact(by="a", of=("b",), reason=""), LostContact(by="b", of=("a",), reason="")]
    >>> most_named(pair, "abc"), most_named([*pair, LostContact(by="c", of=("a",), reason="")], "abc")
    ('b', 'a')
    """
    pairs = {(word.by, other) for word in words for other in word.of if other in members and other != word.by}
    votes = Counter(other for _, other in pairs)
    if not votes:
        return None
    return max(votes, key=lambda worker: (votes[worker], list(members).index(worker)))
