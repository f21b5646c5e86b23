"""Which arm of a sweep is better, and how sure that is.

Shapes: S seeds, E examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from wherelm.ablation.inference.effects import Deciding, Speedup, deciding, effective_speedup
from wherelm.ablation.inference.intervals import (
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
from wherelm.ablation.plan import Arm, Job
from wherelm.run_folder import (
    EXAMPLES,
    LOWER,
    figure_of,
    higher_is_better,
    is_validation,
    metric_lines,
    read_scores,
    write_json,
)
from wherelm.seeds import numpy_generator


@dataclass(frozen=True)
class Difference:
    """An arm less its baseline on the seeds of which both saw the same batches.

    `paired` carries Student's interval and p over seeds, never surer than the examples alone allow,
    `unpaired` Welch's of the same runs, `correlation` what pairing gained, and `examples` the
    interval over new seeds and new examples. All are None where there are too few seeds for them.
    `other_data`: the two saw or were measured on other data, so that nothing pairs and the unpaired
    interval is the test. Of the family of all arms: `p_holm`, `adjusted` the ends of intervals that
    hold together, whether the arm is told apart, and whether it is equal within the margin.
    """

    arm: str
    baseline: str
    seeds: tuple[int, ...]
    mean: float
    paired: Interval | None
    unpaired: Interval | None
    correlation: float | None
    examples: Interval | None = None
    other_data: bool = False
    p_holm: float | None = None
    adjusted: tuple[float, float] | None = None
    told_apart: bool = False
    equal: bool = False

    @property
    def test(self) -> Interval | None:
        return self.unpaired if self.other_data else self.paired

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
    """Every arm beside its baseline, by one metric.

    `interactions` are how much an arm's difference at a level of the other factors exceeds that at
    their first level: a family of their own.
    """

    metric: str
    differences: list[Difference]
    interactions: list[Difference]
    unpaired_seeds: dict[str, list[int]]  # complete beside others that pair, on other data
    failed_seeds: dict[str, list[int]]  # of every arm that has some: they pair with nothing
    margin: float | None = None


def compare(
    jobs: Sequence[Job],
    metric: str,
    references: Mapping[str, str],
    margin: float | None = None,
    critical: Callable[[int], float] = bonferroni,
    decided: Collection[str] | None = None,
) -> Comparison:
    """The comparison of the complete final jobs; failed and missing ones pair with nothing.

    `references` names the baseline of each arm. Differences below `margin` do not matter.
    `critical` is the level of one contrast of so many, at this look: `sequential.critical_now`
    where the sweep was looked at before. Where a sequential design has `decided` which arms are
    told apart, its word counts.
    """
    complete = [
        job for job in jobs if job.phase == "final" and figure_of(job.summary, metric) is not None
    ]
    arms = {job.arm.label: job.arm for job in complete}
    by_seed = {arm: {j.seed: j for j in complete if j.arm.label == arm} for arm in arms}
    differences, other = [], {}
    for arm in (arm for arm in arms if references.get(arm) in by_seed):
        own, base = by_seed[arm], by_seed[references[arm]]
        both = [(own[seed], base[seed]) for seed in sorted(own.keys() & base.keys())]
        pairs = [pair for pair in both if same_data(*pair, metric)]
        if pairs and len(pairs) < len(both):
            other[arm] = [job.seed for job, partner in both if (job, partner) not in pairs]
        values = [[figure_of(j.summary, metric) for j in side.values()] for side in (own, base)]
        if pairs:
            differences.append(_difference(arm, references[arm], pairs, metric))
        elif both:
            differences.append(_of_other_data(arm, references[arm], tuple(sorted(own)), *values))
    failed: dict[str, list[int]] = {}
    for job in jobs:
        if job.phase == "final" and job.status == "failed":
            failed.setdefault(job.arm.label, []).append(job.seed)
    tested = _corrected(differences, margin, critical)
    if decided is not None:
        tested = [replace(d, told_apart=d.arm in decided) for d in tested]
    between = _corrected(_interactions(arms, by_seed, references, metric), None, critical)
    return Comparison(metric, tested, between, other, failed, margin)


def same_data(own: Job, other: Job, metric: str) -> bool:
    """Whether both learned the same batches (as far as each went, where time was made equal) and
    were measured on the same splits."""
    digests = [job.summary.get("digests", {}) for job in (own, other)]
    splits = ("train", metric.rpartition(".")[0], "validation")
    if any(digests[0].get(split) != digests[1].get(split) for split in splits):
        return False
    shortened = own.share != 1 or other.share != 1
    return shortened or own.summary["batches_hash"] == other.summary["batches_hash"]


def _difference(
    arm: str, baseline: str, pairs: Sequence[tuple[Job, Job]], metric: str
) -> Difference:
    values = [[figure_of(job.summary, metric) for job in pair] for pair in pairs]
    own_S, base_S = np.array(values, dtype=np.float64).T
    error, examples = _examples(pairs, metric)
    return Difference(
        arm,
        baseline,
        tuple(job.seed for job, _ in pairs),
        float((own_S - base_S).mean()),
        t_interval(own_S - base_S, error),
        welch_interval(own_S, base_S, error),
        correlation(own_S, base_S),
        examples,
    )


def _of_other_data(
    arm: str, baseline: str, seeds: tuple[int, ...], own_S: list[float], base_S: list[float]
) -> Difference:
    mean = float(np.mean(own_S) - np.mean(base_S))
    interval = welch_interval(own_S, base_S)
    return Difference(arm, baseline, seeds, mean, None, interval, None, other_data=True)


def _interactions(
    arms: Mapping[str, Arm],
    by_seed: Mapping[str, Mapping[int, Job]],
    references: Mapping[str, str],
    metric: str,
) -> list[Difference]:
    """(arm - baseline) at a level of the other factors, less the same at their first level."""
    first = {}
    for arm in (arm for arm in arms.values() if arm.levels and arm.label in references):
        first.setdefault(arm.levels[0], arm)
    result = []
    for label, arm in arms.items():
        base = first.get(arm.levels[0]) if arm.levels and label in references else None
        if base is None or base is arm or references[label] == references[base.label]:
            continue
        names = (label, references[label], base.label, references[base.label])
        if any(name not in by_seed for name in names):
            continue
        own = []
        seeds = sorted(set.intersection(*(set(by_seed[name]) for name in names)))
        for seed in seeds:
            a, b, c, d = (figure_of(by_seed[name][seed].summary, metric) for name in names)
            own.append((a - b) - (c - d))
        if own:
            interval = t_interval(own)
            mean = float(np.mean(own))
            result.append(Difference(label, base.label, tuple(seeds), mean, interval, None, None))
    return result


def _corrected(
    differences: Sequence[Difference], margin: float | None, critical: Callable[[int], float]
) -> list[Difference]:
    """With what the others of the family make of each; one that is not tested counts in none."""
    tested = [d for d in differences if d.test is not None]
    p_values = [d.test.p for d in tested]
    family = zip(
        tested,
        holm(p_values),
        simultaneous([d.test for d in tested], critical),
        told_apart(p_values, critical),
        strict=True,
    )
    corrected = {
        d.arm: replace(
            d,
            p_holm=p,
            adjusted=ends if math.isfinite(ends[0]) else None,  # no level is left at this look
            told_apart=apart,
            equal=margin is not None and d.test.equal_p(margin) <= critical(len(tested)),
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


def validation_curve(folder: Path, figure: str) -> list[tuple[float, float]]:
    """(targets learned, figure) at each evaluation of the validation split."""
    lines = [line for line in metric_lines(folder) if is_validation(line) and figure in line]
    return [(line["targets"], line[figure]) for line in lines]


def speedup(jobs: Sequence[Job], difference: Difference) -> Speedup | None:
    """What the arm is worth in training of its baseline, by loss on validation."""
    curves: dict[str, list] = {difference.arm: [], difference.baseline: []}
    for seed in difference.seeds if not difference.other_data else ():
        for label, own in curves.items():
            own += [
                validation_curve(job.folder, LOWER[0])
                for job in jobs
                if (job.phase, job.arm.label, job.seed) == ("final", label, seed)
            ]
    own, base = curves.values()
    if not own or not all(len(curve) > 1 for curve in (*own, *base)):
        return None
    return effective_speedup(own, base)


def deciding_messages(
    jobs: Sequence[Job], difference: Difference, metric: str
) -> tuple[Deciding, Deciding] | None:
    """The examples that the arm wins with every seed, and those that it loses with every seed."""
    by = {(j.arm.label, j.seed): j for j in jobs if j.phase == "final"}
    if difference.other_data:
        return None
    pairs = [(by[difference.arm, s], by[difference.baseline, s]) for s in difference.seeds]
    found = example_differences(pairs, metric)
    if found is None:
        return None
    sign = 1 if higher_is_better(metric) else -1
    return deciding(sign * found[0], numpy_generator(0, "deciding", difference.arm))


def save(comparisons: Sequence[Comparison], path: Path) -> None:
    """A list with a comparison for each task."""
    write_json(path, [asdict(comparison) for comparison in comparisons])
