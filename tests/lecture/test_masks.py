"""The lecture's claims 10 to 13: masks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import batch_logits, difference, random_decoder
from tests.lecture.conftest import CPU
from wherelm.batches.batch import collate
from wherelm.batches.store import TokenStore
from wherelm.model.attention import attend, attend_textbook
from wherelm.model.decoder import next_token_loss
from wherelm.model.masks import visible
from wherelm.schemes import SCHEMES

every_scheme = pytest.mark.parametrize("name", SCHEMES)


every_side = pytest.mark.parametrize("side", ["right", "left"])


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
