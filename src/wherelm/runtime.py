"""The machine: device, precision, threads, memory and signals."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

PRECISIONS = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cuda", "mps", "cpu")
MOST_THREADS = 64  # on a small machine; on others four a core


def choose_device(name: str) -> torch.device:
    """`auto` takes cuda, else mps, else the CPU."""
    here = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return torch.device(next(kind for kind, present in here.items() if present))
    if not here[name]:
        present = ", ".join(kind for kind, yes in here.items() if yes)
        raise ValueError(f"training.device={name}: not on this machine, which has {present}")
    return torch.device(name)


def choose_precision(name: str, device: torch.device) -> str:
    """`auto` takes bfloat16 where the machine multiplies it faster than float32."""
    if name != "auto":
        return name
    return "bfloat16" if multiplies_bfloat16(device) else "float32"


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the machine multiplies bfloat16 faster than float32.

    On a CPU that takes AVX-512 BF16 (a few times as fast) or AMX; without, torch emulates it.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    units = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return device.type == "cpu" and any(getattr(torch.cpu, unit, bool)() for unit in units)


def choose_threads(asked: int | None) -> int:
    """As many as asked for, else as torch takes; ValueError for more than a machine can start."""
    cores = os.cpu_count() or 1
    most = max(MOST_THREADS, 4 * cores)
    if asked is not None and asked > most:
        raise ValueError(
            f"training.threads={asked}: expected at most {most} on this machine of {cores} cores; "
            "more threads than cores are slower"
        )
    return asked or torch.get_num_threads()


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager:
    """Matrix products in bfloat16; parameters, norms and losses stay float32."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def keep_freed_memory() -> None:
    """Lets glibc keep what tensors give back, instead of asking the kernel for fresh pages.

    Activations come and go at the same sizes every step; without this a large part of a small
    model's step on a CPU is page faults. Elsewhere than on glibc nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 << 20)  # glibc refuses more
        libc.mallopt(trim_threshold, 1 << 30)


def expect_compiler(device: torch.device) -> None:
    """ValueError where `torch.compile` would find no compiler of C++, which it needs on a CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    if device.type == "cpu":
        try:
            get_cpp_compiler()
        except Exception as error:
            raise ValueError(
                "training.compile=true: no C++ compiler found; install g++, or name one with the "
                "environment variable CXX, or give training.compile=false"
            ) from error


def reset_peak_memory(device: torch.device) -> None:
    """Lets `peak_memory_mb` begin anew, where the system can: a sweep runs several jobs in one."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what `keep_freed_memory` kept of the job before
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb(device: torch.device) -> float | None:
    """The most memory held at one time, in MB of 2^20 bytes: of tensors on CUDA, else the process.

    None on a system that does not say.
    """
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    status = Path("/proc/self/status")
    if status.is_file():
        # What getrusage tells survives exec: a child would report its parent's peak.
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return round(int(line.split()[1]) / 2**10, 1)
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(most / 2 ** (20 if sys.platform == "darwin" else 10), 1)


class StopRequest:
    """Set by Ctrl-C or SIGTERM: the loop finishes its step, saves and stops."""

    signal_number: int | None = None

    @property
    def exit_code(self) -> int:
        """130 after SIGINT, 143 after SIGTERM, 0 without."""
        return 0 if self.signal_number is None else 128 + self.signal_number

    def __bool__(self) -> bool:
        return self.signal_number is not None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Notes the first signal; a second one ends the process as usual."""
    request = StopRequest()
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number, frame):
        request.signal_number = number
        for each, handler in former.items():
            signal.signal(each, handler)

    for number in former:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
