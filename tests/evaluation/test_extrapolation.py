import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.helpers import CONTEXT, PAD, VOCABULARY, random_decoder
from wherelm.batches.store import TokenStore
from wherelm.evaluation.extrapolation import extrapolate, ratio_sums, stretches, table
from wherelm.run_folder import EXAMPLES, FACTORS, figure_of, read_scores

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


# Two texts in which the longest factor fits two times each, and one that is too short.
STORE = texts(8 * CONTEXT * 2 + 5, CONTEXT, 8 * CONTEXT * 2)
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
    assert entry["targets"] == len(expected) == 4 * STRETCH
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
    assert entry["targets"] == len(expected) == 4 * STRETCH
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


def test_one_very_long_text_does_not_set_the_table_alone():
    """Texts take turns, and none gives more stretches than all others together."""
    long, short = 200 * STRETCH, [2 * STRETCH + n for n in range(5)]
    store = texts(long, *short)
    found = stretches(store, STRETCH, STRETCH, 128)
    document = np.searchsorted(store.offsets, [s.start for s in found], side="right") - 1
    assert np.bincount(document).tolist() == [10, 2, 2, 2, 2, 2]
    # Those of the long text lie all over it.
    own = [s.start for s in found if s.stop <= store.offsets[1]]
    assert own[0] == 0
    assert own[-1] > long - 2 * STRETCH
    assert max(np.diff(own)) < long / 8
    few = stretches(store, STRETCH, STRETCH, 8)
    document = np.searchsorted(store.offsets, [s.start for s in few], side="right") - 1
    assert np.bincount(document).tolist() == [2, 2, 1, 1, 1, 1]
    # Of more texts than stretches they are drawn evenly; a single one gives all.
    many = stretches(texts(*[STRETCH] * 40), STRETCH, STRETCH, 4)
    assert [s.start // (STRETCH + 1) for s in many] == [0, 13, 26, 39]
    assert len(stretches(texts(long), STRETCH, STRETCH, 128)) == 128


def test_every_entry_says_what_context_its_targets_had_and_from_how_many_documents():
    found = measured(random_decoder(layers=1), STORE)
    assert list(found) == ["fixed_targets", "windows", "sliding"]
    for factor in FACTORS:
        length = round(factor * CONTEXT)
        fixed, cut, slid = (found[name][f"{factor:g}"] for name in found)
        assert fixed["context"] == {
            "mean": length - (STRIDE - 1) / 2,
            "least": length - STRIDE + 1,
            "most": length,
        }
        # Windows begin in the text of a stretch, the last of which may be shorter.
        sizes = [min(length, STRETCH - start) for start in range(0, STRETCH, length)]
        every = [before for size in sizes for before in range(1, size + 1)]
        assert cut["context"] == {"mean": mean(every), "least": 1, "most": length}
        assert slid["context"]["mean"] >= cut["context"]["mean"]
        assert {entry["documents"] for entry in (fixed, cut, slid)} == {2}
    # A window as long as a stretch slides no more, and its targets have no more context.
    assert found["sliding"]["8"]["context"] == found["windows"]["8"]["context"]
    out = table(found)
    assert out.splitlines()[1].startswith("fixed_targets (headline)")
    assert "121-128" in out
    assert "of 2 documents" in out


def test_lengths_are_multiples_of_what_training_held_and_not_of_the_context():
    found = measured(random_decoder("alibi", layers=1, trained=6), STORE, factors=(1, 2))
    for entries in found.values():
        assert [entry["length"] for entry in entries.values()] == [6, 12]
        assert entries["1"]["untrained_reads"] == 0.0
        assert entries["2"]["untrained_reads"] > 0
    # Of the 78 pairs in 12 tokens, 21 lie 6 or more apart.
    assert found["fixed_targets"]["2"]["untrained_reads"] == pytest.approx(21 / 78)
    assert "26.9%" in table(found)


def test_the_sums_of_stretches_give_the_figures_back(tmp_path):
    """So a bootstrap over stretches is one of the figure itself."""
    model = random_decoder()
    found = extrapolate(model, STORE, TOKENIZER, 64, starts_with_bos=False, folder=tmp_path)
    at_1 = {name: entries["1"]["loss"] for name, entries in found.items()}
    for name, entries in found.items():
        for factor, entry in entries.items():
            metric = f"extrapolation.{name}.{factor}"
            sums = read_scores(tmp_path, metric)
            assert sums["targets"].sum() == entry["targets"]
            assert entry["ratio_to_1"] == pytest.approx(entry["loss"] / at_1[name], rel=1e-6)
            for figure in ("loss", "ratio_to_1"):
                summary = {"status": "complete", "extrapolation": found}
                value = figure_of(summary, f"{metric}.{figure}")
                assert value == entry[figure]
                key, weights = EXAMPLES[figure]
                assert sums[key].sum() / sums[weights].sum() == pytest.approx(value, rel=1e-5)
    assert set(found["fixed_targets"]["1.25"]) > {"loss", "ratio_to_1", "bits_per_byte"}
    assert found["fixed_targets"]["8"]["ratio_to_1"] != pytest.approx(1, abs=1e-3)


def test_sums_of_a_ratio_vary_over_stretches_as_the_ratio_itself_does():
    """By the bootstrap of the quotient of two sums."""
    generator = np.random.default_rng(0)
    targets_S = generator.integers(20, 40, 200)
    at_1_S = targets_S * generator.gamma(20, 0.1, 200)
    nats_S = at_1_S * generator.normal(1.1, 0.1, 200)
    sums_S = ratio_sums(nats_S, at_1_S, targets_S)
    assert sums_S.sum() / targets_S.sum() == pytest.approx(nats_S.sum() / at_1_S.sum())
    drawn = [generator.integers(0, 200, 200) for _ in range(4000)]
    exact = np.std([nats_S[i].sum() / at_1_S[i].sum() for i in drawn])
    linear = np.std([sums_S[i].sum() / targets_S[i].sum() for i in drawn])
    assert linear == pytest.approx(exact, rel=0.05)
