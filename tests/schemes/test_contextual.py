from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.helpers import (
    CONTEXT,
    difference,
    inputs,
    ragged_store,
    random_decoder,
    row_logits,
)
from tests.schemes.conftest import scheme


@pytest.mark.parametrize("gate", [0.5, 0.9, 0.999])
def test_fox_with_a_constant_gate_is_alibi_with_slope_minus_log_of_the_gate(gate):
    fox = scheme("fox").for_layer(0)
    torch.nn.init.zeros_(fox.weight_HD)
    torch.nn.init.constant_(fox.bias_H, math.log(gate / (1 - gate)))
    values_BHS = fox.token_value(torch.randn(1, 30, 8)).detach()
    bias_BHTS = fox.value_bias(values_BHS, 30)
    for t, s in itertools.product(range(30), range(30)):
        if s <= t:
            expected = math.log(gate) * (t - s)
            assert bias_BHTS[0, :, t, s].tolist() == pytest.approx([expected] * 2, abs=1e-5)


def test_fox_sums_the_log_gates_between_key_and_query():
    fox = random_decoder("fox").scheme.for_layer(1)
    values_BHS = fox.token_value(torch.randn(2, 7, 16)).detach()
    bias_BHTS = fox.value_bias(values_BHS, 3)
    for t, s in itertools.product(range(3), range(7)):
        if s <= 4 + t:
            expected = values_BHS[:, :, s + 1 : 5 + t].sum(-1)
            assert difference(bias_BHTS[:, :, t, s], expected) <= 1e-5


def test_fox_tells_neighbours_apart_behind_a_long_text():
    """Sums beyond 65,536 have steps of 1/128 in float32."""
    values_1HS = torch.full((1, 1, 70_000), -1.0)
    values_1HS[..., -3:] = torch.tensor([-0.001, -0.002, -0.003])
    bias_S = random_decoder("fox").scheme.for_layer(0).value_bias(values_1HS, 1)[0, 0, 0]
    assert bias_S[-3:].tolist() == pytest.approx([-0.005, -0.003, 0.0], abs=1e-6)


def test_fox_gates_are_not_rounded_to_bfloat16_by_autocast():
    fox, x_BTD = random_decoder("fox").scheme.for_layer(0), torch.randn(1, 5, 16)
    exact = fox.token_value(x_BTD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert difference(fox.token_value(x_BTD).detach(), exact.detach()) <= 1e-6


def test_fox_starts_with_gates_that_are_open_over_the_context():
    fox = random_decoder("fox").scheme
    start = fox.initial_value("layers.0.bias_H", torch.Generator()).sigmoid()
    assert float(start[0] ** CONTEXT) == pytest.approx(1 / math.e, abs=0.02)


def cope_bias(q_BHTK, k_BGSK, positions=32):
    """The bias of a layer with a random table, and the table in double."""
    cope = scheme("cope", positions=positions).for_layer(1).to(q_BHTK.dtype)
    torch.nn.init.normal_(cope.table_NK)
    slots = torch.arange(k_BGSK.shape[2])[None]
    bias_BHTS = cope.content_bias(q_BHTK, k_BGSK, slots[:, -q_BHTK.shape[2] :], slots)
    return bias_BHTS.detach(), cope.table_NK.detach().double()


@pytest.mark.parametrize("positions", [32, 5])
def test_cope_with_open_gates_is_a_learned_vector_for_each_distance(positions):
    q_BHTK = torch.randn(1, 2, 9, 4, dtype=torch.float64)
    q_BHTK[..., 0] = 20
    k_BHSK = torch.tensor([20.0, 0, 0, 0], dtype=torch.float64).expand(1, 2, 9, 4)
    bias_BHTS, table_NK = cope_bias(q_BHTK, k_BHSK, positions)
    for t, s in itertools.product(range(9), range(9)):
        if s <= t:
            expected_H = q_BHTK[0, :, t] @ table_NK[min(t - s + 1, positions - 1)] / 2
            assert difference(bias_BHTS[0, :, t, s], expected_H) <= 1e-6


def test_cope_interpolates_between_two_whole_numbers_of_gates():
    """Queries and keys at right angles: every gate is half open."""
    q_BHTK, k_BHSK = torch.zeros(2, 1, 2, 6, 4, dtype=torch.float64)
    q_BHTK[..., 0], k_BHSK[..., 1] = 3, 3
    bias_BHTS, table_NK = cope_bias(q_BHTK, k_BHSK)
    for back in range(6):
        low, odd = divmod(back + 1, 2)
        row_K = (table_NK[low] + table_NK[low + odd]) / 2
        assert bias_BHTS[0, 0, 5, 5 - back].item() == pytest.approx(float(3 * row_K[0] / 2))


def test_cope_starts_as_none():
    cope, tokens = random_decoder("cope"), inputs(ragged_store(), 0)
    with torch.no_grad():
        for name, parameter in cope.scheme.named_parameters():
            parameter.copy_(cope.scheme.initial_value(name, torch.Generator()))
    none = row_logits(random_decoder("none"), tokens)
    assert difference(row_logits(cope, tokens), none) <= 1e-6
    assert difference(row_logits(random_decoder("cope"), tokens), none) > 1e-2


def test_cope_counts_gates_in_float32_under_autocast():
    q_BHTK, k_BHSK = torch.randn(2, 1, 2, 40, 4).unbind()
    torch.manual_seed(1)
    exact, _ = cope_bias(q_BHTK, k_BHSK)
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert difference(cope_bias(q_BHTK, k_BHSK)[0], exact) <= 1e-6


def test_cope_warns_of_rows_that_no_text_of_the_trained_length_reaches():
    (line,) = scheme("cope", context=16).warnings()
    assert line.startswith("position.positions=32: over model.context=16 tokens at most 17")
    assert scheme("cope", context=31).warnings() == []
