"""Which arm of a sweep is better, and how sure that is.

Shapes: S seeds, E examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from wherelm.ablation.intervals import (
    FEWEST,
    Error,
    Interval,
    bonferroni,
    correlation,
    crossed_interval,
    holm,
    simultaneous,
    t_interval,
    told_apart,
    variances,
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


@dataclass(frozen=True)
class Difference:
    """An arm less the baseline on the seeds of which both saw the same batches.

    `paired` carries Student's interval and p over seeds, never surer than the examples alone allow,
    `unpaired` Welch's of the same runs, `correlation` what pairing gained, and `examples` the
    interval over new seeds and new examples. All are None where there are too few seeds for them.
    Of the family of all arms: `p_holm`, `adjusted` the ends of intervals that hold together,
    whether the arm is told apart, and whether it is shown to be equal within the margin.
    """

    arm: str
    seeds: tuple[int, ...]
    mean: float
    paired: Interval | None
    unpaired: Interval | None
    correlation: float | None
    examples: Interval | None = None
    p_holm: float | None = None
    adjusted: tuple[float, float] | None = None
    told_apart: bool = False
    equal: bool = False

    def verdict(self, metric: str) -> str:
        """Where a margin was given, a difference within it is equality, however sure it is."""
        if len(self.seeds) < FEWEST:
            return "too few seeds"
        if self.equal:
            return "equal within margin"
        if not self.told_apart:
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
    failed_seeds: dict[str, list[int]]  # of every arm that has some: they pair with nothing
    margin: float | None = None


def compare(
    jobs: Sequence[Job],
    metric: str,
    baseline: str,
    margin: float | None = None,
    critical: Callable[[int], float] = bonferroni,
) -> Comparison:
    """The comparison of the complete final jobs; failed and missing ones pair with nothing.

    Differences below `margin` do not matter. `critical` is the level of one contrast of so many,
    at this look: `sequential.critical_now` where the sweep was looked at before.
    """
    if margin is not None and not margin > 0:
        raise ValueError(f"ablation.margin={margin:g}: expected more than 0")
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
    failed: dict[str, list[int]] = {}
    for job in jobs:
        if job.phase == "final" and job.status == "failed":
            failed.setdefault(job.arm.label, []).append(job.seed)
    families = (_corrected(family, margin, critical) for family in (tokens, seconds))
    return Comparison(metric, time_metric, baseline, *families, other, failed, margin)


def _data_of(job: Job, metric: str) -> tuple[str, ...]:
    """Hashes of the batches that were learned, and of the splits that are compared."""
    digests = job.summary.get("digests", {})
    splits = (metric.rpartition(".")[0], "validation")
    return job.summary["batches_hash"], *(digests.get(split, "") for split in splits)


def _difference(
    arm: str,
    pairs: Sequence[tuple[Job, Job]],
    values: Sequence[Sequence[float]],
    crossed: tuple[Error | None, Interval | None] = (None, None),
) -> Difference:
    own_S, base_S = np.array(values, dtype=np.float64).T
    error, examples = crossed
    return Difference(
        arm,
        tuple(job.seed for job, _ in pairs),
        float((own_S - base_S).mean()),
        t_interval(own_S - base_S, error),
        welch_interval(own_S, base_S, error),
        correlation(own_S, base_S),
        examples,
    )


def _corrected(
    differences: Sequence[Difference], margin: float | None, critical: Callable[[int], float]
) -> list[Difference]:
    """With what the others of the family make of each; one that is not tested counts in none."""
    tested = [d for d in differences if d.paired is not None]
    p_values = [d.paired.p for d in tested]
    family = zip(
        tested,
        holm(p_values),
        simultaneous([d.paired for d in tested], critical),
        told_apart(p_values, critical),
        strict=True,
    )
    corrected = {
        d.arm: replace(
            d,
            p_holm=p,
            adjusted=ends if math.isfinite(ends[0]) else None,  # no level is left at this look
            told_apart=apart,
            equal=margin is not None and d.paired.equal_p(margin) <= critical(len(tested)),
        )
        for d, p, ends, apart in family
    }
    return [corrected.get(d.arm, d) for d in differences]


def _examples(
    pairs: Sequence[tuple[Job, Job]], metric: str
) -> tuple[Error | None, Interval | None]:
    """The error that examples alone bring, and the interval over seeds and examples.

    None where runs did not keep their scores on equal examples, or there are too few.
    """
    found = example_differences(pairs, metric)
    if found is None or min(found[0].shape) < FEWEST:
        return None, None
    sums_SE, weights_E = found
    # A reply is right or wrong: counts differ by one at least, nats by anything.
    unit = float(np.issubdtype(sums_SE.dtype, np.integer))
    alone = math.sqrt(variances(sums_SE, weights_E, unit).examples)
    error = Error(alone, len(weights_E) - 1)
    return error, crossed_interval(sums_SE, weights_E)


def example_differences(
    pairs: Sequence[tuple[Job, Job]], metric: str
) -> tuple[np.ndarray, np.ndarray] | None:
    """An arm's sums less the baseline's, (S, E), and their weights, (E,): of examples with any.

    None where runs did not keep their scores, or kept those of other examples.
    """
    split, _, figure = metric.rpartition(".")
    if figure not in EXAMPLES:
        return None
    scores = [[read_scores(job.folder, split) for job in pair] for pair in pairs]
    if any(found is None for pair in scores for found in pair):
        return None
    sums_key, weights_key = EXAMPLES[figure]
    weights_E = scores[0][0][weights_key]
    if any(not np.array_equal(weights_E, found[weights_key]) for pair in scores for found in pair):
        return None
    kept = weights_E > 0
    kind = np.int64 if np.issubdtype(scores[0][0][sums_key].dtype, np.integer) else np.float64
    sums_SE = np.stack(
        [own[sums_key].astype(kind) - base[sums_key].astype(kind) for own, base in scores]
    )
    return sums_SE[:, kept], weights_E[kept]


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
