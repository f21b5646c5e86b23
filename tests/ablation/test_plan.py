import csv
import json
import statistics

import pytest

from wherelm.ablation import folder as state
from wherelm.ablation import plan, results, tuning
from wherelm.ablation.course import Course
from wherelm.ablation.plan import AblationConfig, Arm, make_job
from wherelm.ablation.progress import Progress
from wherelm.run_folder import SUMMARY, figure_of, figures_beside

TUNED = AblationConfig("test.loss", tune=True)
MUON = {"name": "muon", "learning_rate": 0.01, "head_learning_rate": 0.004, "momentum": 0.95}


def arm(scheme, **position):
    config = {
        "name": "made up",
        "seed": 0,
        "model": {"width": 8},
        "position": {"name": scheme, **position},
        "data": {"train": "some.jsonl", "cache": ".cache"},
        "optimizer": dict(MUON),
        "training": {"steps": 3, "epochs": None, "tokens": None, "threads": None},
        "evaluation": {"splits": None, "extrapolation": True},
        "tracking": {"name": "none"},
    }
    return Arm(scheme, (f"position={scheme}",), config)


def write_summary(job, status="complete", loss=1.0, **more):
    job.folder.mkdir(parents=True, exist_ok=True)
    splits = {"validation": {"loss": loss}} if status == "complete" else {}
    summary = {"status": status, "splits": splits, "validation_loss": loss, "seconds": 1.0, **more}
    (job.folder / SUMMARY).write_text(json.dumps(summary))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric": "loss"}, r"ablation\.metric=loss: expected SPLIT\.FIGURE"),
        ({"metric": "test.beauty"}, r"ablation\.metric=test\.beauty: expected SPLIT\.FIGURE"),
        ({"metric": "extrapolation.fixed.8.loss"}, r"PROTOCOL one of fixed_targets, windows"),
        ({"metric": "extrapolation.windows.3.loss"}, r"FACTOR one of 1, 1\.25, 1\.5, 2, 4, 8"),
        ({"metric": "extrapolation.windows.loss"}, r"FACTOR one of 1, 1\.25, 1\.5, 2, 4, 8"),
        ({"metric": "extrapolation.windows.8.accuracy"}, r"FIGURE one of loss, bits_per_byte, r"),
        ({"seeds": "0"}, r"ablation\.seeds=0: expected 1 to 999"),
        ({"seeds": "1000"}, r"ablation\.seeds=1000: expected 1 to 999"),
        ({"seeds": "9-5"}, r"ablation\.seeds=9-5: expected 1 to 999, or from-to such as 5-20"),
        ({"seeds": "2-9"}, r"ablation\.seeds=2-9: nothing is decided with fewer than 3 seeds"),
        ({"margin": 0.0}, r"ablation\.margin=0\.0: expected more than 0"),
        ({"equal": "watts"}, r"ablation\.equal=watts: expected tokens or time"),
        ({"rule": "rope wins"}, r"ablation\.rule=rope wins: .* cannot be read"),
        ({"learning_rates": 2}, r"ablation\.learning_rates=2: expected 3 to 999"),
        ({"tuning_seeds": 0}, r"ablation\.tuning_seeds=0: expected 1 to 999"),
    ],
)
def test_a_wrong_setting_names_the_key_and_what_is_accepted(changes, message):
    with pytest.raises(ValueError, match=message):
        AblationConfig(**changes)


def grid_of_arms():
    return [
        Arm(
            f"{scheme} model.layers={layers}",
            (),
            {},
            (("position", scheme), ("model.layers", layers)),
        )
        for scheme in ("rope", "alibi", "none")
        for layers in ("2", "5")
    ]


def test_arms_are_compared_within_each_level_of_the_other_factors():
    arms = grid_of_arms()
    within = {
        f"{scheme} model.layers={layers}": f"rope model.layers={layers}"
        for scheme in ("alibi", "none")
        for layers in ("2", "5")
    }
    assert plan.references(arms, None) == plan.references(arms, "rope") == within
    assert plan.references(arms, "none")["rope model.layers=5"] == "none model.layers=5"


def test_a_baseline_that_is_named_in_full_serves_all_arms():
    found = plan.references(grid_of_arms(), "rope model.layers=5")
    assert set(found.values()) == {"rope model.layers=5"}
    assert len(found) == 5
    with pytest.raises(
        ValueError, match="baseline=t5: expected one of rope, alibi, none, rope mod"
    ):
        plan.references(grid_of_arms(), "t5")


def test_what_acts_on_tuning_alone_is_told_where_nothing_is_tuned():
    own = {"learning_rates": 5, "tuning_seeds": 3}
    lines = AblationConfig(**own).warnings()
    assert lines == [
        "ablation.learning_rates=5 acts on tuning alone: give ablation.tune=true",
        "ablation.tuning_seeds=3 acts on tuning alone: give ablation.tune=true",
    ]
    assert (
        AblationConfig("test.loss", **own, tune=True).warnings()
        == AblationConfig().warnings()
        == []
    )


@pytest.mark.parametrize("metric", ["extrapolation.fixed_targets.8.ratio_to_1", "longer.loss"])
def test_a_metric_of_extrapolation_turns_its_measurement_on(metric):
    expected = ("evaluation.extrapolation=true",) if "ratio" in metric else ()
    assert AblationConfig(metric=metric).overrides == expected


def test_a_metric_is_found_where_its_figures_lie():
    beyond = {"fixed_targets": {"1.25": {"loss": 2.0}, "8": {"loss": None, "reason": "short"}}}
    splits = {"test": {"loss": 1.0}, "extrapolation": {"loss": 3.0}}
    summary = {"status": "complete", "splits": splits, "extrapolation": beyond}
    assert figure_of(summary, "test.loss") == 1.0
    assert figure_of(summary, "extrapolation.loss") == 3.0  # of a split that is named so
    assert figure_of(summary, "extrapolation.fixed_targets.1.25.loss") == 2.0
    assert figure_of(summary, "extrapolation.fixed_targets.8.loss") is None
    assert figure_of(summary, "extrapolation.windows.8.loss") is None
    assert figures_beside(summary, "extrapolation.fixed_targets.8.loss")["reason"] == "short"
    assert figure_of(summary | {"status": "failed"}, "test.loss") is None


def test_learning_rates_lie_a_factor_two_apart_around_the_configured_one():
    assert tuning.grid(0.01, 4) == [0.0025, 0.005, 0.01, 0.02]
    assert tuning.grid(0.01, 4, lower=1, upper=2) == [0.00125, 0.0025, 0.005, 0.01, *UPPER]


UPPER = [0.02, 0.04, 0.08]


def test_a_folder_is_named_by_what_could_change_a_result_and_by_the_seed(tmp_path):
    job = make_job(tmp_path, arm("rope", base=100.0), 3, "final")
    assert job.folder.name == f"rope-{plan.short_hash(job.config)}-seed3"
    assert job.config["seed"] == 3
    for group, key, value in [
        ("position", "base", 10.0),
        ("model", "width", 16),
        ("data", "train", "other.jsonl"),
        ("optimizer", "momentum", 0.9),
        ("training", "steps", 4),
    ]:
        other = job.config | {group: job.config[group] | {key: value}}
        assert plan.short_hash(other) != plan.short_hash(job.config), key
    same = job.config | {
        "seed": 4,
        "name": "other",
        "tracking": {"name": "wandb"},
        "training": job.config["training"] | {"threads": 1},
        "data": job.config["data"] | {"cache": None},
    }
    assert plan.short_hash(same) == plan.short_hash(job.config)


def test_tuning_scales_all_learning_rates_alike_and_reads_validation_alone(tmp_path):
    job = make_job(tmp_path, arm("rope"), 1000, "tune", 0.02)
    assert job.config["optimizer"] == MUON | {"learning_rate": 0.02, "head_learning_rate": 0.008}
    assert job.config["evaluation"] == {"splits": ["validation"], "extrapolation": False}
    assert set(job.overrides) == {
        "position=rope",
        "seed=1000",
        "optimizer.learning_rate=0.02",
        "optimizer.head_learning_rate=0.008",
        "evaluation.splits=[validation]",
        "evaluation.extrapolation=false",
    }
    final = make_job(tmp_path, arm("rope"), 0, "final")
    assert final.config["evaluation"] == arm("rope").config["evaluation"]
    assert final.overrides == ("position=rope", "seed=0")


def test_a_folder_says_how_far_its_job_came_and_what_of_it_is_kept(tmp_path):
    job = make_job(tmp_path, arm("rope"), 0, "final")
    assert job.status == "missing"
    checkpoint = job.folder / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    for name in ("config.yaml", "train.log", "metrics.jsonl"):
        (job.folder / name).write_text("so far")
    (checkpoint / "state.json").write_text("{}")
    assert job.status == "killed"
    assert state.ready(job.folder)
    (job.folder / SUMMARY).write_text('{"status": "comp')
    assert job.status == "killed"
    write_summary(job, "interrupted")
    assert job.status == "interrupted"
    assert state.ready(job.folder)
    state.write_failure(job.folder, ValueError("too much\nof it"))
    assert (job.status, job.summary["error"]) == ("failed", "too much")
    assert not state.ready(job.folder)
    assert [path.name for path in job.folder.iterdir()] == ["train.log"]
    assert job.status == "missing"


def tuned(sweep, best, settings, first_seed=0):
    """The rates that tuning picks where an arm's loss is a parabola around its best rate."""
    arms = [arm(name) for name in best]
    for each in arms:
        each.config["seed"] = first_seed

    def launch(jobs):
        for job in jobs:
            if job.status != "complete":
                octaves = job.learning_rate / best[job.arm.label]
                write_summary(job, loss=abs(octaves - 1 / octaves) + job.seed / 1e6)

    course = Course(sweep, arms, settings, launch, Progress(99))
    course.tune()
    return course.rates, course.jobs, course.progress.total - 99


def test_tuning_gives_every_arm_the_same_grid_and_picks_each_its_own_rate(tmp_path):
    settings = AblationConfig("test.loss", tune=True)
    best, jobs, more = tuned(tmp_path, {"rope": 0.01, "alibi": 0.005}, settings)
    assert best == {"rope": 0.01, "alibi": 0.005}
    assert more == 0
    tried = {(job.arm.label, job.learning_rate, job.seed) for job in jobs}
    seeds = (plan.TUNING_SEED, plan.TUNING_SEED + 1)
    assert tried == {
        (label, rate, seed)
        for label in best
        for rate in (0.0025, 0.005, 0.01, 0.02)
        for seed in seeds
    }


def test_tuning_never_meets_a_final_seed_wherever_those_begin(tmp_path):
    most = AblationConfig("test.loss", seeds=str(plan.TUNING_SEED - 1), tune=True)
    for first in (0, 998, plan.TUNING_SEED):
        _, jobs, _ = tuned(tmp_path / str(first), {"rope": 0.01}, most, first)
        assert not {job.seed for job in jobs} & set(range(first, first + most.most))


def test_a_best_rate_at_the_edge_widens_the_grid_for_all_arms(tmp_path, capsys):
    best, jobs, more = tuned(tmp_path, {"rope": 0.01, "alibi": 0.04}, TUNED)
    assert best == {"rope": 0.01, "alibi": 0.04}
    rates = {label: {j.learning_rate for j in jobs if j.arm.label == label} for label in best}
    assert rates["rope"] == rates["alibi"] == {0.0025, 0.005, 0.01, 0.02, 0.04, 0.08}
    assert more == 2 * 2 * TUNED.tuning_seeds
    assert "may lie beyond" not in capsys.readouterr().out


def test_a_best_rate_that_stays_at_the_edge_is_said_and_the_curve_is_kept(tmp_path, capsys):
    best, _, _ = tuned(tmp_path, {"rope": 0.01, "alibi": 1e-5}, TUNED)
    lowest = 0.0025 / 2**tuning.WIDENINGS
    assert best == {"rope": 0.01, "alibi": lowest}
    rope, alibi = capsys.readouterr().out.splitlines()
    assert "may lie beyond" not in rope
    assert "the lowest of the grid, so a better one may lie beyond" in alibi
    rows = list(csv.DictReader((tmp_path / "tuning.csv").open()))
    assert len(rows) == 2 * (4 + tuning.WIDENINGS)
    (picked,) = [row for row in rows if row["arm"] == "alibi" and row["picked"] == "True"]
    assert (float(picked["learning_rate"]), picked["edge"]) == (lowest, "lowest")


def tuning_jobs(sweep, losses):
    """Tuning jobs of one arm: {rate: a loss a seed, None where it failed}."""
    jobs = []
    for rate, values in losses.items():
        for seed, loss in enumerate(values, start=1000):
            job = make_job(sweep, arm("rope"), seed, "tune", rate)
            write_summary(job, "failed") if loss is None else write_summary(job, loss=loss)
            jobs.append(job)
    return jobs


def test_tuning_leaves_out_rates_that_fail(tmp_path):
    losses = {0.005: [0.2], 0.01: [0.6], 0.02: [0.4], 0.04: [None]}
    (curve,) = tuning.sensitivities(tuning_jobs(tmp_path, losses))
    assert curve.values == {0.005: 0.2, 0.01: 0.6, 0.02: 0.4}
    assert (curve.best, curve.edge) == (0.005, "lowest")
    (none,) = tuning.sensitivities(tuning_jobs(tmp_path, {0.01: [None], 0.02: [None]}))
    assert none.best is None
    assert "every learning rate failed" in tuning.tuning_table([none])


def test_several_tuning_seeds_count_by_their_mean(tmp_path):
    (curve,) = tuning.sensitivities(tuning_jobs(tmp_path, {0.01: [1.0, 2.5]}))
    assert curve.values == {0.01: statistics.fmean((1.0, 2.5))}


def test_of_equal_rates_and_of_a_flat_curve_the_middle_is_picked_and_not_the_lowest(tmp_path):
    tie = {rate: [0.5] for rate in (0.0025, 0.005, 0.01, 0.02, 0.04)}
    (curve,) = tuning.sensitivities(tuning_jobs(tmp_path / "tie", tie))
    assert (curve.best, curve.edge) == (0.01, None)
    # Seeds differ by 0.1, rates by 0.01: the curve says nothing but that 0.04 is too high.
    flat = {0.005: [0.45, 0.55], 0.01: [0.46, 0.56], 0.02: [0.47, 0.57], 0.04: [0.8, 0.9]}
    (curve,) = tuning.sensitivities(tuning_jobs(tmp_path / "flat", flat))
    assert (curve.best, curve.edge) == (0.01, None)
    # Where seeds agree, differences as small decide.
    sharp = {rate: [values[0], values[0] + 1e-4] for rate, values in flat.items()}
    (curve,) = tuning.sensitivities(tuning_jobs(tmp_path / "sharp", sharp))
    assert (curve.best, curve.edge) == (0.005, "lowest")


def test_the_split_that_tunes_does_not_judge():
    with pytest.raises(ValueError, match=r"metric=validation\.loss: .* give ablation\.metric=test"):
        AblationConfig(tune=True)
    assert AblationConfig(tune=True, metric="longer.exact_match").tuning_seeds == 2


def test_results_hold_a_row_a_job_with_the_settings_of_its_scheme(tmp_path):
    arms = (arm("rope", base=100.0), arm("alibi", slopes="learned"))
    jobs = [make_job(tmp_path, each, seed, "final") for seed in (0, 1) for each in arms]
    for job in jobs[:-1]:
        write_summary(job, loss=1.5, parameters=7)
    state.write_failure(jobs[-1].folder, RuntimeError("out of memory"))
    results.write_csv(tmp_path / "results.csv", results.results(jobs))
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [row["folder"] for row in rows] == [job.folder.name for job in jobs]
    assert [row["status"] for row in rows] == ["complete", "complete", "complete", "failed"]
    assert [row["splits.validation.loss"] for row in rows] == ["1.5", "1.5", "1.5", ""]
    assert [row["position.base"] for row in rows] == ["100.0", "", "100.0", ""]
    assert [row["position.slopes"] for row in rows] == ["", "learned", "", "learned"]
    assert rows[-1]["error"] == "RuntimeError: out of memory"
    assert "model.width" not in rows[0]
