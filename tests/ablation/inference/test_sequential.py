import numpy as np
import pytest
from scipy import stats

from tests.benchmarks.simulations import equal_power, paired_p, stopped_sweeps
from wherelm.ablation.inference import sequential
from wherelm.ablation.inference.sequential import (
    Looks,
    critical_now,
    detectable,
    forecast,
    look_levels,
    obrien_fleming,
    pilot_spread,
    power,
    quadratic,
    seeds_needed,
    unannounced,
)


def test_the_bounds_of_five_equal_looks_are_those_in_print():
    """Lan–DeMets with O'Brien–Fleming's spending, two-sided 5 %, as in every table of it."""
    levels_K = look_levels(obrien_fleming(0.05, [0.2, 0.4, 0.6, 0.8, 1]), [1, 2, 3, 4, 5])
    assert stats.norm.isf(levels_K / 2) == pytest.approx(
        [4.877, 3.357, 2.680, 2.290, 2.031], abs=1e-3
    )


@pytest.mark.parametrize("spend", [obrien_fleming, quadratic, lambda a, f: unannounced(a, len(f))])
def test_looks_spend_what_they_may_and_no_more(spend):
    """Against simulated sums, for looks at odd distances and a level large enough to count."""
    seeds_K, level, sweeps = [3, 4, 9, 20], 0.2, 200_000
    spent_K = spend(level, np.array(seeds_K) / seeds_K[-1])
    assert np.all(np.diff(spent_K) > 0)
    assert spent_K[-1] <= level + 1e-12
    steps = np.diff(seeds_K, prepend=0)
    sums = np.random.default_rng(0).normal(size=(sweeps, 4)) * np.sqrt(steps)
    p = 2 * stats.norm.sf(np.abs(sums.cumsum(1)) / np.sqrt(seeds_K))
    crossed = np.logical_or.accumulate(p <= look_levels(spent_K, seeds_K), axis=1).mean(0)
    assert crossed == pytest.approx(spent_K, abs=0.003)


def test_a_single_look_at_the_end_has_the_whole_level():
    for spend in (obrien_fleming, quadratic):
        assert look_levels(spend(0.05, [1.0]), [7])[0] == pytest.approx(0.05)


def test_looks_that_bring_no_seeds_are_refused():
    with pytest.raises(ValueError, match="more seeds at every look"):
        look_levels([0.01, 0.02], [5, 5])


def test_going_on_until_it_is_significant_errs_no_more_than_looking_once():
    generator = np.random.default_rng(1)
    of_seed = generator.normal(size=(30_000, 10))
    looks = (3, 5, 10)
    p_K = [stats.ttest_1samp(of_seed[:, :seeds], 0, axis=1).pvalue for seeds in looks]
    naive = np.any([p <= 0.05 for p in p_K], axis=0).mean()
    assert naive > 0.11
    for planned in (None, 10):
        bounds = [critical_now(looks[: k + 1], planned)(1) for k in range(3)]
        assert np.any([p <= b for p, b in zip(p_K, bounds, strict=True)], axis=0).mean() < 0.0535


def test_a_sweep_that_is_looked_at_once_keeps_nearly_all_of_its_level():
    assert critical_now([3])(1) == pytest.approx(0.04)
    assert critical_now([3])(9) == pytest.approx(0.04 / 9)
    assert critical_now([5], planned=5)(1) == pytest.approx(0.05)


def test_seeds_beyond_those_announced_have_no_level_left():
    assert critical_now([5, 8], planned=5)(1) == 0.0
    assert critical_now([3, 5], planned=10)(1) > 0.0


def test_a_look_decides_in_holms_steps_and_gives_up_the_hopeless():
    looks = Looks((5, 10, 20), contrasts=3)
    least, second, third = (looks.critical(1, family) for family in (3, 2, 1))
    assert least < second < third
    found, hopeless = looks.decide(1, {"a": least * 0.9, "b": second * 0.9, "c": 0.9})
    assert (found, hopeless) == (["a", "b"], ["c"])
    # Alone, b is not small enough for a family of three, nor hopeless; after a, it is.
    assert looks.decide(1, {"b": second * 0.99, "c": 0.9}) == ([], ["c"])
    assert looks.decide(1, {"b": second * 0.99}, different=["a"]) == (["b"], [])
    assert looks.decide(2, {"b": 0.5})[1] == ["b"]  # nothing comes after the last look


def test_the_chance_left_is_the_share_of_simulated_endings():
    looks, p = Looks((5, 10, 20), contrasts=1), 0.1
    z = stats.norm.isf(p / 2)
    last = stats.norm.isf(looks.critical(2, 1) / 2)
    drift = z / np.sqrt(10)  # of one seed, as it looks after ten
    ends = z * np.sqrt(10) + np.random.default_rng(2).normal(10 * drift, np.sqrt(10), 200_000)
    assert looks.chance(1, p, 1) == pytest.approx((ends / np.sqrt(20) > last).mean(), abs=0.005)


def test_a_sweep_that_stops_what_is_decided_saves_a_third_and_errs_no_more():
    truth, sweeps = np.array([0.0] * 6 + [1.0] * 3), 400
    p_after = paired_p(np.random.default_rng(4), truth, sweeps, 24)
    called, jobs = stopped_sweeps(p_after, tuple(range(5, 21)), sweeps, len(truth))
    assert called[:, truth == 0].any(1).mean() <= 0.07
    found = called[:, truth != 0].mean()
    assert found > 0.7
    fixed = equal_power(p_after, truth != 0, found) * (len(truth) + 1)
    assert jobs / sweeps < 0.7 * fixed


@pytest.mark.parametrize(("seeds", "level"), [(2, 0.05), (5, 0.05 / 9), (20, 0.01)])
def test_power_is_that_of_the_noncentral_t(seeds, level):
    t = stats.t.isf(level / 2, seeds - 1)
    for effect in (0.0, 0.3, 1.0, 2.5):
        noncentral = stats.nct(seeds - 1, effect * np.sqrt(seeds))
        lower = np.nan_to_num(noncentral.cdf(-t))  # no number where it is next to nothing
        found = power(2 * effect, 2.0, seeds, level)
        assert found == pytest.approx(noncentral.sf(t) + lower, abs=1e-4)
    assert power(1e9, 1.0, seeds, level) == 1.0


@pytest.mark.parametrize("contrasts", [1, 9])
def test_the_plan_names_the_smallest_difference_and_the_fewest_seeds(contrasts):
    level = 0.05 / contrasts
    for seeds in (2, 3, 7, 30):
        size = detectable(0.01, seeds, level)
        assert power(size, 0.01, seeds, level) == pytest.approx(0.8, abs=1e-4)
        assert seeds_needed(0.01, size * 1.001, level) == seeds
    assert seeds_needed(1.0, 1e-9, level) == sequential.MOST_SEEDS
    assert power(1.0, 1.0, 100, level) > 0.8
    words = forecast(0.01, contrasts, 5, 0.004)
    needed = seeds_needed(0.01, 0.004, level)
    assert words.startswith(
        f"at 5 seeds, differences of {detectable(0.01, 5, level):.2g} are found"
    )
    assert words.endswith(f"for 0.004 you need {needed}")


def test_a_pilot_gives_the_spread_of_differences_whatever_arms_and_seeds_add():
    generator = np.random.default_rng(3)
    arms, seeds, spread = 5, 2, 0.3
    found = []
    for _ in range(4000):
        figures_AS = generator.normal(size=(arms, 1)) * 9 + generator.normal(size=(1, seeds)) * 9
        figures_AS = figures_AS + generator.normal(0, spread / np.sqrt(2), (arms, seeds))
        found.append(pilot_spread(figures_AS))
    assert found[0].freedom == 4
    assert np.sqrt(np.mean([one.estimate**2 for one in found])) == pytest.approx(spread, rel=0.03)
    assert np.mean([one.upper >= spread for one in found]) == pytest.approx(0.8, abs=0.02)


def test_a_pilot_of_one_seed_says_that_the_arms_are_in_its_spread():
    figures_AS = np.array([[1.0], [2.0], [3.0]])
    found = pilot_spread(figures_AS)
    assert found.arms_in_it
    assert found.estimate == pytest.approx(np.sqrt(2))
    assert pilot_spread(figures_AS[:1]) is None
