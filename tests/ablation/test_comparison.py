import json

import numpy as np
import pytest
from scipy import stats

from tests.ablation.test_plan import arm
from wherelm.ablation import comparison, tables
from wherelm.ablation.folder import write_failure
from wherelm.ablation.plan import Arm, make_job, references

LOSSES = {
    "rope": [1.00, 1.20, 0.90, 1.10],
    "alibi": [1.12, 1.29, 1.03, 1.20],
    "none": [1.02, 1.15, 0.97, 1.08],
}


def finish(job, loss, hash_="equal", **figures):
    """The files of a complete run, as training writes them."""
    job.folder.mkdir(parents=True)
    validation = {"loss": loss, **figures}
    summary = {
        "status": "complete",
        "batches_hash": f"{hash_} {job.seed}",
        "splits": {"validation": validation, "test": {"loss": loss + 1}},
        "parameters": 10,
        "scheme_parameters": 4 if job.arm.scheme == "alibi" else 0,
        "tokens_per_second": 5.0,
    }
    (job.folder / "summary.json").write_text(json.dumps(summary))
    write_metrics(job, [(1, 2.0)], [(1, loss)])
    return job


def write_metrics(job, seconds_a_step, evaluations):
    """`seconds_a_step`: (step, seconds); `evaluations`: (step, loss) behind the line of that step.

    Every step has 10 targets; the clock in a line also counts what is no training.
    """
    losses, lines = dict(evaluations), []
    for step, seconds in seconds_a_step:
        lines.append({"step": step, "targets": 10 * step, "targets_per_second": 10 / seconds})
        lines[-1]["seconds"] = 100.0 * step
        if step in losses:
            lines.append(
                {"step": step, "split": "validation", "targets": 10 * step, "loss": losses[step]}
            )
    lines.append({"step": step, "split": "validation", "final": True, "loss": 9.0})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (job.folder / "metrics.jsonl").write_text(text)


def compare(jobs, metric, margin=None, references=None, **options):
    """Every arm beside rope, unless told otherwise."""
    references = references or {job.arm.label: "rope" for job in jobs if job.arm.label != "rope"}
    return comparison.compare(jobs, metric, references, margin, **options)


def table(found, jobs):
    return tables.table(found, jobs, {d.arm: d.baseline for d in found.differences})


def sweep(folder, losses):
    return [
        finish(make_job(folder, arm(name), seed, "final"), loss)
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]


def test_differences_are_paired_by_seed_and_corrected_for_their_number(tmp_path):
    jobs = sweep(tmp_path, LOSSES)
    found = compare(jobs, "validation.loss").differences
    assert [d.arm for d in found] == ["alibi", "none"]
    p_values = []
    for difference in found:
        own, base = LOSSES[difference.arm], LOSSES["rope"]
        paired = stats.ttest_rel(own, base)
        low, high = paired.confidence_interval(0.95)
        unpaired = stats.ttest_ind(own, base, equal_var=False).confidence_interval(0.95)
        assert difference.seeds == (0, 1, 2, 3)
        assert difference.mean == pytest.approx(np.mean(own) - np.mean(base))
        assert (difference.paired.low, difference.paired.high) == pytest.approx((low, high))
        assert (difference.unpaired.low, difference.unpaired.high) == pytest.approx(unpaired)
        assert difference.correlation is None  # four pairs
        p_values.append(paired.pvalue)
    assert p_values[0] < p_values[1]
    assert [d.p_holm for d in found] == pytest.approx([2 * p_values[0], p_values[1]])
    verdicts = [d.verdict("validation.loss") for d in found]
    assert verdicts == ["worse", "not told apart"]
    assert found[0].verdict("validation.exact_match") == "better"


def test_runs_on_other_batches_are_never_paired(tmp_path):
    rope = sweep(tmp_path, {"rope": LOSSES["rope"]})
    alibi = [
        finish(
            make_job(tmp_path, arm("alibi"), seed, "final"), loss, "other" if seed == 2 else "equal"
        )
        for seed, loss in enumerate(LOSSES["alibi"])
    ]
    none = [
        finish(make_job(tmp_path, arm("none"), seed, "final"), loss, "other")
        for seed, loss in enumerate(LOSSES["none"])
    ]
    found = compare([*rope, *alibi, *none], "validation.loss")
    difference, other = found.differences
    assert (difference.arm, difference.seeds) == ("alibi", (0, 1, 3))
    assert difference.mean == pytest.approx((0.12 + 0.09 + 0.10) / 3)
    assert found.unpaired_seeds == {"alibi": [2]}
    text = table(found, [*rope, *alibi, *none])
    assert "alibi: seeds [2] had other data than its baseline and are left out" in text
    # An arm none of whose runs pairs is compared all the same, by Welch's interval, and said so.
    assert (other.arm, other.paired, other.other_data) == ("none", None, True)
    expected = stats.ttest_ind(LOSSES["none"], LOSSES["rope"], equal_var=False)
    assert other.test.p == pytest.approx(expected.pvalue)
    assert "not told apart, unpaired: other data" in text


@pytest.mark.parametrize("split", ["validation", "test"])
def test_runs_that_were_measured_on_other_data_are_not_paired(tmp_path, split):
    jobs = sweep(tmp_path, {"rope": LOSSES["rope"], "alibi": LOSSES["alibi"]})
    for job in jobs:
        digests = {"validation": "a", "test": "b", "longer": job.arm.scheme}
        digests[split] += job.arm.scheme
        place = job.folder / "summary.json"
        place.write_text(json.dumps(json.loads(place.read_text()) | {"digests": digests}))
    (found,) = compare(jobs, "test.loss").differences
    assert (found.paired, found.other_data) == (None, True)


def test_runs_that_were_shortened_to_equal_time_pair_with_longer_ones_on_the_same_data(tmp_path):
    """Their batches are the first ones of the longer run, so their hashes differ."""
    arms = [arm(name) for name in ("rope", "alibi")]
    for each in arms:
        each.config["training"] |= {"steps": 100, "epochs": None, "tokens": None}
    for share, paired in ((0.5, True), (1.0, False)):
        jobs = [
            finish(
                make_job(tmp_path / str(share), each, seed, "final", None, own), loss, each.label
            )
            for each, own in zip(arms, (1.0, share), strict=True)
            for seed, loss in enumerate(LOSSES[each.label])
        ]
        (found,) = compare(jobs, "validation.loss").differences
        assert (found.paired is not None) == paired
    shortened = make_job(tmp_path, arms[0], 0, "final", None, 0.25)
    assert shortened.config["training"]["steps"] == 25
    assert "training.steps=25" in shortened.overrides


def test_an_interaction_is_the_difference_of_differences_between_levels(tmp_path):
    values = {("rope", "2"): 1.0, ("alibi", "2"): 1.1, ("rope", "5"): 0.5, ("alibi", "5"): 0.9}
    noise = np.random.default_rng(0).normal(0, 0.01, (4, 5))
    jobs, expected = [], {}
    for (scheme, layers), scatter in zip(values, noise, strict=True):
        config = {**arm(scheme).config, "model": {"layers": layers}}
        label = f"{scheme} model.layers={layers}"
        one = Arm(label, (), config, (("position", scheme), ("model.layers", layers)))
        for seed in range(5):
            expected[scheme, layers, seed] = values[scheme, layers] + scatter[seed]
            job = make_job(tmp_path, one, seed, "final")
            jobs.append(finish(job, expected[scheme, layers, seed]))
    found = compare(jobs, "validation.loss", None, references([j.arm for j in jobs], None))
    assert [(d.arm, d.baseline) for d in found.differences] == [
        ("alibi model.layers=2", "rope model.layers=2"),
        ("alibi model.layers=5", "rope model.layers=5"),
    ]
    (between,) = found.interactions
    own = [
        expected["alibi", "5", s]
        - expected["rope", "5", s]
        - expected["alibi", "2", s]
        + expected["rope", "2", s]
        for s in range(5)
    ]
    assert (between.arm, between.baseline) == ("alibi model.layers=5", "alibi model.layers=2")
    assert between.mean == pytest.approx(np.mean(own))
    assert between.paired.p == pytest.approx(stats.ttest_1samp(own, 0).pvalue)
    assert between.verdict("validation.loss") == "worse"


def test_failed_and_tuning_runs_pair_with_nothing(tmp_path):
    jobs = sweep(tmp_path, {"rope": LOSSES["rope"], "alibi": LOSSES["alibi"]})
    write_failure(jobs[0].folder, ValueError("lost"))
    tuning = finish(make_job(tmp_path, arm("alibi"), 0, "tune"), 7.0)
    found = compare([*jobs, tuning], "validation.loss")
    assert found.differences[0].seeds == (1, 2, 3)
    without = compare(jobs[4:], "validation.loss")
    assert without.differences == []


def test_fewer_than_three_seeds_give_a_mean_but_no_interval(tmp_path):
    jobs = sweep(tmp_path, {name: values[:2] for name, values in LOSSES.items()})
    found = compare(jobs, "validation.loss")
    for difference in found.differences:
        assert difference.paired is difference.unpaired is difference.p_holm is None
        assert difference.verdict("validation.loss") == "too few seeds"
    assert "too few seeds" in table(found, jobs)


def test_examples_have_their_interval_where_all_runs_scored_the_same_ones(tmp_path):
    jobs = sweep(tmp_path, {"rope": LOSSES["rope"], "alibi": LOSSES["alibi"]})
    generator = np.random.default_rng(0)
    targets = generator.integers(1, 5, 50)
    sums = {}
    for job in jobs:
        shift = 0.2 if job.arm.scheme == "alibi" else 0.0
        nats = targets * (1 + shift) + generator.normal(0, 0.05, 50)
        sums[job.arm.scheme, job.seed] = nats
        np.savez(job.folder / "scores-validation.npz", nats=nats, targets=targets)
    (found,) = compare(jobs, "validation.loss").differences
    differences = [(sums["alibi", s] - sums["rope", s]).sum() / targets.sum() for s in range(4)]
    assert found.examples.mean == pytest.approx(np.mean(differences))
    assert found.examples.low < np.mean(differences) < found.examples.high
    assert 0.15 < found.examples.low < found.examples.high < 0.25
    np.savez(jobs[0].folder / "scores-validation.npz", nats=targets, targets=targets[::-1] + 1)
    (found,) = compare(jobs, "validation.loss").differences
    assert found.examples is None


@pytest.mark.parametrize(
    ("values", "words"),
    [((0.995, 0.999), "is saturated"), ((0.0, 0.01), "has not begun"), ((0.5, 0.995), None)],
)
def test_a_metric_at_an_end_of_its_range_for_every_arm_is_said(tmp_path, values, words):
    jobs = [
        finish(make_job(tmp_path, arm(name), 0, "final"), 1.0, exact_match=value)
        for name, value in zip(("rope", "alibi"), values, strict=True)
    ]
    metric = "validation.exact_match"
    text = table(compare(jobs, metric), jobs)
    assert (f"{metric} {words}" in text) if words else ("saturated" not in text)
    assert "begun" not in text or words == "has not begun"


def test_floor_and_ceiling_are_measured_from_chance(tmp_path):
    """0.51 of two answers is guessing, and so is no start; 0.51 of any text is much."""
    jobs = [
        finish(make_job(tmp_path, arm(name), 0, "final"), 1.0, exact_match=value)
        for name, value in (("rope", 0.51), ("alibi", 0.49))
    ]
    found = compare(jobs, "validation.exact_match")
    assert "begun" not in table(found, jobs)
    for job in jobs:
        place = job.folder / "summary.json"
        summary = json.loads(place.read_text())
        summary["splits"]["validation"]["chance"] = 0.5
        place.write_text(json.dumps(summary))
    text = table(found, jobs)
    assert "has not begun: at most 0.525 (0.5 by chance)" in text
    assert "; chance 0.5\n" in text
    complete = {"rope": [jobs[0]]}
    assert tables.saturation(complete, "validation.exact_match", 0.45) is None
    assert "saturated" in tables.saturation(complete, "validation.exact_match", -49.0)


def write_exact(jobs, exact, examples=1000):
    """Scores of runs that have so many replies right: the first ones."""
    for job, right in zip(jobs, exact, strict=True):
        np.savez(
            job.folder / "scores-validation.npz",
            exact=(np.arange(examples) < right).astype(np.int32),
            replies=np.ones(examples, dtype=np.int32),
        )


def test_one_reply_in_a_thousand_is_not_better_in_however_many_seeds(tmp_path):
    """The same +.001 in every seed: no spread, and yet nothing that tells the arms apart."""
    jobs = [
        finish(make_job(tmp_path, arm(name), seed, "final"), 1.0, exact_match=right / 1000)
        for name, right in (("rope", 950), ("alibi", 951))
        for seed in range(5)
    ]
    (found,) = compare(jobs, "validation.exact_match").differences
    assert found.paired is None
    assert found.verdict("validation.exact_match") == "not told apart"
    write_exact(jobs, [950] * 5 + [951] * 5)
    compared = compare(jobs, "validation.exact_match")
    (found,) = compared.differences
    assert found.mean == pytest.approx(0.001)
    assert found.p_holm > 0.3
    assert found.paired.low < 0 < found.paired.high
    assert found.verdict("validation.exact_match") == "not told apart"
    assert "not told apart" in table(compared, jobs)
    write_exact(jobs, [900] * 5 + [951] * 5)
    (found,) = compare(jobs, "validation.exact_match").differences
    assert found.examples is not None


def test_a_difference_within_the_margin_is_equality(tmp_path):
    jobs = sweep(tmp_path, LOSSES)

    def verdicts(margin):
        found = compare(jobs, "validation.loss", margin).differences
        return [d.verdict("validation.loss") for d in found]

    assert verdicts(None) == ["worse", "not told apart"]
    assert verdicts(1.0) == ["equal within margin"] * 2
    assert verdicts(0.08) == ["worse", "not told apart"]
    text = table(compare(jobs, "validation.loss", 1.0), jobs)
    assert text.splitlines()[0].endswith("; margin 1")


def test_intervals_in_the_table_are_those_of_the_whole_family_at_this_look(tmp_path):
    jobs = sweep(tmp_path, LOSSES)
    alibi, none = compare(jobs, "validation.loss").differences
    differences = np.subtract(LOSSES["alibi"], LOSSES["rope"])
    ends = stats.ttest_1samp(differences, 0).confidence_interval(1 - 0.05 / 2)
    assert alibi.adjusted == pytest.approx(tuple(ends))
    assert none.adjusted[0] < none.paired.low < 0 < none.paired.high < none.adjusted[1]
    later = compare(jobs, "validation.loss", critical=lambda family: 1e-9)
    assert [d.verdict("validation.loss") for d in later.differences] == ["not told apart"] * 2
    assert later.differences[0].adjusted[0] < 0
    text = table(later, jobs)
    assert f"{later.differences[0].adjusted[0]:+.4f}" in text
    spent = compare(jobs, "validation.loss", critical=lambda family: 0.0)
    assert spent.differences[0].adjusted is None
    assert spent.differences[0].verdict("validation.loss") == "not told apart"


def test_failed_runs_are_counted_and_no_arm_gains_by_them_in_silence(tmp_path):
    jobs = sweep(tmp_path, LOSSES)
    write_failure(jobs[5].folder, ValueError("diverged"))
    assert (jobs[5].arm.label, jobs[5].seed) == ("alibi", 1)
    found = compare(jobs, "validation.loss")
    assert found.failed_seeds == {"alibi": [1]}
    lines = table(found, jobs).split("the same, alone")[0].splitlines()
    (alibi,) = [line for line in lines if line.startswith("alibi ")]
    assert "1/4" in alibi.split()
    assert alibi.endswith(", of runs that ended")
    (none,) = [line for line in lines if line.startswith("none ")]
    assert "0/4" in none.split()
    assert not none.endswith("ended")
    assert any(line.startswith("alibi: seeds [1] failed and are in no pair") for line in lines)


def test_the_table_names_the_metric_the_parameters_added_and_marks_what_is_secondary(tmp_path):
    jobs = sweep(tmp_path, LOSSES)
    found = compare(jobs, "validation.loss")
    text = table(found, jobs)
    assert text.startswith("validation.loss (lower is better), named in advance")
    main, secondary = text.split("secondary loss")
    (row,) = [line for line in main.split("the same, alone")[0].splitlines() if line[:5] == "alibi"]
    assert row.split()[:4] == ["alibi", "4", "4", "1.1600"]
    assert row.endswith("worse")
    assert "0/4" in row.split()
    assert secondary.splitlines()[0].split() == ["test"]
    comparison.save([found], tmp_path / "comparison.json")
    saved = json.loads((tmp_path / "comparison.json").read_text())
    assert saved[0]["differences"][0]["paired"]["mean"] == pytest.approx(0.11)
