"""Where a run goes on from, and for how long."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wherelm import checkpoint
from wherelm.config import LENGTHS, RunConfig, TrainingConfig, load_yaml, run_config
from wherelm.optim.schedules import learning_rate_factor
from wherelm.run_folder import CONFIG, METRICS, SUMMARY
from wherelm.schemes import build_scheme
from wherelm.schemes.base import PositionScheme

log = logging.getLogger(__name__)


def check_new(folder: Path) -> None:
    """ValueError where a run would be written over."""
    if (folder / METRICS).exists():
        raise ValueError(
            f"{folder}: holds a run already; go on with resume={folder}, or give another folder"
        )


def resumed_from(folder: Path, config: RunConfig) -> Path:
    """The checkpoint that a run goes on from, with a new length where `config` has one.

    ValueError where nothing is left to do, or the run so far is no beginning of one of that length.
    """
    last = checkpoint.last(folder)
    before = run_config(load_yaml(last / CONFIG))
    if _length(before.training) != _length(config.training):
        check_length(before, config, checkpoint.load_state(last))
        log.info("goes on to %s, before %s", _length(config.training), _length(before.training))
    elif (folder / SUMMARY).exists():
        try:
            summary = json.loads((folder / SUMMARY).read_text())
        except ValueError as error:
            raise ValueError(f"{folder / SUMMARY}: damaged ({error}); delete it") from error
        if summary.get("status") == "complete":
            key = _length(config.training).partition("=")[0]
            lasts = learning_rate_factor(config.schedule, 1.0) == 1
            more = f"; a larger {key} trains it longer" if lasts else ""
            raise ValueError(f"{folder}: this run is complete, with {summary['step']} steps{more}")
    return last


def check_length(before: RunConfig, after: RunConfig, state: Mapping[str, Any]) -> None:
    """ValueError where what was learned under `before` is not what `after` would have learned.

    Both follow the share of the run that is done. They agree where the learning rate stands at its
    peak by either length, and the position scheme does not look at the share.
    """
    length = _length(after.training)
    scheme = build_scheme(after.position, after.model.shape)
    layers = [scheme.for_layer(layer) for layer in range(after.model.layers)]
    if any(type(layer).progress is not PositionScheme.progress for layer in layers):
        raise ValueError(
            f"{length}: position={after.position.name} changes after a share of the run, which "
            f"another length makes another one; begin a new run of {length}"
        )
    done = state["share"]
    share = done * _number(before.training) / _number(after.training)
    if share >= 1:
        raise ValueError(
            f"{length}: step {state['step']} has reached it already; give more than "
            f"{_length(before.training)}"
        )
    name = after.schedule.name
    for point, of in ((done, _length(before.training)), (share, length)):
        rate = learning_rate_factor(after.schedule, point)
        if rate < 1 and point < after.schedule.warmup:
            raise ValueError(
                f"{length}: step {state['step']}, where the run stands, is in the warm-up of {of} "
                f"(schedule.warmup={after.schedule.warmup:g}); go on as it is, and past it first"
            )
        if rate < 1:
            raise ValueError(
                f"{length}: at step {state['step']}, where the run stands, schedule={name} of {of} "
                f"has lowered the learning rate to {rate:.0%} of its peak; begin a new run of "
                f"{length}, or one with schedule=constant, which can go on from anywhere"
            )


def _length(training: TrainingConfig) -> str:
    """The one of LENGTHS that is given, as an override."""
    (key,) = (key for key in LENGTHS if getattr(training, key) is not None)
    return f"training.{key}={getattr(training, key)}"


def _number(training: TrainingConfig) -> float:
    return next(filter(None, (getattr(training, key) for key in LENGTHS)))
