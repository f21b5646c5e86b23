"""Write the corpus `errands`: short office requests whose meaning is the order of the things to do.

A chain of k things is told by one clause for each neighbouring pair, in either direction; the reply
is the whole order, or the one thing that a closing question asks for. README.md beside the files
says why they are made so. Standard library only; the same text on every run.
"""

import argparse
import gzip
import hashlib
import json
import math
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_OBJECTS = (
    "report slides invoice agenda contract budget memo letter proposal draft "
    "summary schedule receipt survey brochure manual form quote plan map "
    "chart poster policy permit ledger roster calendar catalogue menu script "
    "speech lease notice handbook checklist statement transcript forecast minutes newsletter"
)
OBJECTS = tuple(_OBJECTS.split())

# base: (-ing form, past participle)
VERBS = {
    "send": ("sending", "sent"),
    "print": ("printing", "printed"),
    "sign": ("signing", "signed"),
    "file": ("filing", "filed"),
    "approve": ("approving", "approved"),
    "check": ("checking", "checked"),
    "copy": ("copying", "copied"),
    "scan": ("scanning", "scanned"),
    "review": ("reviewing", "reviewed"),
    "finish": ("finishing", "finished"),
    "update": ("updating", "updated"),
    "share": ("sharing", "shared"),
    "post": ("posting", "posted"),
    "read": ("reading", "read"),
}

# `a` is done before `b`. Forward templates mention `a` first, backward ones `b`. No finite verb
# agrees with an object, since some objects are plural.
FORWARD = (
    "{a.do} before you {b.do}",
    "{a.do} before {b.doing}",
    "{a.do} and only then {b.do}",
    "first {a.do}, then {b.do}",
    "after you {a.do}, {b.do}",
    "once you have {a.done}, {b.do}",
    "as soon as you have {a.done}, {b.do}",
)
BACKWARD = (
    "before you {b.do}, {a.do}",
    "before {b.doing}, {a.do}",
    "{b.do} after you {a.do}",
    "{b.do} only after {a.doing}",
    "{b.do} once you have {a.done}",
    "do not {b.do} until you {a.do}",
    "do not {b.do} before you {a.do}",
)
# Where both things share their verb, the second mention needs none.
FORWARD_SHARED = (
    "{a.do} before {b.name}",
    "first {a.do}, then {b.name}",
    "after {a.name}, {b.do}",
)
BACKWARD_SHARED = (
    "{b.do} after {a.name}",
    "before {b.name}, {a.do}",
    "do not {b.do} before {a.name}",
)
FORWARD_BARE = ("{a.name} must come before {b.name}",)
BACKWARD_BARE = ("{b.name} must come after {a.name}",)

QUESTIONS = {
    "first": ("What comes first?", "What is the first thing?"),
    "last": ("What comes last?", "What is the last thing?"),
    "before": ("What comes right before the {x}?", "What is right before the {x}?"),
    "after": ("What comes right after the {x}?", "What is right after the {x}?"),
}
# By k. With two things, "right before X" has one possible answer, so it is not asked.
QUESTION_WEIGHTS = {
    2: {"order": 0.5, "first": 0.25, "last": 0.25},
    3: {"order": 0.5, "first": 0.1, "last": 0.1, "before": 0.15, "after": 0.15},
}

OPENERS = ("Hello.", "Hi.", "Good morning.", "Here is what I need.", "Some errands for today.")
CLOSERS = ("Thank you.", "Thanks.", "Many thanks.", "That is all.")
# Of many lengths, so that padding can reach any length; no word of them speaks of order.
FILLERS = (
    "Take your time.",
    "No need to hurry.",
    "My desk is full.",
    "The room is cold.",
    "The weather is fine.",
    "It is a busy day.",
    "I am in a meeting.",
    "I hope you are well.",
    "We have a new printer.",
    "The office is quiet today.",
    "The lift is slow today.",
    "You know where everything is.",
    "The client is a friend of mine.",
    "The phone is on my desk.",
    "The key is in my blue coat.",
    "All of this is for the new client.",
    "I am at my desk all day.",
    "There is fresh coffee in the kitchen.",
    "Call my phone if you need help.",
    "My blue coat is in the meeting room.",
    "The new office is near the park and the old church.",
    "There is plenty of paper in the room beside the kitchen.",
    "The kitchen is cold today, but there is plenty of fresh coffee.",
    "You are in the old office today, and I am in the new office.",
)

TRAINED_LENGTHS = {2: 1.0, 3: 1.0, 4: 1.0}


class Split(NamedTuple):
    """How one file is made: its size, how often each k occurs, and its share of all chains."""

    file: str
    requests: int
    lengths: dict[int, float]
    share: float
    shuffled: bool = False
    padded: bool = False


SPLITS = {
    "train": Split("train.jsonl.gz", 100_000, TRAINED_LENGTHS, 0.80),
    "validation": Split("validation.jsonl", 1_000, TRAINED_LENGTHS, 0.06),
    "test": Split("test.jsonl", 1_000, TRAINED_LENGTHS, 0.06),
    "padded_out": Split("padded_out.jsonl", 500, TRAINED_LENGTHS, 0.04, padded=True),
    # With three things or fewer any order of the clauses grows outward, so only k = 4 differs.
    "shuffled": Split("shuffled.jsonl", 500, {4: 1.0}, 0.04, shuffled=True),
    "longer": Split("longer.jsonl", 500, {5: 0.25, 6: 0.25, 7: 0.25, 8: 0.25}, 0.0),
}


class Dice(random.Random):
    """Choices made from `random()` alone, the one method whose values Python promises to keep."""

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.random() * len(options))]

    def weighted(self, weights: dict[T, float]) -> T:
        left = self.random() * math.fsum(weights.values())
        for option, weight in weights.items():
            left -= weight
            if left < 0:
                return option
        return option

    def some(self, options: Sequence[T], k: int) -> list[T]:
        """k different options in random order."""
        rest = list(options)
        return [rest.pop(int(self.random() * len(rest))) for _ in range(k)]


@dataclass(frozen=True)
class Thing:
    """One thing to do: "send the report"."""

    verb: str
    object: str

    @property
    def name(self) -> str:
        return f"the {self.object}"

    @property
    def do(self) -> str:
        return f"{self.verb} {self.name}"

    @property
    def doing(self) -> str:
        return f"{VERBS[self.verb][0]} {self.name}"

    @property
    def done(self) -> str:
        return f"{VERBS[self.verb][1]} {self.name}"


def split_of(chain: Sequence[str]) -> str:
    """The only split that may hold this chain of objects.

    All orders of the same objects share a split: if one order were in training and another in test,
    remembering the objects alone would say which orders are left. Five or more make it longer's.
    """
    if len(chain) > max(TRAINED_LENGTHS):
        return "longer"
    digest = hashlib.sha256(" ".join(sorted(chain)).encode()).digest()
    left = int.from_bytes(digest[:4], "big") / 2**32
    for name, split in SPLITS.items():
        left -= split.share
        if left < 0:
            return name
    raise AssertionError("the shares add up to less than 1")


def reply(chain: Sequence[str], question: str = "order", about: int | None = None) -> str:
    """The answer; `about` is the place in the chain that a before or after question names."""
    match question:
        case "order":
            return ", then ".join(chain) + "."
        case "first":
            return f"{chain[0]}."
        case "last":
            return f"{chain[-1]}."
        case _:
            assert about is not None
            return f"{chain[about + (1 if question == 'after' else -1)]}."


def templates(a: Thing, b: Thing, forward: bool) -> dict[tuple[str, ...], float]:
    """The families of templates that fit a before b, each with its weight."""
    full = FORWARD if forward else BACKWARD
    bare = FORWARD_BARE if forward else BACKWARD_BARE
    shared = FORWARD_SHARED if forward else BACKWARD_SHARED
    return {full: 0.4, shared: 0.5, bare: 0.1} if a.verb == b.verb else {full: 0.9, bare: 0.1}


def outward(dice: Dice, pairs: int) -> list[int]:
    """Starts at a random pair; each further one is next to those already told."""
    low = high = int(dice.random() * pairs)
    told = [low]
    while len(told) < pairs:
        if low > 0 and (high == pairs - 1 or dice.random() < 0.5):
            low -= 1
            told.append(low)
        else:
            high += 1
            told.append(high)
    return told


def capitalise(text: str) -> str:
    return text[0].upper() + text[1:]


def sentences(dice: Dice, clauses: Sequence[str]) -> list[str]:
    """Clauses as sentences, some of two clauses, some with "please" or "also"."""
    written: list[str] = []
    joined = False  # at most two clauses in a sentence
    for clause in clauses:
        chance = dice.random()
        if dice.random() < 0.06 and clause.split()[0] in (*VERBS, "do", "deal"):
            clause = f"please {clause}"
        if written and not joined and chance < 0.15:
            plain = not re.search(r",| and ", clause + written[-1])
            link = ", and " if plain and dice.random() < 0.6 else "; "
            written[-1] = written[-1][:-1] + link + clause + "."
            joined = True
            continue
        also = written and 0.15 <= chance < 0.22 and not clause.startswith("please")
        written.append(("Also, " + clause if also else capitalise(clause)) + ".")
        joined = False
    return written


def length(text: str) -> int:
    """Words and punctuation marks: nearly the number of tokens, each word being one."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def fillers(dice: Dice, room: int) -> list[str]:
    """Different fillers, in random order, as near to `room` long together as eight tries get."""
    best: list[str] = []
    shortest = room
    for _ in range(8):
        chosen, left = [], room
        for filler in dice.some(FILLERS, len(FILLERS)):
            if length(filler) <= left:
                chosen.append(filler)
                left -= length(filler)
        if left < shortest:
            best, shortest = chosen, left
    return best


def make_request(
    dice: Dice, chain: Sequence[str], *, shuffled: bool = False, target: int | None = None
) -> tuple[str, str]:
    """One request and its reply.

    chain: the objects in the order in which their things are to be done.
    shuffled: tell the clauses in any order instead of growing outward.
    target: fill up with order-neutral sentences to this `length`.
    """
    k, verbs = len(chain), list(VERBS)
    shared = dice.pick(verbs) if dice.random() < 0.4 else None
    things = [Thing(shared or dice.pick(verbs), name) for name in chain]
    order = dice.some(range(k - 1), k - 1) if shuffled else outward(dice, k - 1)
    pairs = list(pairwise(things))
    clauses = []
    for a, b in (pairs[i] for i in order):
        family = dice.weighted(templates(a, b, forward=dice.random() < 0.5))
        clauses.append(dice.pick(family).format(a=a, b=b))
    written = sentences(dice, clauses)

    question = dice.weighted(QUESTION_WEIGHTS[min(k, 3)])
    about = None
    if question in ("before", "after"):
        # Of three things only the middle one is told of twice; a question about another would be
        # answered by that count alone.
        low, high = (1, 1) if k == 3 else (1, k - 1) if question == "before" else (0, k - 2)
        about = low + int(dice.random() * (high - low + 1))

    opener = [dice.pick(OPENERS)] if dice.random() < 0.12 else []
    closer = [dice.pick(CLOSERS)] if dice.random() < 0.12 else []
    asked = []
    if question != "order":
        asked = [dice.pick(QUESTIONS[question]).format(x=chain[about or 0])]
    if target is None:
        extra = dice.some(FILLERS, dice.weighted({0: 0.8, 1: 0.14, 2: 0.04, 3: 0.02}))
    else:
        extra = fillers(dice, target - length(" ".join(opener + written + closer + asked)))
    for filler in extra:
        written.insert(int(dice.random() * (len(written) + 1)), filler)
    return " ".join(opener + written + closer + asked), reply(chain, question, about)


def generate(name: str) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """The (chain, request, reply) of one split, without end and without a repeated request."""
    split = SPLITS[name]
    dice = Dice(int.from_bytes(hashlib.sha256(f"errands {name}".encode()).digest()[:8], "big"))
    targets: list[int] = []
    if split.padded:
        models = islice(generate("longer"), SPLITS["longer"].requests)
        targets = [length(request) for _, request, _ in models]
    seen: set[str] = set()
    for i in count():
        target = targets[i % len(targets)] if targets else None
        while True:
            chain = tuple(dice.some(OBJECTS, dice.weighted(split.lengths)))
            if split_of(chain) != name:
                continue
            request, answer = make_request(dice, chain, shuffled=split.shuffled, target=target)
            if request not in seen:
                break
        seen.add(request)
        yield chain, request, answer


def lines(name: str) -> Iterator[str]:
    """The lines of one split's file, each with its line feed."""
    for chain, request, answer in islice(generate(name), SPLITS[name].requests):
        turns = [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
        yield json.dumps({"messages": turns, "group": len(chain)}) + "\n"


def write(folder: Path, name: str) -> Path:
    """Write one split's file and return its path."""
    path = folder / SPLITS[name].file
    data = "".join(lines(name)).encode("ascii")
    if path.suffix == ".gz":
        with (
            path.open("wb") as raw,
            # No name and no time in the header: the bytes depend on the text alone.
            gzip.GzipFile("", "wb", compresslevel=9, fileobj=raw, mtime=0) as file,
        ):
            file.write(data)
    else:
        path.write_bytes(data)
    return path


def main() -> int:
    default = Path(__file__).resolve().parent / "errands"
    parser = argparse.ArgumentParser(
        description="Write the corpus errands (six files, a few seconds); see its README.md."
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=default,
        metavar="FOLDER",
        help="folder to write to, made if missing (default: errands, beside this script)",
    )
    out = parser.parse_args().out
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, split in SPLITS.items():
            path = write(out, name)
            print(f"{path}: {split.requests:,} requests, {path.stat().st_size / 1e6:.2f} MB")
    except OSError as error:
        print(f"make_errands.py: --out {out}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
