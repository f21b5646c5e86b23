"""Llama 3's scaling and dynamic NTK.

Shapes: B rows, T slots, P pairs.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers import (
    alone_logits,
    difference,
    inputs,
    packed,
    padded,
    ragged_store,
    random_decoder,
    real_logits,
    row_logits,
)
from tests.oracle import NaiveDecoder
from tests.sampling.test_stepper import NEW, read_then_step
from tests.schemes.conftest import scheme
from wherelm.schemes.scalings import message_lengths, self_extend_groups

TRAINED = 4  # so that examples of 9 and 12 tokens are longer, and one of 4 is not


def hugging_face(kind: str, factor: float, **settings) -> torch.Tensor:
    """Frequencies for heads of 64 entries, trained on 4,096 tokens."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    length = settings.pop("length", None)
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": factor, **settings},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), length)[0].double()


def test_llama3_has_the_frequencies_of_hugging_face():
    theirs_P = hugging_face(
        "llama3",
        8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=4096,
    )
    ours = scheme("rope", width=128, context=4096, scaling="llama3", factor=8.0)
    assert difference(ours.frequencies_P / theirs_P, torch.ones(32)) <= 1e-6


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("length", [100, 4096, 5000, 30_000])
def test_dynamic_has_the_frequencies_of_hugging_face_at_every_length(length, factor):
    ours = scheme("rope", width=128, context=4096, scaling="dynamic", factor=factor)
    ours_P = ours.frequencies_of(torch.tensor([[length]]))[0, 0]
    theirs_P = hugging_face("dynamic", factor, length=length)
    assert difference(ours_P / theirs_P, torch.ones(32)) <= 1e-6


def test_llama3_keeps_pairs_of_4_turns_and_divides_those_below_1():
    plain = scheme("rope", width=128, context=4096).frequencies_P
    scaled = scheme("rope", width=128, context=4096, scaling="llama3", factor=8.0).frequencies_P
    turns = plain * 4096 / (2 * math.pi)
    assert torch.equal(scaled[turns >= 4], plain[turns >= 4])
    assert torch.equal(scaled[turns <= 1], plain[turns <= 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_dynamic_is_rope_within_the_trained_length_and_another_one_beyond(factor):
    tokens = inputs(ragged_store(), 0)
    options = {"scaling": "dynamic", "factor": factor}
    dynamic = random_decoder("rope", options, context=TRAINED)
    rope = random_decoder("rope", context=TRAINED)
    within, beyond = tokens[:TRAINED], tokens
    assert difference(row_logits(dynamic, within), row_logits(rope, within)) <= 1e-6
    assert difference(row_logits(dynamic, beyond), row_logits(rope, beyond)) > 1e-3


@pytest.mark.parametrize("options", [{}, {"fraction": 0.5, "base": 100.0}, {"factor": 2.0}])
def test_dynamic_goes_by_each_message_s_own_length(options):
    """Beyond the trained length: padded, packed and stepped rows equal each message alone."""
    options = {"scaling": "dynamic", **options}
    model = random_decoder("rope", options, width=32, context=TRAINED)
    exact = random_decoder("rope", options, width=32, context=TRAINED, dtype=torch.float64)
    store = ragged_store((9, 4, 6, 12))
    expected = [alone_logits(model, store, index) for index in range(4)]
    for index in range(4):
        naive = torch.from_numpy(NaiveDecoder(exact).logits(inputs(store, index).tolist()))
        assert difference(expected[index], naive) <= 1e-5
    right, left = (padded(store, range(4), side) for side in ("right", "left"))
    for batch in (right, left, packed(store, [[0, 1], [2, 3]])):
        for logits_TV, expected_TV in zip(real_logits(model, batch), expected, strict=True):
            assert difference(logits_TV, expected_TV) <= 1e-5
    # A cache knows in advance how long each row grows.
    with torch.inference_mode():
        stepped = read_then_step(model, left, [3, 0, 1])
    assert difference(stepped[0], expected[3][-NEW:]) <= 1e-5
    assert difference(stepped[1], expected[0][-NEW:]) <= 1e-5


def test_message_lengths_are_those_of_padded_packed_and_growing_rows():
    positions_BT = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    keys_BT = torch.tensor([[7, 7, 7, 8, 8, 0], [9, 9, 9, 9, 9, 9]])
    lengths = message_lengths(positions_BT, keys_BT)
    assert lengths.tolist() == [[3, 3, 3, 2, 2, 1], [6] * 6]
    assert message_lengths(positions_BT, None).tolist() == [[3] * 6, [6] * 6]
    longest_B1 = torch.tensor([[5], [9]])
    assert message_lengths(positions_BT, None, longest_B1).tolist() == [[5] * 6, [9] * 6]


def test_dynamic_needs_no_factor_and_says_nothing_without_one():
    assert scheme("rope", context=128, base=100.0, scaling="dynamic").warnings() == []


@pytest.mark.parametrize("factor", [1.0, 1.5, 4.0, 8.0])
@pytest.mark.parametrize("trained", [4, 16, 100])
def test_self_extend_reads_no_distance_that_was_not_trained(trained, factor):
    group, near = self_extend_groups(factor, trained)
    longest = int(factor * trained)
    for t, s in ((longest - 1, 0), (longest - 1, 1), (near, 0), (2 * near, near)):
        back = t // group + near - near // group - s // group if t - s >= near else t - s
        assert 0 <= back <= trained
    assert group == 1 if factor == 1 else group > 1


def test_self_extend_turns_far_keys_as_if_they_stood_at_their_group():
    """Beside attention that rotates to grouped positions outright; near keys are left alone."""
    extended = scheme("rope", width=16, context=16, scaling="self_extend", factor=4.0, fraction=0.5)
    rope = scheme("rope", width=16, context=16, fraction=0.5)
    q_BHTK, k_BHSK = torch.randn(2, 1, 2, 40, 8, dtype=torch.float64).unbind()
    slots_1T = torch.arange(40)[None]

    def scores(scheme, q_positions, k_positions):
        q, k = (
            scheme.rotate(q_BHTK, q_positions, "query"),
            scheme.rotate(k_BHSK, k_positions, "key"),
        )
        return q, k, q @ k.mT / 8**0.5

    q, k, plain = scores(extended, slots_1T, slots_1T)
    bias_BHTS = extended.content_bias(q, k, slots_1T, slots_1T)
    group, near = extended.group, extended.near
    far = scores(rope, slots_1T // group + near - near // group, slots_1T // group)[2]
    back_TS = slots_1T.T - slots_1T
    expected = torch.where(back_TS >= near, far, plain)
    assert difference(plain + bias_BHTS, expected) <= 1e-5
    assert difference(plain, expected) > 0.1
    assert (bias_BHTS[:, :, back_TS < near] == 0).all()
