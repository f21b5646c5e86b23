"""What a run says while it goes: metrics.jsonl, one tqdm line, Weights & Biases if asked for."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import netrc
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from wherelm.config import RunConfig, plain
from wherelm.run_folder import (
    CURVE,
    METRICS,
    cut_back,
    is_training,
    is_validation,
    metric_lines,
)

log = logging.getLogger(__name__)


class Tracker:
    """Writes every line of metrics to `folder`/metrics.jsonl and mirrors it to the other places."""

    def __init__(self, folder: Path, config: RunConfig, resumed_at: int | None = None):
        self.path = folder / METRICS
        if resumed_at is not None:
            cut_back(folder, resumed_at)
        # Without a buffer, which would be written again, and fail again, when it is closed.
        self._file = self.path.open("ab" if resumed_at is not None else "wb", buffering=0)
        self._wandb = start_wandb(folder, config) if config.tracking.name == "wandb" else None
        # No `{postfix}` of the library's: it puts a comma in front.
        # None from a worker of a sweep, and none left behind below the bar of a sweep.
        self._bar = tqdm(
            total=100.0,
            disable=not sys.stderr.isatty() or multiprocessing.parent_process() is not None,
            leave=None,
            bar_format="{percentage:3.0f}% |{bar:20}| {desc}[{elapsed}<{remaining}]",
            dynamic_ncols=True,
        )

    def write(self, **values: Any) -> None:
        """One object in metrics.jsonl, at once, so that a run that dies keeps what it measured.

        OSError, which names the file, where it does not fit on the disk.
        """
        line = (json.dumps(values) + "\n").encode()
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if self._wandb is not None:
            prefix = f"{values['split']}/" if "split" in values else "train/"
            numbers = {prefix + k: v for k, v in values.items() if isinstance(v, (int, float))}
            self._wandb.log(numbers, step=values["step"])

    def progress(self, share: float, line: str) -> None:
        """Moves the bar to this share of the run; its remaining time follows from that."""
        self._bar.set_description_str(f"{line} ", refresh=False)
        self._bar.update(100 * share - self._bar.n)

    def close(self) -> None:
        self._bar.close()
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()


def start_wandb(folder: Path, config: RunConfig) -> Any:
    """A W&B run in the folder; without key or network it goes on offline after one warning."""
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    mode = config.tracking.mode
    if mode == "online" and not wandb_key():
        log.warning(
            "wandb: no API key, so this run is kept offline (wandb login; wandb sync later)"
        )
        mode = "offline"
    try:
        return _init_wandb(wandb, folder, config, mode)
    except (wandb.errors.CommError, wandb.errors.UsageError) as error:
        log.warning("wandb: %s; this run is kept offline", str(error).splitlines()[0])
        return _init_wandb(wandb, folder, config, "offline")


def wandb_key() -> str | None:
    """The API key of the environment, or the one that `wandb login` left in netrc; asks nobody."""
    key = os.environ.get("WANDB_API_KEY")
    if key:
        return key
    try:
        hosts = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return None
    return next((login[2] for host, login in hosts.items() if host.endswith("wandb.ai")), None)


def _init_wandb(wandb: Any, folder: Path, config: RunConfig, mode: str) -> Any:
    return wandb.init(
        project=config.tracking.project,
        name=config.name,
        config=plain(config),
        dir=folder,
        mode=mode,
        settings=wandb.Settings(init_timeout=20),
    )


def draw_curve(folder: Path) -> None:
    """curve.png: training and validation loss by supervised tokens, from metrics.jsonl."""
    from matplotlib.figure import Figure

    lines = list(metric_lines(folder))
    # A layout that looks for its margins would draw everything twice.
    margins = {"left": 0.1, "right": 0.98, "bottom": 0.13, "top": 0.97}
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots(gridspec_kw=margins)
    train = [line for line in lines if is_training(line)]
    axes.plot([p["targets"] for p in train], [p["loss"] for p in train], label="training", lw=0.8)
    watched = [line for line in lines if is_validation(line)]
    axes.plot(
        [p["targets"] for p in watched], [p["loss"] for p in watched], "o-", label="validation"
    )
    axes.set(xlabel="supervised tokens", ylabel="loss (nats a token)", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(folder / CURVE, dpi=120)
