import os
import signal
from pathlib import Path

import pytest
import torch

from wherelm import runtime
from wherelm.runtime import (
    autocast,
    choose_device,
    choose_precision,
    keep_freed_memory,
    peak_memory_mb,
    reset_peak_memory,
    stop_on_signals,
)


def test_auto_takes_a_device_that_is_here():
    device = choose_device("auto")
    assert torch.zeros(2, device=device).sum() == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_an_absent_device_is_one_line_that_names_the_present_ones():
    with pytest.raises(ValueError, match=r"training\.device=cuda: not on this machine.*cpu"):
        choose_device("cuda")


def test_precision_given_by_name_is_kept():
    cpu = torch.device("cpu")
    assert choose_precision("bfloat16", cpu) == "bfloat16"
    assert choose_precision("auto", cpu) in ("float32", "bfloat16")


def test_autocast_multiplies_in_bfloat16_and_can_be_entered_again():
    a = torch.ones(4, 4)
    context = autocast("bfloat16", torch.device("cpu"))
    for _ in range(2):
        with context:
            assert (a @ a).dtype == torch.bfloat16
    with autocast("float32", torch.device("cpu")):
        assert (a @ a).dtype == torch.float32


def test_keeping_memory_never_fails():
    keep_freed_memory()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_noted_and_handlers_come_back(number, code):
    former = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.exit_code == code
        assert signal.getsignal(number) is former
    assert signal.getsignal(number) is former


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak to reset here")
def test_the_peak_of_memory_is_that_of_the_present_job_alone():
    cpu, mb = torch.device("cpu"), 2**20 // 4

    def peak_with(size_mb):
        reset_peak_memory(cpu)
        before = peak_memory_mb(cpu)
        held = torch.ones(size_mb * mb)
        peak = peak_memory_mb(cpu)
        del held
        assert peak_memory_mb(cpu) == pytest.approx(peak, abs=2)  # the kernel counts in batches
        return peak - before

    assert peak_with(200) == pytest.approx(200, abs=10)
    assert peak_with(100) == pytest.approx(100, abs=10)


def test_more_threads_than_a_machine_can_start_are_refused(monkeypatch):
    for cores, most in ((2, 64), (128, 512)):
        monkeypatch.setattr(runtime.os, "cpu_count", lambda cores=cores: cores)
        assert runtime.choose_threads(most) == most
        with pytest.raises(ValueError, match=f"at most {most} on this machine of {cores} cores"):
            runtime.choose_threads(most + 1)
    assert runtime.choose_threads(None) == torch.get_num_threads()
