"""The schemes' own numbers.

Shapes: B batch, T slots, D width, H heads, K head width.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers import (
    CONTEXT,
    difference,
    inputs,
    padded,
    ragged_store,
    random_decoder,
    real_logits,
    row_logits,
)

from wherelm.schemes import SCHEMES, PositionScheme, Shape
from wherelm.schemes.absolute import sinusoid_table
from wherelm.schemes.rotary import rotary_frequencies, rotation_table

FAR = 65_536


def scheme(name: str, width: int = 8, heads: int = 2, context: int = 16, **options):
    shape = Shape(width, heads, width // heads, context, layers=2)
    return SCHEMES[name](SCHEMES[name].Config(**options), shape)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_documented_and_knows_its_name(name):
    assert SCHEMES[name].Config().name == name
    assert SCHEMES[name].__doc__
    assert issubclass(SCHEMES[name], PositionScheme)


def test_the_base_class_is_the_scheme_none_and_every_hook_the_identity():
    none = scheme("none")
    assert type(none) is PositionScheme
    positions, x_BTD, q_BHTK = torch.arange(5)[None], torch.randn(1, 5, 8), torch.randn(1, 2, 5, 4)
    assert none.place(positions) is positions
    assert none.embed(x_BTD, positions) is x_BTD
    assert none.rotate(q_BHTK, positions, "query") is q_BHTK
    assert none.bias(positions, positions) is None
    assert none.for_layer(1) is none
    assert list(none.parameters()) == []


# Sinusoidal


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


def sinusoid_in_double(position: int, width: int, base: float) -> torch.Tensor:
    values = []
    for i in range(width // 2):
        angle = position * base ** (-2 * i / width)
        values += [math.sin(angle), math.cos(angle)]
    return torch.tensor(values, dtype=torch.float64)


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


# RoPE


def test_rope_turns_a_query_of_width_4_at_position_1():
    rope = scheme("rope")
    q_BHTK = torch.tensor([1.0, 0, 1, 0]).expand(1, 2, 1, 4)
    turned = rope.rotate(q_BHTK, torch.tensor([[1]]), "query")
    for head in range(2):
        expected = [0.540302, 0.841471, 0.99995, 0.01]
        assert turned[0, head, 0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_is_exact_at_position_65536_also_after_a_cast_of_the_model(dtype):
    """The unit vectors (1, 0) of every pair turn into their cosines and sines."""
    model = random_decoder("rope", width=128, heads=2).to(dtype)
    units = torch.tensor([1.0, 0.0]).repeat(32).view(1, 1, 1, 64)
    turned = model.scheme.rotate(units, torch.tensor([[FAR]]), "query").view(32, 2)
    exact = sinusoid_in_double(FAR, 64, 10_000.0).view(32, 2).flip(-1)
    assert turned.dtype == torch.float32
    assert difference(turned, exact) <= 1e-6


def test_rope_keeps_norms_and_the_type_of_what_it_turns():
    rope = scheme("rope", width=32)
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        x_BHTK = torch.randn(2, 2, 7, 16, dtype=dtype)
        turned = rope.rotate(x_BHTK, torch.arange(7)[None] * 1000, "key")
        assert turned.dtype == dtype
        assert difference(turned.float().norm(dim=-1), x_BHTK.float().norm(dim=-1)) <= tolerance


def test_rope_takes_positions_of_each_row_and_fractions():
    rope = scheme("rope")
    x_BHTK = torch.randn(2, 2, 3, 4)
    positions_BT = torch.tensor([[0, 1, 2], [0.5, 7, 7]])
    together = rope.rotate(x_BHTK, positions_BT, "query")
    for row in range(2):
        alone = rope.rotate(x_BHTK[[row]], positions_BT[[row]], "query")
        assert difference(together[[row]], alone) <= 1e-6
    assert torch.equal(together[0, :, 0], x_BHTK[0, :, 0])


def test_the_rotation_table_is_cosine_and_sine_of_every_pair():
    table = rotation_table(torch.tensor([[3]]), rotary_frequencies(4, 100.0))[0, 0]
    assert table.real.tolist() == pytest.approx([math.cos(3), math.cos(0.3)], abs=1e-6)
    assert table.imag.tolist() == pytest.approx([math.sin(3), math.sin(0.3)], abs=1e-6)


def test_rope_with_fraction_0_is_none_with_the_same_weights():
    tokens = inputs(ragged_store(), 0)
    still = row_logits(random_decoder("rope", {"fraction": 0.0}), tokens)
    none = row_logits(random_decoder("none"), tokens)
    assert torch.equal(still, none)
    assert difference(row_logits(random_decoder("rope"), tokens), none) > 1e-2


def test_rope_with_fraction_1_is_rope():
    tokens = inputs(ragged_store(), 0)
    whole = row_logits(random_decoder("rope", {"fraction": 1.0}), tokens)
    assert torch.equal(whole, row_logits(random_decoder("rope"), tokens))


def test_rope_with_a_fraction_turns_the_first_entries_of_each_head_alone():
    rope = scheme("rope", width=16, fraction=0.5)
    x_BHTK = torch.randn(1, 2, 3, 8)
    positions = torch.tensor([[1, 2, 3]])
    turned = rope.rotate(x_BHTK, positions, "query")
    assert torch.equal(turned[..., 4:], x_BHTK[..., 4:])
    narrow = scheme("rope", width=8).rotate(x_BHTK[..., :4], positions, "query")
    assert difference(turned[..., :4], narrow) <= 1e-6


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"fraction": 1.5}, "position.fraction=1.5"),
        ({"fraction": -0.1}, "position.fraction=-0.1"),
        ({"base": 0.0}, "position.base=0.0"),
    ],
)
def test_a_wrong_setting_of_rope_is_one_line_that_names_the_key(options, key):
    with pytest.raises(ValueError, match="expected") as error:
        SCHEMES["rope"].Config(**options)
    assert str(error.value).startswith(f"{key}: expected")
    assert "\n" not in str(error.value)


def test_rope_needs_an_even_head_width():
    with pytest.raises(ValueError, match=r"even head width, not 3.*model\.width and model\.heads"):
        scheme("rope", width=6)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_copy_of_a_used_model_gives_the_same_logits(name):
    model = random_decoder(name)
    tokens = inputs(ragged_store(), 0)
    logits_TV = row_logits(model, tokens)
    twin = copy.deepcopy(model)
    assert torch.equal(row_logits(twin, tokens), logits_TV)
    assert set(twin.state_dict()) == {name for name, _ in model.named_parameters()}


# Learned


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
