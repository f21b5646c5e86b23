"""What a difference is worth, and where it lies: in training, and in single examples.

Shapes: S seeds, E examples, N points of a curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wherelm.ablation.inference.intervals import t_interval

PERMUTATIONS = 10_000

Curve = Sequence[tuple[float, float]]  # (targets learned, figure on validation), in this order


@dataclass(frozen=True)
class Speedup:
    """How much more training the arm is worth: 0.12 is 12 % more targets, negative is less.

    `low` and `high` are the 95 % interval over seeds, None below three. `censored` seeds, in which
    the better one was ahead from its first evaluation, are in none of it: it is worth more there
    than can be read.
    """

    worth: float
    low: float | None
    high: float | None
    seeds: int
    censored: int

    def __str__(self) -> str:
        if self.low is None:
            return f"worth {self.worth:.0%} of training"
        return f"worth {self.worth:.0%} ({100 * self.low:.0f} to {100 * self.high:.0f}) of training"


def log_speedup(own_N: Curve, base_N: Curve, higher: bool = False) -> float | None:
    """log of how many times the training the arm is worth, in one seed.

    The better of the two passes the other's final figure at some number of targets; the quotient is
    that of all targets to it. Nothing is read beyond a curve's end, and since a figure in the
    middle has not seen its schedule end, the worth is rather too small. The best figure so far
    counts, interpolated in log targets; None where it was passed before the first evaluation.
    """
    sign = -1.0 if higher else 1.0
    curves = [np.array(curve, dtype=np.float64).T for curve in (own_N, base_N)]
    (own_targets, own), (base_targets, base) = ((t, sign * v) for t, v in curves)
    if own[-1] <= base[-1]:
        passed = _passed(own_targets, own, base[-1])
        return None if passed is None else math.log(base_targets[-1] / passed)
    passed = _passed(base_targets, base, own[-1])
    return None if passed is None else -math.log(own_targets[-1] / passed)


def _passed(targets_N: np.ndarray, values_N: np.ndarray, goal: float) -> float | None:
    """The targets after which the lowest value so far is `goal`; it is reached by the end."""
    best_N = np.minimum.accumulate(values_N)
    after = int(np.argmax(best_N <= goal))
    if after == 0:
        return None
    x, y = np.log(targets_N[after - 1 : after + 1]), best_N[after - 1 : after + 1]
    return float(np.exp(x[0] + (x[1] - x[0]) * (y[0] - goal) / (y[0] - y[1])))


def effective_speedup(
    own_SN: Sequence[Curve], base_SN: Sequence[Curve], higher: bool = False
) -> Speedup | None:
    """The worth over seeds, paired: Student's t on logs. None where no seed tells it."""
    logs = [log_speedup(own, base, higher) for own, base in zip(own_SN, base_SN, strict=True)]
    known = [log for log in logs if log is not None]
    if not known:
        return None
    interval = t_interval(known)
    ends = (None, None)
    if interval is not None:
        ends = (math.expm1(interval.low), math.expm1(interval.high))
    return Speedup(math.expm1(np.mean(known)), *ends, len(known), len(logs) - len(known))


@dataclass(frozen=True)
class Deciding:
    """The examples in which one arm beats the other with every seed.

    `by_chance` is how many there would be of them if no example were decided for either arm beyond
    the lead that each seed has over all, and `p` the chance of so many.
    """

    examples: tuple[int, ...]
    by_chance: float
    p: float


def deciding(
    better_SE: np.ndarray, generator: np.random.Generator
) -> tuple[Deciding, Deciding] | None:
    """The examples that the arm wins with every seed, and those it loses with every seed.

    `better_SE` is by how much the arm is better, 0 a tie. The null exchanges within each seed the
    signs of those examples that no seed ties in: an easy example, or one that nobody solves,
    tells nothing, and a seed that wins everywhere makes no example special. So many permutations
    need no table: how many of the examples that were won so far are won again is hypergeometric.
    None with fewer than two seeds.
    """
    seeds, examples = better_SE.shape
    if seeds < 2 or not examples:
        return None
    signs_SE = np.sign(better_SE)
    contended = np.flatnonzero((signs_SE != 0).all(0))
    found = []
    for sign in (1, -1):
        won_S = (signs_SE[:, contended] == sign).sum(1)
        every = np.flatnonzero((signs_SE == sign).all(0))
        counts = np.full(PERMUTATIONS, won_S[0])
        for won in won_S[1:]:
            counts = generator.hypergeometric(won, len(contended) - won, counts)
        p = (1 + int((counts >= len(every)).sum())) / (1 + PERMUTATIONS)
        found.append(Deciding(tuple(every.tolist()), float(counts.mean()), p))
    return found[0], found[1]
