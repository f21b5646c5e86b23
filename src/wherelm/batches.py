"""Token ids of many examples, and the padded batches that are cut from them.

Shapes: B rows, T slots, N examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wherelm.seeds import numpy_generator

if TYPE_CHECKING:
    import datasets

BATCHINGS = ("bucketed", "padded")
POOL = 8192  # examples sorted by length together: little padding left, and still a random order


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
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    key_mask_BT: Tensor
    loss_mask_BT: Tensor
    positions_BT: Tensor
    segments_BT: Tensor
    side: str
    first: int = 0

    def to(self, device: torch.device) -> Batch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: v for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **{n: t.to(device, non_blocking=True) for n, t in tensors.items()})

    @property
    def targets(self) -> int:
        """How many targets are to be learned."""
        return int(self.loss_mask_BT.sum())


@dataclass(frozen=True)
class TokenStore:
    """All examples of a split in one flat buffer: example i is ids[offsets[i] : offsets[i + 1]]."""

    ids: np.ndarray
    learned: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_dataset(cls, dataset: datasets.Dataset) -> TokenStore:
        """From a dataset with the columns `ids` and `learned`."""
        ids = dataset.with_format("arrow")["ids"].combine_chunks()
        learned = dataset.with_format("arrow")["learned"].combine_chunks()
        offsets = ids.offsets.to_numpy().astype(np.int64)
        return cls(
            ids.flatten().to_numpy(zero_copy_only=False),
            learned.flatten().to_numpy(zero_copy_only=False),
            offsets - offsets[0],
        )

    @classmethod
    def from_lists(cls, examples: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> TokenStore:
        """From (ids, learned) pairs."""
        ids = np.array([token for tokens, _ in examples for token in tokens], dtype=np.int64)
        learned = np.array([flag for _, flags in examples for flag in flags], dtype=bool)
        lengths = [len(tokens) for tokens, _ in examples]
        return cls(ids, learned, np.concatenate(([0], np.cumsum(lengths))).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.ids[part], self.learned[part]

    @property
    def lengths(self) -> np.ndarray:
        """Input slots of each example: one less than its tokens, for the last has no target."""
        return np.diff(self.offsets) - 1

    def trained_positions(self) -> np.ndarray:
        """How many learned targets stand at each input position."""
        inputs = np.arange(len(self.ids)) - np.repeat(self.offsets[:-1], np.diff(self.offsets)) - 1
        return np.bincount(inputs[self.learned & (inputs >= 0)])


def collate(
    store: TokenStore, indices: Sequence[int] | np.ndarray, pad: int, side: str = "right"
) -> Batch:
    """One row an example, padded to the longest with the id `pad`. Masks come from lengths."""
    assert side in ("right", "left"), side
    indices = np.asarray(indices)
    starts, lengths = store.offsets[indices], store.lengths[indices]
    width = int(lengths.max())
    slots = np.arange(width)
    position = np.broadcast_to(slots, (len(indices), width))
    if side == "left":
        position = position - (width - lengths)[:, None]
    real = (position >= 0) & (position < lengths[:, None])
    source = np.where(real, starts[:, None] + position, 0)
    tokens = np.where(real, store.ids[source], pad)
    targets = np.where(real, store.ids[source + 1], pad)
    learned = real & store.learned[source + 1]
    positions = slots[None] if side == "right" else np.where(real, position, 0)
    return Batch(
        tokens_BT=torch.from_numpy(tokens.astype(np.int64)),
        targets_BT=torch.from_numpy(targets.astype(np.int64)),
        key_mask_BT=torch.from_numpy(real),
        loss_mask_BT=torch.from_numpy(learned),
        positions_BT=torch.from_numpy(positions.astype(np.int64)),
        segments_BT=torch.from_numpy(real.astype(np.int64)),
        side=side,
        first=int(learned.any(0).argmax()),
    )


def cut(lengths: np.ndarray, order: np.ndarray, budget: int) -> list[np.ndarray]:
    """Consecutive groups of `order` whose rows times longest row stay within `budget` slots.

    A single example longer than the budget is a group of its own.
    """
    groups, start, longest = [], 0, 0
    for end, length in enumerate(lengths[order].tolist()):
        grown = max(longest, length)
        if end > start and (end - start + 1) * grown > budget:
            groups.append(order[start:end])
            start, grown = end, length
        longest = grown
    if len(order):
        groups.append(order[start:])
    return groups


@dataclass
class Sampler:
    """Batches of example indices, epoch after epoch, in an order that (seed, epoch) determines.

    `bucketed` shuffles, sorts by length within pools, cuts to the token budget and shuffles the
    batches; `padded` leaves the sorting out. The whole state is (seed, epoch, position).
    """

    lengths: np.ndarray
    budget: int
    batching: str
    seed: int
    epoch: int = 0
    position: int = 0

    def __post_init__(self):
        self._batches = self.batches_of(self.epoch)

    def batches_of(self, epoch: int) -> list[np.ndarray]:
        """All batches of one epoch, in order."""
        generator = numpy_generator(self.seed, "data order", epoch)
        order = generator.permutation(len(self.lengths))
        if self.batching == "padded":
            return cut(self.lengths, order, self.budget)
        batches = []
        for start in range(0, len(order), POOL):
            pool = order[start : start + POOL]
            pool = pool[np.argsort(self.lengths[pool], kind="stable")]
            batches += cut(self.lengths, pool, self.budget)
        return [batches[i] for i in generator.permutation(len(batches))]

    def __iter__(self) -> Iterator[np.ndarray]:
        """Goes on from (epoch, position), without end; the state then names the next batch."""
        while True:
            while self.position < len(self._batches):
                self.position += 1
                yield self._batches[self.position - 1]
            self.epoch, self.position = self.epoch + 1, 0
            self._batches = self.batches_of(self.epoch)

    @property
    def epochs_done(self) -> float:
        """Epochs handed out so far, the present one as the share of its batches."""
        return self.epoch + self.position / len(self._batches)


def token_ledger(store: TokenStore) -> dict[str, int]:
    """Input slots of a store whose next token is learned, and those that are only read."""
    real = int(store.lengths.sum())
    supervised = int(store.trained_positions().sum())
    return {"supervised": supervised, "read_only": real - supervised}


def padding_ledger(store: TokenStore, batches: Sequence[np.ndarray]) -> dict[str, float]:
    """Empty slots that one epoch of these batches holds, and their share of all slots."""
    real = int(store.lengths.sum())
    slots = sum(len(batch) * int(store.lengths[batch].max()) for batch in batches)
    return {"padding": slots - real, "padding_share": round(1 - real / slots, 4)}
