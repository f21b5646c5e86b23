"""Sweeps whose truth is known: the draws behind `believable`.

Shapes: R sweeps, A arms (the baseline first), S seeds, E examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from wherelm.ablation.inference.effects import Curve
from wherelm.ablation.inference.intervals import LEVEL, two_sided
from wherelm.ablation.inference.sequential import Looks

ARMS, EXAMPLES = 10, 1000
MOST = 24  # seeds of a fixed design, in the search for one of equal power
CHUNK = 2_000_000  # values at a time
# Standard deviations of a difference: of seeds, of examples, of single replies.
PARTS = {
    "seeds differ": (1.0, 0.0, 1.0),
    "examples differ": (0.0, 2.0, 1.0),
    "both differ": (0.1, 2.0, 1.0),
    "seeds differ more": (0.3, 2.0, 1.0),
    "neither: single replies": (0.0, 0.0, 1.0),
}
# True differences of the arms, in standard deviations of a single difference.
TRUTHS = {
    "nine arms, none differs": (0.0,) * 9,
    "nine arms, three differ by 1": (0.0,) * 6 + (1.0,) * 3,
    "nine arms, differences from 0 to 2": (0.0, 0.0, 0.0, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0),
    "three arms, one differs by 1": (0.0, 0.0, 1.0),
    "nine arms, all differ by 1": (1.0,) * 9,
}


@dataclass(frozen=True)
class Simulation:
    sweeps: int
    seed: int = 0

    def generator(self, *number: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *number])

    def chunks(self, values: int) -> Iterator[int]:
        """Numbers of sweeps that add up to all of them, so many values each."""
        left, most = self.sweeps, max(1, CHUNK // values)
        while left:
            yield min(left, most)
            left -= min(left, most)


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def replies(
    generator: np.random.Generator, sweeps: int, seeds: int, accuracy: float, spread: float
) -> np.ndarray:
    """Which are right, (R, A, S, E): examples are as hard for every arm, and no arm is better.

    A reply is right where hardness, luck of the run and luck of the reply stay below a bound; the
    hardness of an example and the luck of a reply vary alike, that of a run by `spread` of them.
    """
    from scipy.special import ndtri

    hardness = generator.standard_normal((sweeps, 1, 1, EXAMPLES), dtype=np.float32)
    run = generator.standard_normal((sweeps, ARMS, seeds, 1), dtype=np.float32) * spread
    reply = generator.standard_normal((sweeps, ARMS, seeds, EXAMPLES), dtype=np.float32)
    bound = np.float32(ndtri(accuracy) * np.sqrt(2 + spread**2))
    reply += hardness
    reply += run.astype(np.float32)
    return reply < bound


def differences(
    generator: np.random.Generator, sweeps: int, seeds: int, parts: Sequence[float]
) -> np.ndarray:
    of_seeds, of_examples, of_replies = parts
    examples = EXAMPLES // 2
    result = generator.standard_normal((sweeps, seeds, examples)) * of_replies
    result += generator.standard_normal((sweeps, seeds, 1)) * of_seeds
    result += generator.standard_normal((sweeps, 1, examples)) * of_examples
    return result


def counted(generator: np.random.Generator, sweeps: int, seeds: int, accuracy: float) -> np.ndarray:
    """Differences in replies that are right, whose arms find different examples hard."""
    from scipy.special import ndtri

    shape, bound = (sweeps, 2, seeds, EXAMPLES // 2), ndtri(accuracy) * np.sqrt(2)
    hard = generator.standard_normal((sweeps, 2, 1, EXAMPLES // 2))
    right = (hard + generator.standard_normal(shape) < bound).astype(np.int8)
    return right[:, 1] - right[:, 0]


def paired_p(
    generator: np.random.Generator, truth: Sequence[float], sweeps: int, most: int
) -> Callable[[int], np.ndarray]:
    """p of the paired test after each number of seeds, as a function: (R, A - 1).

    A difference of one seed has the standard deviation 1; all share the baseline.
    """
    figures = generator.standard_normal((sweeps, len(truth) + 1, most))
    of_seed = (figures[:, 1:] - figures[:, :1]) / np.sqrt(2) + np.array(truth)[:, None]

    def p_after(seeds: int) -> np.ndarray:
        seen = of_seed[..., :seeds]
        return two_sided(seen.mean(-1), seen.std(-1, ddof=1) / np.sqrt(seeds), seeds - 1)

    return p_after


def holm_share(p: np.ndarray, differ: np.ndarray) -> float:
    """How many of the arms that differ Holm's steps tell apart, (R, A - 1) → a share."""
    order = np.argsort(p, axis=1)
    bounds = LEVEL / np.arange(p.shape[1], 0, -1)
    steps = np.logical_and.accumulate(np.take_along_axis(p, order, 1) <= bounds, axis=1)
    return float(steps[differ[order]].sum() / (differ.sum() * len(p)))


def equal_power(p_after: Callable[[int], np.ndarray], differ: np.ndarray, wanted: float) -> float:
    """Seeds of a fixed design that tells as many apart, between whole numbers on a line."""
    former = 0.0
    for seeds in range(2, MOST + 1):
        share = holm_share(p_after(seeds), differ)
        if share >= wanted:
            return seeds - 1 + (wanted - former) / (share - former)
        former = share
    return float("nan")


def stopped_sweeps(
    p_after: Callable[[int], np.ndarray], looks_K: tuple[int, ...], sweeps: int, contrasts: int
) -> tuple[np.ndarray, int]:
    """Which arms are told apart by sweeps that stop those decided, (R, A - 1), and all their jobs.

    The baseline runs as long as any arm does.
    """
    p_K = [p_after(seeds) for seeds in looks_K]
    looks = Looks(looks_K, contrasts)
    jobs, called = 0, np.zeros((sweeps, contrasts), dtype=bool)
    for sweep in range(sweeps):
        running, apart = list(range(contrasts)), []
        for look, seeds in enumerate(looks_K):
            jobs += (len(running) + 1) * (seeds - (looks_K[look - 1] if look else 0))
            p_values = {arm: float(p_K[look][sweep, arm]) for arm in running}
            found, hopeless = looks.decide(look, p_values, apart)
            apart += found
            running = [arm for arm in running if arm not in {*found, *hopeless}]
            if not running:
                break
        called[sweep, apart] = True
    return called, jobs


def curves(
    generator: np.random.Generator, targets_N: np.ndarray, seeds: int, worth: float
) -> list[list[Curve]]:
    """Curves of the arm and of the baseline, one a seed: the arm's targets count 1 + worth times.

    They fall as the square root of training; a run's luck moves all of its curve, that of an
    evaluation one point.
    """
    counted_AN = np.array([1 + worth, 1.0])[:, None] * targets_N
    values = 1 + 0.5 * counted_AN[:, None] ** -0.5
    values = values + generator.normal(0, 0.004, (2, seeds, 1))
    values = values + generator.normal(0, 0.001, (2, seeds, len(targets_N)))
    return [[list(zip(targets_N, one, strict=True)) for one in arm] for arm in values]
