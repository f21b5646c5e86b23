"""Multi-head attention: the textbook form, the fast form, the mask and the cache.

Shapes: B batch, T query slots, S key slots, D width, C context width, H query heads,
G key-value heads, K head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wherelm.runtime import for_products
from wherelm.schemes.base import PositionScheme

SHORT, SHORT_BFLOAT16 = 96, 512  # the most keys that are few, in float32 and in bfloat16


@dataclass(frozen=True)
class Mask:
    """Which keys a query may read, in the cheapest form that is exact.

    `causal` alone means the causal flag of the kernel; else `keys_B1TS` is True where a key may
    be read, or None where every key may. `path` says in words which form was chosen.
    """

    causal: bool
    keys_B1TS: Tensor | None
    path: str

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """The mask as booleans, (B or 1, 1, T, S)."""
        if self.keys_B1TS is not None:
            return self.keys_B1TS
        full = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
        return full.tril() if self.causal else full

    def additive(self, bias_BHTS: Tensor) -> Tensor:
        """A bias with -inf where the mask forbids, (B or 1, H, T, S)."""
        queries, keys = bias_BHTS.shape[-2:]
        allowed_B1TS = self.dense(queries, keys, bias_BHTS.device)
        return bias_BHTS.masked_fill(~allowed_B1TS, float("-inf"))

    def from_slot(self, first: int, queries: int, keys: int, device: torch.device) -> Mask:
        """The same mask without the rows of the first so many queries."""
        return Mask(False, self.dense(queries, keys, device)[:, :, first:], self.path)


def visible(
    key_mask_BS: Tensor | None,
    queries: int,
    keys: int,
    device: torch.device,
    side: str = "right",
    segments_BT: Tensor | None = None,
    window: int | None = None,
) -> Mask:
    """The causal mask and the key mask of a batch as one `Mask`, made once for all layers.

    The T queries stand in the last T of the S slots. Causality is by slot. With padding on the
    right every real query already has only real keys before it, so the key mask adds nothing:

        query \\ key   please  send  <PAD>
        please           x
        send             x      x
        <PAD>            x      x     x        (no target, so nobody reads this row)

    Padding on the left, packed rows and a window (a query reads the newest `window` slots, its own
    among them) need the dense form. An empty slot may read itself, so that no row is fully masked:
    softmax over nothing is 0 or NaN, by the kernel.
    """
    if window is not None and window >= keys:
        window = None
    if window is None and side != "packed":
        if queries == keys and (side == "right" or key_mask_BS is None):
            return Mask(True, None, "causal flag (right padding needs no mask)")
        if queries == 1 and key_mask_BS is None:
            return Mask(False, None, "no mask (one query after all of its keys)")
    slots_S = torch.arange(keys, device=device)
    slots_T = slots_S[keys - queries :]
    back_TS = slots_T[:, None] - slots_S
    allowed_B1TS = ((back_TS >= 0) & (back_TS < (window or keys)))[None, None]
    if key_mask_BS is not None:
        allowed_B1TS = allowed_B1TS & key_mask_BS[:, None, None, :]
    if side == "packed":
        same = segments_BT[:, None, :, None] == segments_BT[:, None, None, :]
        allowed_B1TS = allowed_B1TS & same
    kind = f"{side} rows" if window is None else f"{side} rows, window {window}"
    return Mask(False, allowed_B1TS | (back_TS == 0), f"boolean mask ({kind})")


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


class KeyValueCache:
    """Keys (already rotated) and values of the slots read so far, for one decoder.

    One (B, G, capacity, K) pair of tensors a layer, a contextual scheme's values, and beside them
    what masks and biases need of the same slots: their positions and which of them are real.
    `longest_B1` is how many tokens each row may come to hold, `capacity` if it is not given.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        device: torch.device,
        longest_B1: Tensor | None = None,
    ):
        self.capacity = capacity
        if longest_B1 is None:
            longest_B1 = torch.full((batch, 1), capacity, device=device)
        self.longest_B1 = longest_B1
        self.length = 0
        self.key_mask_BS = torch.zeros(batch, capacity, dtype=torch.bool, device=device)
        self.positions_BS = torch.zeros(batch, capacity, device=device)
        self.any_padding = False
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self._values: dict[int, Tensor] = {}

    def advance(self, positions_BT: Tensor, key_mask_BT: Tensor | None) -> None:
        """Makes room for T more slots; called once a forward pass, before the layers."""
        start, self.length = self.length, self.length + positions_BT.shape[1]
        assert self.length <= self.capacity, "the cache was made too small for this generation"
        self.positions_BS = self.positions_BS.to(positions_BT.dtype)
        self.positions_BS[:, start : self.length] = positions_BT
        if key_mask_BT is None:
            self.key_mask_BS[:, start : self.length] = True
        else:
            self.key_mask_BS[:, start : self.length] = key_mask_BT
            self.any_padding = self.any_padding or not bool(key_mask_BT.all())

    def extend(self, layer: int, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the newest keys and values of a layer; returns all of them, (B, G, S, K)."""
        if self._layers[layer] is None:
            # A scheme may have widened the keys, in their number of entries and in type.
            self._layers[layer] = tuple(
                x.new_empty((*x.shape[:2], self.capacity, x.shape[3]), dtype=v_BGTK.dtype)
                for x in (k_BGTK, v_BGTK)
            )
        keys, values = self._layers[layer]
        count = k_BGTK.shape[2]
        keys.narrow(2, self.length - count, count).copy_(k_BGTK)
        values.narrow(2, self.length - count, count).copy_(v_BGTK)
        return keys.narrow(2, 0, self.length), values.narrow(2, 0, self.length)

    def extend_values(self, layer: int, values_BHT: Tensor | None) -> Tensor | None:
        """The same for a scheme's value of each token, (B, H, S)."""
        if values_BHT is None:
            return None
        if layer not in self._values:
            shape = (*values_BHT.shape[:2], self.capacity)
            self._values[layer] = values_BHT.new_zeros(shape)
        values_BHS = self._values[layer]
        values_BHS[:, :, self.length - values_BHT.shape[2] : self.length] = values_BHT
        return values_BHS[:, :, : self.length]

    def keep_rows(self, rows: Tensor) -> None:
        """Drops every row of the batch but these, so that finished rows cost nothing more."""
        self.key_mask_BS, self.longest_B1 = self.key_mask_BS[rows], self.longest_B1[rows]
        self.positions_BS = self.positions_BS[rows]
        self._layers = [(self._kept(k, rows), self._kept(v, rows)) for k, v in self._layers]
        self._values = {layer: self._kept(x, rows) for layer, x in self._values.items()}

    def _kept(self, x: Tensor, rows: Tensor) -> Tensor:
        # Room for what is still to come is neither read nor copied.
        kept = x.new_empty((len(rows), *x.shape[1:]))
        kept[:, :, : self.length] = x[:, :, : self.length].index_select(0, rows)
        return kept


class Attention(nn.Module):
    """Multi-head attention of queries from X over keys and values from a context C.

    Y = Concat(Y_1 … Y_H) W_O^T, Y_h = softmax_rows(Q_h K_h^T / sqrt(K) + M) V_h, with Q = X W_Q^T,
    K = C W_K^T, V = C W_V^T. Self-attention is the case C = X. With fewer key-value heads than
    query heads, neighbouring query heads share a pair (Ainslie et al., 2023).
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
    ):
        super().__init__()
        self.heads, self.head_width = heads, head_width
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.qk_norm, self.dropout = qk_norm, dropout
        self.scale = head_width**-0.5
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
        if values_BHS is not None:
            value_bias_BHTS = scheme.value_bias(values_BHS, q_BHTK.shape[2])
            value_bias_BHTS = mask.additive(value_bias_BHTS)
            bias_BHTS = value_bias_BHTS if bias_BHTS is None else bias_BHTS + value_bias_BHTS
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
