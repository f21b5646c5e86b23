from __future__ import annotations

import math

import pytest
import torch

from tests.helpers import (
    CONTEXT,
    difference,
    inputs,
    padded,
    ragged_store,
    random_decoder,
    real_logits,
    row_logits,
)
from tests.schemes.conftest import FAR, scheme, sinusoid_in_double
from wherelm.schemes import SCHEMES
from wherelm.schemes.absolute import sinusoid_table


def test_the_sinusoid_at_position_1_and_width_8():
    expected = [0.841471, 0.540302, 0.099833, 0.995004, 0.01, 0.99995, 0.001, 1]
    table = sinusoid_table(torch.tensor([[1]]), 8, 10_000.0)[0, 0]
    assert table.tolist() == pytest.approx(expected, abs=1e-5)
    embedded = scheme("sinusoidal").embed(torch.zeros(1, 1, 8), torch.tensor([[1]]))
    assert embedded.flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_the_inner_product_of_sinusoids_depends_on_their_distance_alone():
    table = sinusoid_table(torch.arange(200)[None], 8, 10_000.0)[0]
    products = (table[:-5] * table[5:]).sum(-1)
    assert products.tolist() == pytest.approx([3.159983] * 195, abs=1e-5)
    assert table.pow(2).sum(-1).tolist() == pytest.approx([4.0] * 200, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sinusoid_is_exact_at_position_65536_also_after_a_cast_of_the_model(dtype):
    model = random_decoder("sinusoidal", context=FAR + 1).to(dtype)
    # Into float32, so that the table shows and not the rounding of the sum.
    actual = model.scheme.embed(torch.zeros(1, 1, 16), torch.tensor([[FAR]]))[0, 0]
    assert actual.dtype == torch.float32
    assert difference(actual, sinusoid_in_double(FAR, 16, 10_000.0)) <= 1e-6


def test_the_sinusoid_takes_fractional_positions():
    actual = sinusoid_table(torch.tensor([[2.5]]), 4, 100.0)[0, 0]
    expected = [math.sin(2.5), math.cos(2.5), math.sin(0.25), math.cos(0.25)]
    assert actual.tolist() == pytest.approx(expected, abs=1e-6)


def test_learned_adds_the_vector_of_each_position():
    model = random_decoder("learned")
    table_LD = model.scheme.table_LD
    assert table_LD.shape == (CONTEXT, 16)
    x_BTD = torch.randn(2, 3, 16)
    positions_BT = torch.tensor([[0, 1, 2], [5, 5, 15]])
    added = model.scheme.embed(x_BTD, positions_BT) - x_BTD
    assert difference(added.detach(), table_LD.detach()[positions_BT]) <= 1e-6


def test_learned_says_its_limit_and_the_fix_in_one_line():
    model = random_decoder("learned")
    tokens = torch.arange(CONTEXT + 4) % 20
    assert row_logits(model, tokens[:CONTEXT]).isfinite().all()
    with pytest.raises(ValueError, match=rf"asked for position {CONTEXT}:"):
        row_logits(model, tokens[: CONTEXT + 1])
    with pytest.raises(ValueError, match="position=learned") as error:
        row_logits(model, tokens)
    message = str(error.value)
    assert f"{CONTEXT} positions" in message
    assert f"position {CONTEXT + 3}:" in message
    assert f"model.context={CONTEXT + 4}" in message
    assert "\n" not in message


def test_learned_is_not_limited_by_padding_on_the_left():
    """Its limit concerns positions in a message and not slots in a row."""
    store = ragged_store((CONTEXT, 3))
    model = random_decoder("learned")
    several = real_logits(model, padded(store, [0, 1], "left"))
    assert difference(several[1], row_logits(model, inputs(store, 1))) <= 1e-5


def test_learned_starts_from_the_seed():
    learned = scheme("learned")
    first, again, other = (
        learned.initial_value("table_LD", torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert first.shape == learned.table_LD.shape
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_learned_can_start_from_the_sinusoid():
    learned = scheme("learned", start="sinusoid")
    table_LD = learned.initial_value("table_LD", torch.Generator())
    assert torch.equal(table_LD, sinusoid_table(torch.arange(16)[None], 8, 10_000.0)[0])
    with pytest.raises(ValueError, match=r"position\.start=zero: expected one of random, sinusoid"):
        SCHEMES["learned"].Config(start="zero")
