"""A learning rate for each arm, picked by validation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wherelm.ablation.plan import Arm, Job
from wherelm.ablation.results import write_csv
from wherelm.run_folder import figure_of, higher_is_better, is_extrapolation

WIDENINGS = 2


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
    if is_extrapolation(metric):
        figure = "validation.loss"
    result = []
    for arm in dict.fromkeys(job.arm.label for job in jobs):
        own = [job for job in jobs if job.arm.label == arm]
        rates = sorted({job.learning_rate for job in own})
        values = {}
        for rate in rates:
            found = [figure_of(job.summary, figure) for job in own if job.learning_rate == rate]
            if None not in found:
                values[rate] = statistics.fmean(found)
        sign = -1 if higher_is_better(metric) else 1
        best = min(values, key=lambda rate: sign * values[rate]) if values else None
        edge = {rates[0]: "lowest", rates[-1]: "highest"}.get(best)
        result.append(Sensitivity(own[0].arm, values, best, edge))
    return result


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
