import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.helpers import CONTEXT, PAD, VOCABULARY, random_decoder
from wherelm.batches.store import TokenStore
from wherelm.evaluation.extrapolation import FACTORS, extrapolate, table

TOKENIZER = SimpleNamespace(
    pad=PAD,
    bos=1,
    eos=2,
    user=3,
    assistant=4,
    system=5,
    byte_lengths=np.array([0] * 6 + [1] * (VOCABULARY - 6)),
)
STRIDE = CONTEXT // 2


def texts(*lengths, seed=0):
    generator = np.random.default_rng(seed)
    return TokenStore.from_lists(
        [(generator.integers(6, VOCABULARY, n + 1), [True] * (n + 1)) for n in lengths]
    )


def measured(model, store, factors=FACTORS, bos=False, budget=64):
    return extrapolate(model, store, TOKENIZER, budget, starts_with_bos=bos, factors=factors)


def nats_of(model, context, target):
    """-log p of one token after its context alone: a forward pass for each target."""
    tokens = torch.as_tensor(np.asarray(context, dtype=np.int64))[None]
    with torch.no_grad():
        logits = model(tokens, torch.arange(tokens.shape[1])[None])[0, -1]
    return float(-F.log_softmax(logits, -1)[int(target)])


def mean(values):
    return sum(values) / len(values)


# Two texts in which the longest factor fits three and two times, and one that is too short.
STORE = texts(8 * CONTEXT * 3 + 5, CONTEXT, 8 * CONTEXT * 2)
LONG = [STORE[0][0], STORE[2][0]]
STRETCH = 8 * CONTEXT


@pytest.fixture(scope="module", params=["none", "rope", "alibi", "fox"])
def model(request):
    return random_decoder(request.param)


@pytest.mark.parametrize("factor", [1, 1.5, 4])
def test_windows_equal_the_loss_of_each_target_after_what_its_window_holds_before_it(model, factor):
    length = round(factor * CONTEXT)
    expected = []
    for text in LONG:
        whole = (len(text) - 1) // STRETCH * STRETCH
        for at in range(1, whole + 1):
            # Windows begin anew in every stretch of eight contexts.
            begin = (at - 1) // STRETCH * STRETCH
            begin += (at - 1 - begin) // length * length
            expected.append(nats_of(model, text[begin:at], text[at]))
    entry = measured(model, STORE)["windows"][f"{factor:g}"]
    assert entry["targets"] == len(expected) == 5 * STRETCH
    assert entry["loss"] == pytest.approx(mean(expected), abs=1e-5)


@pytest.mark.parametrize("factor", [1, 1.25, 4])
def test_a_sliding_window_scores_every_target_once_with_the_most_context(model, factor):
    length = round(factor * CONTEXT)
    expected = []
    for text in LONG:
        for begin in range(0, len(text) - STRETCH, STRETCH):
            stretch = text[begin : begin + STRETCH + 1]
            # Window after window by the stride, the last one pulled back to the end.
            starts = [*range(0, STRETCH - length, STRIDE), STRETCH - length]
            for at in range(1, STRETCH + 1):
                first = next(s for s in starts if at <= s + length)
                expected.append(nats_of(model, stretch[first:at], stretch[at]))
    entry = measured(model, STORE)["sliding"][f"{factor:g}"]
    assert entry["stride"] == STRIDE
    assert entry["targets"] == len(expected) == 5 * STRETCH
    assert entry["loss"] == pytest.approx(mean(expected), abs=1e-5)


@pytest.mark.parametrize("factor", [1, 2, 8])
def test_fixed_targets_are_the_same_tokens_after_more_and_more_of_their_text(model, factor):
    length = round(factor * CONTEXT)
    expected = []
    for text in LONG:
        for end in range(STRETCH + 1, len(text) + 1, STRIDE):
            for at in range(end - STRIDE, end):
                expected.append(nats_of(model, text[end - length - 1 : at], text[at]))
    entry = measured(model, STORE)["fixed_targets"][f"{factor:g}"]
    assert entry["targets"] == len(expected)
    assert entry["loss"] == pytest.approx(mean(expected), abs=1e-5)


def test_the_three_protocols_are_told_apart():
    """Where they must differ they do, so the equalities above are not vacuous."""
    found = measured(random_decoder(), STORE)
    assert len({round(entries["1"]["loss"], 3) for entries in found.values()}) == 3
    # A window as long as a stretch has nowhere to slide to.
    assert found["sliding"]["8"]["loss"] == pytest.approx(found["windows"]["8"]["loss"], abs=1e-6)
    for entries in found.values():
        assert list(entries) == ["1", "1.25", "1.5", "2", "4", "8"]
        assert len({entry["targets"] for entry in entries.values()}) == 1


def test_what_stands_further_back_than_a_window_does_not_count():
    """A model that looks back four slots a layer gains nothing from a longer context."""
    model = random_decoder(window=4)
    entries = measured(model, STORE)["fixed_targets"]
    losses = [entry["loss"] for entry in entries.values()]
    assert losses[0] == pytest.approx(losses[-1], abs=1e-5)
    whole = [entry["loss"] for entry in measured(random_decoder(), STORE)["fixed_targets"].values()]
    assert abs(whole[0] - whole[-1]) > 1e-3


def test_windows_begin_with_bos_where_rows_of_training_did():
    model, text = random_decoder(), LONG[1]
    found = measured(model, TokenStore.from_lists([(text, [True] * len(text))]), bos=True)
    expected = []
    for at in range(1, 2 * STRETCH + 1):
        begin = (at - 1) // CONTEXT * CONTEXT
        expected.append(nats_of(model, [1, *text[begin + 1 : at]], text[at]))
    assert found["windows"]["1"]["loss"] == pytest.approx(mean(expected), abs=1e-5)


def test_only_learned_targets_count():
    generator = np.random.default_rng(3)
    ids, learned = generator.integers(6, VOCABULARY, 200), generator.random(200) < 0.3
    model = random_decoder()
    found = measured(model, TokenStore.from_lists([(ids, learned)]))
    assert found["windows"]["8"]["targets"] == int(learned[1 : STRETCH + 1].sum())


def test_a_scheme_with_a_limit_gives_no_figure_beyond_it_but_the_reason():
    found = measured(random_decoder("learned"), STORE)
    for name, entries in found.items():
        assert math.isfinite(entries["1"]["loss"]), name
        for factor in ("1.25", "8"):
            assert entries[factor]["loss"] is None
            assert "vectors for 16 positions" in entries[factor]["reason"]
    assert "vectors for 16 positions" in table(found)


def test_texts_that_are_too_short_are_said_and_the_rest_is_measured():
    found = measured(random_decoder(), texts(40, 33, 5))
    for entries in found.values():
        assert math.isfinite(entries["2"]["loss"])
        assert entries["4"]["loss"] is None
        assert entries["4"]["reason"] == "needs a text of 65 tokens; the longest has 41"
    nothing = measured(random_decoder(), texts(9, 5))
    assert all(e["loss"] is None for entries in nothing.values() for e in entries.values())
    assert "needs a text of 17 tokens; the longest has 10" in table(nothing)


def test_figures_do_not_depend_on_how_windows_are_batched():
    model = random_decoder("t5")
    for name, entries in measured(model, STORE, budget=1).items():
        for factor, entry in measured(model, STORE, budget=4096)[name].items():
            assert entry["loss"] == pytest.approx(entries[factor]["loss"], abs=1e-5)


def test_long_texts_cost_no_more_than_short_ones():
    found = measured(random_decoder(layers=1, heads=1, width=8), texts(60_000), factors=(1, 8))
    assert found["windows"]["8"]["targets"] == 128 * STRETCH
    assert found["fixed_targets"]["8"]["targets"] == 512 * STRIDE
