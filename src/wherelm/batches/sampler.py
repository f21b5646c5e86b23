"""Which examples share a batch, and in which order batches come."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from wherelm.batches.batch import Rows
from wherelm.batches.store import widths_of
from wherelm.seeds import numpy_generator

BATCHINGS = ("bucketed", "padded", "packed")
POOL = 8192  # examples sorted by length together: little padding left, and still a random order
MIX = 2  # portions of one length each that a bucketed batch is made of


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
