"""Datasets kept on disk under a key that names everything they were made from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

COUNTS = "counts.json"


def key_of(*parts: str | bytes | int | None) -> str:
    """A sha256 over the parts, which cannot run into each other."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()


def stored(
    folder: Path | None,
    name: str,
    build: Callable[[], tuple[datasets.Dataset, dict[str, Any]]],
) -> tuple[datasets.Dataset, dict[str, Any]]:
    """What `build` returns, read from folder/name if it is there, else built and written there.

    It is written beside its place and renamed, so that it is there whole or not at all. A folder of
    None keeps nothing. ValueError if the folder cannot be written.
    """
    if folder is None:
        return build()

    from datasets import load_from_disk

    place = folder / name
    if not place.is_dir():
        dataset, counts = build()
        with _beside(place) as part:
            _save(dataset, part)
            (part / COUNTS).write_text(json.dumps(counts), encoding="utf-8")
    counts = json.loads((place / COUNTS).read_text(encoding="utf-8"))
    return load_from_disk(str(place)), counts


def stored_text(folder: Path | None, name: str, build: Callable[[], str]) -> str:
    """As `stored`, for one text."""
    if folder is None:
        return build()
    place = folder / name
    if not place.is_dir():
        text = build()
        with _beside(place) as part:
            (part / "text").write_text(text, encoding="utf-8")
    return (place / "text").read_text(encoding="utf-8")


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
        except OSError:
            if not self.place.is_dir():
                raise
        finally:
            shutil.rmtree(self.part, ignore_errors=True)


def _save(dataset: datasets.Dataset, folder: Path) -> None:
    import datasets

    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        dataset.save_to_disk(str(folder))
    finally:
        if not shown:
            datasets.enable_progress_bars()
