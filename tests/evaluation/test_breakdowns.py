import json
from dataclasses import replace

import numpy as np
import pytest

from tests.evaluation.test_measures import Ids, conversations
from tests.helpers import random_decoder
from wherelm.batches.store import TokenStore
from wherelm.evaluation.breakdowns import breakdowns, edges, save_examples, text, turns
from wherelm.evaluation.measures import Scores, exact_matches, measures, replies, score

STORE = replace(
    conversations(60), groups=np.array([[None, "2", "10", "b"][i % 4] for i in range(60)])
)


@pytest.fixture(scope="module")
def scores():
    found = score(random_decoder(), STORE, Ids.pad, 64)
    # A random model gets no reply right.
    right = np.random.default_rng(0).random(len(found.correct_E)) < 0.8
    return Scores(found.scored_E, found.nats_E, right)


def counted_by_hand(scores, label):
    """{label: (targets, mean nats)} with a loop over every target; label(example, place in it)."""
    sums = {}
    for index in range(len(STORE)):
        for place in range(len(STORE[index][0])):
            at = STORE.offsets[index] + place
            if scores.scored_E[at]:
                sums.setdefault(label(index, place), []).append(scores.nats_E[at])
    sums.pop(None, None)
    return {key: (len(nats), sum(nats) / len(nats)) for key, nats in sums.items()}


def same(entries, expected):
    assert len(entries) == len(expected) > 1
    for entry, (key, (targets, loss)) in zip(entries, sorted(expected.items()), strict=True):
        assert entry["targets"] == targets, (entry, key)
        assert entry["loss"] == pytest.approx(loss, abs=1e-9)


def bin_of(value):
    return max(start for start in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24) if start <= value)


def turn_by_hand(index, place):
    ids = STORE[index][0].tolist()
    return ids[:place].count(Ids.assistant) or None


def test_losses_by_position_length_and_turn_are_those_of_a_loop(scores):
    found = breakdowns(scores, STORE, Ids)
    same(found["position"], counted_by_hand(scores, lambda i, place: bin_of(place - 1)))
    same(found["length"], counted_by_hand(scores, lambda i, place: bin_of(len(STORE[i][0]))))
    same(found["turn"], counted_by_hand(scores, turn_by_hand))
    assert [entry["from"] for entry in found["turn"]] == [1, 2]


def test_replies_by_group_turn_and_length_are_those_of_a_loop(scores):
    found = breakdowns(scores, STORE, Ids)
    hits = {"group": {}, "turn": {}, "length": {}}
    for index in range(len(STORE)):
        ids = STORE[index][0].tolist()
        starts = [i + 1 for i, token in enumerate(ids) if token == Ids.assistant]
        for turn, start in enumerate(starts, start=1):
            if Ids.eos not in ids[start:]:
                continue
            stop = ids.index(Ids.eos, start) + 1
            right = scores.correct_E[STORE.offsets[index] :][start:stop].all()
            keys = {"group": STORE.groups[index], "turn": turn, "length": bin_of(len(ids))}
            for name, key in keys.items():
                hits[name].setdefault(key, []).append(bool(right))
    hits["group"].pop(None)
    assert [entry["group"] for entry in found["group"]] == ["2", "10", "b"]
    for name, expected in hits.items():
        entries = {entry.get("group", entry.get("from")): entry for entry in found[name]}
        for key, matches in expected.items():
            assert entries[key]["replies"] == len(matches)
            assert entries[key]["exact_match"] == pytest.approx(np.mean(matches))
    assert 0 < found["group"][0]["exact_match"] < 1


def test_each_breakdown_adds_up_to_the_whole(scores):
    whole, found = measures(scores, STORE, Ids), breakdowns(scores, STORE, Ids)
    for name in ("position", "length", "turn"):
        assert sum(entry["targets"] for entry in found[name]) == whole["targets"]
        nats = sum(entry["targets"] * entry["loss"] for entry in found[name])
        assert nats / whole["targets"] == pytest.approx(whole["loss"])
    assert sum(entry["replies"] for entry in found["turn"]) == whole["replies"]
    assert json.loads(json.dumps(found)) == found


def test_bins_are_the_same_whatever_the_data_and_hold_every_value():
    assert edges(20).tolist() == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
    for largest in range(1, 200):
        assert edges(largest)[-1] > largest
        assert (edges(largest) == edges(1000)[: len(edges(largest))]).all()


def test_what_a_user_says_belongs_to_no_turn_even_where_it_is_learned():
    rows = [([1, 3, 9, 4, 8, 2, 3, 9, 9, 4, 7, 2], [True] * 12), ([1, 7, 8, 2], [True] * 4)]
    store = TokenStore.from_lists(rows)
    assert turns(store, Ids).tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0]


def test_texts_have_neither_turns_nor_groups_and_names_of_rows_are_no_groups(scores):
    store = TokenStore.from_lists([([1, 7, 8, 9, 2], [False, *[True] * 4])] * 3)
    found = breakdowns(score(random_decoder(), store, Ids.pad, 64), store, Ids)
    assert list(found) == ["position", "length"]
    assert "exact_match" not in found["length"][0]
    named = replace(STORE, groups=np.array([f"row {i}" for i in range(60)] * 2)[:60])
    assert "group" in breakdowns(scores, named, Ids)
    many = conversations(70)
    many = replace(many, groups=np.array([f"row {i}" for i in range(70)]))
    assert "group" not in breakdowns(score(random_decoder(), many, Ids.pad, 64), many, Ids)


def test_the_scores_of_examples_are_kept_in_their_order(scores, tmp_path):
    save_examples(tmp_path, "validation", scores, STORE, Ids)
    kept = np.load(tmp_path / "scores-validation.npz")
    whole = measures(scores, STORE, Ids)
    assert kept["nats"].sum() / kept["targets"].sum() == pytest.approx(whole["loss"], rel=1e-5)
    assert kept["exact"].sum() / kept["replies"].sum() == pytest.approx(whole["exact_match"])
    here = slice(STORE.offsets[7], STORE.offsets[8])
    assert kept["nats"][7] == pytest.approx(scores.nats_E[here].sum(), rel=1e-6)
    own = np.unique(replies(STORE, Ids)[here])
    numbers = np.unique(replies(STORE, Ids)[replies(STORE, Ids) >= 0])
    matches = dict(zip(numbers, exact_matches(scores, replies(STORE, Ids)), strict=True))
    assert kept["exact"][7] == sum(matches[n] for n in own if n >= 0)


def test_the_text_shows_every_bin(scores):
    found = breakdowns(scores, STORE, Ids)
    lines = text("test", found).splitlines()
    assert len(lines) == len(found) + sum(map(len, found.values()))
    assert any(line.split()[0] == "8-11" for line in lines)
