"""The schemes' own numbers.

Shapes: B batch, T slots, D width, H heads, K head width.
"""

from __future__ import annotations

import copy
import itertools
import math
import re

import pytest
import torch
from helpers import (
    CONTEXT,
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
from oracle import NaiveDecoder

from wherelm import attention
from wherelm.batches import collate
from wherelm.model import next_token_loss
from wherelm.schemes import SCHEMES, PositionScheme, Shape
from wherelm.schemes.absolute import sinusoid_table
from wherelm.schemes.patterns import Layer
from wherelm.schemes.relative import alibi_slopes, t5_bucket
from wherelm.schemes.rotary import (
    SCALINGS,
    ntk_scaling,
    rotary_frequencies,
    rotation_table,
    yarn_magnitude,
    yarn_ramp,
    yarn_scaling,
    yarn_turns,
)

FAR = 65_536


def scheme(
    name: str, width: int = 8, heads: int = 2, context: int = 16, layers: int = 2, **options
):
    shape = Shape(width, heads, width // heads, context, layers)
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


def test_learned_can_start_from_the_sinusoid():
    learned = scheme("learned", start="sinusoid")
    table_LD = learned.initial_value("table_LD", torch.Generator())
    assert torch.equal(table_LD, sinusoid_table(torch.arange(16)[None], 8, 10_000.0)[0])
    with pytest.raises(ValueError, match=r"position\.start=zero: expected one of random, sinusoid"):
        SCHEMES["learned"].Config(start="zero")


# RoPE: p and the extensions of the context


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 1.0])
def test_p_rope_keeps_the_fastest_pairs_and_the_rest_do_not_rotate(p):
    rope, partial = scheme("rope", width=32), scheme("rope", width=32, p=p)
    x_BHTK, positions = torch.randn(1, 2, 3, 16), torch.tensor([[1, 2, 30]])
    kept = 2 * int(p * 8)
    turned = partial.rotate(x_BHTK, positions, "query")
    whole = rope.rotate(x_BHTK, positions, "query")
    assert torch.allclose(turned[..., :kept], whole[..., :kept], rtol=0, atol=1e-6)
    assert torch.equal(turned[..., kept:], x_BHTK[..., kept:])


def test_p_rope_is_rope_at_1_and_none_at_0():
    tokens = inputs(ragged_store(), 0)
    logits = {p: row_logits(random_decoder("rope", {"p": p}), tokens) for p in (0.0, 1.0)}
    assert torch.equal(logits[1.0], row_logits(random_decoder("rope"), tokens))
    assert torch.equal(logits[0.0], row_logits(random_decoder("none"), tokens))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_extension_at_scale_1_is_rope(scaling):
    tokens = inputs(ragged_store(), 0)
    options = {"scaling": scaling, "factor": 1.0}
    same = row_logits(random_decoder("rope", options), tokens)
    plain = row_logits(random_decoder("rope"), tokens)
    assert difference(same, plain) <= 1e-5
    other = row_logits(random_decoder("rope", options | {"factor": 4.0}), tokens)
    assert difference(other, plain) > 1e-3


def test_linear_scaling_divides_every_position():
    stretched, rope = scheme("rope", scaling="linear", factor=4.0), scheme("rope")
    x_BHTK = torch.randn(1, 2, 3, 4)
    turned = stretched.rotate(x_BHTK, torch.tensor([[4, 8, 20]]), "key")
    assert difference(turned, rope.rotate(x_BHTK, torch.tensor([[1, 2, 5]]), "key")) <= 1e-6


def test_ntk_raises_the_base_so_that_only_the_slowest_pair_is_divided_by_the_scale():
    plain = rotary_frequencies(64, 10_000.0)
    scaled = ntk_scaling(plain, 2.0, 10_000.0, 4096)
    assert difference(scaled, rotary_frequencies(64, 20_452.23)) <= 1e-7
    assert scaled[0] == plain[0]
    assert float(plain[-1] / scaled[-1]) == pytest.approx(2.0, abs=1e-9)


def test_yarn_keeps_the_first_pairs_and_interpolates_the_last():
    ramp = yarn_ramp(64, 10_000.0, 4096, 1.0, 32.0)
    assert [i for i in range(32) if ramp[i] == 1] == list(range(11))
    assert [i for i in range(32) if ramp[i] == 0] == list(range(23, 32))
    assert yarn_turns(4096) == pytest.approx(32)
    plain = rotary_frequencies(64, 10_000.0)
    scaled = yarn_scaling(plain, 8.0, 10_000.0, 4096)
    assert torch.equal(scaled[:11], plain[:11])
    assert difference(scaled[23:], plain[23:] / 8) <= 1e-12
    assert yarn_magnitude(8.0) == pytest.approx(1.2079, abs=5e-5)


def test_yarn_lengthens_queries_and_keys():
    yarn = scheme("rope", width=128, context=4096, scaling="yarn", factor=8.0)
    x_BHTK = torch.randn(1, 2, 3, 64)
    turned = yarn.rotate(x_BHTK, torch.tensor([[0, 5, 9000]]), "query")
    ratio = turned.norm(dim=-1) / x_BHTK.norm(dim=-1)
    assert difference(ratio, torch.full_like(ratio, 0.1 * math.log(8) + 1)) <= 1e-5


def test_yarn_has_the_frequencies_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
    }
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=8 * 4096,
        rope_parameters=parameters,
    )
    theirs, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    ours = scheme("rope", width=128, context=4096, scaling="yarn", factor=8.0)
    relative = ours.frequencies_P / theirs.double()
    assert difference(relative, torch.ones_like(relative)) <= 1e-6
    assert ours.magnitude() == pytest.approx(magnitude)


# RoPE that is dropped


def test_drope_is_rope_before_the_drop_and_none_after_it():
    tokens = inputs(ragged_store(), 0)
    model = random_decoder("drope", {"drop_at": 0.5})
    plain = {name: row_logits(random_decoder(name), tokens) for name in ("rope", "none")}
    for share, name in ((0.0, "rope"), (0.49, "rope"), (0.5, "none"), (1.0, "none")):
        model.scheme.progress(share)
        assert torch.equal(row_logits(model, tokens), plain[name])
    assert difference(plain["rope"], plain["none"]) > 1e-2


# PoPE


def test_popes_two_vector_form_equals_its_cosine_sum():
    pope = scheme("pope")
    torch.nn.init.normal_(pope.delta_HK)
    delta_HK = pope.delta_HK.tolist()
    q_BHTK, k_BHTK = torch.randn(2, 1, 2, 5, 4, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 5, 9]])
    query, key = (pope.rotate(q_BHTK, positions, "query"), pope.rotate(k_BHTK, positions, "key"))
    assert query.shape == key.shape == (1, 2, 5, 8)
    scores = (query @ key.transpose(-1, -2)).detach()
    for h, t, s in itertools.product(range(2), range(5), range(5)):
        expected = 0.0
        for c in range(4):
            size = math.log1p(math.exp(q_BHTK[0, h, t, c])) * math.log1p(
                math.exp(k_BHTK[0, h, s, c])
            )
            back = float(positions[0, s] - positions[0, t])
            expected += size * math.cos(back * 10_000 ** (-c / 4) + delta_HK[h][c])
        assert float(scores[0, h, t, s]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pope_is_exact_at_position_65536_also_after_a_cast_of_the_model(dtype):
    model = random_decoder("pope", width=64, heads=2).to(dtype)
    # softplus of this is 1, so that the table shows.
    units = torch.full((1, 1, 1, 32), math.log(math.e - 1))
    turned = model.scheme.rotate(units, torch.tensor([[FAR]]), "key").view(32, 2)
    exact = sinusoid_in_double(FAR, 64, 10_000.0).view(32, 2).flip(-1)
    assert difference(turned, exact) <= 1e-6


# Biases


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


# FoX


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


def test_fox_gates_are_not_rounded_to_bfloat16_by_autocast():
    fox, x_BTD = random_decoder("fox").scheme.for_layer(0), torch.randn(1, 5, 16)
    exact = fox.token_value(x_BTD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert difference(fox.token_value(x_BTD).detach(), exact.detach()) <= 1e-6


def test_fox_starts_with_gates_that_are_open_over_the_context():
    fox = random_decoder("fox").scheme
    start = fox.initial_value("layers.0.bias_H", torch.Generator()).sigmoid()
    assert float(start[0] ** CONTEXT) == pytest.approx(1 / math.e, abs=0.02)


# Patterns


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
        ("fire", {"inner": 0}, "position.inner=0: expected 1 or more"),
        ("drope", {"drop_at": 2.0}, "position.drop_at=2.0: expected a share, 0 to 1"),
        ("pope", {"base": 1.0}, "position.base=1.0: expected a number above 1"),
        ("sinusoidal", {"base": 0.5}, "position.base=0.5: expected a number above 1"),
        ("rope", {"p": 1.5}, "position.p=1.5: expected 0 to 1"),
        ("rope", {"scaling": "dynamic"}, "expected one of null, linear, ntk, yarn"),
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


# Randomised positions


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
    # What follows leaves a prefix where it stands.
    assert together[0] == placed(one, [16], [7])[0][:3]


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
    one.place(torch.arange(32)[None])
    with pytest.raises(ValueError, match=r"from 40 positions .* position\.length=48") as error:
        one.place(torch.arange(33)[None])
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"position\.length=15: expected at least"):
        scheme("randomised", length=15)


# Warnings


def test_settings_that_act_give_no_warning():
    for name in SCHEMES:
        one = scheme(name, width=128, heads=4, context=128, layers=4)
        assert one.warnings() == [], name


def test_rope_warns_where_most_pairs_turn_less_than_one_radian():
    """At base 10,000 and width 32, 9 pairs of 16 turn a radian over 128 positions."""
    assert scheme("rope", width=64, context=128).warnings() == []
    for name in ("rope", "drope", "pope"):
        (line,) = scheme(name, width=64, context=16).warnings()
        assert line.startswith("position.base=10000: ")
        assert scheme(name, width=64, context=16, base=100.0).warnings() == []
    assert "11 of 16 pairs" in scheme("rope", width=64, context=16).warnings()[0]


def test_rotations_that_are_left_out_are_told():
    for options in ({"p": 0.0}, {"fraction": 0.0}):
        (line,) = scheme("rope", context=128, **options).warnings()
        assert "no pair is left to rotate" in line
    for share, what in ((0.0, "nothing ever rotates"), (1.0, "nothing is recalibrated")):
        assert what in scheme("drope", context=128, drop_at=share).warnings()[-1]


def test_t5_warns_of_buckets_that_training_never_reaches():
    assert scheme("t5", context=128, max_distance=128).warnings() == []
    (line,) = scheme("t5", context=64, max_distance=128).warnings()
    assert "reaches the first 27 alone" in line
    assert scheme("t5", context=16).warnings()


def test_yarn_warns_where_no_pair_turns_often_enough():
    line = scheme("rope", context=6, scaling="yarn", factor=2.0, base=2.0).warnings()[-1]
    assert line.startswith("position.scaling=yarn: no pair completes 1.0 turns")
    assert scheme("rope", context=128, scaling="yarn", factor=2.0, base=100.0).warnings() == []


def test_an_extension_without_a_factor_warns_that_it_changes_nothing():
    (line,) = scheme("rope", context=128, base=100.0, scaling="ntk").warnings()
    assert line == "position.scaling=ntk changes nothing with position.factor=1"
