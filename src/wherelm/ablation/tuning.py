"""A learning rate for each arm, picked by validation loss."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wherelm.ablation.plan import Arm, Job
from wherelm.ablation.results import write_csv
from wherelm.run_folder import figure_of

WIDENINGS = 2
LOSS = "validation.loss"  # smooth where a share of exact replies is coarse


def grid(centre: float, count: int, lower: int = 0, upper: int = 0) -> list[float]:
    """`count` learning rates a factor 2 apart around the centre, and as many more on each side."""
    first = -(count // 2) - lower
    return [float(f"{centre * 2.0**i:.6g}") for i in range(first, count - count // 2 + upper)]


@dataclass(frozen=True)
class Sensitivity:
    """What tuning found for one arm: the mean validation loss at each learning rate."""

    arm: Arm
    values: dict[float, float]  # without those whose runs failed
    best: float | None
    edge: str | None  # "lowest" or "highest" where the best rate is the last of the grid


def sensitivities(jobs: Sequence[Job]) -> list[Sensitivity]:
    """The curve of each arm over its tuning jobs.

    Of the rates whose mean lies within a standard error of the lowest, pooled over the rates of the
    arm, the middle one is the best: a tie or a flat curve says nothing for its lowest rate (the
    rule of one standard error, Breiman et al., 1984, "Classification and Regression Trees").
    """
    result = []
    for arm in dict.fromkeys(job.arm.label for job in jobs):
        own = [job for job in jobs if job.arm.label == arm]
        rates = sorted({job.learning_rate for job in own})
        losses = {}
        for rate in rates:
            found = [figure_of(job.summary, LOSS) for job in own if job.learning_rate == rate]
            if None not in found:
                losses[rate] = found
        values = {rate: statistics.fmean(found) for rate, found in losses.items()}
        error = _standard_error(list(losses.values()))
        tied = [rate for rate in values if values[rate] <= min(values.values()) + error]
        best = tied[(len(tied) - 1) // 2] if tied else None
        edge = {rates[0]: "lowest", rates[-1]: "highest"}.get(best)
        result.append(Sensitivity(own[0].arm, values, best, edge))
    return result


def _standard_error(groups: Sequence[Sequence[float]]) -> float:
    """Of the mean of a group, by the spread within all of them; 0 where each has one value."""
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return 0.0
    squares = sum((x - statistics.fmean(group)) ** 2 for group in groups for x in group)
    return (squares / freedom / len(groups[0])) ** 0.5


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
