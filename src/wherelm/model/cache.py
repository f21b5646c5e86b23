"""Keys and values of the slots that a decoder has read.

Shapes: B batch, T new slots, S slots so far, H query heads, G key-value heads, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
        self.read_positions_BS = self.positions_BS[:, :0]  # of the slots so far
        self.any_padding = False
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self._values: dict[int, Tensor] = {}

    def advance(self, positions_BT: Tensor, key_mask_BT: Tensor | None) -> None:
        """Makes room for T more slots; called once a forward pass, before the layers."""
        start, self.length = self.length, self.length + positions_BT.shape[1]
        assert self.length <= self.capacity, "the cache was made too small for this generation"
        self.positions_BS = self.positions_BS.to(positions_BT.dtype)
        self.positions_BS[:, start : self.length] = positions_BT
        self.read_positions_BS = self.positions_BS[:, : self.length]
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
