"""The lecture's claims 1 to 8: attention, and what is built around it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import batch_logits, difference, inputs, padded, ragged_store, random_decoder
from tests.lecture.conftest import CAUSAL, CPU, EVERYTHING, scheme, self_attention
from wherelm.model.attention import Attention, attend, attend_textbook


def head_weights(module: Attention, x_LD: Tensor, allowed: Tensor | None = None) -> Tensor:
    """(H, L, L) of every head, by the textbook, from the module's own projections."""
    q, k, v = (
        part(x_LD).unflatten(-1, (module.heads, -1)).transpose(0, 1)[None]
        for part in (module.query, module.key, module.value)
    )
    return attend_textbook(q, k, v, module.scale, allowed)[1][0]


# 1


def test_claim_1_attention_is_one_matrix_operation():
    d, d_k, length = 6, 4, 5
    module = Attention(d, 1, d_k)
    w_q, w_k, w_v = module.query.weight, module.key.weight, module.value.weight
    assert w_q.shape == w_k.shape == w_v.shape == (d_k, d)
    x_LD = torch.randn(length, d)
    q, k, v = x_LD @ w_q.T, x_LD @ w_k.T, x_LD @ w_v.T
    expected = torch.softmax(q @ k.T / math.sqrt(d_k), dim=-1)

    y, weights = attend_textbook(q[None, None], k[None, None], v[None, None], d_k**-0.5)
    assert weights.shape == (1, 1, length, length)
    assert y.shape == (1, 1, length, d_k)
    assert difference(weights[0, 0], expected) <= 1e-6
    assert (weights >= 0).all()
    assert difference(weights.sum(-1), torch.ones(1, 1, length)) <= 1e-6
    assert difference(y[0, 0], expected @ v) <= 1e-6
    assert (
        difference(self_attention(module, x_LD[None])[0], expected @ v @ module.output.weight.T)
        <= 1e-6
    )


def test_claim_1_a_score_is_one_inner_product_of_a_query_and_a_key():
    q, k = torch.randn(5, 4), torch.randn(5, 4)
    # The values are the unit vectors, so the output row is the row of weights.
    weights = attend_textbook(q[None, None], k[None, None], torch.eye(5)[None, None], 0.5)[0][0, 0]
    for row, column in itertools.product(range(5), range(5)):
        ratio = weights[row, column] / weights[row, 0]
        assert ratio.log().item() == pytest.approx(
            0.5 * (q[row] @ (k[column] - k[0])).item(), abs=1e-5
        )


# 2


def test_claim_2_soft_lookup_by_hand():
    q = torch.tensor([1.0]).view(1, 1, 1, 1)
    keys = torch.tensor([0.0, math.log(2), math.log(3)]).view(1, 1, 3, 1)
    values = torch.tensor([[1.0, 0.0], [0.0, 2.0], [2.0, 2.0]])[None, None]
    y, weights = attend_textbook(q, keys, values, scale=1.0)
    assert weights.flatten().tolist() == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert y.flatten().tolist() == pytest.approx([7 / 6, 5 / 3])
    assert attend(q, keys, values, 1.0, EVERYTHING).flatten().tolist() == pytest.approx(
        [7 / 6, 5 / 3]
    )


# 3


def test_claim_3_subtracting_the_row_maximum_leaves_the_weights_unchanged():
    scores = torch.randn(1, 1, 4, 4, dtype=torch.float64)
    nothing = torch.zeros(1, 1, 4, 1, dtype=torch.float64)
    values = torch.eye(4, dtype=torch.float64)[None, None]
    weights = attend_textbook(nothing, nothing, values, 1.0, bias_BHTS=scores)[1]
    assert difference(weights, scores.exp() / scores.exp().sum(-1, keepdim=True)) <= 1e-12
    shifted = scores - torch.tensor([1.0, -30.0, 500.0, 0.0]).view(4, 1)
    assert (
        difference(attend_textbook(nothing, nothing, values, 1.0, bias_BHTS=shifted)[1], weights)
        <= 1e-12
    )


def test_claim_3_huge_scores_stay_finite():
    q = torch.tensor([1e4, -1e4, 1e4]).view(1, 1, 3, 1)
    keys = torch.tensor([1.0, -1.0, 1.0]).view(1, 1, 3, 1)
    values = torch.tensor([[1.0], [2.0], [4.0]])[None, None]
    y, weights = attend_textbook(q, keys, values, scale=1.0)
    assert weights[0, 0].tolist() == [[0.5, 0, 0.5], [0, 1, 0], [0.5, 0, 0.5]]
    assert y.flatten().tolist() == [2.5, 2.0, 2.5]
    assert attend(q, keys, values, 1.0, EVERYTHING).flatten().tolist() == [2.5, 2.0, 2.5]


# 4


@pytest.mark.parametrize("d_k", [4, 20, 64, 256])
def test_claim_4_scaled_scores_have_standard_deviation_1_for_any_width(d_k):
    q, k = torch.randn(300, d_k), torch.randn(300, d_k)
    raw = q @ k.T
    assert raw.mean().item() == pytest.approx(0, abs=0.05 * d_k**0.5)
    assert raw.var().item() == pytest.approx(d_k, rel=0.1)
    module = Attention(d_k, 1, d_k)
    assert module.scale == pytest.approx(1 / math.sqrt(d_k))
    # The logarithm of the weights is the score but for a constant of its row.
    v = torch.zeros(1, 1, 300, 1)
    logs = attend_textbook(q[None, None], k[None, None], v, module.scale)[1][0, 0].log()
    assert (logs - logs.mean(-1, keepdim=True)).std().item() == pytest.approx(1, abs=0.06)


def two_key_weights(scale: float) -> Tensor:
    """Raw scores 0 and sqrt(20) at d_k = 20."""
    q, keys = torch.ones(1, 1, 1, 20), torch.zeros(1, 1, 2, 20)
    keys[0, 0, 1] = math.sqrt(20) / 20
    return attend_textbook(q, keys, torch.zeros(1, 1, 2, 1), scale)[1].flatten()


def test_claim_4_scaling_by_hand():
    percent = [round(100 * w, 1) for w in two_key_weights(1.0).tolist()]
    assert percent == [1.1, 98.9]
    percent = [round(100 * w, 1) for w in two_key_weights(Attention(20, 1, 20).scale).tolist()]
    assert percent == [26.9, 73.1]


def test_claim_4_saturated_softmax_has_small_gradients():
    sizes = {}
    for scale in (1.0, 20**-0.5, 4.0):
        scores = torch.tensor([0.0, math.sqrt(20) * scale], requires_grad=True)
        zeros = torch.zeros(1, 1, 2, 1)
        bias = scores.view(1, 1, 1, 2)
        attend_textbook(zeros[:, :, :1], zeros, zeros, 1.0, bias_BHTS=bias)[1][
            ..., 1
        ].sum().backward()
        sizes[scale] = scores.grad.norm().item()
    p = 0.989
    assert sizes[1.0] == pytest.approx(math.sqrt(2) * p * (1 - p), rel=0.05)
    assert sizes[20**-0.5] > 15 * sizes[1.0] > 15 * 15 * sizes[4.0]


# 5


def test_claim_5_cross_attention_reads_a_context_of_another_length_and_width():
    """Question tokens query a passage."""
    module = Attention(6, 2, 4, context_width=10)
    question, passage = torch.randn(1, 3, 6), torch.randn(1, 5, 10)

    def forward(x, c):
        positions = torch.arange(x.shape[1])[None], torch.arange(c.shape[1])[None]
        return module(x, c, scheme("none"), *positions, EVERYTHING)

    y = forward(question, passage)
    assert y.shape == (1, 3, 6)
    q = module.query(question).unflatten(-1, (2, 4)).transpose(1, 2)
    k = module.key(passage).unflatten(-1, (2, 4)).transpose(1, 2)
    v = module.value(passage).unflatten(-1, (2, 4)).transpose(1, 2)
    heads, weights = attend_textbook(q, k, v, module.scale)
    assert weights.shape == (1, 2, 3, 5)
    assert heads.shape == (1, 2, 3, 4)
    assert difference(y, module.output(heads.transpose(1, 2).flatten(2))) <= 1e-6

    other = passage.clone()
    other[:, 4] += 1
    assert ((forward(question, other) - y).abs().amax(-1) > 1e-4).all()
    other = question.clone()
    other[:, 2] += 1
    changed = (forward(other, passage) - y).abs().amax(-1)[0]
    assert changed[:2].max() <= 1e-6 < 1e-3 < changed[2]


def test_claim_5_self_attention_is_the_case_where_the_context_is_x():
    x_BLD = torch.randn(2, 5, 8)
    module, wide = Attention(8, 2, 4), Attention(8, 2, 4, context_width=8)
    wide.load_state_dict(module.state_dict())
    positions = torch.arange(5)[None]
    cross = wide(x_BLD, x_BLD.clone(), scheme("none"), positions, positions, EVERYTHING)
    assert torch.equal(cross, self_attention(module, x_BLD))

    given = []
    model = random_decoder("none")
    for block in model.blocks:
        block.attention.register_forward_hook(lambda module, inputs, output: given.append(inputs))
    model(torch.arange(5)[None], positions)
    assert len(given) == 2
    assert all(x is context for x, context, *_ in given)


# 6


def rnn_cell_chain(x_LD: Tensor) -> list[Tensor]:
    """The states h_l = tanh(W x_l + U h_(l-1)) of a small recurrent network."""
    width = x_LD.shape[-1]
    cell = nn.RNNCell(width, width)
    states = [torch.zeros(1, width)]
    for x_D in x_LD:
        states.append(cell(x_D[None], states[-1]))
    return states[1:]


def attention_outputs(x_LD: Tensor, module: Attention | None = None) -> list[Tensor]:
    """Each output by a call of its own, from its own query and the inputs that it may read."""
    module = Attention(x_LD.shape[-1], 2, 4) if module is None else module
    x_BLD, positions = x_LD[None], torch.arange(len(x_LD))[None]
    return [
        module(
            x_BLD[:, i : i + 1],
            x_BLD[:, : i + 1],
            scheme("none"),
            positions[:, i : i + 1],
            positions[:, : i + 1],
            EVERYTHING,
        )[0]
        for i in range(len(x_LD))
    ]


def attention_at_once(x_LD: Tensor, module: Attention | None = None) -> Tensor:
    """All outputs by one call."""
    module = Attention(x_LD.shape[-1], 2, 4) if module is None else module
    return self_attention(module, x_LD[None], CAUSAL)[0]


def gradient_past_the_others(layer, source: int, target: int, length: int = 6) -> float:
    """Size of d output / d input along the paths that cross no other position's output."""
    x_LD = torch.randn(length, 8, requires_grad=True)
    outputs = layer(x_LD)
    for position, output in enumerate(outputs):
        if position != target:
            output.register_hook(torch.zeros_like)
    (gradient,) = torch.autograd.grad(outputs[target].sum(), x_LD)
    return gradient[source].norm().item()


def longest_path(node) -> int:
    """Operations in a row between a tensor and what it was made of."""
    depths: dict = {}

    def depth(node) -> int:
        if node is None:
            return 0
        if node not in depths:
            depths[node] = 1 + max((depth(n) for n, _ in node.next_functions), default=0)
        return depths[node]

    return depth(node)


def test_claim_6_all_outputs_together_are_those_computed_without_each_other():
    module, x_LD = Attention(8, 2, 4), torch.randn(6, 8)
    one_by_one = torch.cat(attention_outputs(x_LD, module))
    assert difference(attention_at_once(x_LD, module), one_by_one) <= 1e-6


def test_claim_6_attention_reaches_every_allowed_input_directly():
    for target, source in itertools.product(range(6), range(6)):
        size = gradient_past_the_others(attention_outputs, source, target)
        assert size > 1e-4 if source <= target else size == 0


def test_claim_6_a_recurrent_network_has_no_direct_path():
    for target, source in itertools.product(range(6), range(6)):
        size = gradient_past_the_others(rnn_cell_chain, source, target)
        assert size > 1e-4 if source == target else size == 0
    x_LD = torch.randn(6, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(rnn_cell_chain(x_LD)[5].sum(), x_LD)
    assert (gradient.norm(dim=-1) > 1e-6).all()  # it passes, but through every state between


def test_claim_6_attention_has_no_sequential_chain():
    def depth(layer, length: int) -> int:
        return longest_path(layer(torch.randn(length, 8, requires_grad=True))[-1].grad_fn)

    assert depth(attention_at_once, 4) == depth(attention_at_once, 40)
    assert depth(rnn_cell_chain, 40) - depth(rnn_cell_chain, 4) >= 36


# 7


def test_claim_7_projections_are_fixed_and_weights_depend_on_the_input():
    module = Attention(8, 2, 4)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    first, second = torch.randn(5, 8), torch.randn(5, 8)
    for x_LD in (first, second):
        self_attention(module, x_LD[None])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert difference(head_weights(module, first), head_weights(module, second)) > 0.01
    # Were the weights fixed, the layer would be linear in its input.
    doubled = self_attention(module, 2 * first[None])
    assert difference(doubled, 2 * self_attention(module, first[None])) > 1e-3


# 8


def test_claim_8_heads_are_separate_attentions_whose_outputs_are_concatenated():
    d, heads, d_k = 8, 4, 3
    module = Attention(d, heads, d_k)
    x_BLD = torch.randn(2, 5, d)
    outputs = []
    for h in range(heads):
        own = slice(h * d_k, (h + 1) * d_k)
        q, k, v = (
            (x_BLD @ part.weight[own].T)[:, None]
            for part in (module.query, module.key, module.value)
        )
        outputs.append(attend_textbook(q, k, v, d_k**-0.5, CAUSAL.dense(5, 5, CPU))[0][:, 0])
    expected = torch.cat(outputs, dim=-1) @ module.output.weight.T
    assert difference(self_attention(module, x_BLD, CAUSAL), expected) <= 1e-6


@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_claim_8_each_head_has_its_own_projections(part):
    module = Attention(8, 4, 3)
    module.output = nn.Identity()
    x_BLD = torch.randn(1, 5, 8)
    before = self_attention(module, x_BLD).unflatten(-1, (4, 3))
    with torch.no_grad():
        getattr(module, part).weight[6:9].normal_()
    changed = (self_attention(module, x_BLD).unflatten(-1, (4, 3)) - before).abs().amax((0, 1, 3))
    assert (changed > 1e-3).tolist() == [False, False, True, False]


def test_claim_8_every_head_obeys_the_allowed_context():
    weights_HLL = head_weights(Attention(8, 4, 3), torch.randn(5, 8), CAUSAL.dense(5, 5, CPU))
    below = torch.ones(5, 5, dtype=torch.bool).tril()
    assert (weights_HLL[:, ~below] == 0).all()
    assert (weights_HLL[:, below] > 0).all()


# What the lecture hands on


def test_decoder_blocks_combine_attention_and_a_token_wise_mlp_on_residual_paths():
    model = random_decoder("rope")
    block = model.blocks[0]
    x_BTD = torch.randn(1, 5, model.config.width)
    positions = torch.arange(5)[None]
    with torch.no_grad():
        h = block.attention_norm(x_BTD)
        h = x_BTD + block.attention(h, h, model.scheme, positions, positions, CAUSAL)
        expected = h + torch.cat([block.mlp(block.mlp_norm(h[:, [t]])) for t in range(5)], dim=1)
        actual = block(x_BTD, model.scheme, positions, CAUSAL, None, None)
    assert difference(actual, expected) <= 1e-5


def test_a_vocabulary_head_predicts_the_next_token():
    model = random_decoder("rope")
    store = ragged_store((6,))
    batch = padded(store, [0])
    with torch.no_grad():
        x_BTD = model.hidden(inputs(store, 0)[None], batch.positions_BT)
        logits = x_BTD @ model.head.weight.T
    assert logits.shape == (1, 6, model.vocab_size)
    assert difference(batch_logits(model, batch).detach(), logits) <= 1e-5
