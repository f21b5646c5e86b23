"""How many seeds a question needs, and how to look at the answer before all of them are there.

Everything is a function of p values and numbers of seeds. p values come from t tests with the
degrees of freedom of the seeds seen so far, and bounds are levels that p is compared with: with few
seeds this keeps the error where bounds on t itself would not (Jennison, Turnbull, 2000, "Group
Sequential Methods", section 4.4).

Shapes: K looks, A arms, S seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from wherelm.ablation.inference.intervals import LEVEL, told_apart

POWER = 0.8  # the chance that a plan gives to a difference to be found
PILOT_CONFIDENCE = 0.8  # that the spread is not larger than a plan takes it for
FIRST_SHARE = 0.8  # of the level, for the first look at a sweep that announced no other
HOPELESS = 0.05  # a chance to be told apart below which further seeds are not worth it
MOST_SEEDS = 100_000
NODES = 128  # of a quadrature


# How the level is spent over looks.


def obrien_fleming(level: float, fractions_K: Sequence[float]) -> np.ndarray:
    """The level spent by each look at these fractions of all seeds: hardly any of it early.

    On either side half of it, as 2 - 2 Φ(z / √t) with z = Φ⁻¹(1 - level / 4) (Lan, DeMets, 1983).
    """
    from scipy.special import ndtr, ndtri

    fractions_K = np.minimum(np.asarray(fractions_K, dtype=np.float64), 1.0)
    return 4 * ndtr(ndtri(level / 4) / np.sqrt(fractions_K))


def quadratic(level: float, fractions_K: Sequence[float]) -> np.ndarray:
    """The level spent with the square of the seeds: arms stop earlier (Kim, DeMets, 1987, ρ = 2).

    Student's t with four degrees of freedom never crosses O'Brien and Fleming's first bound.
    """
    return level * np.minimum(np.asarray(fractions_K, dtype=np.float64), 1.0) ** 2


def unannounced(level: float, looks: int) -> np.ndarray:
    """The level spent by each of so many looks, where nobody said before how many there would be.

    The first look spends 0.8 of it, every later one half of what is left, so that it never runs
    out, and a sweep that is looked at once loses next to nothing.
    """
    return level * (1 - (1 - FIRST_SHARE) * 0.5 ** np.arange(looks))


def look_levels(spent_K: Sequence[float], seeds_K: Sequence[int]) -> np.ndarray:
    """What p must not exceed at each look, so that the chance of ever doing so is what was spent.

    The sums behind the looks share their first seeds: a Brownian motion seen at the times
    `seeds_K`, whose density between the bounds is carried from look to look (Armitage, McPherson,
    Rowe, 1969). A look that spends nothing has the level 0.
    """
    from scipy.special import ndtr

    times_K = np.asarray(seeds_K, dtype=np.float64)
    if np.any(np.diff(times_K, prepend=0.0) <= 0):
        raise ValueError(f"looks at {list(seeds_K)} seeds: expected more seeds at every look")
    nodes, weights = _quadrature()
    levels, at, mass = [], np.zeros(1), np.ones(1)  # all of it at 0 before the first look
    former = 0.0
    for spent, time, step in zip(spent_K, times_K, np.diff(times_K, prepend=0.0), strict=True):
        increment, deviation = spent - former, math.sqrt(step)
        former = max(former, spent)
        low, high = 0.0, 40.0  # the bound, in standard deviations of the whole
        for _ in range(60 if increment > 0 else 0):
            middle = (low + high) / 2
            bound = middle * math.sqrt(time)
            beyond = mass @ (ndtr((at - bound) / deviation) + ndtr((-at - bound) / deviation))
            low, high = (middle, high) if beyond > increment else (low, middle)
        levels.append(float(2 * ndtr(-high)) if increment > 0 else 0.0)
        bound = min(high, 9.0) * math.sqrt(time)
        now = bound * nodes
        kernel = np.exp(-(((now[:, None] - at) / deviation) ** 2) / 2)
        kernel /= deviation * math.sqrt(2 * math.pi)
        at, mass = now, bound * weights * (kernel @ mass)
    return np.array(levels)


@cache
def _quadrature() -> tuple[np.ndarray, np.ndarray]:
    """Gauss and Legendre's nodes in (-1, 1), and their weights."""
    return np.polynomial.legendre.leggauss(NODES)


def critical_now(
    seeds_K: Sequence[int], planned: int | None = None, level: float = LEVEL
) -> Callable[[int], float]:
    """The level of one of so many undecided contrasts, at the last of these looks.

    `seeds_K` are the seeds of every look at a sweep so far. Where `planned` seeds were announced
    before the first one, O'Brien and Fleming's spending keeps nearly all of the level for the end;
    else `unannounced`.
    """

    def critical(family: int) -> float:
        own = level / family
        if planned is None:
            spent_K = unannounced(own, len(seeds_K))
        else:
            spent_K = obrien_fleming(own, np.asarray(seeds_K) / planned)
        return float(look_levels(spent_K, seeds_K)[-1])

    return critical


@dataclass(frozen=True)
class Looks:
    """The numbers of seeds at which a sweep is looked at, the last one at all of them.

    After every seed is cheapest: ablation.seeds=5-20 is tuple(range(5, 21)).

    An arm is done when it is told apart from the baseline (efficacy), or when it has less than a
    chance of HOPELESS of ever being (futility). Futility gives up power, never level: it may
    be overruled.
    """

    seeds: tuple[int, ...]
    contrasts: int
    level: float = LEVEL

    def critical(self, look: int, family: int) -> float:
        """What p must not exceed at a look (from 0), `family` contrasts being undecided."""
        return _criticals(self.seeds, self.level / family)[look]

    def decide(
        self, look: int, p_values: Mapping[str, float], different: Collection[str] = ()
    ) -> tuple[list[str], list[str]]:
        """The arms that a look tells apart from the baseline, and those not worth going on with.

        `p_values` of the arms that still run, not corrected; `different` were told apart before.
        Holm's steps, each with the bounds of its own level (Maurer, Bretz, 2013).
        """
        family = self.contrasts - len(different)
        apart = told_apart(list(p_values.values()), partial(self.critical, look), family)
        found = [arm for arm, is_apart in zip(p_values, apart, strict=True) if is_apart]
        family -= len(found)
        others = [arm for arm in p_values if arm not in found]
        return found, [arm for arm in others if self.chance(look, p_values[arm], family) < HOPELESS]

    def chance(self, look: int, p: float, family: int) -> float:
        """The chance of being told apart in the end if the difference is what it looks like now.

        Conditional power under the current trend (Lan, Simon, Halperin, 1982).
        """
        from scipy.special import ndtr, ndtri

        fraction = self.seeds[look] / self.seeds[-1]
        if fraction == 1:
            return 0.0
        z, last = -ndtri(p / 2), -ndtri(self.critical(len(self.seeds) - 1, family) / 2)
        return float(ndtr((z / math.sqrt(fraction) - last) / math.sqrt(1 - fraction)))


@cache
def _criticals(seeds_K: tuple[int, ...], level: float) -> tuple[float, ...]:
    fractions = np.array(seeds_K) / seeds_K[-1]
    return tuple(look_levels(quadratic(level, fractions), seeds_K).tolist())


# How many seeds find what.


@dataclass(frozen=True)
class Spread:
    """The standard deviation of a difference between two arms of one seed, as a pilot shows it.

    `upper` is not exceeded with a confidence of PILOT_CONFIDENCE, which is what a plan should build
    on. From one seed (`arms_in_it`) the arms' own differences are in it, and it can be far too
    large: never too small by more than chance.
    """

    estimate: float
    upper: float
    freedom: int
    arms_in_it: bool


def pilot_spread(figures_AS: np.ndarray) -> Spread | None:
    """The spread that a pilot shows: a figure of every arm and seed, (A, S); None below two arms.

    With two seeds or more what is left of the table when arms and seeds are taken out, with one the
    spread of its arms; a difference has √2 of either. The limit by χ².
    """
    from scipy.special import chdtri

    figures_AS = np.asarray(figures_AS, dtype=np.float64)
    arms, seeds = figures_AS.shape
    if arms < 2 or seeds < 1:
        return None
    rest_AS = figures_AS - figures_AS.mean(0)
    freedom = arms - 1
    if seeds > 1:
        rest_AS = rest_AS - rest_AS.mean(1, keepdims=True)
        freedom *= seeds - 1
    estimate = math.sqrt(2 * float(np.square(rest_AS).sum()) / freedom)
    upper = estimate * math.sqrt(freedom / float(chdtri(freedom, PILOT_CONFIDENCE)))
    return Spread(estimate, upper, freedom, seeds == 1)


def power(difference: float, spread: float, seeds: int, level: float) -> float:
    """The chance that a paired t test over so many seeds finds a difference, two-sided.

    `spread` is the standard deviation of single differences. The noncentral t, as the mean of a
    normal's tails over the spreads that the test may see; scipy's own has no value far out.
    """
    from scipy.special import chdtri, ndtr, stdtrit

    nodes, weights = _quadrature()
    seen = np.sqrt(chdtri(seeds - 1, (1 + nodes) / 2) / (seeds - 1))  # of spreads, in the true one
    t = -float(stdtrit(seeds - 1, level / 2))
    away = abs(difference) / spread * math.sqrt(seeds)
    return float(weights @ (ndtr(away - t * seen) + ndtr(-away - t * seen))) / 2


def detectable(spread: float, seeds: int, level: float, wanted: float = POWER) -> float:
    """The difference that so many seeds (two or more) find with the wanted power."""
    low, high = 0.0, spread
    while power(high, spread, seeds, level) < wanted:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        enough = power(middle, spread, seeds, level) >= wanted
        low, high = (low, middle) if enough else (middle, high)
    return high


def seeds_needed(spread: float, difference: float, level: float, wanted: float = POWER) -> int:
    """The fewest seeds that find this difference with the wanted power; at most MOST_SEEDS."""
    low, high = 1, 2
    while high < MOST_SEEDS and power(difference, spread, high, level) < wanted:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        enough = power(difference, spread, middle, level) >= wanted
        low, high = (low, middle) if enough else (middle, high)
    return min(high, MOST_SEEDS)


def forecast(spread: float, contrasts: int, seeds: int, difference: float | None = None) -> str:
    """What so many seeds find, and how many a difference needs (half of that by default)."""
    level = LEVEL / contrasts
    if seeds < 2:
        return "one seed finds no difference"
    found = detectable(spread, seeds, level)
    wanted = found / 2 if difference is None else abs(difference)
    return (
        f"at {seeds} seeds, differences of {found:.2g} are found with {POWER:.0%}; "
        f"for {wanted:.2g} you need {seeds_needed(spread, wanted, level)}"
    )
