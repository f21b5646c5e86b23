"""A sweep: its jobs, where each stands, and the learning rates that tuning picks.

Only files are read and written here; `hydra_plugins.wherelm_sweeper` starts the jobs.
"""

from __future__ import annotations

import copy
import csv
import hashlib
import json
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUMMARY = "summary.json"
STOP, CACHE = ".stop", ".cache"
LEARNING_RATE = "learning_rate"
TUNING_SEED = 1000  # how far behind the first final seed those of tuning begin: they never meet
WIDENINGS = 2
# What changes no number that is compared, or has a place of its own in a folder's name.
UNNAMED = (("name",), ("seed",), ("tracking",), ("training", "threads"), ("data", "cache"))


LOWER, HIGHER = ("loss", "bits_per_byte", "perplexity"), ("exact_match", "accuracy")


@dataclass(frozen=True)
class AblationConfig:
    """Every arm with `seeds` seeds, by the one `metric` named in advance, against `baseline`.

    `baseline` is the label of an arm; null takes the first one of the command line.
    `tune` first gives every arm the same `learning_rates`, a factor 2 apart around the optimizer's
    own, with `tuning_seeds` seeds that are not used again.
    """

    metric: str = "validation.loss"
    baseline: str | None = None
    seeds: int = 3
    tune: bool = False
    learning_rates: int = 4
    tuning_seeds: int = 1

    def __post_init__(self):
        if not self.split or self.figure not in LOWER + HIGHER:
            raise ValueError(
                f"ablation.metric={self.metric}: expected SPLIT.FIGURE such as validation.loss, "
                f"the figure one of {', '.join(LOWER + HIGHER)}"
            )
        for key, least in {"seeds": 1, "learning_rates": 3, "tuning_seeds": 1}.items():
            value = getattr(self, key)
            if not least <= value < TUNING_SEED:
                raise ValueError(f"ablation.{key}={value}: expected {least} to {TUNING_SEED - 1}")

    @property
    def split(self) -> str:
        return self.metric.rpartition(".")[0]

    @property
    def figure(self) -> str:
        return self.metric.rpartition(".")[2]


@dataclass(frozen=True)
class Arm:
    """One thing that is compared: a label, Hydra's overrides, and the configuration they make."""

    label: str
    overrides: tuple[str, ...]
    config: dict[str, Any]

    @property
    def scheme(self) -> str:
        return self.config["position"]["name"]


@dataclass(frozen=True)
class Job:
    """One run of an arm: its seed, its learning rate and its folder within the sweep's.

    `phase` is "tune" or "final".
    """

    arm: Arm
    seed: int
    phase: str
    learning_rate: float
    folder: Path
    config: dict[str, Any]
    overrides: tuple[str, ...]

    @property
    def status(self) -> str:
        return status(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        return read_summary(self.folder)


def make_job(
    sweep: Path, arm: Arm, seed: int, phase: str, learning_rate: float | None = None
) -> Job:
    """The job of an arm with this seed; `learning_rate` replaces the configured one.

    All learning rates of the optimiser are scaled alike. Tuning reads no split but validation.
    """
    config = copy.deepcopy(arm.config)
    config["seed"] = seed
    changes = {"seed": seed}
    optimizer = config["optimizer"]
    if learning_rate is not None:
        factor = learning_rate / optimizer[LEARNING_RATE]
        for key in (key for key in optimizer if key.endswith(LEARNING_RATE)):
            optimizer[key] = float(f"{optimizer[key] * factor:.6g}")
            changes[f"optimizer.{key}"] = optimizer[key]
    if phase == "tune":
        config["evaluation"] |= {"splits": ["validation"], "extrapolation": False}
        changes |= {"evaluation.splits": "[validation]", "evaluation.extrapolation": "false"}
    folder = sweep / f"{arm.scheme}-{short_hash(config)}-seed{seed}"
    overrides = (*arm.overrides, *(f"{key}={value}" for key, value in changes.items()))
    return Job(arm, seed, phase, optimizer[LEARNING_RATE], folder, config, overrides)


def short_hash(config: Mapping[str, Any]) -> str:
    """Six hex digits that differ where anything does that could change a result, the seed apart."""
    config = copy.deepcopy(dict(config))
    for *groups, key in UNNAMED:
        place = config
        for group in groups:
            place = place[group]
        place.pop(key, None)
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:6]


def read_summary(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or cut short by a kill
        return {}


def status(folder: Path) -> str:
    """complete, failed, interrupted, killed (begun, and nobody wrote its end) or missing."""
    written = read_summary(folder).get("status")
    return written or ("killed" if (folder / "config.yaml").exists() else "missing")


def ready(folder: Path) -> bool:
    """Makes a folder ready for its job; True where the job goes on from a checkpoint.

    What failed, or was killed before its first checkpoint, begins anew; its log is kept.
    """
    states = (folder / "checkpoints").glob("step-*/state.json")
    if status(folder) in ("interrupted", "killed") and any(states):
        return True
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix != ".log":
            path.unlink()
    return False


def write_failure(folder: Path, error: BaseException) -> dict[str, Any]:
    """The summary of a job that raised."""
    words = str(error).strip() or type(error).__name__
    if not isinstance(error, ValueError):
        words = f"{type(error).__name__}: {words}"
    summary = {"status": "failed", "error": words.splitlines()[0]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


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


def grid(centre: float, count: int, lower: int = 0, upper: int = 0) -> list[float]:
    """`count` learning rates a factor 2 apart around the centre, and as many more on each side."""
    first = -(count // 2) - lower
    return [float(f"{centre * 2.0**i:.6g}") for i in range(first, count - count // 2 + upper)]


@dataclass(frozen=True)
class Sensitivity:
    """What tuning found for one arm: the mean of the metric at each learning rate."""

    arm: Arm
    values: dict[float, float]  # without those whose runs failed
    best: float | None
    edge: str | None  # "lowest" or "highest" where the best rate is the last of the grid


def sensitivities(jobs: Sequence[Job], metric: str) -> list[Sensitivity]:
    """The curve of each arm over its tuning jobs, by the metric's figure on validation."""
    figure = f"validation.{metric.rpartition('.')[2]}"
    result = []
    for arm in dict.fromkeys(job.arm.label for job in jobs):
        own = [job for job in jobs if job.arm.label == arm]
        rates = sorted({job.learning_rate for job in own})
        values = {}
        for rate in rates:
            found = [read(job.summary, figure) for job in own if job.learning_rate == rate]
            if None not in found:
                values[rate] = statistics.fmean(found)
        sign = -1 if higher_is_better(metric) else 1
        best = min(values, key=lambda rate: sign * values[rate]) if values else None
        edge = {rates[0]: "lowest", rates[-1]: "highest"}.get(best)
        result.append(Sensitivity(own[0].arm, values, best, edge))
    return result


def higher_is_better(metric: str) -> bool:
    return metric.rpartition(".")[2] in HIGHER


def read(summary: Mapping[str, Any], metric: str) -> float | None:
    """SPLIT.FIGURE of a complete run, else None."""
    split, _, figure = metric.rpartition(".")
    if summary.get("status") != "complete":
        return None
    return summary["splits"].get(split, {}).get(figure)


def tuning_table(found: Sequence[Sensitivity]) -> str:
    """The picked learning rate of every arm, and where the grid was too short for it."""
    lines = []
    for curve in found:
        values = ", ".join(f"{rate:g}: {value:.4f}" for rate, value in curve.values.items())
        line = (
            f"{curve.arm.label}: learning rate {curve.best:g} ({values})"
            if values
            else (f"{curve.arm.label}: every learning rate failed; the configured one is kept")
        )
        if curve.edge:
            line += f"; the {curve.edge} of the grid, so a better one may lie beyond"
        lines.append(line)
    return "\n".join(lines)


def write_tuning(path: Path, found: Sequence[Sensitivity]) -> None:
    """tuning.csv: the sensitivity curve of every arm, a line a learning rate."""
    lines = [
        {
            "arm": curve.arm.label,
            "learning_rate": rate,
            "value": value,
            "picked": rate == curve.best,
            "edge": curve.edge if rate == curve.best else None,
        }
        for curve in found
        for rate, value in curve.values.items()
    ]
    write_csv(path, lines)


def results(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """A row a job: what it was, every setting in which jobs differ, and all that it measured."""
    settings = [_flat(job.config) for job in jobs]
    keys = dict.fromkeys(key for one in settings for key in one)
    differing = [
        key
        for key in keys
        if key.startswith("position.") or len({str(one.get(key)) for one in settings}) > 1
    ]
    rows = []
    for job, one in zip(jobs, settings, strict=True):
        row = {
            "folder": job.folder.name,
            "phase": job.phase,
            "arm": job.arm.label,
            "scheme": job.arm.scheme,
            "seed": job.seed,
            "status": job.status,
            "error": job.summary.get("error"),
            "learning_rate": job.learning_rate,
        }
        row |= {key: one[key] for key in differing if key in one and key != "seed"}
        rows.append(row | _flat({k: v for k, v in job.summary.items() if k not in row}))
    return rows


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, their keys joined by dots; lists as JSON."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= _flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = json.dumps(value) if isinstance(value, list) else value
    return result


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
