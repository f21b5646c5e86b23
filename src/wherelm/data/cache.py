"""Datasets kept on disk under a key that names everything they were made from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

COUNTS = "counts.json"
ENTRY = "*-" + 32 * "[0-9a-f]"
MOST_BYTES = 8 << 30  # of all entries together
KEPT = 24 * 60 * 60  # seconds: what was used since then may be in use


def key_of(*parts: str | bytes | int | None) -> str:
    """A sha256 over the parts, which cannot run into each other."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()


def code_of(*modules: str) -> bytes:
    """The source of modules such as "data.readers", a part of the key of what they make.

    Whoever changes how a thing is made must not meet one that was made before.
    """
    package = Path(__file__).parents[1]
    places = (package / f"{module.replace('.', '/')}.py" for module in modules)
    return b"".join(place.read_bytes() for place in places)


def stored(
    folder: Path | None,
    name: str,
    build: Callable[[], tuple[datasets.Dataset, dict[str, Any]]],
) -> tuple[pa.Table, dict[str, Any]]:
    """The table of what `build` returns, and its counts.

    They are read from folder/name if they are there, else built and written there. They are written
    beside their place and renamed, so that they are there whole or not at all. A folder of None
    keeps nothing. ValueError if the folder cannot be written.
    """
    if folder is None:
        dataset, counts = build()
        return dataset.data.table, counts
    place = folder / name
    if not _present(place):
        dataset, counts = build()
        with _beside(place) as part:
            _save(dataset, part)
            (part / COUNTS).write_text(json.dumps(counts), encoding="utf-8")
    with _reading(place):
        counts = json.loads((place / COUNTS).read_text(encoding="utf-8"))
        return _mapped(place), counts


def stored_text(folder: Path | None, name: str, build: Callable[[], str]) -> str:
    """As `stored`, for one text."""
    if folder is None:
        return build()
    place = folder / name
    if not _present(place):
        text = build()
        with _beside(place) as part:
            (part / "text").write_text(text, encoding="utf-8")
    with _reading(place):
        return (place / "text").read_text(encoding="utf-8")


def _present(place: Path) -> bool:
    """Whether an entry is there; its time says when it was last used."""
    with contextlib.suppress(OSError):
        os.utime(place)
    return place.is_dir()


@contextlib.contextmanager
def _reading(place: Path) -> Iterator[None]:
    """ValueError, with the fix, where an entry turns out to be damaged."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:  # Arrow's own are among them
        raise ValueError(f"{place}: damaged ({error}); delete this folder") from error


class _beside:
    """A fresh folder that takes its place at the end, unless another process was faster."""

    def __init__(self, place: Path):
        self.place = place

    def __enter__(self) -> Path:
        try:
            self.place.parent.mkdir(parents=True, exist_ok=True)
            self.part = Path(tempfile.mkdtemp(prefix=".part-", dir=self.place.parent))
        except OSError as error:
            raise ValueError(
                f"data.cache={self.place.parent}: cannot be written ({error.strerror}); "
                "give another folder, or data.cache=null"
            ) from error
        return self.part

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None:
                os.rename(self.part, self.place)
                _prune(self.place.parent)
        except OSError:
            if not self.place.is_dir():
                raise
        finally:
            shutil.rmtree(self.part, ignore_errors=True)


def _prune(folder: Path) -> None:
    """Drops the entries longest unused that, with all used since, take more than MOST_BYTES."""
    entries = [(place.stat().st_mtime, place) for place in folder.glob(ENTRY)]
    total = 0
    for used, place in sorted(entries, reverse=True):
        total += sum(file.stat().st_size for file in place.iterdir())
        if total > MOST_BYTES and used < time.time() - KEPT:
            # Renamed first, so that no other process meets half of it.
            with contextlib.suppress(OSError):
                shutil.rmtree(place.rename(place.with_name(f".part-{place.name}")))


def _mapped(place: Path) -> pa.Table:
    """The table of a saved dataset, mapped; `datasets` would take a second to be imported."""
    import pyarrow as pa

    files = json.loads((place / "state.json").read_text(encoding="utf-8"))["_data_files"]
    maps = [pa.memory_map(str(place / file["filename"])) for file in files]
    return pa.concat_tables(pa.ipc.open_stream(each).read_all() for each in maps)


def _save(dataset: datasets.Dataset, folder: Path) -> None:
    import datasets

    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        dataset.save_to_disk(str(folder))
    finally:
        if not shown:
            datasets.enable_progress_bars()
