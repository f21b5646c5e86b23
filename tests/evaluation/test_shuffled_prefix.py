import math

import numpy as np
import pytest

from tests.evaluation.test_measures import Ids, conversations
from tests.helpers import random_decoder, row_logits
from wherelm.batches.store import TokenStore
from wherelm.evaluation.shuffled_prefix import prefixes, shuffled_prefix, table

STORE = conversations(40)
CONTROL = range(6)


def replies_by_hand(store):
    """(ids up to the end of a reply, where it starts) of every reply, reading token by token."""
    found = []
    for index in range(len(store)):
        ids = store[index][0].tolist()
        for start, token in enumerate(ids, start=1):
            if token == Ids.assistant and start < len(ids):
                rest = ids[start:]
                stop = start + (rest.index(Ids.eos) + 1 if Ids.eos in rest else len(rest))
                found.append((ids[:stop], start))
    return found


def nats_of(model, rows):
    """-log p of every token from `start` on, each after what stands before it, one at a time."""
    return np.array(
        [
            -float(row_logits(model, ids[:at])[-1].log_softmax(-1)[ids[at]])
            for ids, start in rows
            for at in range(start, len(ids))
        ]
    )


def test_the_losses_are_those_of_each_reply_read_token_by_token():
    model, rows = random_decoder(), replies_by_hand(STORE)
    found = shuffled_prefix(model, STORE, Ids, 64, seed=3)
    store = prefixes(STORE, Ids, seed=3)
    plain_N = nats_of(model, rows)
    shuffled_N = nats_of(model, [(store[i][0].tolist(), s) for i, (_, s) in enumerate(rows)])
    assert found["targets"] == len(plain_N)
    assert found["loss"] == pytest.approx(plain_N.mean(), abs=1e-5)
    assert found["shuffled_loss"] == pytest.approx(shuffled_N.mean(), abs=1e-5)
    assert found["change"] == found["shuffled_loss"] - found["loss"]
    assert abs(plain_N - shuffled_N).max() > 1e-2


def test_only_what_is_text_before_a_reply_changes_places():
    rows, store = replies_by_hand(STORE), prefixes(STORE, Ids, seed=0)
    assert len(rows) == len(store) > len(STORE)
    moved = 0
    for index, (ids, start) in enumerate(rows):
        shuffled, learned = store[index]
        assert shuffled[start:].tolist() == ids[start:]
        assert sorted(shuffled) == sorted(ids)
        control = np.isin(ids, CONTROL)
        assert (shuffled[control] == np.array(ids)[control]).all()
        assert learned.tolist() == [False] * start + [True] * (len(ids) - start)
        moved += shuffled.tolist() != ids
    assert moved > len(rows) / 2


def test_shuffling_depends_on_the_seed_alone():
    first, again, other = (prefixes(STORE, Ids, seed).ids for seed in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()


def test_one_layer_without_positions_loses_nothing_to_a_shuffle():
    one = shuffled_prefix(random_decoder("none", layers=1), STORE, Ids, 64)
    assert abs(one["change"]) < 1e-6
    for model in (random_decoder("none"), random_decoder("rope", layers=1)):
        assert abs(shuffled_prefix(model, STORE, Ids, 64)["change"]) > 1e-4


def test_a_text_without_replies_is_shuffled_in_its_first_half_and_scored_in_its_second():
    ids = [1, *range(6, 14), 2]
    store = prefixes(TokenStore.from_lists([(ids, [False, *[True] * 9])]), Ids, seed=0)
    shuffled, learned = store[0]
    assert shuffled[5:].tolist() == ids[5:]
    assert sorted(shuffled[:5]) == ids[:5]
    assert shuffled.tolist() != ids
    assert learned.tolist() == [False] * 5 + [True] * 5


def test_what_is_not_learned_is_not_scored():
    store = TokenStore.from_lists([([1, 3, 9, 8, 4, 7, 2], [False] * 7)])
    assert len(prefixes(store, Ids)) == 0
    with pytest.raises(ValueError, match="no learned target"):
        shuffled_prefix(random_decoder(), store, Ids, 64)


def test_the_table_shows_every_split():
    found = shuffled_prefix(random_decoder(), STORE, Ids, 64)
    assert math.isfinite(found["exact_match"])
    lines = table({"validation": found, "test": found}).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["validation", "test"]
