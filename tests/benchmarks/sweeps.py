"""What a sweep costs beside training, and whether two jobs at once pay on this machine.

Sweeps run as processes of their own, from their launch to their end. Training is the time of the
jobs' own steps, as metrics.jsonl tells it; evaluation is what a pass over validation takes
afterwards, times the passes made; the rest is everything else: starting Python and importing,
composing the jobs, reading what is tokenised, saving, samples, pictures and tables.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from tests.benchmarks.measure import (
    ROOT,
    Times,
    circumstances,
    in_turns,
    lap,
    left_out,
    spread,
    write,
)
from wherelm import checkpoint, pipeline, runtime
from wherelm.ablation.folder import cores
from wherelm.evaluation.measures import evaluate

MOST_OUTSIDE = 0.05
ONE, TWO = "one job of all threads", "as many jobs of one thread"
JOBS = ("position=rope,none,alibi", "ablation.seeds=4")
FEWER = ("position=rope,none", "ablation.seeds=2")


def sweep(folder: Path, steps: int, *more: str) -> None:
    """A sweep of short runs on errands; what is tokenised already is found again."""
    command = [
        *(sys.executable, "train.py", "-m", *more, f"hydra.sweep.dir={folder}"),
        *(f"training.steps={steps}", f"evaluation.every={steps}"),
        "evaluation.splits=[validation]",
    ]
    subprocess.run(
        command,
        cwd=ROOT,
        check=True,
        capture_output=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )


def training_seconds(folder: Path) -> float:
    """Seconds that a job spent in steps, by its own record."""
    seconds, targets = 0.0, 0
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if "split" not in line:
            seconds += (line["targets"] - targets) / line["targets_per_second"]
            targets = line["targets"]
    return seconds


def evaluation_seconds(folder: Path) -> float:
    """One pass over validation with the last weights of a job."""
    loaded = checkpoint.load(checkpoint.last(folder))
    config = loaded.config
    store = pipeline.prepare(config, ROOT, ["validation"], loaded.tokenizer).stores["validation"]
    precision = runtime.choose_precision(config.training.precision, torch.device("cpu"))
    autocast = runtime.autocast(precision, torch.device("cpu"))
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        evaluate(loaded.model, store, loaded.tokenizer, config.evaluation.batch_tokens, autocast)
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def overhead(folder: Path, steps: int) -> tuple[str, float]:
    """A line of the first table, and the share of the machine that others took."""
    one = lap(lambda: sweep(folder, steps, *JOBS))
    jobs = [path.parent for path in folder.glob("*/metrics.jsonl")]
    training = sum(map(training_seconds, jobs))
    evaluation = len(jobs) * evaluation_seconds(jobs[0])  # at the last step alone
    rest = one.seconds - training - evaluation
    cells = [f"{len(jobs)} jobs of {steps} steps", f"{one.seconds:.0f}"]
    cells += [f"{part:.0f} ({part / one.seconds:.1%})" for part in (training, evaluation, rest)]
    cells += [f"{1 - training / one.seconds:.1%}", f"{rest / len(jobs):.2f}"]
    return f"| {' | '.join(cells)} |", one.others


def at_once(folder: Path, steps: int, rounds: int) -> Times:
    """The same jobs one after another with all threads, and side by side with one thread each."""
    number = itertools.count()

    def run(*more: str) -> None:
        sweep(folder / str(next(number)), steps, *FEWER, *more)

    every = (f"hydra.launcher.n_jobs={cores()}", "hydra/launcher=joblib")
    return in_turns({ONE: run, TWO: lambda: run(*every)}, rounds, "at once")


def report(line: str, others: float, times: Times, steps: int) -> str:
    lines = [
        "# Sweeps",
        "",
        f"`python train.py -m {' '.join(JOBS)}` on errands, from launch to end; others took "
        f"{others:.1%} of the machine. Seconds, all jobs together; wanted: at most "
        f"{MOST_OUTSIDE:.0%} outside training steps.",
        "",
        "| | whole | training steps | evaluation | rest | outside training | rest a job |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        line,
        "",
        f"Four jobs of {steps} steps, each sweep from launch to end. Medians (smallest – largest); "
        "ratios within a round.",
        "",
        "| | seconds | times as fast |",
        "| --- | ---: | ---: |",
        f"| {ONE} | {spread(times.seconds[ONE], '.1f')} | 1 |",
        f"| {TWO} (`hydra/launcher=joblib`) | {spread(times.seconds[TWO], '.1f')} | "
        f"{spread(times.ratios(TWO, ONE))} |",
        "",
        circumstances("sweeps", torch.device("cpu"), ["hydra-joblib-launcher"])
        + " "
        + left_out([times]),
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.sweeps", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--steps", type=int, default=160, help="of each job of the long sweep")
    parser.add_argument("--rounds", type=int, default=2, help="of jobs at once and in turn")
    options = parser.parse_args(arguments)
    for name, value in vars(options).items():
        if value < 1:
            parser.error(f"--{name} {value}: expected 1 or more")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sweep(folder / "warm", 1, "position=rope", "ablation.seeds=1")
        line, others = overhead(folder / "long", options.steps)
        short = max(1, options.steps // 2)
        times = at_once(folder, short, options.rounds)
    write(report(line, others, times, short), "sweeps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
