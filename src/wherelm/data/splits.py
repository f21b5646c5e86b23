"""Validation split off, a limit, and what stands in two splits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from wherelm.data.cache import key_of, stored
from wherelm.data.examples import COUNTED, Examples, hashes_of, stream_table
from wherelm.data.messages import messages_of

if TYPE_CHECKING:
    import datasets


def split_off(
    train: Examples, name: str, fraction: float, format: str
) -> tuple[Examples, Examples]:
    """Training and validation examples of the source `name`, which was not split.

    By hash, so that equal examples are on one side, or, of a stream, its end.
    """
    key = key_of(train.key, fraction)

    def build() -> tuple[datasets.Dataset, dict[str, Any]]:
        import datasets
        import pyarrow as pa

        if format == "stream":
            heads, tails = [], []
            for (message,) in messages_of(train.dataset):
                text = message.content
                end = int(len(text) * (1 - fraction))
                heads.append(text[:end])
                tails.append(text[end:])
            tables = [stream_table(heads), stream_table(tails)]
            moved = 0
        else:
            hashes = hashes_of(train)
            held_out = hashes < np.uint64(fraction * 2**64)
            if not held_out.any():
                held_out = hashes == hashes.min()
            tables = [train.table.filter(~held_out), train.table.filter(held_out)]
            moved = int(held_out.sum())
        if not all(len(table) for table in tables):
            raise ValueError(
                f"data.train={name}: too little to split validation off; give "
                "data.validation=FILE, or more messages (equal ones stay together)"
            )
        both = pa.concat_tables(table.replace_schema_metadata() for table in tables)
        counts = {"kept": len(tables[0]), "held_out": moved}
        return datasets.Dataset(both, fingerprint=key[:16]), counts

    both, parted = stored(train.cache, f"examples-{key[:32]}", build)
    rest, validation = both.slice(0, parted["kept"]), both.slice(parted["kept"])
    counts = train.counts | parted
    validation_counts = dict.fromkeys(COUNTED, 0) | {
        "split_off": len(validation),
        "kept": len(validation),
        "first_malformed": [],
    }
    return (
        Examples(rest, counts, key_of(key, "train"), train.cache),
        Examples(validation, validation_counts, key_of(key, "validation"), train.cache),
    )


def limited(examples: Examples, limit: int | None) -> Examples:
    """The first `limit` examples."""
    size = len(examples.table)
    if limit is None or limit >= size:
        return examples
    counts = examples.counts | {"kept": limit, "over_limit": size - limit}
    key = key_of(examples.key, limit)
    return Examples(examples.table.slice(0, limit), counts, key, examples.cache)


def with_duplicates(name: str, splits: dict[str, Examples]) -> Examples:
    examples = splits[name]
    hashes = hashes_of(examples)
    shared = None
    if name != "train" and "train" in splits:
        shared = int(np.isin(hashes, hashes_of(splits["train"])).sum())
    counts = examples.counts | {
        "repeated": int((np.diff(np.sort(hashes)) == 0).sum()),  # np.unique takes 50 times as long
        "in_train": shared,
    }
    return replace(examples, counts=counts)
