"""Write short children's stories from a grammar: the training text of `weights/tiny`.

A plot (see `story_plots.py`) is a story with open choices, in three forms:

* `[a|b|c]` chooses an alternative; `[3*a|b]` chooses the first three times out of four;
* `<rule>` chooses a line of the table with that name in `RULES`;
* `{hero}` names a part of the story. It is chosen at its first mention and then stays the same. A
  dot selects a field: `{friend.his}`. Plain pronouns, such as `{he}` or `{His}`, and `{family}` are
  the hero's.

The teller adds up the cost -ln p of every choice. The sum is the negative log-likelihood of the
derivation, an upper bound of the text's. On average, no model can be much better than the grammar.

    python tools/stories.py --seed 1 --count 3     print three stories
    python tools/stories.py --check 20000          write 20,000 stories and look for mistakes
"""

import argparse
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from story_phrases import RULES
from story_plots import PLOTS
from story_words import FAMILY, NAMES, PARTS, PRONOUNS, SPECIES, Part, Table

T = TypeVar("T")

CAST = ("hero", "friend", "other")
OPENERS = "[<{"
CLOSERS = {"[": "]", "<": ">", "{": "}"}


@dataclass(frozen=True)
class Story:
    """A finished story, with the cost of its choices."""

    text: str
    nats: float
    plot: str


class Teller:
    """Tells one story: makes choices, remembers the parts and adds up the cost."""

    def __init__(self, rng: random.Random, tables: dict[str, Table]) -> None:
        self.rng = rng
        self.tables = tables
        self.parts: dict[str, Part] = {}
        self.nats = 0.0

    def pick(self, options: Sequence[T], weights: Sequence[int] | None = None) -> T:
        """Choose an option and add its cost."""
        weights = weights or [1] * len(options)
        index = self.rng.choices(range(len(options)), weights)[0]
        self.nats -= math.log(weights[index] / sum(weights))
        return options[index]

    def tell(self, template: str) -> str:
        """Make every choice of a template, from left to right.

        Outer choices come first, so alternatives that are not chosen cost nothing.
        """
        words = []
        position = 0
        while position < len(template):
            char = template[position]
            if char not in OPENERS:
                words.append(char)
                position += 1
                continue
            end = _closing(template, position)
            inside = template[position + 1 : end]
            if char == "[":
                words.append(self.tell(self.pick(*_alternatives(inside))))
            elif char == "<":
                words.append(self.tell(self.pick(RULES[inside])))
            else:
                words.append(self.tell(self.look_up(inside)))
            position = end + 1
        return "".join(words)

    def look_up(self, slot: str) -> str:
        """Return the words for `hero`, `thing.look`, `friend.his` or the hero's `he`."""
        name, _, field = slot.partition(".")
        if name == "family" or name.lower() in PRONOUNS["he"]:
            name, field = "hero", name
        if name not in self.parts:
            self.parts[name] = self.cast() if name in CAST else self.draw(name)
        words = self.parts[name][field.lower() or "name"]
        return words[0].upper() + words[1:] if field[:1].isupper() else words

    def draw(self, name: str) -> Part:
        """Choose a part from its table, and make the choices in its name."""
        part = self.pick(self.tables[name])
        return part | {"name": self.tell(part["name"])}

    def cast(self) -> Part:
        """Choose a person or an animal that is not yet in the story."""
        folk = self.pick(("people", "animals"))
        he = self.pick(("she", "he"))
        used = {part["name"] for part in self.parts.values()}
        name = self.pick([name for name in NAMES[folk, he] if name not in used])
        if folk == "people":
            kind = "girl" if he == "she" else "boy"
        else:
            kinds = {part.get("kind") for part in self.parts.values()}
            kind = self.pick([species for species in SPECIES if species not in kinds])
        full = f"a {kind} named {name}"
        return Part(name=name, kind=kind, full=full, family=FAMILY[folk, he]) | PRONOUNS[he]


def write_story(rng: random.Random) -> Story:
    """Write a story, which depends only on the state of `rng`."""
    teller = Teller(rng, PARTS)
    plot = teller.pick(tuple(PLOTS))
    templates = PLOTS[plot].strip().split("\n\n")
    paragraphs = [_tidy(teller.tell(_one_line(template))) for template in templates]
    return Story("\n\n".join(filter(None, paragraphs)), teller.nats, plot)


def _one_line(template: str) -> str:
    """Join lines with spaces, but without a space after a bar or a bracket."""
    return re.sub(r"([|\[]) ", r"\1", " ".join(line.strip() for line in template.splitlines()))


def _tidy(text: str) -> str:
    """Remove the gaps of empty alternatives, and change `a` to `an` before a vowel."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", re.sub(r" +", " ", text)).strip()


def _closing(template: str, start: int) -> int:
    """Return the position of the bracket that closes the one at `start`."""
    opener, closer = template[start], CLOSERS[template[start]]
    depth = 0
    for position in range(start, len(template)):
        depth += (template[position] == opener) - (template[position] == closer)
        if depth == 0:
            return position
    raise ValueError(f"unclosed bracket: {template[start : start + 40]!r}")


def _alternatives(inside: str) -> tuple[list[str], list[int]]:
    """Split `a|b [c|d]|2*e` at the outer bars; return the alternatives and their weights."""
    pieces = [""]
    depth = 0
    for char in inside:
        depth += (char == "[") - (char == "]")
        if char == "|" and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += char
    options, weights = [], []
    for piece in pieces:
        weight, star, rest = piece.partition("*")
        options.append(rest if star and weight.isdigit() else piece)
        weights.append(int(weight) if star and weight.isdigit() else 1)
    return options, weights


MISTAKES = {
    "doubled or stray space": r"  |^ | $| [,.!?]| \n|\n ",
    "unfilled placeholder": r"[\[\]{}<>|*]",
    "a before a vowel": r"\b[Aa] [aeiou]",
    "stray space inside quotes": r'^([^"]*"[^"]*")*[^"]*"( |[^"]* ")',
    "doubled word": r"\b(\w+) \1\b",
    "doubled punctuation": r"[,.!?]{2}",
    "small letter after a full stop": r"(?<!Mr)(?<!Mrs)[.] [a-z]",
    "paragraph without an end": r"[^.!?\"]$",
}


def find_mistakes(text: str) -> list[str]:
    """Return the names of the mistakes in a story's form."""
    paragraphs = text.split("\n\n")
    mistakes = [
        name for name, bad in MISTAKES.items() if any(re.search(bad, p) for p in paragraphs)
    ]
    if any(paragraph.count('"') % 2 for paragraph in paragraphs):
        mistakes.append("unbalanced quotes")
    if not 80 <= len(text.split()) <= 300:
        mistakes.append("too short or too long")
    if not 3 <= len(paragraphs) <= 6:
        mistakes.append("too few or too many paragraphs")
    return mistakes


def check(seed: int, count: int) -> None:
    """Write many stories, look for mistakes, and print statistics of the grammar."""
    rng = random.Random(seed)
    texts: set[str] = set()
    words: Counter[str] = Counter()
    mistakes: Counter[str] = Counter()
    plots: Counter[str] = Counter()
    lengths = []
    nats = 0.0
    for _ in range(count):
        story = write_story(rng)
        texts.add(story.text)
        lengths.append(len(story.text.split()))
        words.update(re.findall(r"[a-z']+", story.text.lower()))
        mistakes.update(find_mistakes(story.text))
        plots[story.plot] += 1
        nats += story.nats
    print(f"{len(texts)} of {count} stories are different; mistakes: {dict(mistakes) or 'none'}")
    print(f"{min(lengths)} to {max(lengths)} words, {sum(lengths) / count:.0f} on average")
    print(f"{len(words)} different words, {nats / count:.0f} nats per story")
    once = sum(text.startswith("Once upon a time") for text in texts) / len(texts)
    print(f"{once:.0%} begin with 'Once upon a time'; plots: {dict(plots)}")
    if mistakes or len(texts) < count:
        raise SystemExit("the grammar makes mistakes")


def main() -> None:
    """Print stories, or check many of them."""
    parser = argparse.ArgumentParser(description="Write children's stories from a grammar.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1, help="number of stories to print")
    parser.add_argument("--check", type=int, metavar="N", help="write N stories, look for mistakes")
    options = parser.parse_args()
    if options.check:
        check(options.seed, options.check)
        return
    rng = random.Random(options.seed)
    print("\n\n---\n\n".join(write_story(rng).text for _ in range(options.count)))


if __name__ == "__main__":
    main()
