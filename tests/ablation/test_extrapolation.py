"""A metric beyond the trained length is compared like any other."""

import json

import numpy as np
import pytest

from tests.ablation.test_comparison import sweep
from wherelm.ablation import comparison, tables, tuning
from wherelm.run_folder import read_summary, write_scores

PLACE = "extrapolation.fixed_targets.8"


def with_extrapolation(jobs):
    """Each run's figures at 8 times the trained length, as training writes them."""
    generator = np.random.default_rng(0)
    targets = np.full(40, 16)
    for job in jobs:
        own = 0.3 if job.arm.scheme == "alibi" else 0.5
        ratio = targets * (1 + own + generator.normal(0, 0.05, 40))
        loss = float(ratio.sum() / targets.sum())
        entry = {"loss": 2 * loss, "ratio_to_1": loss}
        summary = read_summary(job.folder) | {"extrapolation": {"fixed_targets": {"8": entry}}}
        (job.folder / "summary.json").write_text(json.dumps(summary))
        write_scores(job.folder, PLACE, nats=2 * ratio, targets=targets, ratio=ratio)
    return jobs


@pytest.mark.parametrize("figure", ["loss", "ratio_to_1"])
def test_it_has_pairs_a_correction_and_intervals_over_seeds_and_stretches(tmp_path, figure):
    arms = {name: [1.0, 1.1, 1.2, 1.3] for name in ("rope", "alibi", "none")}
    jobs, metric = with_extrapolation(sweep(tmp_path, arms)), f"{PLACE}.{figure}"
    found = comparison.compare(jobs, metric, {"alibi": "rope", "none": "rope"})
    alibi, none = found.differences
    assert alibi.mean == pytest.approx(-0.2 * (1 + (figure == "loss")), abs=0.05)
    assert alibi.verdict(metric) == "better"
    assert none.verdict(metric) == "not told apart"
    for difference in (alibi, none):
        assert difference.seeds == (0, 1, 2, 3)
        assert difference.p_holm >= difference.paired.p
        low, high = difference.examples.low, difference.examples.high
        assert low < difference.mean < high
    assert f"{metric} (lower is better)" in tables.table(
        found, jobs, {"alibi": "rope", "none": "rope"}
    )


def test_tuning_for_it_goes_by_validation_loss(tmp_path):
    jobs = sweep(tmp_path, {"rope": [1.5]})
    (curve,) = tuning.sensitivities(jobs)
    assert list(curve.values.values()) == [1.5]
