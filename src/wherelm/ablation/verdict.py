"""What a sweep answers: its looks, the plan it was sealed with, and a comparison for each task."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wherelm.ablation import comparison, seal, tables
from wherelm.ablation.inference import sequential
from wherelm.ablation.plan import AblationConfig, Arm, Job, references, short_hash
from wherelm.ablation.progress import clock
from wherelm.run_folder import figure_of, write_json

LOOKS = "looks.json"
TASK = "data"  # the factor whose levels are different questions: a table each


@dataclass(frozen=True)
class Task:
    """The arms that are compared to each other, and to whom each."""

    name: str
    arms: list[Arm]
    references: dict[str, str]


def tasks_of(arms: Sequence[Arm], baseline: str | None) -> list[Task]:
    """One task, or one for each level of `data` where that varies beside another factor."""
    levels = [dict(arm.levels).get(TASK) for arm in arms]
    several = len(set(levels)) > 1 and all(len(arm.levels) > 1 for arm in arms)
    if not several:
        return [Task("", list(arms), references(arms, baseline))]
    found = references(arms, baseline)
    result = []
    for level in dict.fromkeys(levels):
        own = [arm for arm, other in zip(arms, levels, strict=True) if other == level]
        labels = {arm.label for arm in own}
        within = {a: b for a, b in found.items() if a in labels and b in labels}
        result.append(Task(f"{TASK}={level}", own, within))
    return result


def sealed(folder: Path, settings: AblationConfig, arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Every plan that the sweep's folder has had, the present one last."""
    plan = {
        "question": settings.question,
        "metric": settings.metric,
        "baselines": references(arms, settings.baseline),
        "margin": settings.margin,
        "rule": settings.rule,
        "seeds": settings.seeds,
        "equal": settings.equal,
        "tune": settings.tune,
        "arms": {arm.label: short_hash(arm.config) for arm in arms},
    }
    return seal.seal(folder, plan)


def looked(folder: Path, seeds: int) -> list[int]:
    """The seeds of every look at a sweep so far, this one among them: looks.json keeps count."""
    path = folder / LOOKS
    looks = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    if seeds and (not looks or seeds > looks[-1]):
        looks.append(seeds)
        write_json(path, looks)
    return looks


def p_values(
    jobs: Sequence[Job], metric: str, references: Mapping[str, str], arms: Collection[str]
) -> dict[str, float]:
    """p of these arms, not corrected; 1 where nothing can be said."""
    found = {d.arm: d for d in comparison.compare(jobs, metric, references).differences}
    return {arm: found[arm].test.p if arm in found and found[arm].test else 1.0 for arm in arms}


def announce(
    pilot: Sequence[Job], arms: Sequence[Arm], settings: AblationConfig, parallel: int
) -> str:
    """What the plan will find and take, by the runs of a pilot."""
    figures = [
        [figure_of(job.summary, settings.metric) for job in pilot if job.arm.label == arm.label]
        for arm in arms
    ]
    if any(value is None for row in figures for value in row):
        return "pilot: not every run has the metric, so nothing can be said of the plan"
    spread = sequential.pilot_spread(np.array(figures))
    contrasts = max(1, len(references(arms, settings.baseline)))
    if spread is None or not spread.upper:
        return "pilot: no spread to plan by"
    words = sequential.forecast(spread.upper, contrasts, settings.most, settings.margin)
    each = statistics.median(job.summary["seconds"] for job in pilot)
    seconds = each * len(arms) * settings.most / parallel
    inside = " (the arms' own differences are in it)" if spread.arms_in_it else ""
    return (
        f"pilot: a difference of one seed has a standard deviation of at most "
        f"{spread.upper:.2g}{inside}; {words}; about {clock(seconds)}"
    )


def answer(
    folder: Path,
    jobs: Sequence[Job],
    arms: Sequence[Arm],
    settings: AblationConfig,
    decided: Collection[str] | None,
) -> str:
    """Writes comparison.json and returns the tables, and whether the plan's rule was kept.

    `decided` are the arms that a sequential design tells apart; else the level is spent over the
    looks at this folder.
    """
    metric, final = settings.metric, [job for job in jobs if job.phase == "final"]
    measured = [job for job in final if figure_of(job.summary, metric) is not None]
    seeds = {arm.label: sum(job.arm.label == arm.label for job in measured) for arm in arms}
    critical: Callable[[int], float] = comparison.bonferroni
    notes = []
    if decided is None:
        looks = looked(folder, min(seeds.values()))
        if len(looks) > 1:
            critical = sequential.critical_now(looks)
            shown = ", ".join(map(str, looks))
            notes.append(
                f"looked at {len(looks)} times, with {shown} seeds: this look has "
                f"{critical(1):.2g} of the level of 0.05"
            )
    parts, found = [], []
    for task in tasks_of(arms, settings.baseline):
        labels = {arm.label for arm in task.arms}
        own = [job for job in final if job.arm.label in labels]
        found.append(
            comparison.compare(own, metric, task.references, settings.margin, critical, decided)
        )
        title = f"{task.name}\n" if task.name else ""
        parts.append(title + tables.table(found[-1], own, task.references))
    comparison.save(found, folder / "comparison.json")
    plans = json.loads((folder / seal.FILE).read_text(encoding="utf-8"))
    if settings.rule is not None:
        values: dict[str, dict[int, float]] = {}
        for job in final:
            value = figure_of(job.summary, metric)
            if value is not None:
                values.setdefault(job.arm.label, {})[job.seed] = value
        whole, lines = seal.verdict(settings.rule, values)
        notes.append(f"the rule of the plan is {whole}: {'; '.join(lines)}")
    notes += [
        f"an earlier plan ({plan['hash']}, {plan['sealed']}): {plan['metric']}, seeds "
        f"{plan['seeds']}, rule {plan['rule']}"
        for plan in plans[:-1]
    ]
    notes.append(f"plan {plans[-1]['hash']}, sealed {plans[-1]['sealed']}")
    return "\n\n".join([*parts, "\n".join(notes)])
