"""What scores are multiplied by beside 1/sqrt(K).

Shapes: B rows, T slots, H heads, V vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers import (
    CONTEXT,
    VOCABULARY,
    alone_logits,
    difference,
    packed,
    padded,
    ragged_store,
    random_decoder,
    real_logits,
    row_logits,
)
from tests.sampling.test_stepper import NEW, read_then_step
from wherelm.evaluation.heads import attention_weights
from wherelm.model.attention import SCORE_SCALES, log_sharpness
from wherelm.model.decoder import ModelConfig, initialize

ROW = torch.arange(CONTEXT) % VOCABULARY


def gains(model) -> list[torch.Tensor]:
    return [p for name, p in model.named_parameters() if name.endswith("gain_H")]


def test_a_gain_for_each_head_starts_at_1_and_there_it_is_the_fixed_scale_to_the_bit():
    fixed, learned = random_decoder(), random_decoder(score_scale="learned")
    initialize(learned, 0)
    assert [gain.tolist() for gain in gains(learned)] == [[1.0] * 4] * 2
    missing = learned.load_state_dict(fixed.state_dict(), strict=False).missing_keys
    assert missing == [f"blocks.{i}.attention.gain_H" for i in range(2)]
    assert torch.equal(row_logits(learned, ROW), row_logits(fixed, ROW))
    assert ModelConfig().score_scale == "fixed"


@pytest.mark.parametrize("name", ["rope", "alibi"])
def test_log_multiplies_the_scores_of_a_query_over_n_keys_by_log_n_over_log_trained(name):
    """Scores are read back from the weights: log a_i - log a_j is their difference."""
    store = ragged_store((CONTEXT,))
    weights = {
        scale: attention_weights(
            random_decoder(name, layers=1, score_scale=scale, dtype=torch.float64),
            padded(store, [0]),
        )[0][0].log()
        for scale in ("fixed", "log")
    }
    none = attention_weights(
        random_decoder("none", layers=1, dtype=torch.float64), padded(store, [0])
    )
    for n in range(2, CONTEXT + 1):
        fixed, log = (w[:, n - 1, :n] - w[:, n - 1, n - 1 : n] for w in weights.values())
        factor = math.log(n) / math.log(CONTEXT)
        if name == "alibi":  # the bias stays as it is
            content = none[0][0].log()[:, n - 1, :n] - none[0][0].log()[:, n - 1, n - 1 : n]
            assert difference(log, fixed + (factor - 1) * content) <= 1e-4
        else:
            assert difference(log, factor * fixed) <= 1e-4
            assert n == CONTEXT or difference(log, fixed) > 1e-3


def test_log_sharpness_is_1_at_the_trained_keys_and_finite_for_one_key():
    counts_1T = torch.tensor([[1, 2, 16, 256]])
    assert log_sharpness(counts_1T, 16)[0].tolist() == pytest.approx([0, 0.25, 1, 2])
    assert log_sharpness(counts_1T, 1).isfinite().all()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", ["rope", "fox", "hybrid"])
def test_log_counts_the_keys_of_the_own_message_alone(name, window):
    """In padded, packed and cached rows, and a token at a time."""
    model = random_decoder(name, score_scale="log", window=window)
    store = ragged_store((9, 4, 6, 12))
    expected = [alone_logits(model, store, index) for index in range(4)]
    forms = (
        padded(store, range(4)),
        padded(store, range(4), "left"),
        packed(store, [[0, 1], [2, 3]]),
    )
    for form in forms:
        for logits_TV, expected_TV in zip(real_logits(model, form), expected, strict=True):
            assert difference(logits_TV, expected_TV) <= 1e-5
    with torch.inference_mode():
        stepped = read_then_step(model, forms[1], [3, 0, 1])
    for logits_TV, index in zip(stepped, [3, 0, 1], strict=True):
        assert difference(logits_TV, expected[index][-NEW:]) <= 1e-5


def test_log_counts_keys_and_not_position_numbers():
    model = random_decoder("rope", score_scale="log", dtype=torch.float64)
    positions_1T = torch.arange(CONTEXT)[None]
    with torch.no_grad():
        change = difference(model(ROW[None], positions_1T + 7), model(ROW[None], positions_1T))
    assert change <= 1e-5


def test_a_full_window_counts_as_the_trained_number_of_keys():
    tokens = ROW[:9]
    windowed = {s: random_decoder(layers=1, window=4, score_scale=s) for s in ("fixed", "log")}
    fixed, log = (row_logits(model, tokens) for model in windowed.values())
    assert difference(log[3:], fixed[3:]) <= 1e-6
    assert difference(log[1:3], fixed[1:3]) > 1e-4


def test_with_qk_norm_only_a_gain_lets_a_head_single_out_one_key_among_many():
    """Scores lie within ± sqrt(K): one key of n has at most 1 / (1 + (n - 1) exp(-2 sqrt(K)))."""
    most = 1 / (1 + (CONTEXT - 1) * math.exp(-2 * math.sqrt(4)))
    store = ragged_store((CONTEXT,))

    def largest(model):
        return max(float(w[:, :, -1].max()) for w in attention_weights(model, padded(store, [0])))

    model = random_decoder("none", score_scale="learned")
    with torch.no_grad():
        for gain_H in gains(model):
            gain_H.fill_(1.0)
        assert largest(model) <= most
        for gain_H in gains(model):
            gain_H.fill_(30.0)
    assert largest(model) > 0.99


def test_an_unknown_scale_is_one_line_that_names_the_options():
    expected = rf"model\.score_scale=sqrt: expected one of {', '.join(SCORE_SCALES)}$"
    with pytest.raises(ValueError, match=expected):
        ModelConfig(score_scale="sqrt")
