"""What a training step of several configurations takes, measured side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from wherelm import checkpoint, pipeline, runtime
from wherelm.batches.sampler import Sampler
from wherelm.config import RunConfig
from wherelm.model.decoder import initialize
from wherelm.optim.optimizer import Optimizer
from wherelm.training.steps import accumulate, collated

ROUNDS, STEPS, WARM_UP = 7, 6, 3


def step_seconds(configs: Sequence[RunConfig], root: Path, threads: int | None) -> list[float]:
    """Seconds of a step of each configuration, on the first batches of its run.

    Medians over ROUNDS in which all take turns, so that a busy minute of the machine falls on all
    of them; nothing of it is kept but the time.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        steppers = [stepper(config, root) for config in configs]
        for step in steppers:
            for _ in range(WARM_UP):
                step()
        seconds: list[list[float]] = [[] for _ in configs]
        for _ in range(ROUNDS):
            for own, step in zip(seconds, steppers, strict=True):
                started = time.perf_counter()
                for _ in range(STEPS):
                    step()
                own.append((time.perf_counter() - started) / STEPS)
        return [statistics.median(own) for own in seconds]
    finally:
        torch.set_num_threads(before)


def stepper(config: RunConfig, root: Path) -> Callable[[], None]:
    """Makes one training step of a fresh model at each call."""
    data = pipeline.prepare(config, root, ["train"])
    model = checkpoint.build_model(config, data.tokenizer.vocab_size)
    initialize(model, config.seed)
    device = runtime.choose_device(config.training.device)
    precision = runtime.choose_precision(config.training.precision, device)
    model.to(device).train()
    optimizer = Optimizer(model, config.optimizer, config.schedule)
    settings = config.training
    sampler = Sampler(
        data.stores["train"].lengths,
        settings.batch_tokens,
        settings.batching,
        config.seed,
        capacity=config.model.context,
    )
    batches = iter(sampler)

    def step() -> None:
        micro_batches = collated(data, config, sampler, next(batches))
        accumulate(model, micro_batches, config, 0, runtime.autocast(precision, device))
        optimizer.step(0.5, settings.clip)

    return step
