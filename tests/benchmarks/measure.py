"""What all benchmarks share: opponents that take turns, disturbed rounds left out, medians.

Everything is measured in one run, A B A B …, so that a machine that slows down slows all. The
kernel's count of busy processor time, less that of this process and its children, is what others
took meanwhile: a round in which they took more than DISTURBED of the machine is left out and run
again.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from wherelm import runtime

ROOT = Path(__file__).resolve().parents[2]
DISTURBED = 0.05  # of the machine's processor time
TRIES = 4  # at most so many times the rounds asked for

Work = Callable[[], object]


def busy_seconds() -> float | None:
    """Processor seconds, over all processors, that anybody used since the start; None if untold.

    User, nice, system, interrupts, and what the host took from a virtual machine ("steal").
    """
    counters = Path("/proc/stat")
    if not counters.is_file():
        return None
    user, nice, system, _idle, _wait, *taken = map(
        int, counters.read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + sum(taken)) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Processor seconds of this process and of the children that it waited for."""
    return sum(os.times()[:4])


@dataclass(frozen=True)
class Lap:
    """One call: its wall seconds (a unit), and the share of the machine that others used."""

    seconds: float
    others: float


class Watch:
    """Runs from its making on."""

    def __init__(self):
        self.busy, self.own, self.started = busy_seconds(), own_seconds(), time.perf_counter()

    def lap(self, units: int = 1) -> Lap:
        """The time so far for one of so many units."""
        seconds = time.perf_counter() - self.started
        if self.busy is None:
            return Lap(seconds / units, 0.0)
        others = busy_seconds() - self.busy - (own_seconds() - self.own)
        return Lap(seconds / units, max(0.0, others) / (seconds * os.cpu_count()))


def lap(work: Work) -> Lap:
    """Runs `work` once, until the device is done; where it returns a number, seconds are for one.

    It should take half a second or more: the kernel counts in hundredths. Work that times itself,
    in a process of its own, returns the lap.
    """
    watch = Watch()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (
        result if isinstance(result, Lap) else watch.lap(result if isinstance(result, int) else 1)
    )


@dataclass(frozen=True)
class Times:
    """Seconds of every job in each round that counts, and how many rounds were left out.

    `disturbed` is the largest share of the machine that others took in a round that counts.
    """

    seconds: dict[str, list[float]]
    left_out: int
    disturbed: float

    def rates(self, name: str, units: float) -> list[float]:
        """Units a second in every round."""
        return [units / seconds for seconds in self.seconds[name]]

    def ratios(self, name: str, opponent: str) -> list[float]:
        """How many times as fast as the opponent in the same round."""
        pairs = zip(self.seconds[opponent], self.seconds[name], strict=True)
        return [theirs / ours for theirs, ours in pairs]


def in_turns(jobs: dict[str, Work], rounds: int, label: str) -> Times:
    """Times all jobs, round after round; each round starts at another job.

    Rounds that others disturbed are repeated, up to TRIES times as many as asked; where even that
    leaves too few, the least disturbed ones count.
    """
    names = list(jobs)
    measured: list[tuple[float, dict[str, Lap]]] = []
    with tqdm(total=rounds, desc=label, disable=None) as bar:
        for number in range(TRIES * rounds):
            start = number % len(names)
            laps = {name: lap(jobs[name]) for name in names[start:] + names[:start]}
            others = max(lap.others for lap in laps.values())
            measured.append((others, laps))
            bar.update(others <= DISTURBED)
            if sum(others <= DISTURBED for others, _ in measured) == rounds:
                break
    kept = sorted(measured, key=lambda pair: pair[0])[:rounds]
    return Times(
        {name: [laps[name].seconds for _, laps in kept] for name in names},
        left_out=len(measured) - rounds,
        disturbed=kept[-1][0],
    )


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """The median, and in brackets the smallest and the largest."""
    low, middle, high = (format(f(values), form) for f in (min, median, max))
    return f"{middle} ({low} – {high})"


def machine(device: torch.device) -> str:
    """The processor in words, and what its matrix products can use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
    bfloat16 = ", bfloat16" if runtime.multiplies_bfloat16(device) else ""
    return f"{name} ({torch.backends.cpu.get_cpu_capability()}{bfloat16})"


def circumstances(name: str, device: torch.device, packages: Sequence[str] = ()) -> str:
    """Machine, threads, versions and the command, for the foot of a table."""
    threads = torch.get_num_threads()
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    versions += [f"{package} {version(package)}" for package in packages]
    command = shlex.join(["python", "-m", f"tests.benchmarks.{name}", *sys.argv[1:]])
    return (
        f"{machine(device)}; {threads} thread{'s' if threads > 1 else ''}; "
        f"{', '.join(versions)}; `{command}`."
    )


def left_out(several: Sequence[Times]) -> str:
    """How many rounds other processes disturbed, and whether any such round had to count."""
    text = f"{sum(times.left_out for times in several)} disturbed rounds left out"
    worst = max(times.disturbed for times in several)
    if worst > DISTURBED:
        text += f", but others took {worst:.0%} of the machine in one that counts"
    return text + "."


def write(report: str, name: str) -> None:
    """Prints a report and keeps it in data/results/NAME.md."""
    path = ROOT / "data" / "results" / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report, encoding="utf-8")
    print(report)
