"""The claims of the lecture "Attention and Position", one after another, with its values.

Shapes: L positions, D width, K key width, H heads, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import batch_logits, difference, inputs, padded, ragged_store, random_decoder
from torch import Tensor, nn

from wherelm.attention import Attention, Mask, attend, attend_textbook, visible
from wherelm.batches import TokenStore, collate
from wherelm.model import next_token_loss
from wherelm.schemes import SCHEMES, PositionScheme, Shape
from wherelm.schemes.absolute import sinusoid_table
from wherelm.schemes.rotary import Rope, rotary_frequencies, rotate_pairs, rotation_table

CPU = torch.device("cpu")
EVERYTHING = Mask(False, None, "no mask")
CAUSAL = Mask(True, None, "causal flag")
every_scheme = pytest.mark.parametrize("name", SCHEMES)
every_side = pytest.mark.parametrize("side", ["right", "left"])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def scheme(name: str, width: int = 8, heads: int = 2, **options) -> PositionScheme:
    shape = Shape(width, heads, width // heads, context=16, layers=2)
    return SCHEMES[name](SCHEMES[name].Config(**options), shape)


def self_attention(module: Attention, x_BLD: Tensor, mask: Mask = EVERYTHING) -> Tensor:
    """Without positions."""
    positions = torch.arange(x_BLD.shape[1])[None]
    return module(x_BLD, x_BLD, scheme("none"), positions, positions, mask)


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


# 10


def test_claim_10_the_causal_mask_is_0_on_and_below_the_diagonal_and_minus_infinity_above():
    mask = visible(None, 4, 4, CPU)
    added = torch.zeros(4, 4).masked_fill(~mask.dense(4, 4, CPU)[0, 0], float("-inf"))
    low = float("-inf")
    assert added.tolist() == [[0, low, low, low], [0, 0, low, low], [0, 0, 0, low], [0, 0, 0, 0]]
    q, k, v = torch.randn(3, 1, 1, 4, 4)
    expected = torch.softmax(q @ k.mT / 2 + added, dim=-1)
    y, weights = attend_textbook(q, k, v, 0.5, mask.dense(4, 4, CPU))
    assert difference(weights, expected) <= 1e-6
    assert difference(attend(q, k, v, 0.5, mask), y) <= 1e-6


@every_scheme
def test_claim_10_changing_a_later_token_changes_no_earlier_logit(name):
    model = random_decoder(name)
    tokens = torch.arange(9)
    positions = torch.arange(9)[None]
    with torch.no_grad():
        before = model(tokens[None], positions)[0]
        for later in range(1, 9):
            changed = tokens.clone()
            changed[later] = 20
            after = model(changed[None], positions)[0]
            assert difference(after[:later], before[:later]) <= 1e-6
            assert difference(after[later], before[later]) > 1e-3


def test_claim_10_position_l_predicts_token_l_plus_1():
    batch = collate(TokenStore.from_lists([([5, 6, 7, 8], [False, True, True, True])]), [0], pad=0)
    assert batch.tokens_BT.tolist() == [[5, 6, 7]]
    assert batch.targets_BT.tolist() == [[6, 7, 8]]
    assert batch.positions_BT.tolist() == [[0, 1, 2]]


# 11 to 13: `please send the report` and `send report <PAD> <PAD>`

PAD, PLEASE, SEND, THE, REPORT, END = range(6)


def two_messages(side: str):
    """Each followed by the token that its last position predicts."""
    examples = [[PLEASE, SEND, THE, REPORT, END], [SEND, REPORT, END]]
    store = TokenStore.from_lists([(ids, [True] * len(ids)) for ids in examples])
    batch = collate(store, [0, 1], pad=PAD, side=side)
    real = [SEND, REPORT]
    assert batch.tokens_BT[1].tolist() == (
        real + [PAD] * 2 if side == "right" else [PAD] * 2 + real
    )
    return batch, slice(0, 2) if side == "right" else slice(2, 4)


@every_side
@every_scheme
def test_claim_11_padded_positions_supply_no_value_to_any_real_query(name, side):
    model = random_decoder(name)
    batch, real = two_messages(side)
    with torch.no_grad():
        logits = batch_logits(model, batch)[1, real]
        tokens, positions = torch.tensor([[SEND, REPORT]]), torch.arange(2)[None]
        alone = model(tokens, positions, keys_BT=batch.keys_BT[1:, real])[0]
        assert difference(logits, alone) <= 1e-5
        for other in range(6, 20):
            tokens_BT = batch.tokens_BT.masked_fill(~batch.key_mask_BT, other)
            changed = batch_logits(model, replace(batch, tokens_BT=tokens_BT))[1, real]
            assert difference(changed, logits) <= 1e-6


@every_side
@every_scheme
def test_claim_11_no_gradient_flows_from_real_logits_to_padded_positions_in_any_layer(name, side):
    model = random_decoder(name)
    batch, real = two_messages(side)
    entering = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, given: entering.append(given[0]))
    total = batch_logits(model, batch)[1, real].pow(2).sum()
    gradients = torch.autograd.grad(total, entering)
    assert len(gradients) == 2
    for gradient_BTD in gradients:
        sizes = gradient_BTD[1].norm(dim=-1)
        assert (sizes[~batch.key_mask_BT[1]] == 0).all()
        assert (sizes[batch.key_mask_BT[1]] > 1e-4).all()


@every_side
@every_scheme
def test_claim_12_padded_targets_contribute_nothing_to_the_loss(name, side):
    model = random_decoder(name)
    batch, _ = two_messages(side)
    assert batch.targets == 6
    loss = next_token_loss(model, batch).item()
    targets_BT = batch.targets_BT.masked_fill(~batch.loss_mask_BT, 17)
    assert not torch.equal(targets_BT, batch.targets_BT)
    assert next_token_loss(model, replace(batch, targets_BT=targets_BT)).item() == loss

    with torch.no_grad():
        logs = F.log_softmax(batch_logits(model, batch), dim=-1)
    by_hand = -sum(
        logs[b, t, batch.targets_BT[b, t]].item()
        for b, t in itertools.product(range(2), range(4))
        if batch.key_mask_BT[b, t]
    )
    assert loss == pytest.approx(by_hand, rel=1e-5)


@every_side
@every_scheme
def test_claim_12_padded_targets_contribute_nothing_to_the_gradient(name, side):
    model = random_decoder(name)
    batch, _ = two_messages(side)
    states = []
    model.final_norm.register_forward_hook(lambda module, given, output: states.append(output))

    def gradients(batch):
        model.zero_grad()
        next_token_loss(model, batch).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    expected = gradients(batch)
    targets_BT = batch.targets_BT.masked_fill(~batch.loss_mask_BT, 17)
    for parameter, gradient in gradients(replace(batch, targets_BT=targets_BT)).items():
        assert torch.equal(gradient, expected[parameter]), parameter
    (at_outputs,) = torch.autograd.grad(next_token_loss(model, batch), states[-1])
    sizes = at_outputs.norm(dim=-1)
    assert (sizes[~batch.loss_mask_BT] == 0).all()
    assert (sizes[batch.loss_mask_BT] > 1e-4).all()


@every_side
@every_scheme
def test_claim_13_the_causal_mask_still_applies_inside_each_real_prefix(name, side):
    model = random_decoder(name)
    batch, real = two_messages(side)
    first = range(4)[real][0]
    changed = batch.tokens_BT.clone()
    changed[1, first + 1] = THE
    with torch.no_grad():
        before = batch_logits(model, batch)[1]
        after = batch_logits(model, replace(batch, tokens_BT=changed))[1]
    assert difference(after[first], before[first]) <= 1e-6
    assert difference(after[first + 1], before[first + 1]) > 1e-3


@every_side
def test_claim_13_real_queries_read_exactly_the_real_keys_up_to_their_own(side):
    batch, real = two_messages(side)
    allowed = visible(batch.key_mask_BT, 4, 4, CPU, side).dense(4, 4, CPU).expand(2, 1, 4, 4)[:, 0]
    assert allowed[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    by_side = {"right": [[1, 0, 0, 0], [1, 1, 0, 0]], "left": [[0, 0, 1, 0], [0, 0, 1, 1]]}
    assert allowed[1, real].int().tolist() == by_side[side]


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
