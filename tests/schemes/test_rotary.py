from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.helpers import (
    difference,
    inputs,
    ragged_store,
    random_decoder,
    row_logits,
)
from tests.schemes.conftest import FAR, scheme, sinusoid_in_double
from wherelm.schemes import SCHEMES
from wherelm.schemes.rotary import rotation_table
from wherelm.schemes.scalings import (
    SCALINGS,
    ntk_scaling,
    rotary_frequencies,
    yarn_magnitude,
    yarn_ramp,
    yarn_scaling,
    yarn_turns,
)


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


@pytest.mark.parametrize("scaling", sorted(set(SCALINGS) - {"dynamic"}))
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


def test_yarn_at_a_context_of_16_leaves_pairs_alone_that_turn_less_often_than_32_times():
    """By hand: log(16/2pi) / log(4096/2pi) = 0.14425, and 32 to that power is 1.6486."""
    assert yarn_turns(16) == pytest.approx(1.6486, abs=5e-5)
    assert yarn_turns(6) == 1.0
    yarn = scheme("rope", width=32, heads=1, context=16, base=100.0, scaling="yarn", factor=4.0)
    # Pair i turns 2.5465 / 100^(i/16) times: 1.6486 times at i = 1.5, once at i = 3.2.
    kept = torch.tensor([1, 1, 2 / 3, 1 / 3, *[0] * 12], dtype=torch.float64)
    plain = rotary_frequencies(32, 100.0)
    assert difference(yarn.frequencies_P, plain * (kept + (1 - kept) / 4)) <= 1e-12


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


def test_drope_is_rope_before_the_drop_and_none_after_it():
    tokens = inputs(ragged_store(), 0)
    model = random_decoder("drope", {"drop_at": 0.5})
    plain = {name: row_logits(random_decoder(name), tokens) for name in ("rope", "none")}
    for share, name in ((0.0, "rope"), (0.49, "rope"), (0.5, "none"), (1.0, "none")):
        model.scheme.progress(share)
        assert torch.equal(row_logits(model, tokens), plain[name])
    assert difference(plain["rope"], plain["none"]) > 1e-2


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


def test_yarn_warns_where_no_pair_turns_often_enough():
    line = scheme("rope", context=6, scaling="yarn", factor=2.0, base=2.0).warnings()[-1]
    assert line.startswith("position.scaling=yarn: no pair completes 1.0 turns")
    assert scheme("rope", context=128, scaling="yarn", factor=2.0, base=100.0).warnings() == []


def test_an_extension_without_a_factor_warns_that_it_changes_nothing():
    (line,) = scheme("rope", context=128, base=100.0, scaling="ntk").warnings()
    assert line == "position.scaling=ntk changes nothing with position.factor=1"
