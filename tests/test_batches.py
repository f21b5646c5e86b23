import numpy as np
import pytest
import torch

from wherelm.batches import POOL, Sampler, TokenStore, collate, cut, padding_ledger

PAD = 0
STORE = TokenStore.from_lists(
    [
        ([1, 7, 8, 9, 2], [False, False, True, True, True]),
        ([1, 5, 2], [False, True, True]),
        ([1, 6, 6, 2], [False, True, False, True]),
    ]
)


def many(examples=5000, seed=0):
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(3, 0.7, examples).astype(int), 2, 128)
    return TokenStore.from_lists([([1] * n, [True] * n) for n in lengths])


def test_a_batch_is_shifted_and_padded_by_hand():
    batch = collate(STORE, [0, 1], PAD)
    assert batch.tokens_BT.tolist() == [[1, 7, 8, 9], [1, 5, 0, 0]]
    assert batch.targets_BT.tolist() == [[7, 8, 9, 2], [5, 2, 0, 0]]
    assert batch.key_mask_BT.tolist() == [[True] * 4, [True, True, False, False]]
    assert batch.loss_mask_BT.tolist() == [[False, True, True, True], [True, True, False, False]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3]]
    assert batch.segments_BT.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.targets == 5


def test_left_padding_keeps_every_position_of_the_message():
    batch = collate(STORE, [0, 1], PAD, side="left")
    assert batch.tokens_BT.tolist() == [[1, 7, 8, 9], [0, 0, 1, 5]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    assert batch.loss_mask_BT.tolist() == [[False, True, True, True], [False, False, True, True]]


def test_masks_come_from_lengths_and_not_from_ids():
    store = TokenStore.from_lists(
        [([1, 0, 0, 2], [False, True, True, True]), ([1] * 6, [True] * 6)]
    )
    batch = collate(store, [0, 1], PAD)
    assert batch.key_mask_BT[0].tolist() == [True, True, True, False, False]
    assert batch.loss_mask_BT[0].tolist() == [True, True, True, False, False]


def test_cut_stays_within_the_budget_and_keeps_the_order():
    lengths = np.array([3, 9, 2, 2, 2, 30, 1])
    groups = cut(lengths, np.arange(7), 18)
    assert np.concatenate(groups).tolist() == list(range(7))
    assert [len(g) for g in groups] == [2, 3, 1, 1]
    assert all(len(g) * lengths[g].max() <= 18 for g in groups if len(g) > 1)


@pytest.mark.parametrize("batching", ["bucketed", "padded"])
def test_an_epoch_holds_every_example_once(batching):
    store = many()
    batches = Sampler(store.lengths, 2048, batching, seed=1).batches_of(0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(store)))
    assert all(len(b) * store.lengths[b].max() <= 2048 for b in batches)


def test_bucketing_leaves_little_padding():
    store = many(4 * POOL)
    shares = {
        batching: padding_ledger(store, Sampler(store.lengths, 4096, batching, 1).batches_of(0))
        for batching in ("bucketed", "padded")
    }
    assert shares["bucketed"]["padding_share"] < 0.05 < shares["padded"]["padding_share"]


def test_the_state_of_the_sampler_is_seed_epoch_and_position():
    lengths = many(300).lengths
    whole = Sampler(lengths, 512, "bucketed", seed=3)
    stream = iter(whole)
    seen = [next(stream) for _ in range(70)]
    assert whole.epoch >= 1
    for stop in (1, 20, len(whole.batches_of(0)), 60):
        first = Sampler(lengths, 512, "bucketed", seed=3)
        stream = iter(first)
        for _ in range(stop):
            next(stream)
        second = iter(Sampler(lengths, 512, "bucketed", 3, first.epoch, first.position))
        for expected in seen[stop:]:
            assert next(second).tolist() == expected.tolist()


def test_epochs_and_seeds_differ_in_order():
    lengths = many(300).lengths
    orders = [
        np.concatenate(Sampler(lengths, 512, "bucketed", seed).batches_of(epoch)).tolist()
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


def test_trained_positions_count_learned_targets_where_they_are_predicted():
    counts = STORE.trained_positions()
    by_hand = np.zeros(4, dtype=int)
    for index in range(len(STORE)):
        batch = collate(STORE, [index], PAD)
        by_hand[: batch.loss_mask_BT.shape[1]] += batch.loss_mask_BT[0].numpy()
    assert counts.tolist() == by_hand.tolist()


def test_a_store_from_a_dataset_equals_the_one_from_lists():
    datasets = pytest.importorskip("datasets")
    rows = [{"ids": STORE[i][0].tolist(), "learned": STORE[i][1].tolist()} for i in range(3)]
    store = TokenStore.from_dataset(datasets.Dataset.from_list(rows))
    assert store.ids.tolist() == STORE.ids.tolist()
    assert store.learned.tolist() == STORE.learned.tolist()
    assert store.offsets.tolist() == STORE.offsets.tolist()


def test_a_batch_moves_whole():
    batch = collate(STORE, [0, 1], PAD).to(torch.device("cpu"))
    assert batch.side == "right"
    assert batch.tokens_BT.device.type == "cpu"
