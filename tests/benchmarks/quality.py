"""What the way of making batches costs in quality, at equal supervised tokens.

Every run is `python train.py` in a process of its own, with the default model and optimiser. Random
padded batches are the ones to compare with: nothing but chance decides who is in them. They come
twice: within the same budget of slots, which padding makes more and smaller steps of, and with a
budget that holds about as many targets as the bucketed batches, so that order alone differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tqdm import tqdm

from tests.benchmarks.measure import ROOT, circumstances, write
from wherelm.ablation.inference.intervals import t_interval

CORPORA = ROOT.parent / "shared" / "corpora"
TOKENS, CONTEXT = 300_000, 1024  # the context holds the longest dialogue
SLOTS, MORE_SLOTS = 4096, 6656  # of a batch: the default, and what holds as much with padding
REFERENCE = "padded, as many targets a step"
ARMS = {
    REFERENCE: ("padded", MORE_SLOTS),
    "padded": ("padded", SLOTS),
    "bucketed": ("bucketed", SLOTS),
    "packed": ("packed", SLOTS),
}


def train(folder: Path, batching: str, slots: int, seed: int, tokens: int) -> dict[str, Any]:
    """The summary of a run in this folder; one that is complete there already is only read."""
    summary = folder / "summary.json"
    if not summary.is_file():
        overrides = [
            "data=messages",
            f"data.train={CORPORA / 'dialogues-train.jsonl'}",
            f"data.validation={CORPORA / 'dialogues-dev.jsonl'}",
            f"model.context={CONTEXT}",
            "training.steps=null",
            f"training.tokens={tokens}",
            f"training.batching={batching}",
            f"training.batch_tokens={slots}",
            f"evaluation.every={tokens}",  # never before the end
            f"seed={seed}",
            f"hydra.run.dir={folder}",
        ]
        command = [sys.executable, "train.py", *overrides]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return json.loads(summary.read_text(encoding="utf-8"))


def measure(folder: Path, seeds: int, tokens: int) -> dict[str, list[dict[str, Any]]]:
    """Summaries by arm, one a seed."""
    summaries: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    with tqdm(total=seeds * len(ARMS), disable=None) as bar:
        for seed in range(seeds):
            for name, (batching, slots) in ARMS.items():
                place = folder / f"{batching}-{slots}-{tokens}-seed{seed}"
                summaries[name].append(train(place, batching, slots, seed, tokens))
                bar.update()
    return summaries


def losses(summaries: Sequence[dict[str, Any]]) -> list[float]:
    return [summary["splits"]["validation"]["loss"] for summary in summaries]


def difference(own: Sequence[float], reference: Sequence[float]) -> str:
    """Per cent of the reference's loss with the same seed: mean, and t interval or range."""
    values = [100 * (a / b - 1) for a, b in zip(own, reference, strict=True)]
    interval = t_interval(values)
    low, high = (interval.low, interval.high) if interval else (min(values), max(values))
    return f"{mean(values):+.2f} % ({low:+.2f} – {high:+.2f})"


def report(summaries: dict[str, list[dict[str, Any]]], tokens: int) -> str:
    """The report, as Markdown."""
    seeds = len(summaries[REFERENCE])
    spread = "its 95 % t interval" if seeds > 2 else "the range"
    lines = [
        "# Batches: the same quality at equal supervised tokens",
        "",
        f"`dialogues-train.jsonl`, context {CONTEXT:,} (no dialogue is longer), {tokens:,} "
        "supervised tokens, the default model and optimiser; loss of the whole of "
        f"`dialogues-dev.jsonl`, in nats a token, after training. Differences are to `{REFERENCE}` "
        f"and to `padded` with the same seed, with {spread} over the seeds in brackets.",
        "",
        "| batches | slots a batch | steps | targets a step | tokens/s of training |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, runs in summaries.items():
        steps = mean(run["step"] for run in runs)
        targets = mean(run["targets"] / run["step"] for run in runs)
        rate = mean(run["tokens_per_second"] for run in runs)
        cells = (name, f"{ARMS[name][1]:,}", f"{steps:.0f}", f"{targets:,.0f}", f"{rate:,.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    numbers = [f"seed {seed}" for seed in range(seeds)]
    lines += [
        "",
        f"| batches | {' | '.join(numbers)} | mean | to `{REFERENCE}` | to `padded` |",
        f"| --- | {'---: | ' * seeds}---: | ---: | ---: |",
    ]
    for name, runs in summaries.items():
        own = losses(runs)
        cells = [name, *(f"{loss:.4f}" for loss in own), f"{mean(own):.4f}"]
        for other in (REFERENCE, "padded"):
            cells.append(difference(own, losses(summaries[other])) if other != name else "")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", circumstances("quality", torch.device("cpu")), ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.quality", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="supervised tokens of a run")
    parser.add_argument("--folder", type=Path, help="keep runs there, and use those it has")
    options = parser.parse_args(arguments)
    for name in ("seeds", "tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected 1 or more")
    if not CORPORA.is_dir():
        parser.error(f"{CORPORA}: no such folder; the dialogues are not part of the project")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        write(report(measure(folder, options.seeds, options.tokens), options.tokens), "quality")
    return 0


if __name__ == "__main__":
    sys.exit(main())
