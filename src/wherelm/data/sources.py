"""Files, folders, globs, hub ids or generated tasks to the examples of each split."""

from __future__ import annotations

import glob
import hashlib
import logging
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherelm.data import tasks
from wherelm.data.cache import code_of, key_of, stored
from wherelm.data.examples import Examples, collect
from wherelm.data.messages import LEARN
from wherelm.data.readers import READERS, read_rows, readers, suffix
from wherelm.data.splits import limited, split_off, with_duplicates

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)
FORMATS = ("messages", "stream")
OVERFLOWS = ("truncate", "split", "skip")
# What decides how rows become examples.
CODE = ("data.messages", "data.readers", "data.examples", "data.sources")
SPLITS = ("train", "validation", "test")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


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
            train, result["validation"] = split_off(
                train, config.train, config.validation_fraction, config.format
            )
        result["train"] = limited(train, config.limit)
    for name in wanted:
        if name in result:
            continue
        if name not in paths:
            raise ValueError(f"no split is called {name}: the data has {', '.join(paths)}")
        result[name] = _load(_key(name), paths[name], config, root, cache)
    return {name: with_duplicates(name, result) for name in dict.fromkeys(wanted)}


def _load(key: str, value: str, config: DataConfig, root: Path, cache: Path | None) -> Examples:
    """One source, read or taken from the cache."""
    task = tasks.parse(value) if value.startswith(tasks.PREFIX) else None
    files = find_files(key, value, config, root) if task is None else None
    hub = _from_hub(key, value) if task is None and files is None else None
    split = key.rpartition(".")[2]
    content = [(name, _digest(path)) for name, path in files or ()]
    code = code_of(*CODE, *(["data.tasks"] if task else []))
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
        table, counts = collect(rows, config.format, config.text_column)
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
