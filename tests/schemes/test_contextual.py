from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.helpers import (
    CONTEXT,
    difference,
    random_decoder,
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
