"""Which keys a query may read.

Shapes: B batch, T query slots, S key slots, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Which keys a query may read, in the cheapest form that is exact.

    `causal` alone means the causal flag of the kernel; else `keys_B1TS` is True where a key may
    be read, or None where every key may. `path` says in words which form was chosen, `window` how
    many slots a query looks back (None: over the whole row), `segments_BS` tells the messages of a
    row, and its padding, apart (None: there is one message, and no padding).
    """

    causal: bool
    keys_B1TS: Tensor | None
    path: str
    window: int | None = None
    segments_BS: Tensor | None = None

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """The mask as booleans, (B or 1, 1, T, S)."""
        if self.keys_B1TS is not None:
            return self.keys_B1TS
        full = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
        return full.tril() if self.causal else full

    def counts(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """How many keys each query may read, its own among them, (B or 1, T)."""
        return self.dense(queries, keys, device)[:, 0].sum(-1)

    def additive(self, bias_BHTS: Tensor) -> Tensor:
        """A bias with -inf where the mask forbids, (B or 1, H, T, S)."""
        queries, keys = bias_BHTS.shape[-2:]
        allowed_B1TS = self.dense(queries, keys, bias_BHTS.device)
        return bias_BHTS.masked_fill(~allowed_B1TS, float("-inf"))

    def from_slot(self, first: int, queries: int, keys: int, device: torch.device) -> Mask:
        """The same mask without the rows of the first so many queries."""
        rows_B1TS = self.dense(queries, keys, device)[:, :, first:]
        return replace(self, causal=False, keys_B1TS=rows_B1TS)


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
    segments_BS = segments_BT if side == "packed" else key_mask_BS
    given, window = window, None if window is None or window >= keys else window
    if window is None and side != "packed":
        if queries == keys and (side == "right" or key_mask_BS is None):
            path = "causal flag (right padding needs no mask)"
            return Mask(True, None, path, given, segments_BS)
        if queries == 1 and key_mask_BS is None:
            return Mask(False, None, "no mask (one query after all of its keys)", given)
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
    allowed_B1TS = allowed_B1TS | (back_TS == 0)
    return Mask(False, allowed_B1TS, f"boolean mask ({kind})", given, segments_BS)
