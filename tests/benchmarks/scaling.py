"""How the cost of a training step grows: context, width, layers, batch and vocabulary, each alone.

A step is forward, loss, backward and the update of the default optimiser, on full rows of random
tokens. Points of an axis take turns in one process; peak memory needs a process for each.
Exponents are slopes in log-log, over the larger half of an axis and over its last step, beside that
of the operations which a step has to do and the largest that theory allows: where the measured one
is larger, something is done more often than it has to be.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch
from tqdm import tqdm

from tests.benchmarks.decoders import decoder, full_rows
from tests.benchmarks.measure import (
    ROOT,
    Times,
    circumstances,
    in_turns,
    left_out,
    spread,
    write,
)
from wherelm import runtime
from wherelm.optim.optimizer import OPTIMIZERS, Optimizer
from wherelm.optim.schedules import SCHEDULES
from wherelm.optim.updates import POLAR_EXPRESS
from wherelm.training.steps import accumulate

HEAD_WIDTH = 32
PROCESSES = 3  # at most, to take the median peak memory of
LAP = 0.6  # seconds at least: the kernel counts processor time in hundredths
SURPRISE = 0.1  # of an exponent, above the largest that is expected


@dataclass(frozen=True)
class Point:
    """A training step: rows of `context` tokens that make `batch` tokens together."""

    context: int = 256
    width: int = 128
    layers: int = 4
    batch: int = 4096
    vocabulary: int = 4096

    @property
    def operations(self) -> float:
        """Multiplications and additions a token, of the matrix products alone.

        Forward and backward six for each weight; attention reads half of the context, once for the
        scores and once for the values; Muon makes three square products in each of its iterations.
        """
        weights = 6 * self.layers * self.width**2 + self.vocabulary * self.width
        attention = 3 * self.layers * 4 * self.width * self.context / 2
        muon = 6 * self.layers * len(POLAR_EXPRESS) * 3 * 2 * self.width**3
        return 6 * weights + attention + muon / self.batch


BASE = Point()
AXES = {
    "context": (64, 128, 256, 512, 1024, 2048, 4096),
    "width": (32, 64, 128, 256, 512),
    "layers": (1, 2, 4, 8, 16),
    "batch": (1024, 2048, 4096, 8192, 16384),
    "vocabulary": (256, 1024, 4096, 16384, 65536),
}
UNITS = {"context": "context, tokens", "batch": "batch, tokens a step"}
# The largest exponents that a step of full rows has to have: seconds a token, and peak memory.
# Attention reads the context once a token and holds nothing of its square; weights, gradients and
# moments go with the square of the width, all else with the width.
MOST = {
    "context": (1.0, 0.0),
    "width": (2.0, 2.0),
    "layers": (1.0, 1.0),
    "batch": (0.0, 1.0),
    "vocabulary": (1.0, 1.0),
}


def points(axis: str) -> list[Point]:
    return [replace(BASE, **{axis: value}) for value in AXES[axis]]


class Trained:
    """The default model and optimiser at a point, and one batch that it trains on again."""

    def __init__(self, point: Point):
        shape = {"layers": point.layers, "width": point.width, "context": point.context}
        shape |= {"heads": point.width // HEAD_WIDTH, "mlp_width": point.width}
        cpu, rows = torch.device("cpu"), point.batch // point.context
        self.model = decoder("small", "rope", point.vocabulary, cpu, shape)
        self.optimizer = Optimizer(self.model, OPTIMIZERS["muon"][0](), SCHEDULES["wsd"]())
        self.config = SimpleNamespace(model=self.model.config, seed=0)
        self.batch = full_rows(rows, point.context, point.vocabulary, cpu)

    def steps(self, count: int) -> int:
        """Trains so many steps; returns the number of tokens."""
        for _ in range(count):
            accumulate(self.model, [self.batch], self.config, 0, contextlib.nullcontext())
            self.optimizer.step(0.5, 1.0)
        return count * self.batch.targets


def job(point: Point) -> Callable[[], int]:
    """A lap at this point; the first steps, which allocate and choose kernels, are done."""
    trained = Trained(point)
    trained.steps(2)
    started = time.perf_counter()
    trained.steps(1)
    count = math.ceil(LAP / (time.perf_counter() - started))
    return lambda: trained.steps(count)


def peak_memory(axis: str, value: int) -> float:
    """MB that three steps take, in a process of their own, beyond the program that does them."""
    command = [sys.executable, "-m", "tests.benchmarks.scaling", "--memory-of", axis, str(value)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return float(output.splitlines()[-1])


def report_memory(axis: str, value: int) -> None:
    runtime.keep_freed_memory()
    # Libraries and threads come with the first step, however small it is.
    Trained(Point(context=64, width=HEAD_WIDTH, layers=1, batch=64, vocabulary=64)).steps(1)
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = resident_pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    Trained(replace(BASE, **{axis: value})).steps(3)
    # Not getrusage's: that one keeps what the starting process held.
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**10
    print(peak - before)


def measured_memory(rounds: int) -> dict[Point, float]:
    """Peak memory at every point of all axes, the median of so many processes."""
    places = {replace(BASE, **{axis: v}): (axis, v) for axis in AXES for v in AXES[axis]}
    return {
        point: median(peak_memory(*place) for _ in range(rounds))
        for point, place in tqdm(places.items(), "memory", disable=None)
    }


def exponent(values: Sequence[float], costs: Sequence[float], last: int | None = None) -> float:
    """The slope of log cost against log value over the last so many points (the larger half)."""
    first = -last if last else len(values) // 2
    return float(np.polyfit(np.log(values[first:]), np.log(costs[first:]), 1)[0])


@dataclass(frozen=True)
class Growth:
    """An axis: seconds a token in every round by value, peak memory in MB by value."""

    axis: str
    times: Times
    memory: list[float]

    @property
    def values(self) -> tuple[int, ...]:
        return AXES[self.axis]

    @property
    def seconds(self) -> list[float]:
        """Median seconds a token, by value."""
        return [median(rounds) for rounds in self.times.seconds.values()]

    def exponents(self, last: int | None = None) -> list[float]:
        """Of seconds a token, in every round."""
        rounds = zip(*self.times.seconds.values(), strict=True)
        return [exponent(self.values, seconds, last) for seconds in rounds]

    @property
    def operations(self) -> float:
        """The exponent of the operations a token."""
        return exponent(self.values, [point.operations for point in points(self.axis)])

    @property
    def surprises(self) -> list[str]:
        """What grows faster than it has to, over the larger half or the last step."""
        names = ("time", "memory")
        grown = [max(exponent(self.values, c, k) for k in (None, 2)) for c in self.costs]
        largest = zip(names, grown, MOST[self.axis], strict=True)
        return [name for name, measured, most in largest if measured > most + SURPRISE]

    @property
    def costs(self) -> tuple[list[float], list[float]]:
        """Median seconds a token, and MB."""
        return self.seconds, self.memory


def grow(axis: str, rounds: int, memory: dict[Point, float]) -> Growth:
    """Measures the time of an axis."""
    jobs = {str(value): job(p) for value, p in zip(AXES[axis], points(axis), strict=True)}
    return Growth(axis, in_turns(jobs, rounds, axis), [memory[point] for point in points(axis)])


def draw(grown: Sequence[Growth], path: Path) -> None:
    """Measured points, and the expected slopes from where the larger half begins."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    figure = Figure(figsize=(3.1 * len(grown), 6))
    axes = figure.subplots(2, len(grown), sharey="row")
    units = ((1e6, "microseconds a token"), (1.0, "peak memory, MB"))
    for column, growth in enumerate(grown):
        for row, (factor, label) in enumerate(units):
            costs, expected = np.array(growth.costs[row]) * factor, MOST[growth.axis][row]
            measured = exponent(growth.values, costs)
            panel = axes[row, column]
            half = len(growth.values) // 2
            larger = np.array(growth.values[half:], dtype=float)
            slopes = [(expected, "--", f"at most {expected:.0f}")]
            if row == 0:
                slopes.append((growth.operations, ":", f"operations {growth.operations:.2f}"))
            for slope, style, name in slopes:
                line = costs[half] * (larger / larger[0]) ** slope
                panel.plot(larger, line, style, color="0.35", label=name)
            panel.plot(growth.values, costs, "o-", color="C0", label=f"measured {measured:.2f}")
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.xaxis.set_major_locator(FixedLocator(growth.values))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.set_xticklabels([f"{value:,}" for value in growth.values], rotation=45)
            panel.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_locator(NullLocator())
            panel.grid(alpha=0.25)
            panel.legend(frameon=False, fontsize=8, loc="upper left")
            if row == 0:
                panel.set_title(UNITS.get(growth.axis, growth.axis))
            if column == 0:
                panel.set_ylabel(label)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def table(grown: Sequence[Growth], rounds: int) -> str:
    """The report, as Markdown."""
    lines = [
        "# How the cost of training grows",
        "",
        "![Time a token and peak memory against each axis](scaling.png)",
        "",
        "A training step (forward, loss, backward, update by Muon) of the default model's shape: "
        f"context {BASE.context}, width {BASE.width} (heads of {HEAD_WIDTH}, MLP as wide), "
        f"{BASE.layers} layers, {BASE.batch:,} tokens a step, vocabulary {BASE.vocabulary:,}, "
        "float32, rows full of random tokens; one of these varied at a time. Exponents are slopes "
        "in log-log over the larger half of the axis. Operations are those of the matrix products: "
        "6 a weight, attention over half of the context, Muon's iterations shared among the tokens "
        f"of a step. Medians of {rounds} rounds, in brackets the smallest and the largest. Memory "
        f"is beyond that of the loaded program, the median of {min(rounds, PROCESSES)} processes. "
        + left_out([growth.times for growth in grown]),
        "",
        "| axis | time a token, exponent | over the last step | of the operations | at most "
        "| memory, exponent | at most | faster than expected |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for growth in grown:
        cells = (
            growth.axis,
            spread(growth.exponents()),
            spread(growth.exponents(last=2)),
            f"{growth.operations:.2f}",
            f"{MOST[growth.axis][0]:.0f}",
            f"{exponent(growth.values, growth.memory):.2f}",
            f"{MOST[growth.axis][1]:.0f}",
            ", ".join(growth.surprises) or "nothing",
        )
        lines.append(f"| {' | '.join(cells)} |")
    for growth in grown:
        lines += [
            "",
            f"| {growth.axis} | tokens/s | Gflop/s of matrix products | peak memory, MB |",
            "| ---: | ---: | ---: | ---: |",
        ]
        for value, point, memory in zip(
            growth.values, points(growth.axis), growth.memory, strict=True
        ):
            rates = growth.times.rates(str(value), 1)
            reached = point.operations * median(rates) / 1e9
            cells = (f"{value:,}", spread(rates, ",.0f"), f"{reached:.0f}", f"{memory:.0f}")
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", circumstances("scaling", torch.device("cpu"), ["matplotlib"]), ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.scaling", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds to take the median of")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected 1 or more")
    if options.memory_of:
        axis, value = options.memory_of
        report_memory(axis, int(value))
        return 0
    runtime.keep_freed_memory()
    memory = measured_memory(min(options.rounds, PROCESSES))
    grown = [grow(axis, options.rounds, memory) for axis in AXES]
    write(table(grown, options.rounds), "scaling")
    draw(grown, ROOT / "data" / "results" / "scaling.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
