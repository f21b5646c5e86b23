import numpy as np
import pyarrow as pa
import pytest
import torch

from wherelm.batches.batch import collate, examples_of
from wherelm.batches.ledger import padding_ledger
from wherelm.batches.sampler import MIX, POOL, Sampler, cut, pack
from wherelm.batches.store import WIDTHS, TokenStore, widths_of

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
    sampler = Sampler(store.lengths, 2048, batching, seed=1)
    batches = sampler.batches_of(0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(store)))
    for batch in batches:
        parts = sampler.micro_batches(batch, 2048)
        slots = [collate(store, part, PAD).tokens_BT.numel() for part in parts]
        assert sum(slots) <= 2048
        assert batching == "padded" or max(slots) <= 2048 // MIX


def test_a_bucketed_batch_holds_short_and_long_examples():
    """Else every step would learn one length, which costs a per cent or more of the loss."""
    store = many(4 * POOL)
    batches = Sampler(store.lengths, 4096, "bucketed", 1).batches_of(0)
    ratios = [store.lengths[b].max() / store.lengths[b].min() for b in batches]
    assert np.median(ratios) > 2


def test_portions_that_fill_a_batch_exactly_share_it():
    batches = Sampler(np.full(64, 16), MIX * 64, "bucketed", seed=1).batches_of(0)
    assert [len(batch) for batch in batches] == [MIX * 4] * (16 // MIX)


def test_examples_longer_than_a_portion_stand_alone_and_keep_to_the_budget():
    lengths = np.array([900, 700, 600, 40, 30, 20] * 20)
    sampler = Sampler(lengths, 1024, "bucketed", seed=1)
    for batch in sampler.batches_of(0):
        parts = sampler.micro_batches(batch, 1024)
        assert sum(len(part) * lengths[part].max() for part in parts) <= 1024


def test_an_epoch_of_bucketed_batches_has_few_shapes():
    """Each costs a processor the compilation of its bfloat16 kernels."""
    store = many(2 * POOL)
    longest = store.lengths.max()
    assert longest > 100
    sampler = Sampler(store.lengths, 4096, "bucketed", 1)
    widths = [
        collate(store, part, PAD).tokens_BT.shape[1]
        for rows in sampler.batches_of(0)
        for part in sampler.micro_batches(rows, 4096)
    ]
    assert len(set(widths)) <= WIDTHS * np.log2(longest / WIDTHS) + WIDTHS
    assert max(widths) == longest


def test_widths_are_the_next_of_eight_steps_in_a_doubling_and_never_beyond_the_longest():
    lengths = np.array([1, 7, 8, 15, 16, 17, 31, 33, 64, 65, 97, 99])
    assert widths_of(lengths).tolist() == [1, 7, 8, 15, 16, 18, 32, 36, 64, 72, 99, 99]
    assert widths_of(np.array([], dtype=np.int64)).tolist() == []


def test_rows_are_padded_to_their_width_on_the_right_and_to_the_longest_on_the_left():
    store = TokenStore.from_lists([(range(n + 1), [True] * (n + 1)) for n in (5, 33, 100)])
    assert collate(store, [0, 1], PAD).tokens_BT.shape == (2, 36)
    assert collate(store, [0, 1], PAD, side="left").tokens_BT.shape == (2, 33)
    assert collate(store, [[0, 1]], PAD).tokens_BT.shape == (1, 38)


def test_bucketing_leaves_little_padding():
    store = many(4 * POOL)
    shares = {
        batching: padding_ledger(store, Sampler(store.lengths, 4096, batching, 1), 4096)
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


def test_a_store_from_a_table_equals_the_one_from_lists():
    parts = [STORE[i] for i in range(3)]
    columns = {"ids": [p[0].tolist() for p in parts], "learned": [p[1].tolist() for p in parts]}
    store = TokenStore.from_table(pa.table(columns | {"group": ["a", None, "b"]}))
    assert store.ids.tolist() == STORE.ids.tolist()
    assert store.learned.tolist() == STORE.learned.tolist()
    assert store.offsets.tolist() == STORE.offsets.tolist()
    assert store.groups.tolist() == ["a", None, "b"]


def test_a_batch_moves_whole():
    batch = collate(STORE, [0, 1], PAD).to(torch.device("cpu"))
    assert batch.side == "right"
    assert batch.tokens_BT.device.type == "cpu"


# Packing


def test_packed_rows_hold_several_examples_by_hand():
    batch = collate(STORE, [np.array([1, 2]), np.array([0])], PAD)
    assert batch.side == "packed"
    assert batch.tokens_BT.tolist() == [[1, 5, 1, 6, 6], [1, 7, 8, 9, 0]]
    assert batch.targets_BT.tolist() == [[5, 2, 6, 6, 2], [7, 8, 9, 2, 0]]
    assert batch.key_mask_BT.tolist() == [[True] * 5, [True] * 4 + [False]]
    assert batch.loss_mask_BT.tolist() == [
        [True, True, True, False, True],
        [False, True, True, True, False],
    ]
    assert batch.positions_BT.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]
    assert batch.segments_BT.tolist() == [[1, 1, 2, 2, 2], [1, 1, 1, 1, 0]]
    assert batch.first == 0


def test_rows_of_one_example_each_are_an_ordinary_batch():
    rows, plain = collate(STORE, [np.array([0]), np.array([1])], PAD), collate(STORE, [0, 1], PAD)
    assert rows.side == "right"
    assert torch.equal(rows.positions_BT, plain.positions_BT)
    assert torch.equal(rows.tokens_BT, plain.tokens_BT)


def test_an_example_keeps_its_number_wherever_it_stands_and_an_empty_slot_has_0():
    plain = [int(collate(STORE, [i], PAD, key=5).keys_BT[0, 0]) for i in range(3)]
    packed = collate(STORE, [np.array([1, 2]), np.array([0])], PAD, key=5)
    assert packed.keys_BT[0].tolist() == [plain[1]] * 2 + [plain[2]] * 3
    assert packed.keys_BT[1].tolist() == [plain[0]] * 4 + [0]
    keys = {int(k) for key in (0, 1) for k in collate(STORE, range(3), PAD, key=key).keys_BT[:, 0]}
    assert len(keys) == 6
    assert min(keys) > 0


def test_packing_puts_an_example_into_the_fullest_row_that_has_room():
    lengths = np.array([6, 5, 4, 3, 2])
    rows = pack(lengths, np.arange(5), 10)
    assert sorted(sorted(lengths[row].tolist()) for row in rows) == [[2, 3, 5], [4, 6]]
    longer = pack(np.array([3, 12, 10]), np.arange(3), 10)
    assert sorted(row.tolist() for row in longer) == [[0], [1], [2]]


def test_packing_stays_within_the_capacity_and_wastes_little():
    lengths = many().lengths
    rows = pack(lengths, np.arange(len(lengths)), 128)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths)))
    used = np.array([lengths[row].sum() for row in rows])
    assert used.max() <= 128
    assert len(rows) <= 1.01 * np.ceil(lengths.sum() / 128)


def packed_sampler(lengths, budget=2048, **state):
    return Sampler(lengths, budget, "packed", seed=1, capacity=128, **state)


def test_a_packed_epoch_holds_every_example_once_within_the_budget():
    lengths = many().lengths
    batches = packed_sampler(lengths).batches_of(0)
    assert sorted(np.concatenate([examples_of(b) for b in batches]).tolist()) == list(range(5000))
    assert {len(batch) for batch in batches[:-1]} == {2048 // 128}
    assert max(lengths[row].sum() for batch in batches for row in batch) <= 128


def test_packed_rows_come_in_an_order_that_their_lengths_do_not_tell():
    """Best fit makes them from the longest example to the shortest."""
    lengths = many().lengths
    longest = [lengths[row].max() for rows in packed_sampler(lengths).batches_of(0) for row in rows]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.15


def test_the_state_of_a_packed_sampler_is_seed_epoch_and_position():
    lengths = many(300).lengths
    stream = iter(packed_sampler(lengths))
    seen = [[row.tolist() for row in next(stream)] for _ in range(12)]
    first = packed_sampler(lengths)
    stream = iter(first)
    for _ in range(7):
        next(stream)
    second = iter(packed_sampler(lengths, epoch=first.epoch, position=first.position))
    assert [[row.tolist() for row in next(second)] for _ in range(5)] == seen[7:]


@pytest.mark.parametrize("batching", ["bucketed", "padded", "packed"])
def test_micro_batches_are_the_batch_in_portions_of_the_budget(batching):
    store = many(500)
    sampler = Sampler(store.lengths, 2048, batching, seed=1, capacity=128)
    rows = sampler.batches_of(0)[0]
    parts = sampler.micro_batches(rows, 512)
    assert len(parts) > 1
    together = np.concatenate([examples_of(part) for part in parts])
    assert together.tolist() == examples_of(rows).tolist()
    for part in parts:
        assert collate(store, part, PAD).tokens_BT.numel() <= 512


@pytest.mark.parametrize("batching", ["bucketed", "padded", "packed"])
@pytest.mark.parametrize(("budget", "shape"), [(2048, None), (512, None), (2048, (16, 128))])
def test_the_ledger_counts_the_empty_slots_of_the_batches_themselves(batching, budget, shape):
    store = many(2000)
    if shape is not None and batching != "packed":
        pytest.skip("only packed rows have one shape")
    sampler = Sampler(store.lengths, 2048, batching, seed=1, capacity=128)
    parts = [p for rows in sampler.batches_of(0) for p in sampler.micro_batches(rows, budget)]
    masks = [collate(store, rows, PAD, shape=shape).key_mask_BT for rows in parts]
    empty = sum(int((~mask).sum()) for mask in masks)
    ledger = padding_ledger(store, sampler, budget, shape)
    assert ledger["padding"] == empty
    assert ledger["padding_share"] == round(empty / sum(mask.numel() for mask in masks), 4)


def test_packing_leaves_less_padding_than_padded_rows():
    store = many(2000)
    shares = [
        padding_ledger(store, Sampler(store.lengths, 2048, batching, 1, capacity=128), 2048)[
            "padding_share"
        ]
        for batching in ("packed", "padded")
    ]
    assert shares[0] < 0.02 < shares[1]


def test_a_fixed_shape_fills_up_with_empty_rows_and_slots_and_changes_nothing_else():
    plain, fixed = collate(STORE, [0, 1], PAD), collate(STORE, [[0], [1]], PAD, shape=(4, 6))
    assert fixed.side == "packed"
    # Of one shape whatever is learned first, so that one graph reads all batches.
    assert collate(STORE, [0], PAD).first == 1
    assert collate(STORE, [[0]], PAD, shape=(4, 6)).first == 0
    for name in ("tokens_BT", "targets_BT", "key_mask_BT", "loss_mask_BT", "segments_BT"):
        values = getattr(fixed, name)
        assert values.shape == (4, 6)
        assert torch.equal(values[:2, :4], getattr(plain, name)), name
        assert not values[2:].any(), name
        assert not values[:, 4:].any(), name
    assert fixed.positions_BT[:2].tolist() == [[0, 1, 2, 3, 0, 0], [0, 1, 0, 0, 0, 0]]


def test_offsets_keep_an_example_together_and_reach_all_of_the_room():
    starts = set()
    for key in range(200):
        batch = collate(STORE, [0, 1, 2], PAD, key=key, room=10)
        for positions, real in zip(batch.positions_BT, batch.key_mask_BT, strict=True):
            own = positions[real]
            assert (own.diff() == 1).all()
            assert own[-1] < 10
        starts.add(int(batch.positions_BT[0, 0]))
    assert starts == set(range(7))  # four inputs in ten places
    again = collate(STORE, [0, 1, 2], PAD, key=199, room=10)
    assert torch.equal(again.positions_BT, batch.positions_BT)


def test_an_example_longer_than_the_room_starts_at_zero():
    assert collate(STORE, [0, 2], PAD, key=5, room=3).positions_BT[0].tolist() == [0, 1, 2, 3]
