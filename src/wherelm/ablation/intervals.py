"""How sure a difference is: t intervals, Holm's correction, the bootstrap over seeds and examples.

Shapes: S seeds, E examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
FEWEST = 3  # values below which no interval is given
RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """An estimate, its 95 % interval, and the two-sided p value of its being zero (None: no test).

    An interval whose values do not vary at all has no width, and p is then 0 or 1.
    """

    mean: float
    low: float
    high: float
    p: float | None = None


def t_interval(values_S: Sequence[float]) -> Interval | None:
    """The mean of normal values of unknown spread (Student, 1908); None below three values.

    On differences of pairs this is the paired t test.
    """
    values = np.asarray(values_S, dtype=np.float64)
    if len(values) < FEWEST:
        return None
    return _student(values.mean(), values.std(ddof=1) / math.sqrt(len(values)), len(values) - 1)


def welch_interval(values_S: Sequence[float], others_S: Sequence[float]) -> Interval | None:
    """The difference of two means without pairs or equal spreads (Welch, 1947).

    None below three values on either side.
    """
    a, b = (np.asarray(values, dtype=np.float64) for values in (values_S, others_S))
    if min(len(a), len(b)) < FEWEST:
        return None
    parts = np.array([a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)])
    variance = float(parts.sum())
    freedom = len(a) + len(b) - 2.0
    if variance:
        freedom = variance**2 / float((parts**2 / [len(a) - 1, len(b) - 1]).sum())
    return _student(a.mean() - b.mean(), math.sqrt(variance), freedom)


def _student(mean: float, error: float, freedom: float) -> Interval:
    # scipy.stats has both too, and takes three times as long to import.
    from scipy.special import stdtr, stdtrit

    mean = float(mean)
    if error == 0:
        return Interval(mean, mean, mean, float(mean == 0))
    reach = error * float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
    p = 2 * float(stdtr(freedom, -abs(mean) / error))
    return Interval(mean, mean - reach, mean + reach, p)


def correlation(values_S: Sequence[float], others_S: Sequence[float]) -> float | None:
    """Pearson's correlation of pairs: what pairing gains. None below three, or without spread."""
    a, b = (np.asarray(values, dtype=np.float64) for values in (values_S, others_S))
    if len(a) < FEWEST or a.std() == 0 or b.std() == 0:
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


def bootstrap_interval(
    sums_SE: np.ndarray, weights_E: np.ndarray, generator: np.random.Generator
) -> Interval | None:
    """The quotient of sums and weights when seeds and examples are both drawn anew; None below 3.

    Every seed meets every example, so both are resampled, each with replacement: the pigeonhole
    bootstrap (Owen, 2007, "The pigeonhole bootstrap"), percentiles of 2,000 draws. With the
    difference of two schemes' sums it says how far the difference hangs on these very examples.
    """
    seeds, examples = sums_SE.shape
    if min(seeds, examples) < FEWEST:
        return None
    draws = np.empty(RESAMPLES)
    for draw in range(RESAMPLES):
        seeds_S = np.bincount(generator.integers(seeds, size=seeds), minlength=seeds)
        examples_E = np.bincount(generator.integers(examples, size=examples), minlength=examples)
        weight = seeds * float(weights_E @ examples_E)
        draws[draw] = float(seeds_S @ (sums_SE @ examples_E)) / weight if weight else math.nan
    low, high = np.nanquantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    mean = float(sums_SE.sum()) / (seeds * float(weights_E.sum()))
    return Interval(mean, float(low), float(high))
