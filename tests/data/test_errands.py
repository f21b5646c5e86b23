"""The embedded corpus errands: its meaning is the order of the things, and nothing else."""

import collections
import gzip
import importlib.util
import json
import math
import re
import subprocess
import sys
from itertools import islice, pairwise, permutations
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "data"
FOLDER = DATA / "errands"
SCRIPT = DATA / "make_errands.py"

_spec = importlib.util.spec_from_file_location("make_errands", SCRIPT)
make_errands = importlib.util.module_from_spec(_spec)
# Dataclasses look their module up by name.
sys.modules["make_errands"] = make_errands
_spec.loader.exec_module(make_errands)

Thing = make_errands.Thing
OBJECTS = set(make_errands.OBJECTS)
SMALL = [name for name in make_errands.SPLITS if name != "train"]


def text_of(name):
    path = FOLDER / make_errands.SPLITS[name].file
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("ascii")


def read(name):
    """(request, reply) of every line of one split."""
    rows = []
    for line in text_of(name).splitlines():
        user, assistant = json.loads(line)["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        rows.append((user["content"], assistant["content"]))
    return rows


@pytest.fixture(scope="module")
def corpus():
    return {name: read(name) for name in make_errands.SPLITS}


def words(text):
    return re.findall(r"\w+|[^\w\s]", text)


def mentions(text):
    return [word for word in words(text) if word in OBJECTS]


def question_of(request):
    """The kind of the closing question and the object that it names."""
    asked = re.search(r"[^.?!]*\?$", request)
    if not asked:
        return "order", None
    named = mentions(asked[0])
    kind = next(kind for kind in ("first", "last", "before", "after") if kind in words(asked[0]))
    return kind, (named or [None])[0]


def told(request):
    """The request's pairs (earlier, later), read by rules that share nothing with the templates."""
    pairs = []
    request = re.sub(r"[^.?!]*\?$", "", request).lower()
    for clause in re.split(r"[.;]|, and ", request):
        named = mentions(clause)
        if not named:
            continue
        x, y = named
        spoken = [word for word in words(clause) if word not in ("also", "please", ",")]
        start, middle = spoken[: spoken.index(x)], spoken[spoken.index(x) :]
        if start[0] in ("before", "ahead") or start[:2] == ["do", "not"]:
            forward = False
        elif start[0] in ("after", "once", "when", "until", "first") or start[:2] == ["as", "soon"]:
            forward = True
        elif {"after", "once", "when", "wait", "but"} & set(middle):
            forward = False
        else:
            assert {"before", "ahead", "afterwards", "then"} & set(middle), clause
            forward = True
        pairs.append((x, y) if forward else (y, x))
    return pairs


def chain_of(pairs):
    """The one chain that the pairs spell, whatever order they are in."""
    following = dict(pairs)
    (start,) = set(following) - set(following.values())
    chain = [start]
    while chain[-1] in following:
        chain.append(following[chain[-1]])
    assert len(chain) == len(pairs) + 1
    return chain


def test_the_committed_files_are_what_the_generator_writes():
    for name in SMALL:
        assert text_of(name) == "".join(make_errands.lines(name)), name
    train = text_of("train")
    assert train.startswith("".join(islice(make_errands.lines("train"), 2_000)))
    assert train.count("\n") == make_errands.SPLITS["train"].requests


def test_the_command_writes_the_same_bytes_as_the_functions(tmp_path, monkeypatch, capsys):
    small = {
        name: split._replace(requests=20 if name == "train" else 5)
        for name, split in make_errands.SPLITS.items()
    }
    monkeypatch.setattr(make_errands, "SPLITS", small)
    for folder in ("one", "two"):
        monkeypatch.setattr(sys, "argv", ["make_errands.py", "--out", str(tmp_path / folder)])
        assert make_errands.main() == 0
    for split in small.values():
        one, two = (tmp_path / folder / split.file for folder in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
    header = (tmp_path / "one" / "train.jsonl.gz").read_bytes()[:8]
    assert header[3] == 0, "a file name in the header"
    assert header[4:8] == bytes(4), "a time in the header"
    assert capsys.readouterr().out.count("requests") == 2 * len(small)


def test_help_and_errors_are_short():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=True
    )
    assert "--out" in done.stdout
    done = subprocess.run(
        [sys.executable, SCRIPT, "--out", SCRIPT / "under-a-file"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "--out" in done.stderr


def test_every_reply_follows_from_the_text_of_its_request(corpus):
    for name, rows in corpus.items():
        for request, reply in rows[:5_000]:
            chain = chain_of(told(request))
            kind, about = question_of(request)
            match kind:
                case "order":
                    expected = ", then ".join(chain)
                case "first":
                    expected = chain[0]
                case "last":
                    expected = chain[-1]
                case _:
                    step = 1 if kind == "after" else -1
                    place = chain.index(about) + step
                    assert 0 <= place < len(chain)
                    expected = chain[place]
            assert reply == expected + ".", (name, request)


def test_no_chain_is_in_two_splits(corpus):
    # Stronger: not even the same objects in another order.
    home = {}
    for name, rows in corpus.items():
        for request, _ in rows:
            objects = frozenset(mentions(request))
            assert home.setdefault(objects, name) == name, objects
    assert list(home.values()).count("train") > 30_000


def test_no_request_is_repeated(corpus):
    for name, rows in corpus.items():
        assert len({request for request, _ in rows}) == len(rows), name


def test_the_splits_hold_what_they_are_for(corpus):
    lengths = {name: [len(told(r)) + 1 for r, _ in rows[:5_000]] for name, rows in corpus.items()}
    for name in ("train", "validation", "test", "padded_out"):
        shares = {k: lengths[name].count(k) / len(lengths[name]) for k in set(lengths[name])}
        assert shares == pytest.approx({2: 1 / 3, 3: 1 / 3, 4: 1 / 3}, abs=0.06), name
    assert set(lengths["longer"]) == {5, 6, 7, 8}
    assert set(lengths["shuffled"]) == {4}
    for name, rows in corpus.items():
        kinds = collections.Counter(question_of(request)[0] for request, _ in rows[:5_000])
        assert kinds["order"] / sum(kinds.values()) == pytest.approx(0.5, abs=0.06), name
        assert min(kinds[kind] / sum(kinds.values()) for kind in make_errands.QUESTIONS) > 0.06
    assert (
        sum((FOLDER / split.file).stat().st_size for split in make_errands.SPLITS.values()) < 10e6
    )


def test_padded_out_is_as_long_as_longer(corpus):
    longer, padded = (
        sorted(len(words(request)) for request, _ in corpus[name])
        for name in ("longer", "padded_out")
    )
    for tenth in range(1, 10):
        at = len(longer) * tenth // 10
        assert abs(longer[at] - padded[at]) <= 1
    assert min(longer) > sum(len(words(request)) for request, _ in corpus["test"]) / 1_000


def test_the_telling_grows_outward_except_in_shuffled(corpus):
    def outward(request):
        pairs = told(request)
        known = set(pairs[0])
        for pair in pairs[1:]:
            if not known & set(pair):
                return False
            known |= set(pair)
        return True

    for name in ("train", "validation", "test", "longer", "padded_out"):
        assert all(outward(request) for request, _ in corpus[name][:5_000]), name
    share = sum(outward(request) for request, _ in corpus["shuffled"]) / 500
    assert share == pytest.approx(2 / 3, abs=0.08)


def test_listing_the_objects_as_first_mentioned_answers_few_whole_order_requests(corpus):
    for name in ("test", "validation", "train"):
        right = asked = 0
        for request, reply in corpus[name][:10_000]:
            chain = list(dict.fromkeys(mentions(request)))
            if question_of(request)[0] == "order" and len(chain) >= 3:
                asked += 1
                right += reply == ", then ".join(chain) + "."
        assert asked > 300
        assert right / asked < 0.4, name


def puzzle(request, reply):
    """What a guesser without word order is given, and which of its options is right.

    The objects are sorted by their number of mentions, so that it also knows which ones stand at
    the ends of the chain; an answer is the places of its objects in that list.
    """
    bag = collections.Counter(words(request))
    objects = sorted(OBJECTS & set(bag), key=lambda name: (bag[name], name))
    kind, about = question_of(request)
    answer = tuple(objects.index(name) for name in mentions(reply))
    counts = tuple(bag[name] for name in objects)
    return (kind, counts, about and objects.index(about)), answer, bag


def test_a_bag_of_words_guesser_stays_near_chance(corpus):
    # Naive Bayes over every word of the request, among the answers seen for the same question with
    # the same counts: the strongest that can be had without the order of the words.
    answers = collections.defaultdict(collections.Counter)
    seen = collections.defaultdict(collections.Counter)
    for request, reply in corpus["train"][:40_000]:
        case, answer, bag = puzzle(request, reply)
        answers[case][answer] += 1
        seen[case, answer].update(bag)
    vocabulary = 300

    def log_probability(case, answer, bag):
        counts = seen[case, answer]
        total = sum(counts.values()) + vocabulary
        words_given = sum(n * math.log((counts[word] + 1) / total) for word, n in bag.items())
        return math.log(answers[case][answer]) + words_given

    right, asked = collections.Counter(), collections.Counter()
    for request, reply in corpus["test"] + corpus["validation"]:
        case, answer, bag = puzzle(request, reply)
        options = answers[case]
        guess = max(options, key=lambda option: log_probability(case, option, bag), default=None)
        group = (case[0] == "order", len(case[1]) == 4)
        asked[group] += 1
        right[group] += guess == answer
    # Chance knows how often each object is mentioned, hence which two are the ends: with the inner
    # two of four things there are 2 × 2 whole orders, everything else is a choice between two.
    for (order, four), n in asked.items():
        chance = 0.25 if order and four else 0.5
        tolerance = 3 * math.sqrt(chance * (1 - chance) / n) + 0.01
        assert n > 300
        assert abs(right[order, four] / n - chance) < tolerance, (order, four, right[order, four])


def test_swapping_objects_keeps_the_bag_and_changes_the_answer(corpus):
    # Chains are drawn without regard to their objects, so the swapped request was as likely.
    for request, reply in corpus["test"]:
        kind, about = question_of(request)
        telling, question = re.fullmatch(r"(.*[.])([^.]*)", request).groups()
        counts = collections.Counter(mentions(telling))
        answers = {reply}
        for renamed in permutations(counts):
            swap = dict(zip(counts, renamed, strict=True))
            if any(counts[name] != counts[other] for name, other in swap.items()):
                continue
            other = re.sub(r"\w+", lambda word, swap=swap: swap.get(word[0], word[0]), telling)
            other += question
            assert collections.Counter(words(other)) == collections.Counter(words(request))
            chain = chain_of(told(other))
            place = chain.index(about) if about else None
            if (kind, place) not in (("before", 0), ("after", len(chain) - 1)):
                answers.add(make_errands.reply(chain, kind, place))
        assert len(answers) >= 2, request


def test_the_two_sentences_that_differ_in_order_alone_have_different_replies(corpus):
    report, slides = Thing("send", "report"), Thing("send", "slides")
    for a, b, sentence, reply in (
        (report, slides, "Send the report before the slides.", "report, then slides."),
        (slides, report, "Send the slides before the report.", "slides, then report."),
    ):
        written = {
            make_errands.capitalise(template.format(a=a, b=b)) + "."
            for family in make_errands.templates(a, b, forward=True)
            for template in family
        }
        assert sentence in written
        assert make_errands.reply([a.object, b.object]) == reply
    pattern = re.compile(r"[A-Z]\w+ the (\w+) before the (\w+)\.")
    matches = [(pattern.fullmatch(request), reply) for request, reply in corpus["train"]]
    like_it = [(match, reply) for match, reply in matches if match]
    assert len(like_it) > 50
    assert all(reply == "{}, then {}.".format(*match.groups()) for match, reply in like_it)


def test_what_is_said_besides_the_order_says_nothing_of_it():
    order_words = set(
        [
            "before",
            "after",
            "ahead",
            "first",
            "last",
            "then",
            "once",
            "until",
            "soon",
            "when",
            "only",
            "afterwards",
            "next",
        ]
    )
    verbs = {form for verb, forms in make_errands.VERBS.items() for form in (verb, *forms)}
    neutral = make_errands.FILLERS + make_errands.OPENERS + make_errands.CLOSERS
    for sentence in neutral:
        assert not {word.lower() for word in words(sentence)} & (order_words | verbs | OBJECTS)


def test_the_vocabulary_is_as_wide_as_promised():
    assert len(OBJECTS) >= 40
    assert len(make_errands.VERBS) >= 12
    assert not OBJECTS & {f for v, forms in make_errands.VERBS.items() for f in (v, *forms)}
    a, b = Thing("send", "report"), Thing("print", "slides")
    for forward in (True, False):
        family, *_ = make_errands.templates(a, b, forward)
        assert len(family) >= 7
        for template in family:
            named = mentions(template.format(a=a, b=b))
            assert named == (["report", "slides"] if forward else ["slides", "report"])


def test_both_directions_of_a_pair_are_equally_frequent(corpus):
    forward = total = 0
    for request, _ in corpus["train"][:5_000]:
        for (earlier, _), (x, _) in zip(told(request), pairwise_mentions(request), strict=True):
            forward += earlier == x
            total += 1
    assert forward / total == pytest.approx(0.5, abs=0.02)


def pairwise_mentions(request):
    named = mentions(re.sub(r"[^.?!]*\?$", "", request))
    return list(pairwise(named))[::2]


def test_the_readme_quotes_lines_of_the_files():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    quoted = dict(re.findall(r"^`(\w+)`: .*\n+```json\n(.*)\n```", readme, re.MULTILINE))
    assert set(quoted) == set(make_errands.SPLITS)
    for name, line in quoted.items():
        assert line + "\n" in text_of(name), name
