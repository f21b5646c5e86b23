"""The token ids of a split in one flat buffer.

Shapes: N targets, E tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

WIDTHS = 8  # different widths of rows in each doubling of length


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


def widths_of(lengths: np.ndarray) -> np.ndarray:
    """The slots of a row that each length is padded to: the next of WIDTHS steps in a doubling.

    None is wider than the longest. A run then sees few shapes of batches, and a processor compiles
    its bfloat16 kernels for each shape anew: time and memory that cost more than this padding.
    """
    doublings = np.log2(np.maximum(lengths, WIDTHS)).astype(np.int64)
    steps = 2**doublings // WIDTHS
    return np.minimum(-(-lengths // steps) * steps, lengths.max(initial=0))
