"""What a run measures while it trains and at its end."""

from __future__ import annotations

import logging
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wherelm import pipeline, runtime
from wherelm.config import RunConfig
from wherelm.evaluation import breakdowns, extrapolation
from wherelm.evaluation.measures import Scores, measures, score, table
from wherelm.evaluation.untrained import untrained_reads
from wherelm.model.decoder import Decoder
from wherelm.run_folder import (
    BREAKDOWNS,
    is_training,
    metric_lines,
    write_json,
    write_summary,
)
from wherelm.training.steps import State
from wherelm.training.tracking import Tracker

log = logging.getLogger(__name__)


def watch(
    model: Decoder,
    data: pipeline.Data,
    config: RunConfig,
    state: State,
    tracker: Tracker,
    autocast: Any,
) -> Scores:
    """Measures the whole validation split, says so, and returns its scores."""
    store, budget = data.stores["validation"], config.evaluation.batch_tokens
    scores = score(model, store, data.tokenizer.pad, budget, autocast)
    figures = measures(scores, store, data.tokenizer)
    state.validation_loss = figures["loss"]
    tracker.write(step=state.step, split="validation", **{**figures, "targets": state.targets})
    exact = f", exact match {figures['exact_match']:.1%}" if "exact_match" in figures else ""
    log.info(
        "step %d: validation loss %.4f, %.4f bits a byte%s, %.0f s",
        state.step,
        figures["loss"],
        figures["bits_per_byte"],
        exact,
        state.seconds,
    )
    return scores


def measure(
    model: Decoder,
    data: pipeline.Data,
    config: RunConfig,
    state: State,
    watched: Scores | None,
    root: Path,
    folder: Path,
    autocast: Any,
) -> dict[str, Any]:
    """The final figures of every split, and beyond the trained length where that is asked for.

    Breakdowns and the scores of every example are written into the run folder, and beside the
    breakdowns, as `learned` of `train`, how often each position was learned. `watched` are the
    scores of validation by these weights, if there are any yet.
    """
    budget = config.evaluation.batch_tokens
    figures, parts = {}, {"train": {"learned": breakdowns.histogram(state.positions)}}
    for split in config.final_splits:
        store = data.stores[split]
        scores = watched if split == "validation" else None
        if scores is None:
            scores = score(model, store, data.tokenizer.pad, budget, autocast)
        figures[split] = measures(scores, store, data.tokenizer)
        figures[split]["untrained_reads"] = untrained_reads(model, store.lengths)
        own = breakdowns.breakdowns(scores, store, data.tokenizer)
        parts[split] = parts.get(split, {}) | own
        breakdowns.save_examples(folder, split, scores, store, data.tokenizer)
    place = folder / BREAKDOWNS
    write_json(place, parts)
    log.info("\n%s\nby position, length, turn and group: %s", table(figures), place)
    if not config.evaluation.extrapolation:
        return {"splits": figures}
    texts = pipeline.whole_texts(config, root, "validation", data.tokenizer)
    beyond = extrapolation.extrapolate(
        model,
        texts,
        data.tokenizer,
        budget,
        autocast,
        starts_with_bos=pipeline.starts_with_bos(config),
        folder=folder,
    )
    log.info("\n%s", extrapolation.table(beyond))
    return {"splits": figures, "extrapolation": beyond}


def costs(model: Decoder, folder: Path) -> dict[str, Any]:
    """Parameters, those that the scheme adds, peak memory, and the median speed of training."""
    speeds = [line["tokens_per_second"] for line in metric_lines(folder) if is_training(line)]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "scheme_parameters": sum(p.numel() for p in model.scheme.parameters()),
        "tokens_per_second": statistics.median(speeds),
        "peak_memory_mb": runtime.peak_memory_mb(model.embedding.weight.device),
    }


def summarize(
    folder: Path, state: State, status: str, exit_code: int, **more: Any
) -> dict[str, Any]:
    """What a program would read: written to summary.json and returned.

    `exit_code` is that of the signal that came, if one did: a run may have been complete by then.
    """
    stood = asdict(state)
    del stood["positions"]  # long, and in the breakdowns
    return write_summary(folder, status, exit_code=exit_code, **stood, **more)
