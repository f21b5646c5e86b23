import json

import pytest

from wherelm.ablation.seal import FILE, clauses, expect_arms, seal, verdict

RULE = "alibi <= 1.05; rope > 1.3; sinusoidal > rope"
SEEDS = range(5)


def values(**means):
    """Five seeds of each arm around its mean, in step with each other but for a little."""
    return {
        arm: {s: mean + (0.01 + 0.001 * i) * (s - 2) for s in SEEDS}
        for i, (arm, mean) in enumerate(means.items())
    }


def test_a_rule_is_kept_where_every_interval_lies_on_the_predicted_side():
    found, lines = verdict(RULE, values(alibi=0.95, rope=1.9, sinusoidal=9.0))
    assert found == "kept"
    assert lines == [
        "alibi <= 1.05: kept",
        "rope >= 1.3: kept",
        "sinusoidal >= rope: kept",
    ]


def test_a_rule_is_broken_by_one_clause_and_undecided_where_an_interval_holds_the_bound():
    assert verdict(RULE, values(alibi=1.2, rope=1.9, sinusoidal=9.0))[0] == "broken"
    found, lines = verdict(RULE, values(alibi=1.05, rope=1.9, sinusoidal=9.0))
    assert (found, lines[0]) == ("undecided", "alibi <= 1.05: undecided")
    assert verdict(RULE, values(alibi=1.05, rope=1.1, sinusoidal=9.0))[0] == "broken"


def test_two_arms_are_judged_on_the_seeds_that_both_have():
    # Seed by seed sinusoidal is above rope by 0.1, though both vary by 2.
    rope = {s: float(s) for s in SEEDS}
    sinusoidal = {s: rope[s] + 0.1 + 0.001 * s for s in SEEDS if s} | {9: -50.0}
    found, _ = verdict("sinusoidal > rope", {"rope": rope, "sinusoidal": sinusoidal})
    assert found == "kept"
    few = {arm: {s: v for s, v in own.items() if s < 2} for arm, own in values(rope=1.0).items()}
    assert verdict("rope < 5", few)[0] == "undecided"


def test_a_rule_that_cannot_be_read_or_names_no_arm_is_one_line():
    with pytest.raises(ValueError, match=r"ablation\.rule=alibi is best: 'alibi is best' cannot"):
        clauses("alibi is best")
    with pytest.raises(ValueError, match="no arm is called sinusoidal; expected alibi, rope"):
        expect_arms(RULE, ["alibi", "rope"])
    expect_arms(RULE, ["alibi", "rope", "sinusoidal"])


def test_a_changed_plan_is_a_new_plan_and_both_are_kept(tmp_path):
    plan = {"metric": "test.loss", "seeds": 5, "arms": {"rope": "a1b2c3"}}
    (first,) = seal(tmp_path, plan)
    assert seal(tmp_path, dict(reversed(plan.items()))) == [first]
    both = seal(tmp_path, plan | {"seeds": 10})
    assert [p["seeds"] for p in both] == [5, 10]
    assert both[0] == first
    assert both[0]["hash"] != both[1]["hash"]
    assert json.loads((tmp_path / FILE).read_text()) == both
