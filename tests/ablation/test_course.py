import json

import numpy as np
import pytest

from tests.ablation.test_comparison import finish
from tests.ablation.test_plan import arm
from wherelm.ablation import plan, seal, verdict
from wherelm.ablation.course import Course
from wherelm.ablation.plan import AblationConfig, Arm
from wherelm.ablation.progress import Progress

MEANS = {"rope": 1.0, "alibi": 0.5, "none": 0.97}


def course_of(folder, settings, means=MEANS, spread=0.05):
    """A sweep whose jobs end at once, with a loss around their arm's mean."""
    arms = [Arm(name, (), arm(name).config, (("position", name),)) for name in means]

    def launch(jobs):
        for job in jobs:
            if job.status == "missing":
                noise = np.random.default_rng([job.seed, *job.arm.label.encode()]).normal()
                finish(job, means[job.arm.label] + spread * noise, seconds=1.0)
                summary = json.loads((job.folder / "summary.json").read_text())
                (job.folder / "summary.json").write_text(json.dumps(summary | {"seconds": 60.0}))

    return Course(folder, arms, AblationConfig(**settings), launch, Progress(99))


def test_a_range_of_seeds_stops_the_arms_that_are_decided(tmp_path):
    course = course_of(tmp_path, {"seeds": "5-20"})
    course.run(parallel=1)
    seeds = {name: sorted(j.seed for j in course.jobs if j.arm.label == name) for name in MEANS}
    assert course.decided[0] == "alibi"
    assert len(seeds["alibi"]) < len(seeds["none"]) <= 20
    # The baseline runs as long as any arm that is compared to it.
    assert seeds["rope"] == seeds["none"] == list(range(len(seeds["none"])))
    text = verdict.answer(tmp_path, course.jobs, course.arms, course.settings, course.decided)
    (alibi,) = [line for line in text.splitlines() if line[:5] == "alibi" and "better" in line]
    assert alibi
    assert not (tmp_path / verdict.LOOKS).exists()


def test_a_fixed_number_of_seeds_is_what_every_arm_gets(tmp_path):
    course = course_of(tmp_path, {"seeds": "4"})
    course.run(parallel=1)
    assert course.decided is None
    assert len(course.jobs) == 12


def test_a_pilot_shares_no_seed_and_says_what_the_plan_finds_and_takes(tmp_path, capsys):
    course = course_of(tmp_path, {"seeds": "5", "pilot": 2})
    course.run(parallel=3)
    pilot = {job.seed for job in course.jobs if job.phase == "pilot"}
    final = {job.seed for job in course.jobs if job.phase == "final"}
    assert pilot == {plan.PILOT_SEED, plan.PILOT_SEED + 1}
    assert not pilot & final
    said = capsys.readouterr().out
    assert "at 5 seeds, differences of" in said
    # 3 arms of 5 seeds, a minute each, three at a time
    assert said.strip().endswith("about 5:00")


def test_the_plan_is_sealed_before_the_first_job_that_counts(tmp_path):
    course = course_of(tmp_path, {"seeds": "3", "rule": "alibi < 0.7; none > alibi"})
    seen = []
    launch = course.launch
    course.launch = lambda jobs: (seen.append((tmp_path / seal.FILE).exists()), launch(jobs))
    course.run(parallel=1)
    assert seen == [True]
    text = verdict.answer(tmp_path, course.jobs, course.arms, course.settings, None)
    assert "the rule of the plan is kept: alibi <= 0.7: kept; none >= alibi: kept" in text
    (only,) = json.loads((tmp_path / seal.FILE).read_text())
    assert (only["rule"], only["seeds"]) == ("alibi < 0.7; none > alibi", "3")
    assert f"plan {only['hash']}" in text


def test_a_folder_counts_its_looks_and_spends_the_level_over_them(tmp_path):
    for seeds in (3, 5, 5, 10):
        course = course_of(tmp_path, {"seeds": str(seeds)})
        course.run(parallel=1)
        text = verdict.answer(tmp_path, course.jobs, course.arms, course.settings, None)
    assert json.loads((tmp_path / verdict.LOOKS).read_text()) == [3, 5, 10]
    assert "looked at 3 times, with 3, 5, 10 seeds" in text
    assert text.count("an earlier plan (") == 2


def test_every_task_has_a_table_of_its_own(tmp_path):
    arms = [
        Arm(f"{scheme} data={data}", (), {}, (("position", scheme), ("data", data)))
        for data in ("order", "copy")
        for scheme in ("rope", "none")
    ]
    order, copy = verdict.tasks_of(arms, None)
    assert (order.name, order.references) == ("data=order", {"none data=order": "rope data=order"})
    assert copy.references == {"none data=copy": "rope data=copy"}
    # Where data alone varies, it is what is asked about.
    alone = [Arm(data, (), {}, (("data", data),)) for data in ("order", "copy")]
    (task,) = verdict.tasks_of(alone, None)
    assert task.references == {"copy": "order"}


@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_equal_arms_are_not_told_apart_whatever_their_spread(tmp_path, spread):
    course = course_of(tmp_path, {"seeds": "4"}, {"rope": 1.0, "none": 1.0}, spread)
    course.run(parallel=1)
    text = verdict.answer(tmp_path, course.jobs, course.arms, course.settings, None)
    assert "not told apart" in text
