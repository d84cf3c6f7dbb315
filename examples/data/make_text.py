"""Writes ``harbour.txt``, the text that the character model learns: a little grammar tells a harbour's days.

Every sentence is composed from the words below, so the text is ours alone and can be made again, byte for byte:
``python examples/data/make_text.py``.
"""

from __future__ import annotations

import random
from pathlib import Path

PEOPLE = [
    "the pilot",
    "the old cook",
    "a ferryman",
    "the keeper",
    "the youngest deckhand",
    "Mara",
    "Ilse",
    "Tomas",
    "the rope-maker",
    "a diver",
]
SHIPS = [
    "the Heron",
    "the Long Patience",
    "a grey trawler",
    "the mail boat",
    "the Kestrel",
    "two barges",
    "the dredger",
]
PLACES = [
    "the north pier",
    "the chandler's shop",
    "the slipway",
    "the lamp room",
    "the fish hall",
    "the inner basin",
    "the breakwater",
]
THINGS = [
    "a coil of wet rope",
    "three crates of lemons",
    "the tide table",
    "a brass lantern",
    "the torn net",
    "a letter",
    "the spare anchor",
]
WEATHER = [
    "Fog lay on the water",
    "The wind turned east",
    "Rain came before noon",
    "The sea was flat as slate",
    "Gulls cried over the roofs",
]
MOVES = [
    "came in with the tide",
    "waited outside for a berth",
    "lost half a day to the current",
    "tied up twice",
    "left before the bell",
]
DEEDS = ["carried", "mended", "counted", "forgot", "painted", "weighed", "hid", "looked for"]
REASONS = [
    "because nobody else would",
    "since the season was short",
    "though the light was poor",
    "as the custom was",
    "for a small wage",
]
SAYINGS = (
    "A knot is a promise that can be untied.",
    "If one hand slips, the others hold.",
    "Count the boats twice and the days once.",
    "Whoever joins the line takes the next place in it.",
    "Nobody rows alone; somebody only rows first.",
)


def sentence(chance: random.Random) -> str:
    who, ship, place, thing = (chance.choice(words) for words in (PEOPLE, SHIPS, PLACES, THINGS))
    kind = chance.randrange(6)
    if kind == 0:
        return f"{chance.choice(WEATHER)}, and {ship} {chance.choice(MOVES)}."
    if kind == 1:
        return f"{_capital(who)} {chance.choice(DEEDS)} {thing} {chance.choice(REASONS)}."
    if kind == 2:
        return f"At {place} {who} met {chance.choice([p for p in PEOPLE if p != who])}."
    if kind == 3:
        return f'"{chance.choice(SAYINGS)}" said {who}.'
    if kind == 4:
        return f"Between {place} and the gate {who} found {thing}, {chance.choice(REASONS)}."
    return f"{_capital(ship)} {chance.choice(MOVES)}; {who} wrote it down."


def _capital(name: str) -> str:
    return name[0].upper() + name[1:]


def story(num_chars: int, seed: int = 7) -> str:
    chance = random.Random(seed)
    days, length = [], 0
    while length < num_chars:
        lines = [sentence(chance) for _ in range(chance.randint(3, 7))]
        days.append(f"Day {len(days) + 1}. " + " ".join(lines))
        length += len(days[-1]) + 2
    return "\n\n".join(days) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "harbour.txt").write_text(story(300_000))
