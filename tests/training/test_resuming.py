import json
import signal

import pytest
import torch

from tests.training.test_loop import config, metrics, stop_at, weights
from wherelm import checkpoint
from wherelm.config import load_yaml
from wherelm.training import loop as training


@pytest.fixture
def fit(tmp_path):
    def run(name, resume=False, **changes):
        return training.fit(config(tmp_path, **changes), tmp_path / name, tmp_path, resume)

    return run


def length(steps, **schedule):
    return {"training": {"steps": steps}, "schedule": {"warmup": 0.0, **schedule}}


def same_weights(one, other):
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, weights(other)[name]), name


def test_a_finished_run_of_a_constant_rate_trained_longer_equals_a_long_one(fit, tmp_path, caplog):
    fit("straight", **length(18, name="constant"))
    fit("longer", **length(8, name="constant"))
    assert (tmp_path / "longer" / "summary.json").exists()
    caplog.clear()
    with caplog.at_level("INFO"):
        summary = fit("longer", resume=True, **length(18, name="constant"))
    assert "goes on to training.steps=18, before training.steps=8" in caplog.text
    assert (summary["status"], summary["step"]) == ("complete", 18)
    assert load_yaml(tmp_path / "longer" / "config.yaml")["training"]["steps"] == 18
    same_weights(tmp_path / "straight", tmp_path / "longer")
    steps = [line["step"] for line in metrics(tmp_path / "longer") if "split" not in line]
    assert steps == list(range(1, 19))


@pytest.mark.parametrize("key", ["epochs", "tokens"])
def test_every_kind_of_length_can_grow(fit, tmp_path, key):
    def changes(value):
        none = {"steps": None, key: value}
        return {"training": none, "schedule": {"name": "constant", "warmup": 0.0}}

    short, long = {"epochs": (0.5, 1.0), "tokens": (1000, 2500)}[key]
    fit("straight", **changes(long))
    before = fit("longer", **changes(short))
    after = fit("longer", resume=True, **changes(long))
    assert before["step"] < after["step"]
    same_weights(tmp_path / "straight", tmp_path / "longer")


def test_a_decay_that_has_not_begun_can_be_put_off_and_one_that_has_cannot(
    fit, tmp_path, monkeypatch
):
    wsd = {"name": "wsd", "cooldown": 0.5}
    fit("straight", **length(20, **wsd))
    for step, allowed in ((6, True), (7, False)):
        with monkeypatch.context() as patch:
            stop_at(patch, step, signal.SIGINT)
            fit(f"stopped {step}", **length(12, **wsd))
        if allowed:
            fit(f"stopped {step}", resume=True, **length(20, **wsd))
            same_weights(tmp_path / "straight", tmp_path / f"stopped {step}")
            continue
        before = (tmp_path / f"stopped {step}" / "summary.json").read_bytes()
        with pytest.raises(ValueError, match=r"at step 7, .*schedule=wsd .* 83%"):
            fit(f"stopped {step}", resume=True, **length(20, **wsd))
        assert (tmp_path / f"stopped {step}" / "summary.json").read_bytes() == before
        fit(f"stopped {step}", resume=True, **length(12, **wsd))


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_a_run_that_has_decayed_is_not_trained_longer(fit, name):
    fit("run", **length(4, name=name))
    with pytest.raises(ValueError, match=rf"schedule={name} of training.steps=4 has lowered .* 0%"):
        fit("run", resume=True, **length(8, name=name))
    with pytest.raises(ValueError, match=r"this run is complete, with 4 steps$"):
        fit("run", resume=True, **length(4, name=name))


def test_what_another_length_cannot_mean_is_refused(fit):
    constant = length(4, name="constant")
    fit("run", **constant)
    with pytest.raises(ValueError, match=r"with 4 steps; a larger training\.steps trains"):
        fit("run", resume=True, **constant)
    for steps in (2, 3):
        with pytest.raises(ValueError, match="step 4 has reached it already"):
            fit("run", resume=True, **length(steps, name="constant"))
    with pytest.raises(ValueError, match=r"in the warm-up of training.steps=40 .*=0.5\)"):
        fit("run", resume=True, **length(40, name="constant", warmup=0.5))
    position = {"position": {"name": "drope", "drop_at": 0.5}}
    fit("dropped", **constant, **position)
    with pytest.raises(ValueError, match="position=drope changes after a share of the run"):
        fit("dropped", resume=True, **length(8, name="constant"), **position)


def test_a_longer_run_that_was_killed_goes_on_to_its_new_length(fit, tmp_path, monkeypatch):
    fit("run", **length(6, name="constant"))
    with monkeypatch.context() as patch:
        patch.setattr(training, "accumulate", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit("run", resume=True, **length(12, name="constant"))
    assert not (tmp_path / "run" / "summary.json").exists()
    assert load_yaml(tmp_path / "run" / "config.yaml")["training"]["steps"] == 12
    assert json.loads((checkpoint.last(tmp_path / "run") / "state.json").read_text())["step"] == 6
    assert fit("run", resume=True, **length(12, name="constant"))["step"] == 12
