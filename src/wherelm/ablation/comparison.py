"""Which arm of a sweep is better, and how sure that is.

Shapes: S seeds, E examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from wherelm.ablation.intervals import (
    Interval,
    bootstrap_interval,
    correlation,
    holm,
    t_interval,
    welch_interval,
)
from wherelm.ablation.plan import Job
from wherelm.run_folder import (
    EXAMPLES,
    figure_of,
    higher_is_better,
    is_training,
    is_validation,
    metric_lines,
    read_scores,
    write_json,
)
from wherelm.seeds import numpy_generator

LEVEL = 0.05


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
        job for job in jobs if job.phase == "final" and figure_of(job.summary, metric) is not None
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
        values = [[figure_of(job.summary, metric) for job in pair] for pair in pairs]
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
    scores = [[read_scores(job.folder, split) for job in pair] for pair in pairs]
    if figure not in EXAMPLES or any(found is None for pair in scores for found in pair):
        return None
    sums_key, weights_key = EXAMPLES[figure]
    weights = [found[weights_key] for pair in scores for found in pair]
    if not all(np.array_equal(weights[0], other) for other in weights[1:]):
        return None
    sums = [own[sums_key].astype(np.float64) - base[sums_key] for own, base in scores]
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
    for line in metric_lines(folder):
        if is_training(line):
            # A line's own clock also counts reading, evaluating and saving.
            seconds += (line["targets"] - targets) / line["targets_per_second"]
            targets = line["targets"]
        elif is_validation(line) and figure in line:
            curve.append((seconds, line[figure]))
    return curve


def save(comparison: Comparison, path: Path) -> None:
    write_json(path, asdict(comparison))
