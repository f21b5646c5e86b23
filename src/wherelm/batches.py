"""Token ids of many examples, and the padded batches that are cut from them.

Shapes: B rows, T slots, N examples.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wherelm.seeds import numpy_generator

if TYPE_CHECKING:
    import pyarrow as pa

BATCHINGS = ("bucketed", "padded", "packed")
POOL = 8192  # examples sorted by length together: little padding left, and still a random order
MIX = 2  # portions of one length each that a bucketed batch is made of
WIDTHS = 8  # different widths of rows in each doubling of length


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


@dataclass(frozen=True)
class TokenStore:
    """All examples of a split in one flat buffer: example i is ids[offsets[i] : offsets[i + 1]].

    `groups` names what each example is counted under, None where it has no group.
    """

    ids: np.ndarray
    learned: np.ndarray
    offsets: np.ndarray
    groups: np.ndarray | None = None

    @classmethod
    def from_table(cls, table: pa.Table) -> TokenStore:
        """From a table with the columns `ids`, `learned` and `group`."""
        # Arrow's own to_numpy imports pandas, which takes half a second.
        ids = table["ids"].combine_chunks()
        learned = table["learned"].combine_chunks().flatten().cast("uint8")
        offsets = np.from_dlpack(ids.offsets).astype(np.int64)
        groups = table["group"].combine_chunks().dictionary_encode(null_encoding="encode")
        names = np.array(groups.dictionary.to_pylist(), dtype=object)
        return cls(
            np.from_dlpack(ids.flatten()),
            np.from_dlpack(learned).view(bool),
            offsets - offsets[0],
            names[np.from_dlpack(groups.indices)],
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

    @cached_property
    def lengths(self) -> np.ndarray:
        """Input slots of each example: one less than its tokens, for the last has no target."""
        return np.diff(self.offsets) - 1

    @cached_property
    def widths(self) -> np.ndarray:
        """The slots of a row that each example would be padded to."""
        return widths_of(self.lengths)

    @cached_property
    def digest(self) -> str:
        """A hash of all that is read and learned: equal stores have equal ones."""
        digest = hashlib.sha256()
        for part in (self.offsets, self.ids, self.learned):
            digest.update(np.ascontiguousarray(part))  # read where it lies: it may be large
        return digest.hexdigest()[:16]

    def first(self, count: int) -> TokenStore:
        """The first so many examples."""
        offsets = self.offsets[: count + 1]
        groups = None if self.groups is None else self.groups[:count]
        return TokenStore(self.ids[: offsets[-1]], self.learned[: offsets[-1]], offsets, groups)

    @property
    def example_E(self) -> np.ndarray:
        """The example that each token of the buffer belongs to."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def trained_positions(self) -> np.ndarray:
        """How many learned targets stand at each input position."""
        at_N = np.flatnonzero(self.learned)
        inputs_N = at_N - self.offsets[np.searchsorted(self.offsets, at_N, side="right") - 1] - 1
        return np.bincount(inputs_N[inputs_N >= 0])


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


def widths_of(lengths: np.ndarray) -> np.ndarray:
    """The slots of a row that each length is padded to: the next of WIDTHS steps in a doubling.

    None is wider than the longest. A run then sees few shapes of batches, and a processor compiles
    its bfloat16 kernels for each shape anew: time and memory that cost more than this padding.
    """
    doublings = np.log2(np.maximum(lengths, WIDTHS)).astype(np.int64)
    steps = 2**doublings // WIDTHS
    return np.minimum(-(-lengths // steps) * steps, lengths.max(initial=0))


def padded_width(store: TokenStore, rows: Rows) -> int:
    """The slots of each row of a rectangle that is padded on the right."""
    examples = examples_of(rows)
    if len(examples) == len(rows):
        return int(store.widths[examples].max())
    return max(int(store.lengths[row].sum()) for row in rows)


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


def pack(lengths: np.ndarray, order: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Rows of examples whose lengths sum to `capacity` at most: best fit, the longest first.

    An example goes into the fullest row that still has room for it. Longer ones than the capacity
    get a row of their own.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # the slots left in each row and its number, sorted
    for index in order[np.argsort(-lengths[order], kind="stable")].tolist():
        length = int(lengths[index])
        fullest = bisect_left(rooms, (length, 0))
        if fullest < len(rooms):
            room, number = rooms.pop(fullest)
        else:
            room, number = max(length, capacity), len(rows)
            rows.append([])
        rows[number].append(index)
        insort(rooms, (room - length, number))
    return [np.array(row) for row in rows]


@dataclass
class Sampler:
    """Batches of rows, epoch after epoch, in an order that (seed, epoch) determines.

    `bucketed` shuffles, sorts by length within pools, cuts into portions, shuffles these and joins
    MIX of them to a batch, which then holds short and long examples as any batch should; `padded`
    leaves the sorting out; `packed` fills rows of `capacity` slots with examples of a pool.
    The whole state is (seed, epoch, position); `batches` are those of the epoch, in order.
    """

    lengths: np.ndarray
    budget: int
    batching: str
    seed: int
    epoch: int = 0
    position: int = 0
    capacity: int = 0

    def __post_init__(self):
        self.widths = widths_of(self.lengths)
        self.batches = self.batches_of(self.epoch)

    def batches_of(self, epoch: int) -> list[Rows]:
        """All batches of one epoch, in order."""
        generator = numpy_generator(self.seed, "data order", epoch)
        order = generator.permutation(len(self.lengths))
        if self.batching == "padded":
            return cut(self.widths, order, self.budget)
        pools = [order[start : start + POOL] for start in range(0, len(order), POOL)]
        if self.batching == "packed":
            rows = [row for pool in pools for row in pack(self.lengths, pool, self.capacity)]
            return self._portions([rows[i] for i in generator.permutation(len(rows))], self.budget)
        portions = []
        for pool in pools:
            portions += cut(self.widths, self._sorted(pool), self.budget // MIX)
        joined, room = [], 0
        for index in generator.permutation(len(portions)):
            slots = len(portions[index]) * self.widths[portions[index]].max()
            if slots > room:
                joined.append([])
                room = self.budget
            joined[-1].append(portions[index])
            room -= slots
        return [self._sorted(np.concatenate(batch)) for batch in joined]

    def _sorted(self, examples: np.ndarray) -> np.ndarray:
        return examples[np.argsort(self.lengths[examples], kind="stable")]

    def __iter__(self) -> Iterator[Rows]:
        """Goes on from (epoch, position), without end; the state then names the next batch."""
        while True:
            while self.position < len(self.batches):
                self.position += 1
                yield self.batches[self.position - 1]
            self.epoch, self.position = self.epoch + 1, 0
            self.batches = self.batches_of(self.epoch)

    @property
    def epochs_done(self) -> float:
        """Epochs handed out so far, the present one as the share of its batches."""
        return self.epoch + self.position / len(self.batches)

    def micro_batches(self, rows: Rows, budget: int) -> list[Rows]:
        """A batch cut into portions of `budget` slots at most, and of one length if bucketed."""
        if self.batching == "bucketed":
            budget = min(budget, self.budget // MIX)
        if isinstance(rows, np.ndarray):
            return cut(self.widths, rows, budget)
        return self._portions(rows, budget)

    def _portions(self, rows: list[np.ndarray], budget: int) -> list[Rows]:
        size = max(1, budget // self.capacity)
        return [rows[start : start + size] for start in range(0, len(rows), size)]


def examples_of(rows: Rows) -> np.ndarray:
    """The examples of a batch, row after row."""
    return rows if isinstance(rows, np.ndarray) else np.concatenate(rows)


def token_ledger(store: TokenStore) -> dict[str, int]:
    """Input slots of a store whose next token is learned, and those that are only read."""
    real = int(store.lengths.sum())
    supervised = int(store.learned.sum()) - int(store.learned[store.offsets[:-1]].sum())
    return {"supervised": supervised, "read_only": real - supervised}


def padding_ledger(
    store: TokenStore, sampler: Sampler, budget: int, shape: tuple[int, int] | None = None
) -> dict[str, float]:
    """Empty slots that the first epoch of a sampler holds, and their share of all slots.

    `budget` and `shape` are those of micro-batches, as for `Sampler.micro_batches` and `collate`.
    """
    real = int(store.lengths.sum())
    batches = sampler.batches if sampler.epoch == 0 else sampler.batches_of(0)
    parts = [part for rows in batches for part in sampler.micro_batches(rows, budget)]
    if shape is None:
        slots = sum(len(rows) * padded_width(store, rows) for rows in parts)
    else:
        slots = len(parts) * shape[0] * shape[1]
    return {"padding": slots - real, "padding_share": round(1 - real / slots, 4)}
