import itertools
from pathlib import Path

import pytest
import torch

from tests.training.test_loop import config
from wherelm.training import cost


def test_all_take_turns_and_a_disturbed_round_does_not_set_the_price(monkeypatch):
    clock, order = [0.0], []
    disturbed = itertools.count()

    def stepper(seconds, root):
        def step():
            order.append(seconds)
            # A busy minute of the machine.
            clock[0] += 100.0 if next(disturbed) == 40 else seconds

        return step

    monkeypatch.setattr(cost, "stepper", stepper)
    monkeypatch.setattr(cost.time, "perf_counter", lambda: clock[0])
    assert cost.step_seconds([1.0, 3.0], Path(), None) == pytest.approx([1.0, 3.0])
    rounds = order[2 * cost.WARM_UP :]
    assert rounds == ([1.0] * cost.STEPS + [3.0] * cost.STEPS) * cost.ROUNDS


def test_a_measured_step_is_a_training_step_and_threads_are_given_back(tmp_path):
    threads = torch.get_num_threads()
    seconds = cost.step_seconds([config(tmp_path), config(tmp_path)], tmp_path, 1)
    assert len(seconds) == 2
    assert min(seconds) > 0
    assert torch.get_num_threads() == threads
    assert not (tmp_path / "run").exists()
