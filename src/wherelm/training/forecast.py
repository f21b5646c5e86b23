"""What a run will take, told once after its first steps."""

from __future__ import annotations

import logging
import statistics
import time
from datetime import datetime, timedelta

from wherelm import pipeline
from wherelm.config import RunConfig

log = logging.getLogger(__name__)

# It speaks after this share of the run, but not before as many steps, or after so many seconds.
SHARE, STEPS, SECONDS = 0.03, 8, 5.0
READING = 2.5  # how many times as fast tokens are read only: without gradients and an optimiser


class Forecast:
    """Adds up the steps that are left, by those so far, and the measurements between and after.

    The first step, in which much is set up, does not count.
    """

    def __init__(self, config: RunConfig, data: pipeline.Data, started: float, share: float):
        self.started, self.share = started, share
        self.every = config.evaluation.every
        sizes = {split: int(store.lengths.sum()) for split, store in data.stores.items()}
        self.watched = sizes["validation"]
        self.measured = sum(sizes[split] for split in config.final_splits if split != "validation")
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    def note(self, share: float, seconds: float, tokens: int) -> None:
        """Takes a step: the share of the run done with it, its seconds and its real tokens."""
        if self.seconds is None:
            return
        self.seconds.append(seconds)
        self.tokens.append(tokens)
        enough = len(self.seconds) > STEPS and share - self.share >= SHARE
        if len(self.seconds) > 1 and (enough or sum(self.seconds[1:]) >= SECONDS):
            left = self.seconds_left(share)
            took = time.perf_counter() - self.started + left
            end = datetime.now() + timedelta(seconds=left)
            log.info("about %s here, until %s", duration(took), moment(end))
            self.seconds = None

    def seconds_left(self, share: float) -> float:
        step = statistics.median(self.seconds[1:])
        steps = max(0.0, 1 - share) / ((share - self.share) / len(self.seconds))
        reading = statistics.median(self.tokens[1:]) / step * READING
        evaluations = int(steps / self.every) + 1
        return steps * step + (evaluations * self.watched + self.measured) / reading


def duration(seconds: float) -> str:
    """In the unit that one would say."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    if seconds < 10 * 60:
        minutes, rest = divmod(round(seconds, -1), 60)
        return f"{minutes:.0f} min {rest:.0f} s" if rest else f"{minutes:.0f} min"
    if seconds < 100 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def moment(end: datetime) -> str:
    """The time of day, with the day where that is not today."""
    return end.strftime("%H:%M" if end.date() == datetime.now().date() else "%a %d %b, %H:%M")
