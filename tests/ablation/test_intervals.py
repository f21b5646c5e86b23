import math

import numpy as np
import pytest
from scipy import stats

from wherelm.ablation.intervals import (
    bootstrap_interval,
    correlation,
    holm,
    t_interval,
    welch_interval,
)

# By hand: mean 2, s = 1, so 2 ± 4.302653 / sqrt(3); t = 2 sqrt(3) with two degrees of freedom, for
# which p = 1 - t / sqrt(2 + t^2) = 1 - sqrt(6 / 7).
BY_HAND = (1.0, 2.0, 3.0)


def test_the_t_interval_is_the_one_computed_by_hand():
    found = t_interval(BY_HAND)
    reach = 4.302652729696142 / math.sqrt(3)
    assert (found.mean, found.low, found.high) == pytest.approx((2, 2 - reach, 2 + reach))
    assert found.p == pytest.approx(1 - math.sqrt(6 / 7))


@pytest.mark.parametrize("count", [3, 10])
def test_paired_intervals_agree_with_scipy(count):
    generator = np.random.default_rng(count)
    a = generator.normal(size=count)
    b = a + generator.normal(0.1, 0.05, size=count)
    found, expected = t_interval(a - b), stats.ttest_rel(a, b)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert correlation(a, b) == pytest.approx(stats.pearsonr(a, b).statistic)


def test_unpaired_intervals_agree_with_scipy():
    generator = np.random.default_rng(1)
    a, b = generator.normal(0, 1, size=4), generator.normal(1, 3, size=7)
    found, expected = welch_interval(a, b), stats.ttest_ind(a, b, equal_var=False)
    assert found.mean == pytest.approx(a.mean() - b.mean())
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_fewer_than_three_values_give_no_interval():
    assert t_interval([1.0, 2.0]) is None
    assert welch_interval([1.0, 2.0, 3.0], [1.0, 2.0]) is None
    assert correlation([1.0, 2.0], [2.0, 1.0]) is None
    assert bootstrap_interval(np.ones((2, 9)), np.ones(9), np.random.default_rng(0)) is None


def test_values_without_spread_give_no_width():
    assert (t_interval([2.0] * 3).low, t_interval([2.0] * 3).p) == (2.0, 0.0)
    assert (t_interval([0.0] * 3).high, t_interval([0.0] * 3).p) == (0.0, 1.0)
    assert welch_interval([1.0] * 3, [1.0] * 3).p == 1.0
    assert correlation([1.0] * 3, [1.0, 2.0, 3.0]) is None


def test_holm_corrects_as_by_hand_and_keeps_the_order():
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1, each at least the one before.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_bootstrap_has_the_spread_of_crossed_seeds_and_examples():
    """Against the known variance of x_se = a_s + b_e + noise, and it covers the mean."""
    generator = np.random.default_rng(2)
    seeds, examples = 12, 400
    a_S, b_E = generator.normal(0, 0.3, seeds), generator.normal(0, 2, examples)
    sums_SE = 1 + a_S[:, None] + b_E + generator.normal(0, 0.1, (seeds, examples))
    found = bootstrap_interval(sums_SE, np.ones(examples), np.random.default_rng(0))
    error = math.sqrt(a_S.var() / seeds + b_E.var() / examples)
    assert found.mean == pytest.approx(sums_SE.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    again = bootstrap_interval(sums_SE, np.ones(examples), np.random.default_rng(0))
    assert found == again


def test_the_bootstrap_weighs_examples_by_their_targets():
    sums_SE = np.tile([10.0, 0.0, 2.0], (3, 1))
    weights_E = np.array([5.0, 5.0, 2.0])
    found = bootstrap_interval(sums_SE, weights_E, np.random.default_rng(0))
    assert found.mean == pytest.approx(12 / 12)
    assert found.low < 0.5 < 1.5 < found.high
