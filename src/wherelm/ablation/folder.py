"""Where the jobs of a sweep stand, read off and written to their folders."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from wherelm.run_folder import LOCK, checkpoints, status, write_summary

STOP, CACHE = ".stop", ".cache"


def ready(folder: Path) -> bool:
    """Makes a folder ready for its job; True where the job goes on from a checkpoint.

    What failed, or was killed before its first checkpoint, begins anew; its log is kept.
    """
    if status(folder) in ("interrupted", "killed") and checkpoints(folder):
        return True
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix != ".log" and path.name != LOCK:
            path.unlink()
    return False


def write_failure(folder: Path, error: BaseException) -> dict[str, Any]:
    """The summary of a job that raised."""
    words = str(error).strip() or type(error).__name__
    if not isinstance(error, ValueError):
        words = f"{type(error).__name__}: {words}"
    folder.mkdir(parents=True, exist_ok=True)
    return write_summary(folder, "failed", error=words.splitlines()[0])


def stop(sweep: Path, code: int) -> None:
    """Lets no further job of the sweep begin; its exit status will be `code`."""
    (sweep / STOP).write_text(str(code), encoding="utf-8")


def stopped(sweep: Path) -> int:
    """The exit status with which the sweep is to stop, or 0."""
    return int((sweep / STOP).read_text(encoding="utf-8")) if (sweep / STOP).exists() else 0


def go(sweep: Path) -> None:
    (sweep / STOP).unlink(missing_ok=True)


def cores() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
