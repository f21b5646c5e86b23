"""The lecture's claims 14 to 19: position."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.helpers import difference, random_decoder
from tests.lecture.conftest import CAUSAL, scheme, self_attention
from wherelm.model.attention import Attention
from wherelm.schemes.absolute import sinusoid_table
from wherelm.schemes.base import PositionScheme
from wherelm.schemes.rotary import Rope, rotary_frequencies, rotate_pairs, rotation_table

# 14 and 15


def test_claim_14_without_mask_and_positions_attention_is_permutation_equivariant():
    module = Attention(8, 2, 4)
    x_LD = torch.randn(4, 8)
    y_LD = self_attention(module, x_LD[None])[0]
    for order in itertools.permutations(range(4)):
        assert (
            difference(self_attention(module, x_LD[list(order)][None])[0], y_LD[list(order)])
            <= 1e-6
        )


def test_claim_14_report_gets_the_same_output_in_another_row():
    first = ["send", "the", "report", "before", "the", "slides", "."]
    second = ["send", "the", "slides", "before", "the", "report", "."]
    embedding = {word: torch.randn(8) for word in sorted(set(first))}
    module = Attention(8, 2, 4)
    rows = [
        self_attention(module, torch.stack([embedding[w] for w in words])[None])[0]
        for words in (first, second)
    ]
    here, there = first.index("report"), second.index("report")
    assert here != there
    assert difference(rows[0][here], rows[1][there]) <= 1e-6
    assert difference(rows[0][here], rows[1][here]) > 1e-3


def test_claim_15_a_causal_mask_breaks_arbitrary_equivariance():
    module = Attention(8, 2, 4)
    x_LD = torch.randn(4, 8)
    y_LD = self_attention(module, x_LD[None], CAUSAL)[0]
    for order in itertools.permutations(range(4)):
        change = difference(
            self_attention(module, x_LD[list(order)][None], CAUSAL)[0], y_LD[list(order)]
        )
        assert change <= 1e-6 if list(order) == sorted(order) else change > 1e-3


def last_logits_of_all_prefix_orders(layers: int) -> list[Tensor]:
    """Of the same prefix in every order before one last token, without positions."""
    model = random_decoder("none", layers=layers, dtype=torch.float64)
    prefix, last, positions = [3, 8, 5, 12], 7, torch.arange(5)[None]
    with torch.no_grad():
        return [
            model(torch.tensor([[*order, last]]), positions)[0, -1]
            for order in itertools.permutations(prefix)
        ]


def test_claim_15_with_one_layer_the_last_output_depends_only_on_the_multiset_of_the_prefix():
    first, *others = last_logits_of_all_prefix_orders(layers=1)
    assert len(others) == 23
    assert max(difference(other, first) for other in others) <= 1e-12
    model = random_decoder("none", layers=1, dtype=torch.float64)
    positions = torch.arange(5)[None]
    with torch.no_grad():
        another = model(torch.tensor([[3, 8, 5, 5, 7]]), positions)[0, -1]
        same = model(torch.tensor([[5, 12, 3, 8, 7]]), positions)[0, -1]
    assert difference(same, first) <= 1e-12
    assert difference(another, first) > 1e-3


def test_claim_15_with_two_layers_it_depends_on_the_order_though_nothing_was_told():
    first, *others = last_logits_of_all_prefix_orders(layers=2)
    assert min(difference(other, first) for other in others) > 1e-4


# 16


def test_claim_16_the_sinusoid_has_the_lecture_s_values_at_width_4():
    table = sinusoid_table(torch.tensor([[0, 2, 5]]), 4, 10_000.0)[0]
    fast, slow = 1.0, 10_000 ** (-2 / 4)
    assert slow == pytest.approx(0.01)
    expected = [
        [math.sin(l * fast), math.cos(l * fast), math.sin(l * slow), math.cos(l * slow)]
        for l in (0, 2, 5)  # noqa: E741
    ]
    assert expected[0] == [0, 1, 0, 1]
    assert difference(table, torch.tensor(expected, dtype=torch.float64)) <= 1e-7
    assert table[1].tolist() == pytest.approx([0.909297, -0.416147, 0.019999, 0.9998], abs=1e-6)
    assert table[2].tolist() == pytest.approx([-0.958924, 0.283662, 0.049979, 0.99875], abs=1e-6)


def test_claim_16_additive_positions_enter_with_the_embeddings():
    model = random_decoder("sinusoidal")
    entering = []
    model.blocks[0].register_forward_pre_hook(lambda block, given: entering.append(given[0][0]))
    tokens = torch.tensor([[5, 9, 5]])
    model(tokens, torch.arange(3)[None])
    width = model.config.width
    embedded = model.embedding(tokens)[0] * width**0.5
    p_LD = sinusoid_table(torch.arange(3)[None], width, 10_000.0)[0]
    assert difference(entering[0], embedded + p_LD) <= 1e-6
    assert torch.equal(embedded[0], embedded[2])
    assert difference(entering[0][0], entering[0][2]) > 0.5


def test_claim_16_the_sinusoid_needs_an_even_width():
    with pytest.raises(ValueError, match=r"even model\.width"):
        scheme("sinusoidal", width=7, heads=1)


# 17


def test_claim_17_each_pair_is_rotated_by_its_own_angle():
    d_k = 8
    q = torch.randn(1, 1, 6, d_k, dtype=torch.float64)
    positions = torch.arange(6)[None]
    rope = scheme("rope", width=d_k, heads=1)
    turned = rope.rotate(q, positions, "query")[0, 0]
    for position, i in itertools.product(range(6), range(d_k // 2)):
        angle = position * 10_000 ** (-2 * i / d_k)
        rotation = torch.tensor(
            [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        )
        pair = slice(2 * i, 2 * i + 2)
        expected = rotation.double() @ q[0, 0, position, pair]
        assert difference(turned[position, pair], expected) <= 1e-6
    assert torch.equal(rope.rotate(q, positions, "key")[0, 0], turned)


def test_claim_17_fast_and_slow_pairs_cover_different_scales_of_distance():
    frequencies = rotary_frequencies(64, 10_000.0)
    assert frequencies[0] == 1
    assert frequencies[-1].item() == pytest.approx(10_000 ** (-62 / 64))
    assert (frequencies.diff() < 0).all()
    wavelengths = 2 * math.pi / frequencies
    assert wavelengths[0] < 7 < 10_000 < wavelengths[-1]


# 18


def rope_score(q: Tensor, k: Tensor, q_position: float, k_position: float) -> float:
    rope = scheme("rope", width=len(q), heads=1)
    q, k = q.view(1, 1, 1, -1), k.view(1, 1, 1, -1)
    q = rope.rotate(q, torch.tensor([[q_position]]), "query")
    k = rope.rotate(k, torch.tensor([[k_position]]), "key")
    return (q @ k.mT).item()


def test_claim_18_the_score_is_a_sum_over_pairs_of_rotations_by_the_difference():
    q, k = torch.randn(2, 8, dtype=torch.float64)
    for position, other in ((1, 3), (5, 2), (0, 0)):
        expected = 0.0
        for i in range(4):
            angle = (other - position) * 10_000 ** (-2 * i / 8)
            rotation = torch.tensor(
                [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
            )
            pair = slice(2 * i, 2 * i + 2)
            expected += (q[pair] @ rotation.double() @ k[pair]).item()
        assert rope_score(q, k, position, other) == pytest.approx(expected, abs=1e-6)


def test_claim_18_positions_1_3_and_2_4_give_the_same_score_for_the_same_content():
    q, k = torch.randn(2, 8)
    score = rope_score(q, k, 1, 3)
    assert rope_score(q, k, 2, 4) == pytest.approx(score, abs=1e-5)
    assert abs(rope_score(q, k, 1, 4) - score) > 1e-3


def test_claim_18_rotating_both_by_a_further_30_degrees_keeps_a_60_degree_difference():
    unit = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)

    def turned(degrees: float) -> Tensor:
        # At width 2 there is one pair, and a position is its angle in radians.
        table = rotation_table(
            torch.tensor([[math.radians(degrees)]]), rotary_frequencies(2, 10_000.0)
        )
        return rotate_pairs(unit, table).flatten()

    before, after = (turned(0), turned(60)), (turned(30), turned(90))
    assert (before[0] @ before[1]).item() == pytest.approx(math.cos(math.radians(60)), abs=1e-6)
    assert (after[0] @ after[1]).item() == pytest.approx(0.5, abs=1e-6)
    assert after[1].tolist() == pytest.approx([0, 1], abs=1e-6)


def test_claim_18_norms_are_kept_and_there_is_no_learned_table():
    rope = scheme("rope", width=16, heads=2)
    x = torch.randn(2, 2, 50, 8)
    turned = rope.rotate(x, torch.arange(0, 5000, 100)[None], "query")
    assert difference(turned.norm(dim=-1), x.norm(dim=-1)) <= 1e-5
    assert difference(turned, x) > 1
    assert list(rope.parameters()) == []


# 19


def test_claim_19_rope_adds_nothing_to_the_embeddings():
    entering = []
    tokens, positions = torch.tensor([[5, 9, 5]]), torch.arange(3)[None]
    for name in ("rope", "none"):
        model = random_decoder(name)
        model.blocks[0].register_forward_pre_hook(lambda block, given: entering.append(given[0]))
        model(tokens, positions)
        assert torch.equal(entering[-1], model.embedding(tokens) * model.config.width**0.5)
    assert torch.equal(entering[0], entering[1])
    assert Rope.embed is PositionScheme.embed


def test_claim_19_rope_is_itself_the_position_encoding():
    tokens, positions = torch.tensor([[5, 9, 3, 7]]), torch.arange(4)[None]
    last = {}
    for name in ("rope", "none"):
        model = random_decoder(name, layers=1, dtype=torch.float64)
        with torch.no_grad():
            swapped = model(tokens[:, [1, 0, 2, 3]], positions)[0, -1]
            last[name] = difference(swapped, model(tokens, positions)[0, -1])
    assert last["none"] <= 1e-12 < 1e-3 < last["rope"]
