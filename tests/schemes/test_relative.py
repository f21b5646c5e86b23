from __future__ import annotations

import copy
import math

import pytest
import torch

from tests.helpers import (
    difference,
    inputs,
    packed,
    padded,
    ragged_store,
    random_decoder,
    row_logits,
)
from tests.schemes.conftest import FAR, scheme
from wherelm.model import attention
from wherelm.model.decoder import next_token_loss
from wherelm.schemes.relative import alibi_slopes, t5_bucket


def bias_by_distance(one, length: int = 200) -> torch.Tensor:
    """The bias of the last query at every distance, (H, length), distance 0 first."""
    positions = torch.arange(length)[None]
    return one.bias(positions[:, -1:], positions)[0, :, 0].flip(-1).detach()


def test_alibi_slopes_for_4_8_and_12_heads():
    eighths = [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(8).tolist() == pytest.approx(eighths, abs=1e-9)
    between = [0.7071, 0.3536, 0.1768, 0.0884]
    assert alibi_slopes(12).tolist() == pytest.approx(eighths + between, abs=5e-5)
    assert alibi_slopes(4).tolist() == pytest.approx([1 / 4, 1 / 16, 1 / 64, 1 / 256], abs=1e-9)


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "fire"])
def test_a_bias_is_added_after_the_division_by_the_root_of_the_head_width(name):
    """With queries of zero the weights are the softmax of the bias alone, undivided."""
    model = random_decoder(name, qk_norm=False)
    first = model.blocks[0].attention
    torch.nn.init.zeros_(first.query.weight)
    first.keep_weights = True
    row_logits(model, inputs(ragged_store(), 0))
    expected = bias_by_distance(model.scheme, 9).flip(-1).softmax(-1)
    assert difference(first.weights_BHTS[0, :, -1], expected) <= 1e-6


def test_t5_buckets_of_32_up_to_128():
    expected = {16: 16, 18: 16, 19: 17, 32: 21, 64: 26, 112: 30, 113: 31, 127: 31, 5000: 31}
    expected |= {d: d for d in range(16)}
    distances = torch.tensor(list(expected))
    assert t5_bucket(distances, 32, 128).tolist() == list(expected.values())


def test_t5_counts_its_farthest_bucket_from_a_quarter_of_the_trained_length():
    assert scheme("t5", context=512).max_distance == 128
    assert scheme("t5", context=128).max_distance == 32
    assert scheme("t5", context=16).max_distance == 17
    assert scheme("t5", context=512, trained=256).max_distance == 64
    assert scheme("t5", context=512, max_distance=100).max_distance == 100


def test_kerples_power_form_with_exponent_1_is_alibi():
    kerple, alibi = scheme("kerple", form="power"), scheme("alibi")
    with torch.no_grad():
        kerple.raw1_H.copy_(alibi_slopes(2).expm1().log())
        kerple.raw2_H.copy_(kerple.initial_value("raw2_H", torch.Generator()))
    assert difference(bias_by_distance(kerple), bias_by_distance(alibi)) <= 1e-5


def test_kerples_logarithm_is_minus_r1_log_of_1_plus_r2_d():
    kerple = scheme("kerple")
    with torch.no_grad():
        kerple.raw1_H.copy_(torch.tensor([2.0, 0.5]).expm1().log())
        kerple.raw2_H.copy_(torch.tensor([0.3, 1.0]).expm1().log())
    bias_HS = bias_by_distance(kerple)
    for head, (r1, r2) in enumerate(((2.0, 0.3), (0.5, 1.0))):
        expected = [-r1 * math.log(1 + r2 * d) for d in range(200)]
        assert bias_HS[head].tolist() == pytest.approx(expected, abs=1e-5)


def test_kerple_starts_with_r1_in_0_to_2_and_r2_in_0_to_1():
    kerple = scheme("kerple", width=1024, heads=256)
    for name, most in (("raw1_H", 2.0), ("raw2_H", 1.0)):
        values = torch.nn.functional.softplus(kerple.initial_value(name, torch.Generator()))
        assert 0 < values.min() < 0.1 * most
        assert 0.9 * most < values.max() <= most


def fire_with_threshold_8():
    fire = random_decoder("fire", {"inner": 8}).scheme
    with torch.no_grad():
        fire.threshold.fill_(8 / fire.start)
    return fire


def test_fire_is_shift_invariant_only_while_queries_stand_before_l():
    fire, positions = fire_with_threshold_8(), torch.arange(5)[None]
    bias = fire.bias(positions, positions)
    within = fire.bias(positions + 3, positions + 3)
    beyond = fire.bias(positions + 9, positions + 9)
    assert difference(within, bias) <= 1e-5
    assert difference(beyond, bias) > 1e-3


def test_fire_starts_at_a_quarter_of_the_trained_length():
    assert scheme("fire", context=2048).start == 512


@pytest.mark.parametrize("name", ["kerple", "fire", "t5", "alibi"])
def test_a_bias_is_exact_far_back_also_after_a_cast_of_the_model(name):
    """Neighbouring distances beyond 256 are the same number in bfloat16."""
    half = random_decoder(name, dtype=torch.bfloat16).scheme
    exact = copy.deepcopy(half).double()
    positions = torch.tensor([[0, 1, 60_000, 65_535]])
    queries = torch.tensor([[FAR]])
    actual, expected = half.bias(queries, positions), exact.bias(queries, positions)
    assert (actual.double() / expected - 1).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["kerple", "fire", "t5", "alibi"])
def test_a_bias_is_not_rounded_to_bfloat16_by_autocast(name):
    one, positions = random_decoder(name).scheme, torch.arange(200)[None]
    exact = one.bias(positions, positions).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert difference(one.bias(positions, positions).detach(), exact) <= 1e-6


@pytest.mark.parametrize("name", ["t5", "kerple", "fire", "fox"])
@pytest.mark.parametrize("form", ["right", "packed"])
def test_gradients_through_the_bias_mask_are_those_of_the_textbook_form(name, form, monkeypatch):
    # The fused kernel, which short rows on a CPU would not see else.
    monkeypatch.setattr(attention, "SHORT", 0)
    model, store = random_decoder(name, dtype=torch.float64), ragged_store()
    batch = packed(store, [[0, 1], [2, 3]]) if form == "packed" else padded(store, range(4))
    gradients = []
    for textbook in (False, True):
        for block in model.blocks:
            block.attention.keep_weights = textbook
        model.zero_grad()
        next_token_loss(model, batch).backward()
        gradients.append({n: p.grad.clone() for n, p in model.scheme.named_parameters()})
    fused, plain = gradients
    for parameter, gradient in plain.items():
        assert gradient.norm() > 1e-6
        assert difference(fused[parameter], gradient) <= 1e-10, parameter


def test_t5_warns_of_buckets_that_training_never_reaches():
    assert scheme("t5", context=128, max_distance=128).warnings() == []
    (line,) = scheme("t5", context=64, max_distance=128).warnings()
    assert "reaches the first 27 alone" in line
    assert scheme("t5", context=128, trained=64, max_distance=128).warnings() == [line]
    assert scheme("t5", context=16).warnings()
