from __future__ import annotations

import re

import pytest
import torch

from tests.helpers import (
    CONTEXT,
    alone_logits,
    difference,
    inputs,
    packed,
    padded,
    ragged_store,
    random_decoder,
    row_logits,
)
from tests.oracle import NaiveDecoder
from tests.schemes.conftest import scheme
from tests.test_config import composed
from wherelm.batches.batch import collate
from wherelm.config import run_config
from wherelm.schemes import SCHEMES
from wherelm.schemes.patterns import Layer


def entries(*pairs):
    """A pattern of (scheme, window)."""
    return tuple(Layer(SCHEMES[name].Config(), window) for name, window in pairs)


def test_a_pattern_of_rope_alone_is_rope():
    tokens = inputs(ragged_store(), 0)
    options = {"pattern": entries(("rope", None), ("rope", None), ("rope", None))}
    hybrid = row_logits(random_decoder("hybrid", options), tokens)
    assert torch.equal(hybrid, row_logits(random_decoder("rope"), tokens))


def test_a_pattern_repeats_over_the_layers_and_has_a_window_for_each_entry():
    options = {"pattern": entries(("rope", 5), ("none", None), ("alibi", 3))}
    model = random_decoder("hybrid", options, layers=5, window=7)
    kinds = [type(model.scheme.for_layer(layer)).__name__ for layer in range(5)]
    assert kinds == ["Rope", "PositionScheme", "Alibi", "Rope", "PositionScheme"]
    assert [model.window(layer) for layer in range(5)] == [5, 7, 3, 5, 7]


def test_the_default_pattern_is_three_layers_of_rope_and_one_without():
    model = random_decoder("hybrid", layers=8)
    kinds = [type(model.scheme.for_layer(layer)).__name__ for layer in range(8)]
    assert kinds == ["Rope", "Rope", "Rope", "PositionScheme"] * 2


def test_a_pattern_makes_parameters_for_the_layers_that_read_them_alone():
    options = {"pattern": entries(("rope", None), ("fox", None), ("t5", None))}
    names = [name for name, _ in random_decoder("hybrid", options).scheme.named_parameters()]
    assert names == ["schemes.1.layers.0.weight_HD", "schemes.1.layers.0.bias_H"]
    assert "the last entries have no layer" in random_decoder("hybrid").scheme.warnings()[0]
    nested = {"pattern": (entries(("rope", None))[0], Layer(SCHEMES["hybrid"].Config(**options)))}
    model = random_decoder("hybrid", nested, layers=6)
    kinds = [type(model.scheme.for_layer(layer)).__name__ for layer in range(6)]
    assert kinds == ["Rope", "Rope", "Rope", "ForgetGate", "Rope", "T5"]


def test_a_window_of_a_pattern_that_hides_nothing_at_the_trained_length_is_told():
    for window, told in ((CONTEXT - 1, 0), (CONTEXT, 1)):
        pattern = {"pattern": entries(("rope", window), ("none", None))}
        lines = random_decoder("hybrid", pattern).scheme.warnings()
        assert sum(f"position.pattern.window={window} hides" in line for line in lines) == told


def test_rnope_swa_has_windows_where_it_rotates_and_none_where_it_does_not():
    position = run_config(composed("position=rnope_swa")).position
    model = random_decoder("hybrid", {"pattern": position.pattern}, layers=8)
    kinds = [model.scheme.for_layer(layer).config.name for layer in range(8)]
    assert kinds == ["rope", "rope", "rope", "none"] * 2
    assert [model.window(layer) for layer in range(8)] == [32, 32, 32, None] * 2


def test_a_window_hides_what_stands_farther_back():
    """One layer: a token before the window changes nothing, the first one within it does."""
    for options in ({"window": 4}, {"window": None}):
        model = random_decoder("rope", layers=1, **options)
        tokens = inputs(ragged_store(), 0)
        before = row_logits(model, tokens)[-1]
        for slot in range(len(tokens)):
            changed = tokens.clone()
            changed[slot] = (changed[slot] + 5) % 20
            change = difference(row_logits(model, changed)[-1], before)
            within = options["window"] is None or slot >= len(tokens) - 4
            assert change > 1e-4 if within else change == 0, slot


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hybrid", {"pattern": ()}, "position.pattern=[]: expected a list"),
        ("randomised", {"scheme": SCHEMES["randomised"].Config()}, "expected another scheme"),
        ("t5", {"buckets": 7}, "position.buckets=7: expected an even number"),
        ("t5", {"max_distance": 16}, "position.max_distance=16: expected more than half"),
        ("kerple", {"form": "cubic"}, "position.form=cubic: expected one of log, power"),
        ("cope", {"positions": 1}, "position.positions=1: expected 2 or more"),
        ("key_offset", {"fraction": 1.5}, "position.fraction=1.5: expected 0 to 1"),
        ("fire", {"inner": 0}, "position.inner=0: expected 1 or more"),
        ("drope", {"drop_at": 2.0}, "position.drop_at=2.0: expected a share, 0 to 1"),
        ("pope", {"base": 1.0}, "position.base=1.0: expected a number above 1"),
        ("sinusoidal", {"base": 0.5}, "position.base=0.5: expected a number above 1"),
        ("rope", {"p": 1.5}, "position.p=1.5: expected 0 to 1"),
        (
            "rope",
            {"scaling": "pi"},
            "expected one of null, linear, ntk, yarn, llama3, dynamic, self_ext",
        ),
        ("rope", {"factor": 2.0}, "position.factor=2.0 has nothing to act on"),
        ("rope", {"scaling": "ntk", "factor": 0.5}, "position.factor=0.5: expected 1 or more"),
    ],
)
def test_a_wrong_setting_is_one_line_that_says_what_would_be_accepted(name, options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        SCHEMES[name].Config(**options)
    assert "\n" not in str(error.value)


def test_a_window_and_a_pattern_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"window=0: expected 1 or more, or null"):
        entries(("rope", 0))
    with pytest.raises(ValueError, match=r"put the pattern into position\.scheme"):
        SCHEMES["hybrid"].Config(pattern=entries(("randomised", None)))


def placed(one, lengths: list[int], keys: list[int]) -> list[list[int]]:
    """The positions of examples of these lengths and numbers, padded to one rectangle."""
    slots = torch.arange(max(lengths))
    real_BT = slots < torch.tensor(lengths)[:, None]
    keys_BT = torch.where(real_BT, torch.tensor(keys)[:, None], 0)
    placed_BT = one.place(slots[None], keys_BT)
    return [row[mask].tolist() for row, mask in zip(placed_BT, real_BT, strict=True)]


def test_random_positions_are_a_sorted_subset_below_their_limit():
    one = scheme("randomised", length=40)
    subsets = placed(one, [16] * 50, list(range(1, 51)))
    for subset in subsets:
        assert subset == sorted(set(subset))
        assert 0 <= subset[0] < subset[-1] < 40
    assert set().union(*subsets) == set(range(40))
    assert len({tuple(subset) for subset in subsets}) == 50


def test_random_positions_depend_on_the_example_and_not_on_its_batch():
    one = scheme("randomised")
    together = placed(one, [3, 16, 40], [7, 8, 9])
    assert together == [placed(one, [n], [k])[0] for n, k in ((3, 7), (16, 8), (40, 9))]


def test_short_rows_train_all_random_positions_as_long_ones_do():
    """A row of n has n of the whole range, so its own ends lie anywhere in it: (Ruoss et al.)."""
    one = scheme("randomised", trained=4, length=64)
    for length in (1, 4, 16):
        subsets = placed(one, [length] * 2000, list(range(1, 2001)))
        assert set().union(*subsets) == set(range(64))
        # The last of n is the largest of them: (n 65 / (n + 1)) - 1 on average.
        last = sum(subset[-1] for subset in subsets) / len(subsets)
        assert last == pytest.approx(length * 65 / (length + 1) - 1, abs=2)


def test_the_range_of_random_positions_follows_the_trained_length_and_holds_every_row():
    assert scheme("randomised", context=64, trained=20).length == 160
    assert scheme("randomised", context=64, trained=5).length == 64
    assert scheme("randomised", trained=5).inner.shape.trained == 40


def test_random_positions_of_a_batch_follow_epoch_and_example_in_every_form():
    store, one = ragged_store(), scheme("randomised")

    def of(batch):
        placed_BT = one.place(batch.positions_BT, batch.keys_BT)
        mask_BT = batch.key_mask_BT
        return {int(batch.keys_BT[b, t]): [] for b, t in mask_BT.nonzero().tolist()} | {
            int(key): placed_BT[mask_BT & (batch.keys_BT == key)].tolist()
            for key in batch.keys_BT[mask_BT].unique()
        }

    forms = (
        padded(store, range(4)),
        padded(store, range(4), "left"),
        packed(store, [[0, 1], [2, 3]]),
    )
    first = of(forms[0])
    assert len(first) == 4
    assert all(of(form) == first for form in forms[1:])
    again, other = (collate(store, [0], 0, key=key) for key in (0, 1))
    assert of(again).items() <= first.items()
    assert not set(of(other)) & set(first)


def test_an_example_at_its_own_random_positions_agrees_with_the_equations():
    model, store = random_decoder("randomised", dtype=torch.float64), ragged_store()
    for index in range(len(store)):
        key = int(padded(store, [index]).keys_BT[0, 0])
        expected = NaiveDecoder(model).logits(inputs(store, index).tolist(), key=key)
        assert difference(alone_logits(model, store, index), torch.from_numpy(expected)) <= 1e-6
    other = row_logits(model, inputs(store, 0))
    assert difference(alone_logits(model, store, 0), other) > 1e-3


def test_random_positions_say_their_limit_and_the_fix_in_one_line():
    one = scheme("randomised", length=40)
    one.place(torch.arange(40)[None])
    with pytest.raises(ValueError, match=r"from 40 positions .* position\.length=41") as error:
        one.place(torch.arange(41)[None])
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"position\.length=15: expected at least"):
        scheme("randomised", length=15)
