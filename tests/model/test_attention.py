"""The mask, the fast path beside the textbook, and the cache.

Shapes: B batch, T query slots, S key slots, H heads, K head width.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.helpers import difference, packed, padded, ragged_store, random_decoder
from wherelm.model import attention
from wherelm.model.attention import Attention, attend, attend_textbook
from wherelm.model.cache import KeyValueCache
from wherelm.model.masks import Mask, visible
from wherelm.runtime import autocast
from wherelm.schemes.base import PositionScheme, Shape

CPU = torch.device("cpu")
NONE = PositionScheme(PositionScheme.Config(), Shape(8, 2, 4, 16, 2, 16, 16))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def allowed_by_loops(key_mask_BS, queries, segments_BT=None):
    """Who may read whom, from the words: earlier or own slot, a real token, of the own message."""
    batch, keys = key_mask_BS.shape
    allowed = torch.zeros(batch, 1, queries, keys, dtype=torch.bool)
    for b, t, s in itertools.product(range(batch), range(queries), range(keys)):
        slot = keys - queries + t
        together = segments_BT is None or segments_BT[b, slot] == segments_BT[b, s]
        allowed[b, 0, t, s] = s == slot or (s < slot and bool(key_mask_BS[b, s]) and bool(together))
    return allowed


def real_rows(batch, weights_BHTS):
    return weights_BHTS.transpose(1, 2)[batch.key_mask_BT]


def test_right_padding_needs_no_dense_mask_and_is_exactly_the_dense_one_on_real_queries():
    batch = padded(ragged_store(), range(4), "right")
    width = batch.tokens_BT.shape[1]
    mask = visible(batch.key_mask_BT, width, width, CPU, "right")
    assert mask.causal
    assert mask.keys_B1TS is None
    assert "no mask" in mask.path
    expected = allowed_by_loops(batch.key_mask_BT, width)
    dense = mask.dense(width, width, CPU).expand_as(expected)
    assert torch.equal(real_rows(batch, dense), real_rows(batch, expected))
    assert not torch.equal(dense, expected)


@pytest.mark.parametrize("side", ["left", "packed"])
def test_left_padding_and_packed_rows_build_the_exact_boolean_mask(side):
    store = ragged_store()
    batch = packed(store, [[0, 1], [2, 3]]) if side == "packed" else padded(store, range(4), side)
    width = batch.tokens_BT.shape[1]
    mask = visible(batch.key_mask_BT, width, width, CPU, side, batch.segments_BT)
    assert not mask.causal
    assert side in mask.path
    assert torch.equal(
        mask.keys_B1TS, allowed_by_loops(batch.key_mask_BT, width, batch.segments_BT)
    )


@pytest.mark.parametrize("queries", [1, 2, 5, 9])
def test_new_queries_over_cached_keys_see_the_last_rows_of_the_whole_mask(queries):
    key_mask_BS = padded(ragged_store(), range(4), "left").key_mask_BT
    mask = visible(key_mask_BS, queries, 9, CPU, "left")
    whole = allowed_by_loops(key_mask_BS, 9)
    assert torch.equal(mask.dense(queries, 9, CPU), whole[:, :, 9 - queries :])
    unpadded = visible(None, queries, 9, CPU, "left").dense(queries, 9, CPU)
    assert torch.equal(unpadded, torch.ones(1, 1, 9, 9).tril().bool()[:, :, 9 - queries :])


def test_one_query_after_all_of_its_keys_and_unpadded_rows_take_no_dense_mask():
    assert visible(None, 1, 9, CPU, "left") == Mask(
        False, None, "no mask (one query after all of its keys)"
    )
    assert visible(None, 9, 9, CPU, "left").causal
    assert visible(None, 9, 9, CPU, window=9).causal
    assert not visible(None, 9, 9, CPU, window=8).causal
    assert visible(None, 1, 1, CPU, "left").keys_B1TS is None


def test_no_row_is_fully_masked_even_without_any_real_token():
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    for side in ("left", "packed"):
        mask = visible(nothing, 5, 5, CPU, side, torch.zeros(2, 5, dtype=torch.long))
        assert torch.equal(mask.keys_B1TS, torch.eye(5, dtype=torch.bool).expand(2, 1, 5, 5))


def test_the_path_taken_is_told_to_the_run():
    model = random_decoder()
    paths = {}
    for side in ("right", "left"):
        batch = padded(ragged_store(), range(4), side)
        model.hidden(batch.tokens_BT, batch.positions_BT, batch.key_mask_BT, side=side)
        paths[side] = model.mask_path
    assert paths == {
        "right": "causal flag (right padding needs no mask)",
        "left": "boolean mask (left rows)",
    }


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("side", ["right", "left", "packed"])
def test_the_fast_path_equals_the_textbook(side, biased):
    store = ragged_store()
    batch = packed(store, [[0, 1], [2, 3]]) if side == "packed" else padded(store, range(4), side)
    rows, width = batch.tokens_BT.shape
    mask = visible(batch.key_mask_BT, width, width, CPU, side, batch.segments_BT)
    q, k, v = torch.randn(3, rows, 2, width, 4)
    dense = mask.dense(width, width, CPU)
    bias = torch.randn(1, 2, width, width) if biased else None
    expected, _ = attend_textbook(q, k, v, 0.7, dense, bias)
    masked = None if bias is None else bias.masked_fill(~dense, float("-inf"))
    assert difference(attend(q, k, v, 0.7, mask, masked), expected) <= 1e-6


def test_the_scale_is_given_and_not_inferred_from_the_width():
    q, k, v = torch.randn(3, 1, 1, 4, 16)
    mask = Mask(False, None, "no mask")
    assert difference(attend(q, k, v, 2.0, mask), attend_textbook(q, k, v, 2.0)[0]) <= 1e-5
    assert difference(attend(q, k, v, 2.0, mask), attend(q, k, v, 0.25, mask)) > 1e-2


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("keys", [5, attention.SHORT_BFLOAT16 + 1])
def test_under_autocast_on_a_cpu_attention_is_the_textbook_s_but_for_rounding(keys, biased):
    """bfloat16 keeps 8 bits: a rounding unit of 0.4 % on values of size 3."""
    q, k, v = torch.randn(3, 1, 2, keys, 4)
    mask = Mask(True, None, "causal flag")
    bias = mask.additive(torch.randn(1, 2, keys, keys)) if biased else None
    with autocast("bfloat16", CPU):
        y = attend(q, k, v, 0.5, mask, bias)
    expected, _ = attend_textbook(q, k, v, 0.5, mask.dense(keys, keys, CPU), bias)
    assert y.dtype == torch.bfloat16
    assert 0 < difference(y.float(), expected) <= 0.03


def forward(module: Attention, x_BTD: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x_BTD.shape[1])[None]
    return module(x_BTD, x_BTD, NONE, positions, positions, Mask(True, None, "causal flag"))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_neighbouring_query_heads_share_a_key_value_head(kv_heads):
    grouped, full = Attention(8, 4, 2, kv_heads=kv_heads), Attention(8, 4, 2)
    assert grouped.key.weight.shape == (2 * kv_heads, 8)
    with torch.no_grad():
        for name in ("query", "output"):
            getattr(full, name).weight.copy_(getattr(grouped, name).weight)
        for name in ("key", "value"):
            for head in range(4):
                source = head // (4 // kv_heads)
                rows = getattr(grouped, name).weight[2 * source : 2 * source + 2]
                getattr(full, name).weight[2 * head : 2 * head + 2] = rows
    x_BTD = torch.randn(2, 5, 8)
    assert difference(forward(grouped, x_BTD), forward(full, x_BTD)) <= 1e-6


def test_qk_norm_makes_attention_independent_of_the_size_of_queries_and_keys():
    x_BTD = torch.randn(2, 5, 8)
    for qk_norm in (True, False):
        module = Attention(8, 2, 4, qk_norm=qk_norm)
        before = forward(module, x_BTD)
        with torch.no_grad():
            module.query.weight *= 30
            module.key.weight *= 20
        change = difference(forward(module, x_BTD), before)
        assert change <= 1e-4 if qk_norm else change > 1e-2


@pytest.mark.parametrize("short", [0, attention.SHORT])
def test_dropout_of_weights_acts_in_training_alone(short, monkeypatch):
    """Of the fused kernel as of the plain products."""
    monkeypatch.setattr(attention, "SHORT", short)
    x_BTD = torch.randn(2, 5, 8)
    module = Attention(8, 2, 4, dropout=0.5)
    assert difference(forward(module, x_BTD), forward(module, x_BTD)) > 1e-3
    module.eval()
    assert torch.equal(forward(module, x_BTD), forward(module, x_BTD))


def test_a_cache_holds_what_it_was_given_and_no_more():
    cache = KeyValueCache(1, 2, 3, CPU)
    k, v = torch.randn(2, 2, 1, 3, 4)
    cache.advance(torch.tensor([[0, 1], [0, 0]]), torch.tensor([[True, True], [False, True]]))
    cache.extend(0, k[:, :, :2], v[:, :, :2])
    assert cache.any_padding
    cache.advance(torch.tensor([[2], [1]]), None)
    keys, values = cache.extend(0, k[:, :, 2:], v[:, :, 2:])
    assert torch.equal(keys, k)
    assert torch.equal(values, v)
    assert cache.positions_BS.tolist() == [[0, 1, 2], [0, 0, 1]]
    assert cache.key_mask_BS.tolist() == [[True] * 3, [False, True, True]]
    with pytest.raises(AssertionError, match="too small"):
        cache.advance(torch.tensor([[3], [2]]), None)


def test_fractional_positions_reach_the_cache_whole():
    cache = KeyValueCache(1, 1, 2, CPU)
    cache.advance(torch.tensor([[0.25, 1.5]], dtype=torch.float64), None)
    assert cache.positions_BS.tolist() == [[0.25, 1.5]]
    assert cache.positions_BS.dtype == torch.float64


@pytest.mark.parametrize("form", ["causal", "window", "left", "bias", "none"])
def test_plain_products_and_the_fused_kernel_agree_with_the_textbook(form, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    rows, heads, queries, keys, width = 3, 2, 9, 9, 4
    shape = (rows, heads, queries, width)
    values = [torch.randn(shape, generator=generator, requires_grad=True) for _ in range(3)]
    key_mask = torch.ones(rows, keys, dtype=torch.bool)
    key_mask[1, :4] = False
    cpu = torch.device("cpu")
    mask = {
        "causal": visible(None, queries, keys, cpu),
        "window": visible(None, queries, keys, cpu, window=3),
        "left": visible(key_mask, queries, keys, cpu, side="left"),
        "bias": visible(None, queries, keys, cpu),
        "none": Mask(False, None, ""),
    }[form]
    bias = torch.randn(1, heads, queries, keys, generator=generator, requires_grad=True)
    added = mask.additive(bias) if form == "bias" else None
    allowed = mask.dense(queries, keys, cpu)
    results = [attend_textbook(*values, 0.7, allowed, bias if form == "bias" else None)[0]]
    for short in (0, 96):
        monkeypatch.setattr(attention, "SHORT", short)
        results.append(attention.attend(*values, 0.7, mask, added))
    leaves = [*values, *([bias] if form == "bias" else [])]
    gradients = [torch.autograd.grad(r.square().sum(), leaves, retain_graph=True) for r in results]
    for result, gradient in zip(results[1:], gradients[1:], strict=True):
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-5)
        for a, b in zip(gradient, gradients[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
