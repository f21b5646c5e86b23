"""A comparison as text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from wherelm.ablation.comparison import Comparison, Difference, deciding_messages, speedup
from wherelm.ablation.inference.intervals import LEVEL, Interval
from wherelm.ablation.plan import Job
from wherelm.run_folder import HIGHER, LOWER, figure_of, higher_is_better

SATURATED = 0.99  # of the way from chance to 1
GUESSING = 0.05  # of it: nearer to chance than that lies the scatter of lucky guesses


def table(comparison: Comparison, jobs: Sequence[Job], references: Mapping[str, str]) -> str:
    """The metric of every arm with its difference to its baseline, cost, and secondary figures."""
    metric = comparison.metric
    final = [job for job in jobs if job.phase == "final"]
    arms = list(dict.fromkeys(job.arm.label for job in final))
    complete = {a: [j for j in final if j.arm.label == a and j.status == "complete"] for a in arms}
    failed = comparison.failed_seeds
    chance = _chance(complete, metric)
    width = max(12, *(len(arm) + 2 for arm in arms))
    want = "higher" if higher_is_better(metric) else "lower"
    baselines = list(dict.fromkeys(references.values()))
    to = f"differences to {baselines[0]}" if len(baselines) == 1 else "each level has a baseline"
    lines = [
        f"{metric} ({want} is better), named in advance; {to}"
        + (f"; chance {chance:.4g}" if chance else "")
        + (f"; margin {comparison.margin:g}" if comparison.margin is not None else ""),
        "",
        f"{'':{width}}{'adds':>10}{'seeds':>6}{'mean':>9}{'sd':>9}{'failed':>8}" + TESTED,
    ]
    found = {d.arm: d for d in comparison.differences}
    for arm in arms:
        values = values_of(complete[arm], metric)
        spread = f" {statistics.stdev(values):8.4f}" if len(values) > 1 else f"{'-':>9}"
        mean = f" {statistics.fmean(values):8.4f}" if values else f"{'-':>9}"
        adds = f"{complete[arm][0].summary['scheme_parameters']:,}" if complete[arm] else "-"
        lost = f"{len(failed.get(arm, []))}/{sum(job.arm.label == arm for job in final)}"
        tested = _tested(found.get(arm), metric)
        if tested and (arm in failed or references.get(arm) in failed):
            tested += ", of runs that ended"
        if tested and found[arm].other_data:
            tested += ", unpaired: other data"
        lines.append(f"{arm:{width}}{adds:>10}{len(values):>6}{mean}{spread}{lost:>8}{tested}")
    lines += [
        f"{arm}: seeds {seeds} failed and are in no pair, which favours {arm} if it is the cause"
        for arm, seeds in failed.items()
    ]
    if warning := saturation(complete, metric, chance):
        lines.append(warning)
    if comparison.interactions:
        lines += ["", f"{'interaction':{width}}{'difference more than that of':42}{TESTED}"]
        lines += [
            f"{d.arm:{width}}{d.baseline:42}{_tested(d, metric)}" for d in comparison.interactions
        ]
    lines += [
        "",
        f"{'the same, alone':{width}}{'paired 95 %':>24}{'unpaired 95 %':>24}{'r of pairs':>12}"
        f"{'seeds, examples 95 %':>24}",
    ]
    for d in comparison.differences:
        r = "-" if d.correlation is None else f"{d.correlation:.2f}"
        alone = [f"{_range(_ends(one)):>24}" for one in (d.paired, d.unpaired, d.examples)]
        lines.append(f"{d.arm:{width}}{alone[0]}{alone[1]}{r:>12}{alone[2]}")
    lines += [line for d in comparison.differences for line in _worth(final, d, metric)]
    lines += ["", *_costs(complete, width), *_secondary(complete, metric, width)]
    for arm, seeds in comparison.unpaired_seeds.items():
        lines.append(f"{arm}: seeds {seeds} had other data than its baseline and are left out")
    return "\n".join(line.rstrip() for line in lines)


def _chance(complete: dict[str, list[Job]], metric: str) -> float:
    """The share that always the same reply gets of the metric's split; 0 where it is none."""
    split, _, figure = metric.rpartition(".")
    summaries = [job.summary for jobs in complete.values() for job in jobs]
    if figure != "exact_match" or not summaries:
        return 0.0
    return figure_of(summaries[0], f"{split}.chance") or 0.0


def _worth(jobs: Sequence[Job], difference: Difference, metric: str) -> list[str]:
    """What a difference is worth in training, and how many messages decide it."""
    lines = []
    if found := speedup(jobs, difference):
        lines.append(f"{difference.arm}: {found}, by validation loss")
    if both := deciding_messages(jobs, difference, metric):
        for what, one in zip(("wins", "loses"), both, strict=True):
            if one.p < LEVEL:
                lines.append(
                    f"{difference.arm} {what} {len(one.examples)} messages with every seed, by "
                    f"chance {one.by_chance:.0f} (p {one.p:.3f}): {_first(one.examples)}"
                )
    return lines


def _first(examples: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, examples[:most]))
    return f"numbers {shown}{', …' if len(examples) > most else ''}"


def _ends(interval: Interval | None) -> tuple[float, float] | None:
    return None if interval is None else (interval.low, interval.high)


def _range(ends: tuple[float, float] | None) -> str:
    return "-" if ends is None else f"{ends[0]:+.4f} {ends[1]:+.4f}"


TESTED = f"{'difference':>12}{'adjusted 95 %':>20}{'p (Holm)':>10}  verdict"


def _tested(difference: Difference | None, metric: str) -> str:
    if difference is None:
        return ""
    p = "-" if difference.p_holm is None else f"{difference.p_holm:.3f}"
    verdict = difference.verdict(metric)
    return f"{difference.mean:+12.4f}{_range(difference.adjusted):>20}{p:>10}  {verdict}"


COSTS = {
    "learning_rate": "{:g}",
    "parameters": "{:,.0f}",
    "scheme_parameters": "{:,.0f}",
    "tokens_per_second": "{:,.0f}",
    "peak_memory_mb": "{:,.0f}",
}


def _costs(complete: dict[str, list[Job]], width: int) -> list[str]:
    """What each arm costs, the medians of its runs."""
    lines = [f"{'cost':{width}}" + "".join(f"{name.replace('_', ' '):>19}" for name in COSTS)]
    for arm, jobs in complete.items():
        cells = []
        for name, form in COSTS.items():
            values = [{**j.summary, "learning_rate": j.learning_rate}.get(name) for j in jobs]
            known = [value for value in values if value is not None]
            cells.append(form.format(statistics.median(known)) if known else "-")
        lines.append(f"{arm:{width}}" + "".join(f"{cell:>19}" for cell in cells))
    return lines


def _secondary(complete: dict[str, list[Job]], metric: str, width: int) -> list[str]:
    """Means of all other figures; `test` was read once, from the last weights."""
    every = [job.summary for jobs in complete.values() for job in jobs]
    splits = list(dict.fromkeys(split for summary in every for split in summary["splits"]))
    lines = []
    for figure in (LOWER[0], HIGHER[0]):
        names = [f"{split}.{figure}" for split in splits]
        shown = [
            n for n in names if n != metric and any(figure_of(s, n) is not None for s in every)
        ]
        if not shown:
            continue
        title = f"secondary {figure.replace('_', ' ')}"
        left = max(width, len(title) + 1)
        heads = [f"{name.rpartition('.')[0]:>13}" for name in shown]
        lines += ["", f"{title:{left}}" + "".join(heads)]
        for arm, jobs in complete.items():
            found = [values_of(jobs, name) for name in shown]
            cells = [f"{statistics.fmean(values):.4f}" if values else "-" for values in found]
            lines.append(f"{arm:{left}}" + "".join(f"{cell:>13}" for cell in cells))
    return lines


def values_of(jobs: Sequence[Job], metric: str) -> list[float]:
    return [value for job in jobs if (value := figure_of(job.summary, metric)) is not None]


def saturation(complete: dict[str, list[Job]], metric: str, chance: float = 0.0) -> str | None:
    """A line of warning where a share lies at the same end of its range for every arm.

    The range begins at what guessing gets.
    """
    found = [values_of(jobs, metric) for jobs in complete.values()]
    means = [statistics.fmean(values) for values in found if values]
    if not higher_is_better(metric) or not means:
        return None
    ceiling, floor = (chance + share * (1 - chance) for share in (SATURATED, GUESSING))
    if min(means) >= ceiling:
        return f"{metric} is saturated: at least {ceiling:.4g} for every arm; ask something harder"
    if max(means) <= floor:
        guessed = f" ({chance:.4g} by chance)" if chance else ""
        return f"{metric} has not begun: at most {floor:.4g}{guessed} for every arm; train longer"
    return None
