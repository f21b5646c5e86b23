"""Generated tasks ask what they say they ask, fairly, and of lists that training has not seen."""

import collections
import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.helpers import difference, random_decoder, row_logits
from wherelm.config import load_yaml
from wherelm.data import tasks
from wherelm.data.messages import messages_of, spans
from wherelm.data.sources import DataConfig, load_examples
from wherelm.seeds import numpy_generator
from wherelm.tokenizer.training import TokenizerConfig, build_tokenizer

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SPLITS = ("train", "validation", "test", "longer")
COUNT = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
PAIRS = ("associative_recall", "mqar")  # whose items are two words
every_task = pytest.mark.parametrize("name", tasks.TASKS)


def rows(address, split="train"):
    return list(tasks.rows(tasks.parse(address), split))


def data_config(name):
    return load_yaml(CONFIGS / "data" / f"{name}.yaml")


def config_rows(name, split, examples=500):
    """The first rows of a split as configs/data has it."""
    values = data_config(name)
    address = values["extra"].get(split) or values[split]
    return rows(f"{with_options(address)}examples={examples}", split)


def with_options(address):
    return f"{address}{'&' if '?' in address else '?'}"


def read(row):
    """The words of the list and of the first question."""
    listed, asked = said(row)[0][0].split(":")
    return listed.split()[1:], asked.split()


def said(row):
    """What is asked and replied, turn by turn."""
    if "prompt" in row:
        return [(row["prompt"], row["completion"])]
    texts = [turn["content"] for turn in row["messages"]]
    assert [turn["role"] for turn in row["messages"]] == ["user", "assistant"] * (len(texts) // 2)
    return list(zip(texts[::2], texts[1::2], strict=True))


def answer(name, words, asked):
    """The reply, by reading the prompt as a person would."""
    match name:
        case "order":
            return [next(word for word in words if word in asked)]
        case "recall_at_offset":
            left = list(words)
            for number in COUNT:
                word = left.pop()
                if [number] == asked:
                    return [word]
        case "indirect_index":
            number, side, named = asked
            line = words if side == "after" else list(reversed(words))
            return [line[line.index(named) + 1 + COUNT.index(number)]]
        case "copy" | "copy_repeated":
            assert asked == []
            return words
        case "induction":
            return [dict(itertools.pairwise(words))[asked[0]]]
        case "associative_recall" | "mqar":
            assert set(asked[:-1]) <= set(tasks.FILLERS)
            return [dict(zip(words[::2], words[1::2], strict=True))[asked[-1]]]
        case "membership":
            return ["yes" if asked[0] in words else "no"]
    raise AssertionError((name, words, asked))


@every_task
@pytest.mark.parametrize("split", SPLITS)
def test_every_reply_is_what_a_naive_reading_of_the_prompt_finds(name, split):
    for row in config_rows(name, split):
        words, _ = read(row)
        for prompt, reply in said(row):
            assert reply.split() == answer(name, words, prompt.split(":")[-1].split()), row


@every_task
def test_the_group_is_the_offset_or_the_number_of_items(name):
    for row in config_rows(name, "train"):
        words, asked = read(row)
        if name == "recall_at_offset":
            assert row["group"] == 1 + COUNT.index(asked[0])
        elif name == "indirect_index":
            walked = words.index(row["completion"].strip()) - words.index(asked[-1])
            assert row["group"] == walked
        else:
            assert row["group"] == len(words) // (2 if name in PAIRS else 1)


def test_lists_have_the_words_that_make_the_task_what_it_is():
    for name in ("recall_at_offset", "indirect_index", "copy", "induction"):
        assert all(
            len(set(read(row)[0])) == len(read(row)[0]) for row in config_rows(name, "train")
        )
    assert all(
        len(set(read(row)[0])) < len(read(row)[0]) for row in config_rows("copy_repeated", "longer")
    )
    for row in config_rows("order", "train"):
        words, asked = read(row)
        assert [words.count(thing) for thing in asked] == [1, 1]
        assert set(words) - set(asked) <= set(tasks.FILLERS)
    for row in config_rows("associative_recall", "train"):
        words, _ = read(row)
        assert len(set(words[::2])) == len(words[::2])
        assert not set(words[::2]) & set(tasks.VALUES)


@every_task
def test_no_list_is_in_two_splits_of_whatever_length_and_seed(name):
    # So short that, were splits not kept apart, equal lists would be sure to be drawn.
    items = 1 if name in PAIRS else 3 if name == "copy_repeated" else 2
    offset = "&offset=1" if tasks.TASKS[name].offset else ""
    address = f"task:{name}?items={items}{offset}&examples=500"
    lists = collections.defaultdict(set)
    for split in SPLITS:
        for seed in (0, 1):
            lists[split] |= {tuple(read(row)[0]) for row in rows(f"{address}&seed={seed}", split)}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not lists[one] & lists[other], (one, other)
    assert all(len(found) < 2 * 500 for found in lists.values())


def test_seeds_and_splits_draw_different_lists():
    drawn = [
        {row["prompt"] for row in rows(f"task:copy?items=12&examples=200&seed={seed}", split)}
        for seed in (0, 1)
        for split in ("train", "validation", "longer", "longest")
    ]
    assert len(set.union(*drawn)) == 8 * 200


def assert_uniform(values, expected):
    counts = collections.Counter(values)
    assert set(counts) == set(expected)
    if len(counts) > 1:
        assert chisquare([counts[value] for value in expected]).pvalue > 1e-3, counts


@every_task
@pytest.mark.parametrize("split", ["train", "validation"])
def test_lengths_and_offsets_are_uniform(name, split):
    drawn = config_rows(name, split, examples=3000)
    task = tasks.parse(data_config(name)[split])
    (low, high), offset = task.items, task.offset
    lengths = [len(read(row)[0]) // (2 if name in PAIRS else 1) for row in drawn]
    assert_uniform(lengths, range(low, high + 1))
    if offset:
        signs = (1, -1) if name == "indirect_index" else (1,)
        offsets = [sign * k for sign in signs for k in range(offset[0], offset[1] + 1)]
        assert_uniform([row["group"] for row in drawn], offsets)
        # At every length, too: the length tells nothing of the offset.
        shortest = [row["group"] for row, n in zip(drawn, lengths, strict=True) if n == low]
        assert_uniform(shortest, offsets)


def test_order_is_fair_in_distance_in_things_and_in_how_it_is_asked():
    drawn = rows("task:order?items=9&examples=4000")
    places = [sorted(words.index(thing) for thing in asked) for words, asked in map(read, drawn)]
    assert_uniform([later - earlier for earlier, later in places], range(1, 9))
    assert_uniform([read(row)[1].index(row["completion"].strip()) for row in drawn], range(2))
    earlier_in_name = [
        row["completion"].strip() == min(asked) for row in drawn for asked in [read(row)[1]]
    ]
    assert_uniform(earlier_in_name, [False, True])


def test_asked_words_are_spread_evenly_over_the_list():
    for name, last in (("induction", 9), ("associative_recall", 10)):
        drawn = [read(row) for row in rows(f"task:{name}?items=10&examples=4000")]
        step = 2 if name in PAIRS else 1
        assert_uniform([words.index(asked[0]) // step for words, asked in drawn], range(last))


def test_every_key_is_asked_once_soon_or_after_many_fillers():
    drawn = rows("task:mqar?items=4&words=8192&fillers=32&examples=2000")
    order, waits, words = [], [], set()
    for row in drawn:
        listed, _ = read(row)
        asked = [prompt.split(":")[-1].split() for prompt, _ in said(row)]
        assert sorted(question[-1] for question in asked) == sorted(listed[::2])
        order.append(listed.index(asked[0][-1]) // 2)
        waits.append(len(asked[0]) - 1)
        words |= set(listed)
        # All of its 64 tokens: three controls a turn, <BOS>, the opening word and the colon.
        assert sum(map(len, asked)) + len(listed) + 4 + 3 * 4 + 3 <= 64
    assert_uniform(order, range(4))
    assert len(words) > 0.8 * 8192
    counts = collections.Counter(waits)
    assert counts[0] > counts[1] > counts[3] > counts[15]
    assert max(len(said(row)[-1][0].split()) for row in drawn) > 20


def test_membership_is_fair_and_does_not_depend_on_the_order_of_the_list():
    drawn = rows("task:membership?items=9&examples=4000")
    assert_uniform([row["completion"] for row in drawn], [" no", " yes"])
    asked = [(words, question[0]) for words, question in map(read, drawn)]
    assert_uniform([words.index(word) for words, word in asked if word in words], range(9))
    assert all(len(set(words)) == 9 for words, _ in asked)


def digest_of(drawn):
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


def test_rows_are_the_same_in_every_process():
    code = (
        "import hashlib, json\n"
        "from wherelm.data import tasks\n"
        "drawn = [row for name in tasks.TASKS for split in ('train', 'validation')\n"
        "         for row in tasks.rows(tasks.parse(f'task:{name}?examples=100'), split)]\n"
        "print(hashlib.sha256(json.dumps(drawn).encode()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    here = [
        row
        for name in tasks.TASKS
        for split in ("train", "validation")
        for row in rows(f"task:{name}?examples=100", split)
    ]
    assert found == {digest_of(here)}


def test_fewer_examples_are_the_first_of_more():
    assert rows("task:order?examples=7") == rows("task:order?examples=20")[:7]


@pytest.fixture(scope="module")
def tokenized():
    """Of each task the examples of all splits, and the tokenizer that its training split gives."""

    def load(name):
        values = data_config(name)
        sizes = {"train": 1500, "validation": 200, "test": 200}
        # As many words as so few examples can teach a tokenizer.
        values = json.loads(json.dumps(values).replace("words=8192", "words=64"))
        few = {key: f"{with_options(values[key])}examples={size}" for key, size in sizes.items()}
        extra = {key: f"{path}&examples=200" for key, path in values["extra"].items()}
        values |= few | {"extra": extra, "cache": None}
        splits = load_examples(DataConfig(**values), Path(), SPLITS)
        config = TokenizerConfig(**load_yaml(CONFIGS / "tokenizer" / "bpe.yaml"))
        return splits, build_tokenizer(config, splits["train"], Path())

    return load


@every_task
def test_every_word_is_one_token_the_same_wherever_it_stands(name, tokenized):
    splits, tokenizer = tokenized(name)
    context = load_yaml(CONFIGS / "model" / "small.yaml")["context"]
    ids_of = collections.defaultdict(set)
    for split in SPLITS:
        assert splits[split].counts["kept"] == splits[split].counts["read"]
        for messages in messages_of(splits[split].dataset):
            words = [w for message in messages for w in message.content.replace(":", " : ").split()]
            ids = [id for message in messages for id in tokenizer.encode(message.content)]
            assert len(ids) == len(words), messages
            for word, id in zip(words, ids, strict=True):
                ids_of[word].add(id)
            example, _ = tokenizer.encode_spans(spans(messages))
            assert len(example) == len(words) + 1 + 3 * len(messages) // 2 <= context + 1
    assert {len(ids) for ids in ids_of.values()} == {1}
    assert len(ids_of) == len(set.union(*ids_of.values()))


def test_one_layer_without_positions_cannot_tell_the_order(tokenized):
    splits, tokenizer = tokenized("order")
    generator = numpy_generator(0, "orders of lists")
    pairs = []
    for example in itertools.islice(messages_of(splits["validation"].dataset), 20):
        ids, learned = tokenizer.encode_spans(spans(example))
        ids = np.unique(ids[: learned.index(True)], return_inverse=True)[1]
        listed = np.arange(3, len(ids) - 4)  # <BOS> <USER> order | the list | : A B <ASSISTANT>
        other = ids.copy()
        while (other == ids).all():
            other[listed] = ids[generator.permutation(listed)]
        pairs.append((ids, other))

    def changes(scheme, layers):
        model = random_decoder(scheme, layers=layers, context=32)
        return [difference(row_logits(model, a)[-1], row_logits(model, b)[-1]) for a, b in pairs]

    assert max(changes("none", 1)) <= 1e-6
    assert min(changes("none", 2)) > 1e-4
    assert min(changes("rope", 1)) > 1e-4


@every_task
def test_longer_goes_on_where_training_ends(name):
    values = data_config(name)
    train, longer = (tasks.parse(path) for path in (values["train"], values["extra"]["longer"]))
    assert values["validation"] == values["test"] == values["train"]
    assert longer.items == (train.items[1] + 1, 2 * train.items[1])
    assert longer.offset == train.offset


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "task:ordre",
            r"no such task; expected task: and one of order, .*; did you mean task:order\?",
        ),
        ("task:", "no such task"),
        ("task:order?", "no option ''; order takes items, examples, seed"),
        ("task:order?item=3", "no option 'item'; order takes items, examples, seed"),
        ("task:copy?offset=3", "no option 'offset'; copy takes items"),
        ("task:recall_at_offset?k=3", "takes items, offset, examples, seed"),
        (
            "task:copy?items=few",
            "items=few: expected a number, or a range such as 4-8, from 1 to 64",
        ),
        ("task:copy?items=", "items=: expected a number"),
        ("task:copy?items=9-4", "items=9-4: expected"),
        ("task:copy?items=60-65", "items=60-65: expected .* to 64"),
        ("task:copy?items=²", "items=²: expected"),
        ("task:copy?examples=0", "examples=0: expected a number"),
        ("task:copy?examples=3-4", "examples=3-4: expected a number from 1 on"),
        ("task:copy?seed=-1", "seed=-1: expected"),
        ("task:copy?seed=1&seed=2", "seed is given twice"),
        ("task:recall_at_offset?offset=9", "offset=9: expected .* from 1 to 8"),
        ("task:recall_at_offset?items=4-8", "offset up to 8: expected at most 4"),
        ("task:mqar?words=9000", "words=9000: expected a number from 2 to 8192"),
        ("task:mqar?items=4&words=6", "words=6: expected at least 8, a key and a value for each"),
        ("task:mqar?offset=2", "no option 'offset'; mqar takes items, words, fillers, examples"),
        ("task:order?words=8", "no option 'words'; order takes items, examples, seed"),
        ("task:indirect_index?items=4-8", "offset up to 4: expected at most 3"),
    ],
)
def test_a_wrong_address_is_one_line_that_says_what_is_accepted(address, message):
    for values, key in (
        ({"train": address}, "data.train"),
        ({"train": "task:copy", "extra": {"mine": address}}, "data.extra.mine"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            DataConfig(**values)
        assert str(caught.value).startswith(f"{key}={address}: ")
        assert "\n" not in str(caught.value)


def test_a_task_is_no_stream():
    with pytest.raises(ValueError, match=r"data\.train=task:copy: .* data\.format=messages"):
        DataConfig(train="task:copy", format="stream", overflow="split")


def test_too_few_lists_for_a_split_are_named():
    with pytest.raises(ValueError, match=r"task:copy_repeated: .* lists of 1 .* more items"):
        [rows("task:copy_repeated?items=1", split) for split in SPLITS]


def test_generated_examples_come_from_the_cache_under_their_address_and_split(
    tmp_path, monkeypatch
):
    def load(address, split="train"):
        config = DataConfig(train=address, validation=address, cache=str(tmp_path))
        return load_examples(config, tmp_path, [split])[split]

    first = load("task:order?examples=50")
    others = [
        load("task:copy?examples=50"),
        load("task:order?examples=51"),
        load("task:order?examples=50&seed=1"),
        load("task:order?examples=50&items=5"),
        load("task:order?examples=50", "validation"),
    ]
    assert len({first.key, *(other.key for other in others)}) == 6
    monkeypatch.setattr(tasks, "rows", None)
    again = load("task:order?examples=50&seed=0")
    assert again.key == first.key
    assert list(messages_of(again.dataset)) == list(messages_of(first.dataset))


def test_changing_how_tasks_are_made_makes_them_anew(tmp_path, monkeypatch):
    config = DataConfig(train="task:order?examples=5", validation="task:order", cache=None)
    key = load_examples(config, tmp_path, ["train"])["train"].key
    plain = Path.read_bytes
    changed = b"# changed\n"
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: plain(path) + changed * (path.name == "tasks.py")
    )
    assert load_examples(config, tmp_path, ["train"])["train"].key != key


def test_a_run_s_seed_draws_its_training_set_where_that_is_asked_for(tmp_path):
    address = "task:order?examples=40&seed=7"
    config = DataConfig(train=address, validation="task:order?examples=9", resample=True)
    assert config.of_seed(3).train == ("task:order?examples=40&seed=3",)
    drawn = [load_examples(config.of_seed(seed), tmp_path) for seed in (0, 0, 1)]
    said = [[list(messages_of(s[name].dataset)) for s in drawn] for name in ("train", "validation")]
    assert said[0][0] == said[0][1] != said[0][2]
    assert said[1][0] == said[1][1] == said[1][2]
    assert DataConfig(train=address).of_seed(3).train == address
    with pytest.raises(ValueError, match=r"data\.resample=true: only what is generated"):
        DataConfig(train="mine.jsonl", resample=True)
