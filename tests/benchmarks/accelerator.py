"""An accelerator at work: GPT-2's shape against the limit, training and sampling beside others.

The share of the peak that a 124 M-parameter decoder reaches on rows of 1,024 tokens, and the tables
of `tests.benchmarks.training` and `tests.benchmarks.sampling` on the same device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from statistics import median
from types import SimpleNamespace

import torch

from tests.benchmarks import sampling, training
from tests.benchmarks.decoders import decoder, full_rows
from tests.benchmarks.measure import circumstances, in_turns, left_out, spread, write
from wherelm import runtime
from wherelm.batches.batch import Batch
from wherelm.model.decoder import Decoder
from wherelm.optim.optimizer import OPTIMIZERS, Optimizer
from wherelm.optim.schedules import SCHEDULES

DEVICE, PRECISION = training.DEVICE, training.PRECISION
# GPT-2's 50,257 tokens, filled up to a multiple of 64.
GPT2 = {"layers": 12, "width": 768, "heads": 12, "context": 1024, "dropout": 0.0}
VOCABULARY, ROWS, STEPS, SIDE = 50_304, 16, 8, 8192
REHEARSED = {"layers": 2, "width": 64, "heads": 2, "context": 64, "dropout": 0.0}
RUNS = {
    "AdamW": ("adamw", False),
    "AdamW, training.compile=true": ("adamw", True),
    "Muon, training.compile=true": ("muon", True),
}


def train(model: Decoder, optimizer: Optimizer, batch: Batch, steps: int) -> int:
    """So many steps; returns their tokens."""
    autocast, run = runtime.autocast(PRECISION, DEVICE), SimpleNamespace(model=model.config, seed=0)
    for _ in range(steps):
        training.accumulate(model, [batch], run, 0, autocast)
        optimizer.step(0.5, 1.0)
    return steps * batch.tokens_BT.numel()


def flops_a_token(model: Decoder) -> float:
    """Forward and backward: 6 a weight of a product, and of causal attention 6 a layer, T and D."""
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    config = model.config
    weights = matrices + model.vocab_size * config.width
    return 6.0 * weights + 6.0 * config.layers * config.context * config.width


def peak(side: int, rounds: int) -> float:
    """Operations a second of a large product of square matrices."""
    dtype = getattr(torch, PRECISION)
    x, w = (torch.randn(side, side, dtype=dtype, device=DEVICE) for _ in range(2))
    out, repeats = torch.empty_like(x), 50

    def products() -> None:
        for _ in range(repeats):
            torch.mm(x, w, out=out)

    products()
    return max(in_turns({"mm": products}, rounds, "mm").rates("mm", 2.0 * repeats * side**3))


def utilisation(shape: dict, vocabulary: int, rows: int, side: int, rounds: int) -> str:
    """The report of the decoder of this shape, as Markdown."""
    batch, models, jobs = full_rows(rows, shape["context"], vocabulary, DEVICE), {}, {}
    for name, (kind, compiled) in RUNS.items():
        models[name] = decoder("gpt2", "learned", vocabulary, DEVICE, shape)
        if compiled:
            models[name].compile_training()
        optimizer = Optimizer(models[name], OPTIMIZERS[kind][0](), SCHEDULES["constant"]())
        jobs[name] = partial(train, models[name], optimizer, batch, STEPS)
        train(models[name], optimizer, batch, 2)
    times, limit = in_turns(jobs, rounds, "GPT-2"), peak(side, rounds)
    parameters = sum(p.numel() for p in models["AdamW"].parameters())
    lines = [
        "# On an accelerator",
        "",
        f"GPT-2's shape ({parameters / 1e6:.0f} M parameters, learned positions) on {rows} rows of "
        f"{shape['context']:,} tokens, {PRECISION}; products of {side:,} × {side:,} matrices reach "
        f"{limit / 1e12:.3g} Tflop/s. Medians of {rounds} rounds, in brackets the extremes. "
        f"{left_out([times])}",
        "",
        "| trained by | tokens/s | Tflop/s | share of that peak |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, model in models.items():
        reached = flops_a_token(model) / median(times.seconds[name])
        cells = name, spread(times.rates(name, 1), ",.0f"), f"{reached / 1e12:.3g}"
        lines.append(f"| {' | '.join(cells)} | {reached / limit:.0%} |")
    return "\n".join([*lines, "", circumstances("accelerator", DEVICE), ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.accelerator", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds to take the median of")
    parser.add_argument(
        "--rehearse", action="store_true", help="all of it in small, on any machine; keeps nothing"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected 1 or more")
    if options.rehearse:
        parts = [
            utilisation(REHEARSED, 512, 4, 256, 1),
            training.report(1, ["ours", *training.OPPONENTS]),
        ]
        parts.append(sampling.measure(sampling.contests(["S"], [1, sampling.ROWS], half=True), 1))
        print("\n".join(parts))
        return 0
    if DEVICE.type == "cpu":
        parser.error("no accelerator on this machine; --rehearse runs all of it in small")
    parts = [utilisation(GPT2, VOCABULARY, ROWS, SIDE, options.rounds)]
    torch.cuda.empty_cache()
    parts.append(training.report(options.rounds, list(training.NAMES)))
    several = sampling.contests(list(sampling.SHAPES), [1, sampling.ROWS], half=True)
    parts.append(sampling.measure(several, options.rounds))
    write("\n".join(parts), "accelerator")
    return 0


if __name__ == "__main__":
    sys.exit(main())
