"""How sure a difference is: t intervals, Holm's correction, the variance of seeds and examples.

Shapes: S seeds, E examples; `…` any axes before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LEVEL = 0.05
FEWEST = 3  # values below which no interval is given
FEWEST_DIFFERING = 10  # examples, below which their variance is unknown
FEWEST_PAIRS = 5  # below which no correlation is: that of three normal pairs is anything
ROUNDING = 1e-9  # of the largest value: a smaller spread is none


class Error(NamedTuple):
    """A standard error and its degrees of freedom."""

    size: float
    freedom: float


@dataclass(frozen=True)
class Interval:
    """An estimate, its 95 % interval, and the two-sided p of its being zero.

    Of several `errors` (over seeds, over examples) the one counts that is the least sure, at every
    level: what is told apart is so by each of them.
    """

    mean: float
    low: float
    high: float
    p: float
    errors: tuple[Error, ...]

    def at(self, level: float) -> tuple[float, float]:
        """The ends outside of which the truth lies with a chance of `level`."""
        reach = _reach(self.errors, level)
        return self.mean - reach, self.mean + reach

    def equal_p(self, margin: float) -> float:
        """p of a difference of `margin` or more, either way: two one-sided tests.

        Where it is small, equality within ±margin is shown (Schuirmann, 1987).
        """
        from scipy.special import stdtr

        beyond = abs(self.mean) - margin
        return max(float(stdtr(error.freedom, beyond / error.size)) for error in self.errors)


def student(mean: float, *errors: Error) -> Interval:
    """The interval of an estimate by Student's t."""
    mean, reach = float(mean), _reach(errors, LEVEL)
    p = max(float(two_sided(mean, *error)) for error in errors)
    return Interval(mean, mean - reach, mean + reach, p, errors)


def _reach(errors: Sequence[Error], level: float) -> float:
    # scipy.stats has Student's t too, and takes three times as long to import.
    from scipy.special import stdtrit

    if level <= 0:
        return math.inf
    return max(-error.size * float(stdtrit(error.freedom, level / 2)) for error in errors)


def two_sided(mean: np.ndarray, error: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """p of as large an estimate, either way, where the truth is zero."""
    from scipy.special import stdtr

    return 2 * stdtr(freedom, -np.abs(mean) / error)


def t_interval(values_S: Sequence[float], examples: Error | None = None) -> Interval | None:
    """The mean of normal values of unknown spread (Student, 1908); on differences the paired test.

    `examples` is the error that the examples alone bring: with few replies of a thousand in
    dispute, seeds agree by chance. None below three values, and without any spread where nothing is
    known of the examples: that is no certainty.
    """
    values = np.asarray(values_S, dtype=np.float64)
    if len(values) < FEWEST:
        return None
    error = Error(values.std(ddof=1) / math.sqrt(len(values)), len(values) - 1)
    return _least_sure(values.mean(), np.abs(values).max(), error, examples)


def welch_interval(
    values_S: Sequence[float], others_S: Sequence[float], examples: Error | None = None
) -> Interval | None:
    """The difference of two means without pairs or equal spreads (Welch, 1947).

    `examples` and None as in `t_interval`, three values on either side.
    """
    a, b = (np.asarray(values, dtype=np.float64) for values in (values_S, others_S))
    if min(len(a), len(b)) < FEWEST:
        return None
    parts = np.array([a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)])
    variance = float(parts.sum())
    freedom = len(a) + len(b) - 2.0
    if variance:
        freedom = variance**2 / float((parts**2 / [len(a) - 1, len(b) - 1]).sum())
    largest = max(np.abs(a).max(), np.abs(b).max())
    error = Error(math.sqrt(variance), freedom)
    return _least_sure(a.mean() - b.mean(), largest, error, examples)


def _least_sure(
    mean: float, largest: float, seeds: Error, examples: Error | None
) -> Interval | None:
    errors = []
    if seeds.size > ROUNDING * largest:
        errors.append(Error(float(seeds.size), float(seeds.freedom)))
    if examples is not None and examples.size > 0:
        errors.append(examples)
    return student(mean, *errors) if errors else None


@dataclass(frozen=True)
class Variances:
    """What the mean of crossed seeds and examples varies by, each (…).

    `seeds` is its variance over seeds, the examples being what they are; `examples` that over
    examples, the seeds being what they are. Both hold the scatter of single replies, `scatter`.
    """

    mean: np.ndarray
    seeds: np.ndarray
    examples: np.ndarray
    scatter: np.ndarray

    @property
    def both(self) -> np.ndarray:
        """Over new seeds and new examples, (…): the scatter is counted once.

        Not below a tenth of what the examples alone bring: seeds that agree by chance would make it
        certain, and a larger share the interval too wide where neither seeds nor examples differ.
        """
        return np.maximum(self.seeds + self.own, self.examples / 10)

    @property
    def own(self) -> np.ndarray:
        """Of the examples, beyond the scatter of replies."""
        return np.maximum(self.examples - self.scatter, 0.0)


def variances(sums_SE: np.ndarray, weights_E: np.ndarray, unit: float = 0.0) -> Variances:
    """The variances of Σ sums / (S Σ weights), a quotient, where every seed meets every example.

    sums (…, S, E) and weights (E,), of which none may be zero. By the mean squares of the two-way
    table without repeats (Owen, Eckles, 2012, "Bootstrapping data arrays of arbitrary order", for
    what the two add up to), residuals of a quotient in the place of deviations. `unit` is
    the least by which one example can differ (one reply; 0 for nats): as if one more example had
    differed by it in all seeds, so that no reply in dispute is not taken for no doubt.
    """
    *_, seeds, examples = sums_SE.shape
    whole = float(weights_E.sum())
    of_seed_S = sums_SE.sum(-1) / whole
    of_example_E = sums_SE.mean(-2)
    mean = of_seed_S.mean(-1)
    from_mean_E = of_example_E - mean[..., None] * weights_E
    rest_SE = sums_SE - of_seed_S[..., None] * weights_E - from_mean_E[..., None, :]
    correction = examples / (examples - 1) / whole**2
    return Variances(
        mean,
        of_seed_S.var(-1, ddof=1) / seeds,
        correction * (np.square(from_mean_E).sum(-1) + unit**2),
        correction * np.square(rest_SE).sum((-2, -1)) / (seeds * (seeds - 1)),
    )


def freedom_of_both(found: Variances, seeds: int, examples: int) -> np.ndarray:
    """Degrees of freedom of `Variances.both`, (…).

    The mean of the two parts' own, harmonic and weighted by what each brings. Satterthwaite's
    (1946) weighs by squares, which is too sure with two or four degrees of freedom: where the seeds
    happen to agree, it trusts in the examples.
    """
    parts = found.seeds / (seeds - 1) + found.own / (examples - 1)
    total = found.seeds + found.own
    most = float((seeds - 1) * (examples - 1))
    return np.minimum(total / np.maximum(parts, np.maximum(total, 1e-300) / most), most)


def crossed_interval(sums_SE: np.ndarray, weights_E: np.ndarray) -> Interval | None:
    """The quotient of sums and weights over new seeds and new examples.

    With the difference of two schemes' sums it says how far the difference hangs on these very
    examples. None below three seeds, and where fewer than ten examples differ at all.
    """
    if len(sums_SE) < FEWEST or differing(sums_SE) < FEWEST_DIFFERING:
        return None
    found = variances(sums_SE, weights_E)
    freedom = freedom_of_both(found, *sums_SE.shape)
    return student(found.mean, Error(math.sqrt(found.both), float(freedom)))


def differing(sums_SE: np.ndarray) -> np.ndarray:
    """How many examples differ with any seed, (…)."""
    return (sums_SE != 0).any(-2).sum(-1)


def correlation(values_S: Sequence[float], others_S: Sequence[float]) -> float | None:
    """Pearson's correlation of pairs: what pairing gains. None below five, or without spread."""
    a, b = (np.asarray(values, dtype=np.float64) for values in (values_S, others_S))
    if len(a) < FEWEST_PAIRS or a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for their number, in their order (Holm, 1979).

    Whoever calls those below 0.05 different errs anywhere in the family at most once in twenty.
    """
    order = np.argsort(p_values, kind="stable")
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * float(p_values[index])))
        corrected[index] = highest
    return corrected


def bonferroni(family: int) -> float:
    """The level of each of so many contrasts, with which any of them errs at most at LEVEL."""
    return LEVEL / family


def told_apart(
    p_values: Sequence[float],
    critical: Callable[[int], float] = bonferroni,
    family: int | None = None,
) -> list[bool]:
    """Which p are small enough in Holm's steps, in their order.

    `critical` gives the level of one contrast where so many are undecided; `family` is how many
    are at first, where that is more than there are p.
    """
    family = len(p_values) if family is None else family
    found = [False] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[index] > critical(family - rank):
            break
        found[index] = True
    return found


def simultaneous(
    intervals: Sequence[Interval], critical: Callable[[int], float] = bonferroni
) -> list[tuple[float, float]]:
    """Ends of intervals that all hold together, each beside zero exactly where Holm's step is.

    All at the level of the whole family. Where Holm's later, wider steps tell one apart that this
    does not, it ends at zero.
    """
    found = []
    decided = told_apart([interval.p for interval in intervals], critical)
    for interval, apart in zip(intervals, decided, strict=True):
        low, high = interval.at(critical(len(intervals)))
        if apart:
            low, high = (max(low, 0.0), high) if interval.mean > 0 else (low, min(high, 0.0))
        found.append((low, high))
    return found
