"""Files, folders, globs, hub ids or generated tasks to the examples of each split."""

from __future__ import annotations

import glob
import hashlib
import logging
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wherelm import tasks
from wherelm.cache import key_of, stored
from wherelm.messages import (
    LEARN,
    EmptyExample,
    Message,
    check_encodable,
    group_of_row,
    messages_from_row,
    messages_of,
)
from wherelm.readers import READERS, read_rows, readers, suffix

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

log = logging.getLogger(__name__)

FORMATS = ("messages", "stream")
OVERFLOWS = ("truncate", "split", "skip")
SPLITS = ("train", "validation", "test")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
COUNTED = ("read", "kept", "empty", "malformed", "held_out", "over_limit")
SHOWN_MALFORMED = 5


@dataclass(frozen=True)
class DataConfig:
    """`train`, `validation`, `test` and each of `extra` is a file, glob, folder, hub id or task.

    Without `validation` it is split off `train`. `limit` caps the training examples. `cache` is a
    folder, and null keeps nothing.
    """

    train: str | None = None
    validation: str | None = None
    test: str | None = None
    extra: dict[str, str] = field(default_factory=dict)
    format: str = "messages"
    text_column: str = "text"
    learn: str = "replies"
    overflow: str = "truncate"
    validation_fraction: float = 0.05
    limit: int | None = None
    cache: str | None = ".cache"

    def __post_init__(self):
        options = {"format": FORMATS, "learn": LEARN, "overflow": OVERFLOWS}
        for key, accepted in options.items():
            if getattr(self, key) not in accepted:
                expected = ", ".join(accepted)
                raise ValueError(f"data.{key}={getattr(self, key)}: expected one of {expected}")
        if self.format == "stream" and self.overflow != "split":
            raise ValueError(f"data.overflow={self.overflow}: expected split for a stream")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"data.validation_fraction={self.validation_fraction}: expected a share between 0 "
                "and 1"
            )
        if self.limit is not None and (self.limit <= 0 or self.format == "stream"):
            expected = "null for a stream" if self.format == "stream" else "a number above 0"
            raise ValueError(f"data.limit={self.limit}: expected {expected}")
        for name in self.extra:
            if name in SPLITS:
                raise ValueError(f"data.extra.{name}: expected another name, or data.{name}=…")
            if not name or set("/\\.") & set(name):  # it becomes part of keys and of file names
                raise ValueError(f"data.extra.{name}: expected a name without /, \\ and dots")
        for name, path in self.paths.items():
            if not path.strip():
                raise ValueError(f"{_key(name)}={path}: empty; expected {_accepted(self)}")
            if path.startswith(tasks.PREFIX):
                self._check_task(_key(name), path)

    @property
    def paths(self) -> dict[str, str]:
        """What each split that is given is read from."""
        paths = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: path for name, path in (paths | self.extra).items() if path is not None}

    def _check_task(self, key: str, address: str) -> None:
        if self.format != "messages":
            raise ValueError(f"{key}={address}: expected data.format=messages, as tasks are made")
        try:
            tasks.parse(address)
        except ValueError as error:
            raise ValueError(f"{key}={address}: {error}") from error

    def cache_folder(self, root: Path) -> Path | None:
        """Where datasets are kept; relative to the project."""
        return None if self.cache is None else root / Path(self.cache).expanduser()


@dataclass(frozen=True)
class Examples:
    """The examples of one split.

    `table` has the columns `messages` (a list of {role, content}), `hash` (64 bits of what is
    said) and `group` (what its row is counted under, or null). `counts` says what became of all
    that was read: read = kept + empty + malformed + held_out (moved to validation) + over_limit;
    `first_malformed` names files and lines; `repeated` are examples that stood in this split
    before, `in_train` those that the training split has too (null if it was not loaded). `key` is
    a sha256 over the content, and `cache` the folder in which to keep what is made of it.
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


def load_examples(
    config: DataConfig, root: Path, splits: Collection[str] | None = None
) -> dict[str, Examples]:
    """The examples of each split asked for (all that the configuration has, by default).

    Paths count from the working directory, else from `root`. Without data.validation, validation
    is split off data.train: by hash, so that equal examples are on one side, or, of a stream, its
    end. ValueError names the file and the key.
    """
    paths = config.paths
    wanted = list(dict.fromkeys(splits)) if splits is not None else [*paths, "validation"]
    cache = config.cache_folder(root)
    result: dict[str, Examples] = {}
    if "train" in wanted or ("validation" in wanted and config.validation is None):
        if config.train is None:
            raise ValueError(
                "data.train=null: give the messages to learn with data.train=FILE "
                f"({_accepted(config)})"
            )
        train = _load("data.train", config.train, config, root, cache)
        if config.validation is None:
            train, result["validation"] = _split_off(train, config)
        result["train"] = _limited(train, config.limit)
    for name in wanted:
        if name in result:
            continue
        if name not in paths:
            raise ValueError(f"no split is called {name}: the data has {', '.join(paths)}")
        result[name] = _load(_key(name), paths[name], config, root, cache)
    return {name: _with_duplicates(name, result) for name in dict.fromkeys(wanted)}


def _load(key: str, value: str, config: DataConfig, root: Path, cache: Path | None) -> Examples:
    """One source, read or taken from the cache."""
    task = tasks.parse(value) if value.startswith(tasks.PREFIX) else None
    files = find_files(key, value, config, root) if task is None else None
    hub = _from_hub(key, value) if task is None and files is None else None
    split = key.rpartition(".")[2]
    content = [(name, _digest(path)) for name, path in files or ()]
    # Whoever changes how examples are read must not meet those that were read before.
    code = b"".join(
        Path(__file__).with_name(f"{module}.py").read_bytes()
        for module in ("messages", "readers", "sources", *(["tasks"] if task else []))
    )
    options = (config.format, config.text_column)
    generated = task and repr((task, split))
    name = key_of(code, repr(content), hub and hub._fingerprint, generated, *options)

    def build() -> tuple[datasets.Dataset, dict[str, Any]]:
        import datasets

        if task is not None:
            rows = ((value, row) for row in tasks.rows(task, split))
        elif hub is not None:
            rows = ((f"{value}:{number}", row) for number, row in enumerate(hub, start=1))
        else:
            rows = (
                (f"{file}:{place}" if place else file, row)
                for file, path in files
                for place, row in read_rows(file, path, config.format)
            )
        table, counts = _collect(rows, config)
        if len(table) == 0:
            first = "".join(f"; {place}" for place in counts["first_malformed"][:1])
            raise ValueError(
                f"{key}={value}: no usable message: {counts['read']} read, {counts['empty']} "
                f"empty, {counts['malformed']} malformed{first}"
            )
        return datasets.Dataset(table, fingerprint=name[:16]), counts

    table, counts = stored(cache, f"examples-{name[:32]}", build)
    return Examples(table, counts, name, cache)


def find_files(
    key: str, value: str, config: DataConfig, root: Path
) -> list[tuple[str, Path]] | None:
    """The files of a source, each with the name to show; None for a hub id.

    ValueError names the configuration's key and what it would accept.
    """
    given = Path(value).expanduser()
    places = [Path()] if given.is_absolute() else [Path(), root]
    for place in places:
        path = place / given
        if path.is_file():
            if suffix(path) in readers(config.format):
                return [(value, path)]
            raise ValueError(f"{key}={value}: unknown kind of file; expected {_accepted(config)}")
        if path.is_dir():
            found = [given / p.relative_to(path) for p in path.rglob("*") if not _hidden(p, path)]
        elif glob.has_magic(value):
            found = map(Path, glob.glob(str(given), root_dir=place, recursive=True))
        else:
            continue
        named = [(str(p), place / p) for p in sorted(found) if suffix(p) in readers(config.format)]
        files = [(name, path) for name, path in named if path.is_file()]
        if files:
            return files
        if path.is_dir() or place is places[-1]:
            raise ValueError(f"{key}={value}: no file there ends in {_suffixes(config.format)}")
    parent = value.split("/")[0]
    local = any((place / parent).is_dir() for place in places)
    known = suffix(Path(value)) in READERS
    if config.format == "messages" and HUB_ID.fullmatch(value) and not local and not known:
        return None
    raise ValueError(f"{key}={value}: no such file; expected {_accepted(config)}")


def _from_hub(key: str, value: str) -> datasets.Dataset:
    """A dataset of the hub, "user/name" or "user/name:split"."""
    import datasets
    import huggingface_hub.utils.logging as hub_logging

    # Without a network the hub's client tries for many seconds before it gives up.
    log.info("%s=%s: no such file, so asking the Hugging Face hub for it", key, value)
    name, _, split = value.partition(":")
    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    try:
        return datasets.load_dataset(name, split=split or key.rpartition(".")[2])
    except Exception as error:  # dozens of classes, from sockets to the builders of datasets
        raise ValueError(
            f"{key}={value}: no such file, and as a dataset of the Hugging Face hub it cannot be "
            f"loaded ({_one_line(error)}); give a file, or USER/NAME:SPLIT"
        ) from error
    finally:
        hub_logging.set_verbosity(before)


def _collect(
    rows: Iterable[tuple[str, Any]], config: DataConfig
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
            example = _example(row, config)
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
        hashes.append(_hash(example))
        groups.append(group_of_row(row))
    counts["first_malformed"] = first_malformed
    return _table(roles, contents, ends, hashes, groups), counts


def _example(row: Any, config: DataConfig) -> list[Message]:
    if isinstance(row, ValueError):
        raise row
    if config.format == "messages":
        return messages_from_row(row, config.text_column)
    check_encodable(row)
    if not row or row.isspace():
        raise EmptyExample("the text is empty")
    return [Message("stream", row)]


def _hash(example: list[Message]) -> int:
    said = "\x1f".join(part for message in example for part in (message.role, message.content))
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "little")


def _table(
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


def _stream_table(texts: list[str]) -> pa.Table:
    examples = [Message("stream", text) for text in texts if text]
    return _table(
        [message.role for message in examples],
        [message.content for message in examples],
        list(range(len(examples) + 1)),
        [_hash([message]) for message in examples],
        [None] * len(examples),
    )


def _split_off(train: Examples, config: DataConfig) -> tuple[Examples, Examples]:
    """Training and validation examples of a source that was not split."""
    key = key_of(train.key, config.validation_fraction)

    def build() -> tuple[datasets.Dataset, dict[str, Any]]:
        import datasets
        import pyarrow as pa

        if config.format == "stream":
            heads, tails = [], []
            for (message,) in messages_of(train.dataset):
                text = message.content
                end = int(len(text) * (1 - config.validation_fraction))
                heads.append(text[:end])
                tails.append(text[end:])
            tables = [_stream_table(heads), _stream_table(tails)]
            moved = 0
        else:
            hashes = _hashes(train)
            held_out = hashes < np.uint64(config.validation_fraction * 2**64)
            if not held_out.any():
                held_out = hashes == hashes.min()
            tables = [train.table.filter(~held_out), train.table.filter(held_out)]
            moved = int(held_out.sum())
        if not all(len(table) for table in tables):
            raise ValueError(
                f"data.train={config.train}: too little to split validation off; give "
                "data.validation=FILE, or more messages (equal ones stay together)"
            )
        both = pa.concat_tables(table.replace_schema_metadata() for table in tables)
        counts = {"kept": len(tables[0]), "held_out": moved}
        return datasets.Dataset(both, fingerprint=key[:16]), counts

    both, parted = stored(train.cache, f"examples-{key[:32]}", build)
    rest, validation = both.slice(0, parted["kept"]), both.slice(parted["kept"])
    counts = train.counts | parted
    validation_counts = dict.fromkeys(COUNTED, 0) | {
        "read": len(validation),
        "kept": len(validation),
        "first_malformed": [],
    }
    return (
        Examples(rest, counts, key_of(key, "train"), train.cache),
        Examples(validation, validation_counts, key_of(key, "validation"), train.cache),
    )


def _limited(examples: Examples, limit: int | None) -> Examples:
    """The first `limit` examples."""
    size = len(examples.table)
    if limit is None or limit >= size:
        return examples
    counts = examples.counts | {"kept": limit, "over_limit": size - limit}
    key = key_of(examples.key, limit)
    return Examples(examples.table.slice(0, limit), counts, key, examples.cache)


def _with_duplicates(name: str, splits: dict[str, Examples]) -> Examples:
    examples = splits[name]
    hashes = _hashes(examples)
    shared = None
    if name != "train" and "train" in splits:
        shared = int(np.isin(hashes, _hashes(splits["train"])).sum())
    counts = examples.counts | {
        "repeated": int((np.diff(np.sort(hashes)) == 0).sum()),  # np.unique takes 50 times as long
        "in_train": shared,
    }
    return replace(examples, counts=counts)


def _hashes(examples: Examples) -> np.ndarray:
    # Arrow's own to_numpy imports pandas, which takes half a second.
    return np.from_dlpack(examples.table["hash"].combine_chunks())


def _key(split: str) -> str:
    return f"data.{split}" if split in SPLITS else f"data.extra.{split}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _suffixes(format: str) -> str:
    return f"{', '.join(readers(format))} (each also .gz)"


def _accepted(config: DataConfig) -> str:
    hub = ", a hub id USER/NAME, or task:NAME" if config.format == "messages" else ""
    return f"a file that ends in {_suffixes(config.format)}, a glob, a folder{hub}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
