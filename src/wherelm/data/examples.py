"""The rows of a source as a table of examples, and what became of all that was read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wherelm.data.messages import (
    EmptyExample,
    Message,
    check_encodable,
    group_of_row,
    messages_from_row,
)

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

COUNTED = ("read", "split_off", "kept", "empty", "malformed", "held_out", "over_limit")
SHOWN_MALFORMED = 5


@dataclass(frozen=True)
class Examples:
    """The examples of one split.

    `table` has the columns `messages` (a list of {role, content}), `hash` (64 bits of what is
    said) and `group` (what its row is counted under, or null). `counts` says what became of all
    that was read, each row once: read + split_off (what validation took of train's rows) = kept +
    empty + malformed + held_out (what train gave to validation) + over_limit. `first_malformed`
    names files and lines; `repeated` are examples that stood in this split before, `in_train` those
    that the training split has too (null if it was not loaded). `key` is a sha256 over the content,
    and `cache` the folder in which to keep what is made of it.
    """

    table: pa.Table
    counts: dict[str, Any]
    key: str
    cache: Path | None

    @property
    def dataset(self) -> datasets.Dataset:
        """The table as a dataset, for work that a warm cache spares: `datasets` imports slowly."""
        import datasets

        return datasets.Dataset(self.table, fingerprint=self.key[:16])


def collect(
    rows: Iterable[tuple[str, Any]], format: str, text_column: str
) -> tuple[pa.Table, dict[str, Any]]:
    """The usable rows as a table, and the counts of all."""
    roles: list[str] = []
    contents: list[str] = []
    ends = [0]
    hashes: list[int] = []
    groups: list[str | None] = []
    counts: dict[str, Any] = dict.fromkeys(COUNTED, 0)
    first_malformed: list[str] = []
    for place, row in rows:
        counts["read"] += 1
        try:
            example = _example(row, format, text_column)
        except EmptyExample:
            counts["empty"] += 1
            continue
        except ValueError as error:
            counts["malformed"] += 1
            if len(first_malformed) < SHOWN_MALFORMED:
                first_malformed.append(f"{place}: {error}")
            continue
        counts["kept"] += 1
        roles += [message.role for message in example]
        contents += [message.content for message in example]
        ends.append(len(roles))
        hashes.append(hash_of(example))
        groups.append(group_of_row(row))
    counts["first_malformed"] = first_malformed
    return table_of(roles, contents, ends, hashes, groups), counts


def _example(row: Any, format: str, text_column: str) -> list[Message]:
    if isinstance(row, ValueError):
        raise row
    if format == "messages":
        return messages_from_row(row, text_column)
    check_encodable(row)
    if not row or row.isspace():
        raise EmptyExample("the text is empty")
    return [Message("stream", row)]


def hash_of(example: list[Message]) -> int:
    said = "\x1f".join(part for message in example for part in (message.role, message.content))
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "little")


def table_of(
    roles: list[str],
    contents: list[str],
    ends: list[int],
    hashes: list[int],
    groups: list[str | None],
) -> pa.Table:
    import pyarrow as pa

    turns = pa.StructArray.from_arrays(
        [pa.array(roles, pa.string()), pa.array(contents, pa.large_string())], ["role", "content"]
    )
    lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), turns)
    return pa.table(
        {
            "messages": lists,
            "hash": pa.array(hashes, pa.uint64()),
            "group": pa.array(groups, pa.string()),
        }
    )


def stream_table(texts: list[str]) -> pa.Table:
    examples = [Message("stream", text) for text in texts if text]
    return table_of(
        [message.role for message in examples],
        [message.content for message in examples],
        list(range(len(examples) + 1)),
        [hash_of([message]) for message in examples],
        [None] * len(examples),
    )


def hashes_of(examples: Examples) -> np.ndarray:
    # Arrow's own to_numpy imports pandas, which takes half a second.
    return np.from_dlpack(examples.table["hash"].combine_chunks())
