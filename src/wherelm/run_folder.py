"""The protocol of a run folder: the names of its files, their keys, and who writes and reads them.

No torch here: sweeps and reports know runs by their files alone.

Shapes: N examples.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import socket
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

CONFIG, TOKENIZER, ENVIRONMENT = "config.yaml", "tokenizer.json", "environment.json"
LEDGER, METRICS, SUMMARY, LOG = "ledger.json", "metrics.jsonl", "summary.json", "train.log"
SAMPLES, CURVE, BREAKDOWNS, PROBES = "samples.txt", "curve.png", "breakdowns.json", "probes.json"
PROFILE, TRACE = "profile.txt", "trace.json.gz"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"  # there while a process writes
# The files of a checkpoint beside CONFIG and TOKENIZER.
WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"

# The figures of a split by which runs are compared: less is better, or more.
LOWER, HIGHER = ("loss", "bits_per_byte", "perplexity"), ("exact_match", "accuracy")
# The sums and weights of each example whose quotient is a figure: keys of scores-SPLIT.npz.
EXAMPLES = {
    "loss": ("nats", "targets"),
    "exact_match": ("exact", "replies"),
    "ratio_to_1": ("ratio", "targets"),
}
# Beyond the trained length a metric is extrapolation.PROTOCOL.FACTOR.FIGURE: less is better.
EXTRAPOLATION, PROTOCOLS = "extrapolation", ("fixed_targets", "windows", "sliding")
FACTORS = (1.0, 1.25, 1.5, 2.0, 4.0, 8.0)
BEYOND = ("loss", "bits_per_byte", "ratio_to_1")


def write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def write_summary(folder: Path, status: str, **more: Any) -> dict[str, Any]:
    """What a program would read of a run that ended; returns it."""
    summary = {"status": status, **more}
    write_json(folder / SUMMARY, summary)
    return summary


def read_summary(folder: Path) -> dict[str, Any]:
    """Empty where there is none yet, or where it was cut short by a kill."""
    try:
        return json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def status(folder: Path) -> str:
    """complete, failed, interrupted, killed (begun, and nobody wrote its end) or missing."""
    written = read_summary(folder).get("status")
    return written or ("killed" if (folder / CONFIG).exists() else "missing")


def is_extrapolation(metric: str) -> bool:
    """Whether a metric is EXTRAPOLATION.… and not a figure of a split, even of one so named."""
    return metric.startswith(f"{EXTRAPOLATION}.") and metric.count(".") > 1


def figures_beside(summary: Mapping[str, Any], metric: str) -> Mapping[str, Any]:
    """All that a complete run has where it has this metric: a split, or a factor of a protocol."""
    if summary.get("status") != "complete":
        return {}
    place = metric.rpartition(".")[0]
    if not is_extrapolation(metric):
        return summary["splits"].get(place, {})
    # A factor may hold a dot.
    protocol, _, factor = place.removeprefix(f"{EXTRAPOLATION}.").partition(".")
    return summary.get(EXTRAPOLATION, {}).get(protocol, {}).get(factor, {})


def figure_of(summary: Mapping[str, Any], metric: str) -> float | None:
    """SPLIT.FIGURE or extrapolation.PROTOCOL.FACTOR.FIGURE of a complete run, else None."""
    return figures_beside(summary, metric).get(metric.rpartition(".")[2])


def higher_is_better(metric: str) -> bool:
    return metric.rpartition(".")[2] in HIGHER


def metric_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl, without one that was cut short by a kill."""
    path = folder / METRICS
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def is_training(line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics tells of a step; the others tell of a split."""
    return "split" not in line


def is_validation(line: Mapping[str, Any]) -> bool:
    """Whether it tells of validation while the run went."""
    return line.get("split") == "validation" and not line.get("final")


def cut_back(folder: Path, step: int) -> None:
    """Drops what metrics.jsonl holds beyond `step`: it happens again after resuming from there.

    So does the final measurement.
    """
    kept = [line for line in metric_lines(folder) if line["step"] <= step and not line.get("final")]
    text = "".join(json.dumps(line) + "\n" for line in kept)
    (folder / METRICS).write_text(text, encoding="utf-8")


def write_scores(folder: Path, split: str, **of_examples_N: np.ndarray) -> None:
    """scores-SPLIT.npz: `nats`, `targets`, `replies` and `exact` of each example."""
    import numpy as np

    np.savez_compressed(_scores(folder, split), **of_examples_N)


def read_scores(folder: Path, split: str) -> dict[str, np.ndarray] | None:
    """What `write_scores` wrote, or None."""
    import numpy as np

    if not _scores(folder, split).is_file():
        return None
    with np.load(_scores(folder, split)) as scores:
        return dict(scores)


def _scores(folder: Path, split: str) -> Path:
    return folder / f"scores-{split}.npz"


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:08d}"


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoint folders of a run, oldest first."""
    found = (run / CHECKPOINTS).glob("step-*")
    return sorted(path for path in found if (path / STATE).is_file())


# The folders that this process writes into: the open lock of each, and what was made for it.
_held: dict[Path, tuple[int, list[Path]]] = {}


def claim(place: Path, given: str | None) -> Path:
    """Holds `place`; where nobody gave it by name, the first of PLACE, PLACE-2, … that is unused.

    ValueError, which begins with what was `given`, where another process writes there.
    """
    for number in itertools.count(1):
        free = place if number == 1 else place.with_name(f"{place.name}-{number}")
        if given is None and free.exists() and any(free.iterdir()):
            continue
        try:
            hold(free)
        except BlockingIOError as error:
            if given is not None:
                raise ValueError(f"{given}: {error.strerror}") from error
            continue
        return free
    raise AssertionError("numbers do not end")


def hold(folder: Path) -> None:
    """Makes the folder where it is missing, and locks it to this process until `release`.

    The system itself unlocks it when the process ends, however it ends. BlockingIOError where
    another process holds it, which is named.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(file)
        except BlockingIOError:
            note = os.read(file, 1000).decode() or "another process"
            os.close(file)
            why = f"{note} writes there; wait until it has ended"
            raise BlockingIOError(errno.EAGAIN, why) from None
        # Whoever held it before may have deleted it in between: then it locks nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(folder / LOCK)):
                break
        os.close(file)
    now = datetime.now().isoformat(" ", "seconds")
    note = f"process {os.getpid()} on {socket.gethostname()}, there since {now},"
    os.truncate(file, 0)
    os.write(file, note.encode())
    _held[folder] = file, missing


def release(*folders: Path) -> None:
    """Unlocks the folders that this process holds, or these of them.

    One that was made for it, and in which no run has begun, is deleted again.
    """
    for folder in folders or tuple(_held):
        file, missing = _held.pop(folder)
        if folder in missing and not (folder / CONFIG).exists():
            with contextlib.suppress(OSError):
                (folder / LOG).unlink()
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink()
        os.close(file)
        with contextlib.suppress(OSError):  # the first that is not empty ends it
            for path in missing:
                path.rmdir()


def _lock(file: int) -> None:
    """Locks an open file; BlockingIOError where another process has, nothing where none can."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        try:
            os.lseek(file, 1 << 20, os.SEEK_SET)  # behind the note, which others read
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError from error
        finally:
            os.lseek(file, 0, os.SEEK_SET)
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        return
