"""What each split is read from, to its examples."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherelm.data import tasks
from wherelm.data.cache import code_of, key_of, stored
from wherelm.data.examples import Examples, collect
from wherelm.data.files import STANDARD_INPUT, accepted, source_of
from wherelm.data.messages import LEARN
from wherelm.data.splits import limited, split_off, with_duplicates

if TYPE_CHECKING:
    import datasets

FORMATS = ("messages", "stream")
OVERFLOWS = ("truncate", "split", "skip")
# What decides how rows become examples.
CODE = ("data.messages", "data.readers", "data.examples", "data.files", "data.sources")
SPLITS = ("train", "validation", "test")
Paths = str | tuple[str, ...]


@dataclass(frozen=True)
class DataConfig:
    """`train`, `validation`, `test` and each of `extra` is a path, or a list of them, read in turn.

    A path is a file, glob, folder, hub id or task, or - for standard input. Without `validation` it
    is split off `train`. `limit` caps the training examples. `resample` draws a task's training set
    by the run's seed. `cache` is a folder, and null keeps
    nothing.
    """

    train: Paths | None = None
    validation: Paths | None = None
    test: Paths | None = None
    extra: dict[str, Paths] = field(default_factory=dict)
    format: str = "messages"
    text_column: str = "text"
    learn: str = "replies"
    overflow: str = "truncate"
    validation_fraction: float = 0.05
    limit: int | None = None
    resample: bool = False
    cache: str | None = ".cache"

    def __post_init__(self):
        options = {"format": FORMATS, "learn": LEARN, "overflow": OVERFLOWS}
        for key, values in options.items():
            if getattr(self, key) not in values:
                expected = ", ".join(values)
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
        if self.resample and not any(
            p.startswith(tasks.PREFIX) for p in self.paths.get("train", ())
        ):
            raise ValueError(
                "data.resample=true: only what is generated can be drawn anew; give "
                "data.train=task:NAME, or data.resample=false"
            )
        for name in self.extra:
            if name in SPLITS:
                raise ValueError(f"data.extra.{name}: expected another name, or data.{name}=…")
            if not name or set("/\\.") & set(name):  # it becomes part of keys and of file names
                raise ValueError(f"data.extra.{name}: expected a name without /, \\ and dots")
        piped = None
        for name, paths in self.paths.items():
            key = _key(name)
            if not all(path.strip() for path in paths or [""]):
                shown = _shown(paths)
                raise ValueError(f"{key}={shown}: empty; expected {accepted(self.format)}")
            for path in paths:
                if path.startswith(tasks.PREFIX):
                    self._check_task(key, path)
                if path == STANDARD_INPUT and piped is not None:
                    raise ValueError(f"{key}=-: standard input is {piped} already; give a file")
                piped = key if path == STANDARD_INPUT else piped

    @property
    def paths(self) -> dict[str, tuple[str, ...]]:
        """What each split that is given is read from."""
        given = {"train": self.train, "validation": self.validation, "test": self.test} | self.extra
        return {
            name: (paths,) if isinstance(paths, str) else tuple(paths)
            for name, paths in given.items()
            if paths is not None
        }

    def of_seed(self, seed: int) -> DataConfig:
        """What a run of this seed reads."""
        if not self.resample:
            return self
        drawn = (
            tasks.with_seed(path, seed) if path.startswith(tasks.PREFIX) else path
            for path in self.paths["train"]
        )
        return replace(self, train=tuple(drawn))

    def _check_task(self, key: str, address: str) -> None:
        if self.format != "messages":
            raise ValueError(f"{key}={address}: expected data.format=messages, as tasks are made")
        try:
            tasks.parse(address)
        except ValueError as error:
            raise ValueError(f"{key}={address}: {error}") from error

    def cache_folder(self, root: Path) -> Path | None:
        """Where datasets are kept; relative to the project."""
        return None if self.cache is None else root / os.path.expanduser(self.cache)


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
                f"({accepted(config.format)})"
            )
        train = _load("train", config, root, cache)
        if config.validation is None:
            train, result["validation"] = split_off(
                train, _shown(paths["train"]), config.validation_fraction, config.format
            )
        result["train"] = limited(train, config.limit)
    for name in wanted:
        if name in result:
            continue
        if name not in paths:
            raise ValueError(f"no split is called {name}: the data has {', '.join(paths)}")
        result[name] = _load(name, config, root, cache)
    return {name: with_duplicates(name, result) for name in dict.fromkeys(wanted)}


def _load(split: str, config: DataConfig, root: Path, cache: Path | None) -> Examples:
    """One split, read or taken from the cache."""
    key, paths = _key(split), config.paths[split]
    sources = [source_of(key, path, config.format, root) for path in paths]
    contents = [source.content for source in sources]
    name = key_of(code_of(*CODE), *contents, config.format, config.text_column)

    def build() -> tuple[datasets.Dataset, dict[str, Any]]:
        import datasets

        rows = (row for source in sources for row in source.rows())
        table, counts = collect(rows, config.format, config.text_column)
        if len(table) == 0:
            first = "".join(f"; {place}" for place in counts["first_malformed"][:1])
            raise ValueError(
                f"{key}={_shown(paths)}: no usable message: {counts['read']} read, "
                f"{counts['empty']} empty, {counts['malformed']} malformed{first}"
            )
        return datasets.Dataset(table, fingerprint=name[:16]), counts

    table, counts = stored(cache, f"examples-{name[:32]}", build)
    return Examples(table, counts, name, cache)


def _key(split: str) -> str:
    return f"data.{split}" if split in SPLITS else f"data.extra.{split}"


def _shown(paths: tuple[str, ...]) -> str:
    """Paths as they are typed."""
    return paths[0] if len(paths) == 1 else f"[{','.join(paths)}]"
