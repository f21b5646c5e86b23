"""Which arm of a sweep is better, and how sure that is.

Shapes: S seeds, E examples.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from wherelm.ablation import HIGHER, LOWER, Job, higher_is_better, read
from wherelm.intervals import (
    Interval,
    bootstrap_interval,
    correlation,
    holm,
    t_interval,
    welch_interval,
)
from wherelm.seeds import numpy_generator

METRICS = "metrics.jsonl"
LEVEL = 0.05
SATURATED = 0.99
# The sums and weights in a run's scores-SPLIT.npz whose quotient is a figure.
EXAMPLES = {"loss": ("nats", "targets"), "exact_match": ("exact", "replies")}


@dataclass(frozen=True)
class Difference:
    """An arm less the baseline on the seeds of which both saw the same batches.

    `paired` carries Student's interval and p, `p_holm` that p corrected for the number of arms,
    `unpaired` Welch's interval of the same runs, `correlation` what pairing gained, and `examples`
    the bootstrap over seeds and examples. All are None where there are too few seeds for them.
    """

    arm: str
    seeds: tuple[int, ...]
    mean: float
    paired: Interval | None
    unpaired: Interval | None
    correlation: float | None
    examples: Interval | None = None
    p_holm: float | None = None

    def verdict(self, metric: str) -> str:
        if self.paired is None:
            return "too few seeds"
        if self.p_holm >= LEVEL or self.mean == 0:
            return "not told apart"
        return "better" if (self.mean > 0) == higher_is_better(metric) else "worse"


@dataclass(frozen=True)
class Comparison:
    """Every arm beside the baseline, by one metric: at equal tokens and at equal time."""

    metric: str
    time_metric: str  # the same figure on validation, which is measured while a run goes
    baseline: str
    equal_tokens: list[Difference]
    equal_time: list[Difference]
    unpaired_seeds: dict[str, list[int]]  # complete, but trained or measured on other data


def compare(jobs: Sequence[Job], metric: str, baseline: str) -> Comparison:
    """The comparison of the complete final jobs; failed and missing ones pair with nothing."""
    complete = [
        job for job in jobs if job.phase == "final" and read(job.summary, metric) is not None
    ]
    arms = list(dict.fromkeys(job.arm.label for job in complete))
    by_seed = {arm: {j.seed: j for j in complete if j.arm.label == arm} for arm in arms}
    time_metric = f"validation.{metric.rpartition('.')[2]}"
    tokens, seconds, other = [], [], {}
    for arm in (arm for arm in arms if arm != baseline and baseline in by_seed):
        pairs, strangers = [], []
        for seed, job in sorted(by_seed[arm].items()):
            partner = by_seed[baseline].get(seed)
            if partner is None:
                continue
            same = _data_of(job, metric) == _data_of(partner, metric)
            (pairs if same else strangers).append((job, partner))
        if strangers:
            other[arm] = [job.seed for job, _ in strangers]
        if not pairs:
            continue
        values = [[read(job.summary, metric) for job in pair] for pair in pairs]
        tokens.append(_difference(arm, pairs, values, _examples(pairs, metric)))
        timed = [at_equal_time(*pair, time_metric) for pair in pairs]
        if None not in timed:
            seconds.append(_difference(arm, pairs, timed))
    return Comparison(metric, time_metric, baseline, _corrected(tokens), _corrected(seconds), other)


def _data_of(job: Job, metric: str) -> tuple[str, ...]:
    """Hashes of the batches that were learned, and of the splits that are compared."""
    digests = job.summary.get("digests", {})
    splits = (metric.rpartition(".")[0], "validation")
    return job.summary["batches_hash"], *(digests.get(split, "") for split in splits)


def _difference(
    arm: str,
    pairs: Sequence[tuple[Job, Job]],
    values: Sequence[Sequence[float]],
    examples: Interval | None = None,
) -> Difference:
    own_S, base_S = np.array(values, dtype=np.float64).T
    return Difference(
        arm,
        tuple(job.seed for job, _ in pairs),
        float((own_S - base_S).mean()),
        t_interval(own_S - base_S),
        welch_interval(own_S, base_S),
        correlation(own_S, base_S),
        examples,
    )


def _corrected(differences: Sequence[Difference]) -> list[Difference]:
    tested = [d for d in differences if d.paired is not None]
    corrected = dict(zip((d.arm for d in tested), holm([d.paired.p for d in tested]), strict=True))
    return [Difference(**{**vars(d), "p_holm": corrected.get(d.arm)}) for d in differences]


def _examples(pairs: Sequence[tuple[Job, Job]], metric: str) -> Interval | None:
    """The bootstrap over seeds and examples, where runs kept their scores on equal examples."""
    split, _, figure = metric.rpartition(".")
    places = [[job.folder / f"scores-{split}.npz" for job in pair] for pair in pairs]
    if figure not in EXAMPLES or not all(path.is_file() for pair in places for path in pair):
        return None
    sums_key, weights_key = EXAMPLES[figure]
    sums, weights = [], []
    for pair in places:
        own, base = (np.load(path) for path in pair)
        weights += [own[weights_key], base[weights_key]]
        if not all(np.array_equal(weights[0], other) for other in weights[1:]):
            return None
        sums.append(own[sums_key].astype(np.float64) - base[sums_key])
    if not weights[0].sum():
        return None
    return bootstrap_interval(
        np.stack(sums), weights[0], numpy_generator(0, "bootstrap", metric, pairs[0][0].arm.label)
    )


def at_equal_time(own: Job, other: Job, metric: str) -> tuple[float, float] | None:
    """A figure on validation of both at the training time in which the faster of the two ended.

    Between two evaluations it is interpolated; None where the slower was first evaluated later. The
    slower is read before its schedule ended, which favours the faster.
    """
    curves = [validation_curve(job.folder, metric.rpartition(".")[2]) for job in (own, other)]
    if not all(curves):
        return None
    budget = min(curve[-1][0] for curve in curves)
    if budget < max(curve[0][0] for curve in curves):
        return None
    own_value, other_value = (float(np.interp(budget, *zip(*c, strict=True))) for c in curves)
    return own_value, other_value


def validation_curve(folder: Path, figure: str) -> list[tuple[float, float]]:
    """(seconds of training alone, figure) at each evaluation of the validation split."""
    seconds, targets, curve = 0.0, 0, []
    for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "split" not in entry:
            # A line's own clock also counts reading, evaluating and saving.
            seconds += (entry["targets"] - targets) / entry["targets_per_second"]
            targets = entry["targets"]
        elif entry["split"] == "validation" and not entry.get("final") and figure in entry:
            curve.append((seconds, entry[figure]))
    return curve


def save(comparison: Comparison, path: Path) -> None:
    path.write_text(json.dumps(asdict(comparison), indent=1) + "\n", encoding="utf-8")


def table(comparison: Comparison, jobs: Sequence[Job]) -> str:
    """The metric of every arm with its difference to the baseline, cost, and secondary figures."""
    metric, baseline = comparison.metric, comparison.baseline
    final = [job for job in jobs if job.phase == "final"]
    arms = list(dict.fromkeys(job.arm.label for job in final))
    complete = {a: [j for j in final if j.arm.label == a and j.status == "complete"] for a in arms}
    width = max(12, *(len(arm) + 2 for arm in arms))
    want = "higher" if higher_is_better(metric) else "lower"
    lines = [
        f"{metric} ({want} is better), named in advance; differences to {baseline}",
        "",
        f"{'equal tokens':{width}}{'adds':>10}{'seeds':>6}{'mean':>9}{'sd':>9}{TESTED}",
    ]
    found = {d.arm: d for d in comparison.equal_tokens}
    for arm in arms:
        values = _values(complete[arm], metric)
        spread = f" {statistics.stdev(values):8.4f}" if len(values) > 1 else f"{'-':>9}"
        mean = f" {statistics.fmean(values):8.4f}" if values else f"{'-':>9}"
        adds = f"{complete[arm][0].summary['scheme_parameters']:,}" if complete[arm] else "-"
        tested = _tested(found.get(arm), metric)
        lines.append(f"{arm:{width}}{adds:>10}{len(values):>6}{mean}{spread}{tested}")
    if warning := saturation(complete, metric):
        lines.append(warning)
    lines += ["", f"{'equal time':{width}}{comparison.time_metric:34}{TESTED}"]
    lines += [
        f"{d.arm:{width}}{'':34}{_tested(d, comparison.time_metric)}" for d in comparison.equal_time
    ]
    if len(comparison.equal_time) < len(comparison.equal_tokens):
        lines.append("no figure at equal time where a run was evaluated too late: evaluation.every")
    if comparison.equal_time:
        lines.append("(the slower is read before its schedule ended, which favours the faster)")
    lines += [
        "",
        f"{'the same':{width}}{'unpaired 95 %':>24}{'r of pairs':>12}{'examples 95 %':>24}",
    ]
    for d in comparison.equal_tokens:
        r = "-" if d.correlation is None else f"{d.correlation:.2f}"
        lines.append(f"{d.arm:{width}}{_range(d.unpaired):>24}{r:>12}{_range(d.examples):>24}")
    lines += ["", *_costs(complete, width), *_secondary(complete, metric, width)]
    for arm, seeds in comparison.unpaired_seeds.items():
        lines.append(f"{arm}: seeds {seeds} had other data than {baseline} and are not compared")
    return "\n".join(line.rstrip() for line in lines)


def _range(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.low:+.4f} {interval.high:+.4f}"


TESTED = f"{'difference':>12}{'paired 95 %':>20}{'p (Holm)':>10}  verdict"


def _tested(difference: Difference | None, metric: str) -> str:
    if difference is None:
        return ""
    p = "-" if difference.p_holm is None else f"{difference.p_holm:.3f}"
    verdict = difference.verdict(metric)
    return f"{difference.mean:+12.4f}{_range(difference.paired):>20}{p:>10}  {verdict}"


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
        shown = [n for n in names if n != metric and any(read(s, n) is not None for s in every)]
        if not shown:
            continue
        title = f"secondary {figure.replace('_', ' ')}"
        left = max(width, len(title) + 1)
        heads = [f"{name.rpartition('.')[0]:>13}" for name in shown]
        lines += ["", f"{title:{left}}" + "".join(heads)]
        for arm, jobs in complete.items():
            found = [_values(jobs, name) for name in shown]
            cells = [f"{statistics.fmean(values):.4f}" if values else "-" for values in found]
            lines.append(f"{arm:{left}}" + "".join(f"{cell:>13}" for cell in cells))
    return lines


def _values(jobs: Sequence[Job], metric: str) -> list[float]:
    return [value for job in jobs if (value := read(job.summary, metric)) is not None]


def saturation(complete: dict[str, list[Job]], metric: str) -> str | None:
    """A line of warning where a share lies at the same end of its range for every arm."""
    found = [_values(jobs, metric) for jobs in complete.values()]
    means = [statistics.fmean(values) for values in found if values]
    if not higher_is_better(metric) or not means:
        return None
    if min(means) >= SATURATED:
        return f"{metric} is saturated: at least {SATURATED} for every arm; ask something harder"
    if max(means) <= 1 - SATURATED:
        return f"{metric} has not begun: at most {1 - SATURATED:.2f} for every arm; train longer"
    return None
