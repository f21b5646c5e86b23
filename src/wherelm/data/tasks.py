"""Generated examples that ask one thing about position, named by an address in place of a file.

`task:order` is a task as it stands, `task:order?items=17-32&examples=500` one with options: `items`
(how many stand in the list, a number or a range), `offset` (for tasks that count), `words` and
`fillers` (for mqar), `examples` and `seed`. An example is one question about a list of words, or a
conversation of several:

    order mist cup sand pen: pen cup   ->    cup

The list has its length drawn first, uniformly, then its content. A hash of the list alone decides
which split it belongs to, so that no list is in two splits, whatever is asked of it, of whatever
length and under whatever seed. Every word but the first has a space before it, in the reply as
well: a byte-level tokenizer then holds a word as the same single token wherever it stands.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

PREFIX = "task:"
PARTS = ("extra", "validation", "test", *7 * ("train",))  # a tenth of all lists each
MOST_DRAWS = 10_000  # of lists for one example, before its split counts as empty

_THINGS = (
    "apple arrow badge ball basket bell bench book boot bottle bowl box brush bucket button cake "
    "candle card chair clock coat coin comb crown cup desk drum fan flag flute fork glove "
    "hammer hat horn jar kettle key kite knife ladder lamp leaf lemon mask mirror nail needle "
    "paddle pan pen pillow ring rope rug saddle shell shoe spoon stamp stone tent umbrella wheel"
)
THINGS = tuple(_THINGS.split())
KEYS, VALUES = THINGS[::2], THINGS[1::2]
FEW_THINGS = THINGS[:8]
FILLERS = ("dust", "fog", "mist", "mud", "rain", "sand", "smoke", "snow")
# Two syllables each, for tasks that take more words than there are things: 8,192 of 9,025.
_SYLLABLES = tuple(c + v for v in "aeiou" for c in "bcdfghjklmnpqrstvwz")
MANY_WORDS = tuple(a + b for a, b in itertools.product(_SYLLABLES, repeat=2))[:8192]
MANY_KEYS, MANY_VALUES = MANY_WORDS[::2], MANY_WORDS[1::2]
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight")

Range = tuple[int, int]


class Example(NamedTuple):
    """The words of a list, of the question about it and of the reply, and of what is asked then."""

    words: list[str]
    question: list[str]
    reply: list[str]
    group: int
    more: Sequence[tuple[list[str], list[str]]] = ()


class Draws:
    """Random draws built on `random()` alone, which is the same in every version of Python."""

    def __init__(self, purpose: str):
        self._random = random.Random(purpose).random

    def below(self, n: int) -> int:
        return int(self._random() * n)

    def between(self, range: Range) -> int:
        low, high = range
        return low + self.below(high - low + 1)

    def near(self, most: int) -> int:
        """0 … most, with chances that fall as 1, 1/2, 1/3, …, nearly."""
        return int((most + 1) ** self._random()) - 1

    def any(self, words: Sequence[str], n: int) -> list[str]:
        """n words, each of them any."""
        return [words[self.below(len(words))] for _ in range(n)]

    def different(self, words: Sequence[str], n: int) -> list[str]:
        """n different words, every order of them equally likely."""
        at: dict[int, int] = {}  # places that hold another word than their own
        for i in range(n):
            j = i + self.below(len(words) - i)
            at[i], at[j] = at.get(j, j), at.get(i, i)
        return [words[at[i]] for i in range(n)]


def _order(draws: Draws, n: int, task: Task) -> Example:
    """Two things among n words, the others fillers: every distance between them equally likely."""
    gap = draws.between((1, n - 1))
    first = draws.below(n - gap)
    words = draws.any(FILLERS, n)
    words[first], words[first + gap] = earlier, later = draws.different(THINGS, 2)
    return Example(words, draws.different((earlier, later), 2), [earlier], n)


def _recall_at_offset(draws: Draws, n: int, task: Task) -> Example:
    k = draws.between(task.offset)
    words = draws.different(THINGS, n)
    return Example(words, [NUMBERS[k - 1]], [words[-k]], k)


def _indirect_index(draws: Draws, n: int, task: Task) -> Example:
    k = draws.between(task.offset) * (1, -1)[draws.below(2)]
    words = draws.different(THINGS, n)
    at = draws.below(n - abs(k)) + max(0, -k)
    side = "after" if k > 0 else "before"
    return Example(words, [NUMBERS[abs(k) - 1], side, words[at]], [words[at + k]], k)


def _copy(draws: Draws, n: int, task: Task) -> Example:
    words = draws.different(THINGS, n)
    return Example(words, [], words, n)


def _copy_repeated(draws: Draws, n: int, task: Task) -> Example:
    words = draws.any(FEW_THINGS, n)
    return Example(words, [], words, n)


def _induction(draws: Draws, n: int, task: Task) -> Example:
    words = draws.different(THINGS, n)
    at = draws.below(n - 1)
    return Example(words, [words[at]], [words[at + 1]], n)


def _associative_recall(draws: Draws, n: int, task: Task) -> Example:
    pairs = list(zip(draws.different(KEYS, n), draws.any(VALUES, n), strict=True))
    key, value = pairs[draws.below(n)]
    return Example([word for pair in pairs for word in pair], [key], [value], n)


def _mqar(draws: Draws, n: int, task: Task) -> Example:
    """Every key is asked for once, in any order, soon after the list or after many fillers."""
    half = task.words // 2
    keys, values = draws.different(MANY_KEYS[:half], n), draws.any(MANY_VALUES[:half], n)
    places = sorted(draws.near(task.fillers) for _ in range(n))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0, *places])]
    asked = draws.different(tuple(zip(keys, values, strict=True)), n)
    turns = [
        ([*draws.any(FILLERS, gap), key], [value])
        for gap, (key, value) in zip(gaps, asked, strict=True)
    ]
    listed = [word for pair in zip(keys, values, strict=True) for word in pair]
    return Example(listed, *turns[0], n, turns[1:])


def _membership(draws: Draws, n: int, task: Task) -> Example:
    drawn = draws.different(THINGS, n + 1)
    words, named = drawn[:n], draws.below(2)
    asked = words[draws.below(n)] if named else drawn[n]
    return Example(words, [asked], [("no", "yes")[named]], n)


class Kind(NamedTuple):
    """How a task is drawn, the word that opens its prompts, and what its options may be."""

    draw: Callable[[Draws, int, Task], Example]
    opening: str
    items: Range
    accepted: Range
    offset: Range | None = None
    words: int | None = None
    fillers: int | None = None


TASKS = {
    # Which of two things came first? The bag of words does not say: chance is 1/2.
    "order": Kind(_order, "order", (4, 16), (2, 256)),
    # The word that stands k back from the list's end: position alone, relative to the query.
    "recall_at_offset": Kind(_recall_at_offset, "recall", (8, 16), (1, 64), (1, 8)),
    # The word k before or after a named one: content, then position (indirect indexing, as in
    # Gopalakrishnan et al., 2025).
    "indirect_index": Kind(_indirect_index, "index", (8, 16), (2, 64), (1, 4)),
    # While words are unique, the last one copied tells where to go on; once they repeat, it does
    # not (Zhou et al., 2024; Jelassi et al., 2024).
    "copy": Kind(_copy, "copy", (4, 16), (1, 64)),
    "copy_repeated": Kind(_copy_repeated, "copy", (4, 16), (1, 256)),
    # A B … A -> B (Olsson et al., 2022).
    "induction": Kind(_induction, "continue", (4, 16), (2, 64)),
    # Pairs of a key and a value, and one key is asked for (Ba et al., 2016); `items` counts pairs.
    # The value is the word beside the key, so this needs adjacency, if no distance.
    "associative_recall": Kind(_associative_recall, "find", (2, 8), (1, 32)),
    # The same with many words, and every key asked for: "Zoology" (Arora et al., 2023). `words` are
    # keys and values, half of each; `fillers` are at most so many, before and between the questions
    # (there the places without a question are random words).
    "mqar": Kind(_mqar, "recall", (2, 8), (1, 64), words=64, fillers=8),
    # Was this thing named? The bag of words says it: a control that needs no position at all.
    "membership": Kind(_membership, "named", (4, 16), (2, 63)),
}


@dataclass(frozen=True)
class Task:
    """What an address asks for; `examples` is null for as many as the split has by default."""

    name: str
    items: Range
    offset: Range | None
    examples: int | None = None
    seed: int = 0
    words: int | None = None
    fillers: int | None = None


def with_seed(address: str, seed: int) -> str:
    """The same task, drawn by this seed."""
    name, _, query = address.partition("?")
    others = [option for option in query.split("&") if option and not option.startswith("seed=")]
    return f"{name}?{'&'.join([*others, f'seed={seed}'])}"


def parse(address: str) -> Task:
    """The task of an address `task:NAME?option=value&…`; ValueError says what is accepted."""
    name, asks, query = address.removeprefix(PREFIX).partition("?")
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        guess = f"; did you mean {PREFIX}{near[0]}?" if near else ""
        raise ValueError(f"no such task; expected {PREFIX} and one of {', '.join(TASKS)}{guess}")
    kind = TASKS[name]
    own = [option for option in ("offset", "words", "fillers") if getattr(kind, option) is not None]
    options = {option: getattr(kind, option) for option in ("items", "offset", *own)}
    given = set()
    for pair in query.split("&") if asks else ():
        option, _, value = pair.partition("=")
        if option == "items":
            options[option] = _range(pair, value, kind.accepted)
        elif option == "offset" and option in own:
            options[option] = _range(pair, value, (1, len(NUMBERS)))
        elif option == "words" and option in own:
            options[option] = _number(pair, value, least=2, most=len(MANY_WORDS))
        elif option == "fillers" and option in own:
            options[option] = _number(pair, value, least=0)
        elif option in ("examples", "seed"):
            options[option] = _number(pair, value, least=int(option == "examples"))
        else:
            accepted = ["items", *own, "examples", "seed"]
            raise ValueError(f"no option {option!r}; {name} takes {', '.join(accepted)}")
        if option in given:
            raise ValueError(f"{pair}: {option} is given twice")
        given.add(option)
    task = Task(name, **options)
    # Every offset must fit into every list, or lengths and offsets would depend on each other.
    longest = task.items[0] - (name == "indirect_index")
    if task.offset and task.offset[1] > longest:
        raise ValueError(
            f"offset up to {task.offset[1]}: expected at most {longest}, for the shortest list has "
            f"{task.items[0]} items"
        )
    if task.words and task.words < 2 * task.items[1]:
        raise ValueError(
            f"words={task.words}: expected at least {2 * task.items[1]}, a key and a value for "
            f"each of {task.items[1]} items"
        )
    return task


def _number(pair: str, value: str, least: int, most: int = 10**9) -> int:
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII) or not least <= int(value) <= most:
        raise ValueError(
            f"{pair}: expected a number from {least} " + ("on" if most == 10**9 else f"to {most}")
        )
    return int(value)


def _range(pair: str, value: str, accepted: Range) -> Range:
    """A number or a range such as 4-16, within what is accepted."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", value, re.ASCII)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not accepted[0] <= low <= high <= accepted[1]:
        raise ValueError(
            f"{pair}: expected a number, or a range such as 4-8, from {accepted[0]} to "
            f"{accepted[1]}"
        )
    return low, high


def rows(task: Task, split: str) -> Iterator[dict[str, Any]]:
    """The rows of one split, each with `prompt`, `completion` and `group`, or with `messages`.

    `group` is the offset, negative for "before", where the task has one, else the number of items.
    A split that is not train, validation or test has lists that are in none of the three. The rows
    are the same in every process; fewer `examples` are the first of more. ValueError if the lists
    are too few to give the split any.
    """
    kind = TASKS[task.name]
    part = split if split in PARTS else "extra"
    draws = Draws(f"{task.name}:{task.items}:{task.offset}:{task.seed}:{split}")
    for _ in range(task.examples or (50_000 if part == "train" else 1_000)):
        n = draws.between(task.items)
        for _ in range(MOST_DRAWS):
            example = kind.draw(draws, n, task)
            if part_of(example.words) == part:
                break
        else:
            raise ValueError(
                f"{PREFIX}{task.name}: there are too few lists of {n} to keep any for {split} "
                "alone; expected more items"
            )
        prompt = f"{kind.opening}{_spoken(example.words)}:{_spoken(example.question)}"
        said = {"prompt": prompt, "completion": _spoken(example.reply)}
        if example.more:
            more = (_spoken(words) for turn in example.more for words in turn)
            roles = itertools.cycle(("user", "assistant"))
            turns = zip(roles, (*said.values(), *more), strict=False)
            said = {"messages": [{"role": role, "content": text} for role, text in turns]}
        yield said | {"group": example.group}


def part_of(words: Sequence[str]) -> str:
    """The part that a list belongs to, by a hash of its words."""
    digest = hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest()
    return PARTS[int.from_bytes(digest, "little") * len(PARTS) >> 64]


def _spoken(words: Sequence[str]) -> str:
    return "".join(f" {word}" for word in words)
