"""Learning rates as pure functions of the progress of training."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A learning rate over its peak after a warm-up that is a share of the run, as all is here."""

    name: str
    warmup: float = 0.02

    def __post_init__(self):
        for key, value in vars(self).items():
            if key != "name" and not 0 <= value <= 1:
                raise ValueError(f"schedule.{key}={value}: expected a share, 0 to 1")

    def after_warmup(self, progress: float) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Schedule):
    """1 after the warm-up."""

    name: str = "constant"

    def after_warmup(self, progress: float) -> float:
        return 1.0


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from 1 to `final` ("SGDR", Loshchilov and Hutter, 2017)."""

    name: str = "cosine"
    final: float = 0.0

    def after_warmup(self, progress: float) -> float:
        share = (progress - self.warmup) / (1 - self.warmup)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class Linear(Schedule):
    """A straight line from 1 to `final`."""

    name: str = "linear"
    final: float = 0.0

    def after_warmup(self, progress: float) -> float:
        share = (progress - self.warmup) / (1 - self.warmup)
        return 1 - (1 - self.final) * share


@dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    """1, then a line to `final` over the last `cooldown` ("MiniCPM", Hu et al., 2024)."""

    name: str = "wsd"
    cooldown: float = 0.5
    final: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.warmup + self.cooldown > 1:
            raise ValueError(
                f"schedule.warmup={self.warmup}, schedule.cooldown={self.cooldown}: expected "
                "shares that add up to 1 at most"
            )

    def after_warmup(self, progress: float) -> float:
        share = max(0.0, progress - (1 - self.cooldown)) / max(self.cooldown, 1e-9)
        return 1 - (1 - self.final) * share


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "linear": Linear,
    "wsd": WarmupStableDecay,
}


def learning_rate_factor(schedule: Schedule, progress: float) -> float:
    """What the peak learning rate is multiplied with after this share of training, 0 to 1."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < schedule.warmup:
        return progress / schedule.warmup
    return schedule.after_warmup(progress) if schedule.warmup < 1 else 1.0
