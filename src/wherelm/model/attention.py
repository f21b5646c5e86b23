"""Multi-head attention: the textbook form and the fast form.

Shapes: B batch, T query slots, S key slots, D width, C context width, H query heads,
G key-value heads, K head width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wherelm.model.cache import KeyValueCache
from wherelm.model.dtypes import for_products
from wherelm.model.masks import Mask
from wherelm.schemes.base import PositionScheme

SCORE_SCALES = ("fixed", "learned", "log")
SHORT, SHORT_BFLOAT16 = 96, 512  # the most keys that are few, in float32 and in bfloat16


def attend_textbook(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    scale: float,
    allowed_B1TS: Tensor | None = None,
    bias_BHTS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A = softmax_rows(Q K^T scale + bias + M); returns A V and A. The plain reference.

    The row maximum is subtracted before the exponential: the weights stay the same and huge
    scores stay finite.
    """
    scores_BHTS = q_BHTK @ k_BHSK.transpose(-1, -2) * scale
    if bias_BHTS is not None:
        scores_BHTS = scores_BHTS + bias_BHTS
    if allowed_B1TS is not None:
        scores_BHTS = scores_BHTS.masked_fill(~allowed_B1TS, float("-inf"))
    exponentials = (scores_BHTS - scores_BHTS.amax(-1, keepdim=True)).exp()
    weights_BHTS = exponentials / exponentials.sum(-1, keepdim=True)
    return weights_BHTS @ v_BHSK, weights_BHTS


def attend(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    scale: float,
    mask: Mask,
    bias_BHTS: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """As `attend_textbook`, the fastest way that is known here; `bias_BHTS` already holds the mask.

    That is torch's fused kernel, but for several queries over few keys on a CPU, where the plain
    matrix products take half its time, and in bfloat16 a fraction of it.
    """
    if q_BHTK.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        # What has been rotated or normed is float32 again.
        q_BHTK, k_BHSK, v_BHSK = map(for_products, (q_BHTK, k_BHSK, v_BHSK))
        with torch.autocast("cpu", enabled=False):
            return attend(q_BHTK, k_BHSK, v_BHSK, scale, mask, bias_BHTS, dropout)
    additive = None if bias_BHTS is None else bias_BHTS.to(q_BHTK.dtype)
    queries, keys = q_BHTK.shape[2], k_BHSK.shape[2]
    short = SHORT_BFLOAT16 if q_BHTK.dtype == torch.bfloat16 else SHORT
    if q_BHTK.device.type == "cpu" and queries > 1 and keys <= short:
        scores_BHTS = (q_BHTK * scale) @ k_BHSK.transpose(-1, -2)
        if additive is None and (mask.causal or mask.keys_B1TS is not None):
            additive = mask.additive(q_BHTK.new_zeros(1, 1, queries, keys))
        if additive is not None:
            scores_BHTS = scores_BHTS + additive
        return F.dropout(scores_BHTS.softmax(-1), dropout) @ v_BHSK
    return F.scaled_dot_product_attention(
        q_BHTK,
        k_BHSK,
        v_BHSK,
        attn_mask=mask.keys_B1TS if additive is None else additive,
        dropout_p=dropout,
        is_causal=mask.causal and additive is None,
        scale=scale,
    )


def log_sharpness(counts_BT: Tensor, trained: int) -> Tensor:
    """log n / log N for a query that may read n keys, float32: 1 at the N keys of training.

    Softmax over n keys with scores of one size flattens as n grows; scores that grow by log n keep
    it as sharp: "Overcoming a Theoretical Limitation of Self-Attention" (Chiang, Cholak, 2022),
    "Scalable-Softmax Is Superior for Attention" (Nakanishi, 2025), whose factor s is 1/log N here;
    YaRN's temperature (Peng et al., 2023) is one for all n. It is 0 for a query that reads itself
    alone, whose weight is 1 whatever its score.
    """
    return counts_BT.float().log() / math.log(max(trained, 2))


class Attention(nn.Module):
    """Multi-head attention of queries from X over keys and values from a context C.

    Y = Concat(Y_1 … Y_H) W_O^T, Y_h = softmax_rows(Q_h K_h^T / sqrt(K) + M) V_h, with Q = X W_Q^T,
    K = C W_K^T, V = C W_V^T. Self-attention is the case C = X. With fewer key-value heads than
    query heads, neighbouring query heads share a pair (Ainslie et al., 2023).

    `score_scale` multiplies the scores, before a bias is added, by what 1/sqrt(K) leaves open:
    nothing (fixed); a gain for each head that is learned and starts at 1, so that with QK-norm,
    which bounds scores by sqrt(K), a head can still single out one key among many (learned; as in
    Henry et al., 2020); or `log_sharpness` with `trained` keys, or the window if that is less.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        kv_heads: int | None = None,
        context_width: int | None = None,
        bias: bool = False,
        qk_norm: bool = False,
        dropout: float = 0.0,
        score_scale: str = "fixed",
        trained: int = 2,
    ):
        super().__init__()
        self.heads, self.head_width = heads, head_width
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.qk_norm, self.dropout = qk_norm, dropout
        self.scale = head_width**-0.5
        self.score_scale, self.trained = score_scale, trained
        self.gain_H = nn.Parameter(torch.ones(heads)) if score_scale == "learned" else None
        # Set by who wants to look: then the textbook form runs, and its weights stay here.
        self.keep_weights = False
        self.weights_BHTS: Tensor | None = None
        context_width = width if context_width is None else context_width
        self.query = nn.Linear(width, heads * head_width, bias=bias)
        self.key = nn.Linear(context_width, self.kv_heads * head_width, bias=bias)
        self.value = nn.Linear(context_width, self.kv_heads * head_width, bias=bias)
        self.output = nn.Linear(heads * head_width, width, bias=bias)

    def forward(
        self,
        x_BTD: Tensor,
        context_BSC: Tensor,
        scheme: PositionScheme,
        q_positions_BT: Tensor,
        k_positions_BS: Tensor,
        mask: Mask,
        bias_BHTS: Tensor | None = None,
        cache: KeyValueCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        q_BHTK = self.query(x_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_BGSK = self.key(context_BSC).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        v_BGSK = self.value(context_BSC).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        if self.qk_norm:
            # Bounded scores at any learning rate (Henry et al., 2020).
            q_BHTK = F.rms_norm(q_BHTK, (self.head_width,), eps=1e-6)
            k_BGSK = F.rms_norm(k_BGSK, (self.head_width,), eps=1e-6)
        q_BHTK = scheme.rotate(q_BHTK, q_positions_BT, "query")
        k_BGSK = scheme.rotate(k_BGSK, k_positions_BS, "key")
        values_BHS = scheme.token_value(context_BSC)
        if cache is not None:
            k_BGSK, v_BGSK = (x.to(q_BHTK.dtype) for x in cache.extend(layer, k_BGSK, v_BGSK))
            values_BHS = cache.extend_values(layer, values_BHS)
        k_BGSK = scheme.shift(k_BGSK, mask.segments_BS)
        if self.score_scale != "fixed":
            queries, keys = q_BHTK.shape[2], k_BGSK.shape[2]
            q_BHTK = self.sharpened(q_BHTK, mask.counts(queries, keys, q_BHTK.device), mask.window)
        if cache is not None:
            k_positions_BS = cache.read_positions_BS
        own = [scheme.content_bias(q_BHTK, k_BGSK, q_positions_BT, k_positions_BS)]
        if values_BHS is not None:
            own.append(scheme.value_bias(values_BHS, q_BHTK.shape[2]))
        for own_BHTS in (mask.additive(x) for x in own if x is not None):
            bias_BHTS = own_BHTS if bias_BHTS is None else bias_BHTS + own_BHTS
        if self.kv_heads < self.heads:
            k_BGSK = k_BGSK.repeat_interleave(self.heads // self.kv_heads, dim=1)
            v_BGSK = v_BGSK.repeat_interleave(self.heads // self.kv_heads, dim=1)
        if self.keep_weights:
            allowed_B1TS = mask.dense(q_BHTK.shape[2], k_BGSK.shape[2], q_BHTK.device)
            y_BHTK, self.weights_BHTS = attend_textbook(
                q_BHTK, k_BGSK, v_BGSK, self.scale, allowed_B1TS, bias_BHTS
            )
            return self.output(y_BHTK.transpose(1, 2).flatten(2))
        dropout = self.dropout if self.training else 0.0
        y_BHTK = attend(q_BHTK, k_BGSK, v_BGSK, self.scale, mask, bias_BHTS, dropout)
        return self.output(y_BHTK.transpose(1, 2).flatten(2))

    def sharpened(self, q_BHTK: Tensor, counts_BT: Tensor, window: int | None) -> Tensor:
        """Queries that may read so many keys, times the factor that `score_scale` names."""
        if self.gain_H is not None:
            return q_BHTK * self.gain_H.to(q_BHTK.dtype)[:, None, None]
        factor_BT = log_sharpness(counts_BT, min(self.trained, window or self.trained))
        return q_BHTK * factor_BT.to(q_BHTK.dtype)[:, None, :, None]
