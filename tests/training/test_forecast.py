import re
import time
from datetime import datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest

from wherelm.training.forecast import READING, Forecast, duration, moment


def forecast(started=None, share=0.0, every=100, validation=3000, test=6000):
    stores = {
        split: SimpleNamespace(lengths=np.array([size // 3] * 3))
        for split, size in {"train": 9, "validation": validation, "test": test}.items()
    }
    config = SimpleNamespace(
        evaluation=SimpleNamespace(every=every), final_splits=("validation", "test")
    )
    data = SimpleNamespace(stores=stores)
    return Forecast(config, data, time.perf_counter() if started is None else started, share)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_forecast_adds_steps_and_measurements_and_leaves_out_the_first_step(share, monkeypatch):
    shown = []
    monkeypatch.setattr("wherelm.training.forecast.log.info", lambda *parts: shown.append(parts))
    told = forecast(time.perf_counter() - 70, share)
    for step in range(1, 100):
        told.note(share + step / 1000, 60.0 if step == 1 else 0.1, 1000)
        if shown:
            break
    steps = (1 - share) * 1000 - step
    assert 3 <= step / 1000 * 100 <= 4
    evaluations = int(steps / 100) + 1
    left = steps * 0.1 + (3000 * evaluations + 6000) / (1000 / 0.1 * READING)
    ((_, about, until),) = shown
    assert about == duration(70 + left)
    ends = [datetime.now() + timedelta(seconds=left - late) for late in (0, 60)]
    assert until in [moment(end) for end in ends]
    told.note(0.9, 0.1, 1000)
    assert len(shown) == 1


def test_slow_steps_are_told_of_after_seconds_and_quick_ones_after_several(monkeypatch):
    shown = []
    monkeypatch.setattr("wherelm.training.forecast.log.info", lambda *parts: shown.append(parts))
    slow = forecast()
    slow.note(1 / 1000, 6.0, 1000)
    assert not shown
    slow.note(2 / 1000, 6.0, 1000)
    assert len(shown) == 1
    quick = forecast()
    for step in range(1, 9):
        quick.note(step / 20, 0.1, 1000)
    assert len(shown) == 1
    quick.note(9 / 20, 0.1, 1000)
    assert len(shown) == 2


def test_times_are_said_as_one_would():
    said = [duration(seconds) for seconds in (0.2, 59.6, 134, 298, 5000, 10800, 360000)]
    assert said == ["1 s", "60 s", "2 min 10 s", "5 min", "83 min", "3.0 h", "4.2 days"]
    today = datetime.now().replace(hour=23, minute=59)
    assert moment(today) == "23:59"
    assert re.fullmatch(r"\w+ \d\d \w+, 23:59", moment(today + timedelta(days=1)))
