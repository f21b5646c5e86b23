import math

import numpy as np
import pytest

from wherelm.ablation.inference.effects import deciding, effective_speedup, log_speedup

TARGETS = [100, 200, 300, 450, 700, 1000]


def curve(factor=1.0, luck=0.0):
    """Falls with the log of targets, each of which counts `factor` times."""
    return [(t, 5 - math.log(factor * t) + luck) for t in TARGETS]


@pytest.mark.parametrize("factor", [1.0, 1.12, 2.3])
def test_an_arm_is_worth_the_training_that_it_saves(factor):
    """In a curve that is straight in log targets the interpolation is exact."""
    assert log_speedup(curve(factor), curve()) == pytest.approx(math.log(factor))
    assert log_speedup(curve(), curve(factor)) == pytest.approx(-math.log(factor))
    rising = [[(t, -v) for t, v in one] for one in (curve(factor), curve())]
    assert log_speedup(*rising, higher=True) == pytest.approx(math.log(factor))


def test_a_figure_that_gets_worse_for_a_while_is_passed_when_it_was_first_reached():
    own = [(100, 3.0), (200, 1.0), (400, 2.0), (800, 0.5)]
    assert log_speedup(own, [(100, 4.0), (800, 1.0)]) == pytest.approx(math.log(4))


def test_the_worth_has_an_interval_over_seeds_and_says_what_it_cannot_read():
    base = [curve(luck=luck) for luck in (0.0, 0.1, -0.1, 0.0)]
    own = [curve(1.1), curve(1.2, 0.1), curve(1.15, -0.1), curve(50.0)]
    found = effective_speedup(own, base)
    logs = np.log([1.1, 1.2, 1.15])
    assert (found.seeds, found.censored) == (3, 1)  # 50 times: ahead from the first evaluation
    assert found.worth == pytest.approx(math.expm1(logs.mean()))
    reach = 4.302652729696142 * logs.std(ddof=1) / math.sqrt(3)
    assert math.log1p(found.high) == pytest.approx(logs.mean() + reach)
    assert str(found) == "worth 15% (3 to 28) of training"
    few = effective_speedup(own[:2], base[:2])
    assert (few.low, few.high, str(few)) == (None, None, "worth 15% of training")
    assert effective_speedup(own[3:], base[3:]) is None


def test_examples_that_decide_are_found_beside_those_that_chance_decides():
    generator = np.random.default_rng(0)
    better_SE = generator.normal(size=(5, 600))
    better_SE[:, [3, 50, 599]] = 1.0
    better_SE[:, 200:230] = -1.0
    wins, losses = deciding(better_SE, generator)
    assert {3, 50, 599} <= set(wins.examples)
    assert set(range(200, 230)) <= set(losses.examples)
    assert wins.examples == tuple(np.flatnonzero((better_SE > 0).all(0)))
    assert losses.p < 0.01 < 0.05 < wins.p
    assert losses.by_chance < len(losses.examples) - 20


def test_chance_is_that_of_permuted_signs():
    generator = np.random.default_rng(1)
    better_SE = np.sign(generator.normal(0.4, 1, size=(3, 80)))
    wins, _ = deciding(better_SE, generator)
    counts = [
        (np.stack([generator.permutation(row) for row in better_SE]) > 0).all(0).sum()
        for _ in range(4000)
    ]
    assert wins.by_chance == pytest.approx(np.mean(counts), rel=0.02)
    assert wins.p == pytest.approx(np.mean(np.array(counts) >= len(wins.examples)), abs=0.03)


def test_ties_and_a_lead_in_every_example_decide_none():
    """Most replies tie, in all seeds; in the others one arm leads alike."""
    generator = np.random.default_rng(2)
    small = 0
    for _ in range(60):
        better_SE = np.zeros((4, 300))
        better_SE[:, :60] = np.where(generator.random((4, 60)) < 0.8, 1, -1)
        wins, losses = deciding(better_SE, generator)
        assert max(wins.examples, default=0) < 60
        small += wins.p <= 0.05
        assert losses.by_chance < 1
    assert small <= 8
    assert deciding(np.ones((1, 9)), generator) is None
    everywhere, nowhere = deciding(np.ones((3, 9)), generator)
    assert (len(everywhere.examples), everywhere.p) == (9, 1.0)
    assert (nowhere.examples, nowhere.p) == ((), 1.0)
