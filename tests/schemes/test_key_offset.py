"""Keys whose still entries are those of the token before.

Shapes: B batch, S key slots, G key-value heads, K head width.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.helpers import difference, inputs, ragged_store, random_decoder, row_logits
from tests.schemes.conftest import scheme
from wherelm.model.attention import Attention
from wherelm.model.masks import visible

CPU = torch.device("cpu")


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.75])
def test_still_entries_come_from_the_slot_before_within_the_same_message(fraction):
    """Left-padded, packed and right-padded rows, by loops."""
    offset = scheme("key_offset", width=16, fraction=fraction)
    segments_BS = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 2, 3, 3], [1, 1, 1, 0, 0]])
    k_BGSK = torch.randn(3, 2, 5, 8)
    shifted = offset.shift(k_BGSK, segments_BS)
    still = 2 * round(fraction * 4)
    assert torch.equal(shifted[..., :still], k_BGSK[..., :still])
    for b, s in itertools.product(range(3), range(5)):
        goes_on = s > 0 and segments_BS[b, s - 1] == segments_BS[b, s]
        expected = k_BGSK[b, :, s - 1 if goes_on else s, still:]
        assert torch.equal(shifted[b, :, s, still:], expected), (b, s)


def test_without_segments_only_the_first_slot_keeps_its_own_entries():
    offset, k_BGSK = scheme("key_offset", width=16), torch.randn(2, 2, 5, 8)
    one = torch.ones(2, 5, dtype=torch.bool)
    assert torch.equal(offset.shift(k_BGSK, None), offset.shift(k_BGSK, one))
    assert torch.equal(offset.shift(k_BGSK[:, :, :1], None), k_BGSK[:, :, :1])


def test_where_every_entry_rotates_it_is_rope():
    tokens = inputs(ragged_store(), 0)
    whole = row_logits(random_decoder("key_offset", {"fraction": 1.0}), tokens)
    assert torch.equal(whole, row_logits(random_decoder("rope"), tokens))
    half = row_logits(random_decoder("key_offset"), tokens)
    assert difference(half, row_logits(random_decoder("rope", {"fraction": 0.5}), tokens)) > 1e-2
    (line,) = scheme("key_offset", context=128, base=100.0, fraction=1.0).warnings()
    assert "as with position=rope" in line


@pytest.mark.parametrize(("name", "target"), [("key_offset", "after"), ("rope", "same")])
def test_one_layer_reads_what_followed_the_same_token_before(name, target):
    """Queries and keys are the token's one-hot vector, in the entries that do not rotate."""
    tokens, symbols = [3, 1, 4, 2, 5, 0, 4], 6
    one = scheme(name, width=2 * symbols, heads=1, fraction=0.5)
    attention = Attention(symbols, 1, 2 * symbols)
    embed = torch.cat((torch.zeros(symbols, symbols), torch.eye(symbols))) * 20
    attention.query.weight.data, attention.key.weight.data = embed, embed
    attention.keep_weights = True
    positions_1T, length = torch.arange(len(tokens))[None], len(tokens)
    x_1TD = torch.eye(symbols)[tokens][None]
    with torch.no_grad():
        mask = visible(None, length, length, CPU)
        attention(x_1TD, x_1TD, one, positions_1T, positions_1T, mask)
    weights_T = attention.weights_BHTS[0, 0, -1]
    earlier, last = 2, length - 1
    read = {"after": [earlier + 1], "same": [earlier, last]}[target]
    assert float(weights_T[read].sum()) > 0.999
