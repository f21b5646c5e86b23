import math

import numpy as np
import pytest
from scipy import stats

from tests.benchmarks.simulations import replies
from wherelm.ablation.inference.intervals import (
    LEVEL,
    Error,
    correlation,
    crossed_interval,
    freedom_of_both,
    holm,
    simultaneous,
    student,
    t_interval,
    told_apart,
    variances,
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
    if count == 10:
        assert correlation(a, b) == pytest.approx(stats.pearsonr(a, b).statistic)


def test_unpaired_intervals_agree_with_scipy():
    generator = np.random.default_rng(1)
    a, b = generator.normal(0, 1, size=4), generator.normal(1, 3, size=7)
    found, expected = welch_interval(a, b), stats.ttest_ind(a, b, equal_var=False)
    assert found.mean == pytest.approx(a.mean() - b.mean())
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_an_interval_at_any_level_and_the_test_of_equality_agree_with_scipy():
    values = np.random.default_rng(4).normal(0.3, 1, size=6)
    found = t_interval(values)
    for level in (0.3, 0.05, 0.001):
        expected = stats.ttest_1samp(values, 0).confidence_interval(1 - level)
        assert found.at(level) == pytest.approx(tuple(expected))
    assert found.at(0.0) == (-math.inf, math.inf)
    for margin in (0.2, 0.8, 3.0):
        one_sided = [
            stats.ttest_1samp(values, margin, alternative="less").pvalue,
            stats.ttest_1samp(values, -margin, alternative="greater").pvalue,
        ]
        assert found.equal_p(margin) == pytest.approx(max(one_sided))


def test_fewer_than_three_values_give_no_interval():
    assert t_interval([1.0, 2.0]) is None
    assert welch_interval([1.0, 2.0, 3.0], [1.0, 2.0]) is None
    sums_SE = np.random.default_rng(0).normal(size=(3, 30))
    assert crossed_interval(sums_SE[:2], np.ones(30)) is None
    assert crossed_interval(sums_SE, np.ones(30)) is not None


def test_a_correlation_needs_five_pairs_and_a_spread():
    values = [1.0, 2.0, 4.0, 3.0, 5.0]
    assert correlation(values[:4], values[:4]) is None
    assert correlation(values, values) == pytest.approx(1)
    assert correlation([1.0] * 5, values) is None


@pytest.mark.parametrize("values", [[0.001] * 3, [0.951 - 0.95, 0.501 - 0.5, 0.001], [0.0] * 4])
def test_values_without_spread_are_no_certainty(values):
    assert t_interval(values) is None
    assert welch_interval(values, [0.5] * 3) is None
    found = t_interval(values, Error(0.001, 999))
    assert found.p > 0.3
    assert found.high - found.low == pytest.approx(2 * 1.9623 * 0.001, rel=1e-3)


def test_the_less_sure_of_seeds_and_examples_counts_at_every_level():
    values = np.random.default_rng(5).normal(1, 1, size=3)
    seeds = t_interval(values)
    for size in (0.01, 1.0, 100.0):
        examples = student(values.mean(), Error(size, 999))
        both = t_interval(values, Error(size, 999))
        assert both.p == max(seeds.p, examples.p)
        for level in (0.5, 0.05, 1e-4):
            assert both.at(level)[0] == pytest.approx(
                min(seeds.at(level)[0], examples.at(level)[0])
            )
        assert both.equal_p(9.0) == max(seeds.equal_p(9.0), examples.equal_p(9.0))


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_one_reply_of_a_thousand_is_never_told_apart_however_alike_seeds_are(seeds):
    """Each seed wins one reply, another one or the same: the difference is +.001 in all seeds."""
    for same in (True, False):
        sums_SE = np.zeros((seeds, 1000), dtype=int)
        sums_SE[range(seeds), np.full(seeds, 7) if same else np.arange(seeds)] = 1
        alone = variances(sums_SE, np.ones(1000), unit=1.0).examples
        found = t_interval(sums_SE.mean(1), Error(math.sqrt(alone), 999))
        assert found.mean == pytest.approx(0.001)
        assert found.p > 0.05
        shown = crossed_interval(sums_SE, np.ones(1000)) is not None
        assert shown == (seeds == 10 and not same)  # ten examples differ, else fewer


def test_holm_corrects_as_by_hand_and_keeps_the_order():
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1, each at least the one before.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_equal_arms_of_few_errors_are_not_called_different_where_their_seeds_agree():
    """Nine arms, three seeds, 0.999 right: by seeds alone every sixth sweep errs."""
    alone = wrong = 0
    weights_E = np.ones(1000)
    generator = np.random.default_rng(9)
    for _ in range(100):
        right = replies(generator, 1, 3, 0.999, 0.0)[0].astype(int)
        sums_ASE = right[1:] - right[0]
        examples = np.sqrt(variances(sums_ASE, weights_E, unit=1.0).examples)
        seeds = sums_ASE.mean(-1)
        no_spread = (np.ptp(seeds, axis=1) == 0) & (seeds[:, 0] != 0)
        alone += no_spread.any()
        tests = [t_interval(d, Error(e, 999)) for d, e in zip(seeds, examples, strict=True)]
        wrong += any(told_apart([one.p for one in tests]))
    assert alone > 5
    assert wrong <= 1


def test_steps_and_adjusted_intervals_agree_with_the_corrected_p():
    generator = np.random.default_rng(6)
    seen = set()
    for _ in range(200):
        count = int(generator.integers(1, 8))
        found = [t_interval(generator.normal(m, 1, 5)) for m in generator.normal(0, 2, count)]
        p_values = [one.p for one in found]
        apart = told_apart(p_values)
        assert apart == [p <= LEVEL for p in holm(p_values)]
        for one, told, (low, high) in zip(found, apart, simultaneous(found), strict=True):
            assert low <= one.mean <= high
            assert (low >= 0 or high <= 0) == told
            seen.add(told)
    assert seen == {True, False}


def test_contrasts_that_ended_before_still_count_in_the_family():
    assert told_apart([0.02]) == [True]
    assert told_apart([0.02], family=3) == [False]
    assert told_apart([0.02, 0.001], family=3) == [True, True]
    assert told_apart([0.03, 0.001], family=3) == [False, True]


def test_variances_are_those_of_the_two_way_table_by_hand():
    """Equal weights: mean squares as in any textbook, summed in plain loops."""
    generator = np.random.default_rng(7)
    seeds, examples, weight = 4, 7, 2.5
    sums_SE = generator.normal(size=(seeds, examples))
    x = sums_SE / weight
    rows, columns, mean = x.mean(1), x.mean(0), x.mean()
    of_rows = sum((r - mean) ** 2 for r in rows) / (seeds - 1) / seeds
    of_columns = sum((c - mean) ** 2 for c in columns) / (examples - 1) / examples
    rest = sum(
        (x[s, e] - rows[s] - columns[e] + mean) ** 2 for s in range(seeds) for e in range(examples)
    )
    rest /= (seeds - 1) * (examples - 1) * seeds * examples
    found = variances(sums_SE, np.full(examples, weight))
    assert found.mean == pytest.approx(mean)
    assert (found.seeds, found.examples, found.scatter) == pytest.approx(
        (of_rows, of_columns, rest)
    )
    whole = of_rows + max(of_columns - rest, 0)
    assert found.both == pytest.approx(max(whole, of_columns / 10))
    batch = variances(np.stack([sums_SE, 2 * sums_SE]), np.full(examples, weight))
    assert batch.both == pytest.approx([found.both, 4 * found.both])


def test_variances_weigh_examples_by_their_targets():
    """A difference of the same nats a target in every example has no variance over examples."""
    weights_E = np.array([5, 1, 2, 9])
    found = variances(0.3 * weights_E + np.zeros((3, 1)), weights_E)
    assert found.mean == pytest.approx(0.3)
    assert found.examples == pytest.approx(0, abs=1e-20)
    assert variances(0.3 * np.ones((3, 4)), weights_E).examples > 1e-4


def test_the_crossed_interval_has_the_spread_of_seeds_and_examples():
    """Against the known variance of x_se = a_s + b_e + noise."""
    generator = np.random.default_rng(2)
    seeds, examples = 12, 400
    a_S, b_E = generator.normal(0, 0.3, seeds), generator.normal(0, 2, examples)
    sums_SE = 1 + a_S[:, None] + b_E + generator.normal(0, 0.1, (seeds, examples))
    found = crossed_interval(sums_SE, np.ones(examples))
    error = math.sqrt(a_S.var(ddof=1) / seeds + b_E.var(ddof=1) / examples)
    assert found.mean == pytest.approx(sums_SE.mean())
    assert found.errors[0].size == pytest.approx(error, rel=0.03)
    assert seeds - 1 < found.errors[0].freedom < (seeds - 1) * (examples - 1)


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("parts", [(1, 0, 1), (0, 2, 1), (0.2, 1, 1), (0, 0, 1)])
def test_the_crossed_interval_covers(seeds, parts):
    generator = np.random.default_rng(8)
    examples, sweeps = 60, 3000
    of_seeds, of_examples, of_replies = parts
    x = of_replies * generator.normal(size=(sweeps, seeds, examples))
    x += of_seeds * generator.normal(size=(sweeps, seeds, 1))
    x += of_examples * generator.normal(size=(sweeps, 1, examples))
    found = variances(x, np.ones(examples))
    freedom = freedom_of_both(found, seeds, examples)
    reach = stats.t.ppf(0.975, freedom) * np.sqrt(found.both)
    assert 0.93 <= (np.abs(found.mean) <= reach).mean() <= 0.975
