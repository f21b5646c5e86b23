import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from wherelm.training.tracking import Tracker, cut_back, draw_curve


def config(name="none", mode="offline"):
    return SimpleNamespace(name="test", tracking=SimpleNamespace(name=name, mode=mode, project="p"))


def test_every_line_is_one_object_and_there_at_once(tmp_path):
    tracker = Tracker(tmp_path, config())
    tracker.write(step=1, loss=2.0)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 2.0}
    tracker.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_an_error_that_names_the_file_and_is_not_met_again(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = Tracker(tmp_path, config())
    with pytest.raises(OSError, match="No space left on device") as error:
        tracker.write(step=1, loss=2.0)
    assert error.value.filename == str(tmp_path / "metrics.jsonl")
    tracker.close()


def test_resuming_appends_and_a_new_run_starts_empty(tmp_path):
    for resumed_at, expected in ((None, [1]), (1, [1, 1]), (None, [1])):
        tracker = Tracker(tmp_path, config(), resumed_at)
        tracker.write(step=1, loss=2.0)
        tracker.close()
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == expected


def test_cutting_back_drops_later_final_and_broken_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 3}\n{"step": 2}\n{"step": 2, "final": true}\n{"st')
    cut_back(tmp_path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_the_curve_is_a_picture(tmp_path):
    tracker = Tracker(tmp_path, config())
    for step in range(1, 9):
        tracker.write(step=step, loss=3 / step, targets=step * 10)
    tracker.write(step=8, split="validation", loss=0.5, targets=80)
    tracker.close()
    draw_curve(tmp_path)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_wandb_without_a_key_goes_on_offline_after_one_warning(tmp_path, monkeypatch, caplog):
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    started = []
    run = SimpleNamespace(log=lambda *a, **k: started.append(a), finish=lambda: None)

    def init(**options):
        started.append(options["mode"])
        return run

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr("wherelm.training.tracking.wandb_key", lambda: None)
    monkeypatch.setattr("wherelm.training.tracking.plain", lambda config: {})
    with caplog.at_level(logging.WARNING):
        tracker = Tracker(tmp_path, config("wandb", "online"))
    tracker.write(step=1, loss=1.0)
    tracker.close()
    assert started[0] == "offline"
    assert started[1] == ({"train/step": 1, "train/loss": 1.0},)
    assert len(caplog.records) == 1
