"""Padded and packed rectangles of examples.

Shapes: B rows, T slots, N examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from wherelm.batches.store import TokenStore


@dataclass(frozen=True)
class Batch:
    """Messages cut to one rectangle.

    tokens_BT      inputs; anything in empty slots
    targets_BT     the next token of the same message
    key_mask_BT    True where a real token stands: only these may be attended to
    loss_mask_BT   True where the target is real and is to be learned
    positions_BT   position inside the own message; (1, T) where all rows share it
    segments_BT    which message a slot belongs to; 0 is padding
    side           where the padding is: "right", "left" or "packed"
    first          the first slot that any row learns; what stands before is only read
    keys_BT        a number for the example of each slot, by which a scheme draws positions
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    key_mask_BT: Tensor
    loss_mask_BT: Tensor
    positions_BT: Tensor
    segments_BT: Tensor
    side: str
    first: int = 0
    keys_BT: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: v for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **{n: t.to(device, non_blocking=True) for n, t in tensors.items()})

    @property
    def targets(self) -> int:
        """How many targets are to be learned."""
        return int(self.loss_mask_BT.sum())


Rows = np.ndarray | list[np.ndarray]


def collate(
    store: TokenStore,
    rows: Rows | Sequence[int],
    pad: int,
    side: str = "right",
    key: int = 0,
    shape: tuple[int, int] | None = None,
    room: int = 0,
) -> Batch:
    """A rectangle of rows, each one example (its index) or several, packed (their indices).

    Rows are padded to the longest with the id `pad`, on the given side, and on the right to its
    width in `widths_of`; packed ones are padded on the right to the longest.
    Positions begin anew in each example, masks come from lengths. `key` and an example's index
    give its number in `keys_BT`. A `shape` (rows, slots) is filled up with empty rows and slots and
    always counts as packed, so that all batches of a run are alike. With `room` an example's
    positions begin at an offset that its number draws, so that its last one stays below `room`.
    """
    parts = [np.atleast_1d(row) for row in rows]
    counts = np.array([len(part) for part in parts])
    examples_N = examples_of(parts)
    lengths_N = store.lengths[examples_N]
    row_N = np.repeat(np.arange(len(parts)), counts)
    # An example starts behind the ones that share its row.
    before_N = np.concatenate(([0], lengths_N.cumsum()[:-1]))
    head_N = np.repeat(np.cumsum(counts) - counts, counts)
    start_N = before_N - before_N[head_N]
    used = np.bincount(row_N, weights=lengths_N).astype(np.int64)
    longest = int(used.max()) if side == "left" else padded_width(store, parts)
    height, width = shape or (len(parts), longest)
    packed = shape is not None or bool((counts > 1).any())
    assert side in ("right", "left"), side
    assert side == "right" or not packed, "packed rows are padded on the right"
    if side == "left":
        start_N = start_N + width - used[row_N]

    position = np.arange(lengths_N.sum()) - np.repeat(before_N, lengths_N)
    slot = np.repeat(row_N * width + start_N, lengths_N) + position
    source = np.repeat(store.offsets[examples_N], lengths_N) + position
    number_N = mixed(examples_N, key)
    if room:
        offset_N = number_N % np.maximum(room - lengths_N + 1, 1)
        position = position + np.repeat(offset_N, lengths_N)

    def filled(values: np.ndarray, empty: int | bool) -> Tensor:
        flat = np.full(height * width, empty, dtype=bool if empty is False else np.int64)
        flat[slot] = values
        return torch.from_numpy(flat.reshape(height, width))

    learned_BT = filled(store.learned[source + 1], False)
    shared = side == "right" and not packed and not room
    return Batch(
        tokens_BT=filled(store.ids[source], pad),
        targets_BT=filled(store.ids[source + 1], pad),
        key_mask_BT=filled(np.ones_like(slot, dtype=bool), False),
        loss_mask_BT=learned_BT,
        positions_BT=torch.arange(width)[None] if shared else filled(position, 0),
        segments_BT=filled(np.repeat(np.arange(len(examples_N)) - head_N + 1, lengths_N), 0),
        side="packed" if packed else side,
        first=0 if shape else int(learned_BT.any(0).int().argmax()),
        keys_BT=filled(np.repeat(number_N, lengths_N), 0),
    )


def mixed(examples: np.ndarray, key: int) -> np.ndarray:
    """A 63-bit number for each example under a key: the finaliser of SplitMix64 (Steele, 2014)."""
    # From 1, for 0 stays 0, the number of empty slots.
    x = (examples + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def padded_width(store: TokenStore, rows: Rows) -> int:
    """The slots of each row of a rectangle that is padded on the right."""
    examples = examples_of(rows)
    if len(examples) == len(rows):
        return int(store.widths[examples].max())
    return max(int(store.lengths[row].sum()) for row in rows)


def examples_of(rows: Rows) -> np.ndarray:
    """The examples of a batch, row after row."""
    return rows if isinstance(rows, np.ndarray) else np.concatenate(rows)
