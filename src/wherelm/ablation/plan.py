"""What a sweep compares: its settings, its arms and its jobs."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherelm.ablation.inference.intervals import FEWEST
from wherelm.ablation.seal import clauses
from wherelm.run_folder import (
    BEYOND,
    EXTRAPOLATION,
    FACTORS,
    HIGHER,
    LOWER,
    PROTOCOLS,
    is_extrapolation,
    read_summary,
    status,
)

LEARNING_RATE = "learning_rate"
LENGTHS = ("steps", "epochs", "tokens")
SEEDS = re.compile(r"\d+(-\d+)?")
FACTOR_NAMES = tuple(f"{factor:g}" for factor in FACTORS)
PILOT_SEED = 9000  # how far behind the first final seed those of a pilot begin
TUNING_SEED = 1000  # how far behind the first final seed those of tuning begin: they never meet


# What changes no number that is compared, or has a place of its own in a folder's name.
UNNAMED = (("name",), ("seed",), ("tracking",), ("training", "threads"), ("data", "cache"))


@dataclass(frozen=True)
class AblationConfig:
    """Every arm with `seeds` seeds, by the one `metric` named in advance, against `baseline`.

    `seeds` such as 5-20 looks after each one from the fifth on and stops the arms that are decided.
    Differences below `margin` do not matter. `question` and `rule` ("alibi <= 1.05; rope > none")
    are sealed with the plan before the first job. `equal`: every arm has as many tokens, or, with
    time, the dearer ones train for fewer steps. `pilot` seeds an arm, used for nothing else, first
    show the spread and what the plan can find.
    A metric of extrapolation has `evaluation.extrapolation` turned on in every arm.
    `baseline` is a value of the first factor, met within each level of the others, or the label of
    one arm; null takes the first value of the command line.
    `tune` first gives every arm the same `learning_rates`, a factor 2 apart around the optimizer's
    own, with `tuning_seeds` seeds that are not used again, by validation loss: which cannot judge
    the arms after that.
    """

    metric: str = "validation.loss"
    baseline: str | None = None
    seeds: str = "3"
    margin: float | None = None
    question: str | None = None
    rule: str | None = None
    equal: str = "tokens"
    pilot: int = 0
    tune: bool = False
    learning_rates: int = 4
    tuning_seeds: int = 2

    def __post_init__(self):
        if is_extrapolation(self.metric):
            self._expect_extrapolation()
        elif not self.split or self.figure not in LOWER + HIGHER:
            raise ValueError(
                f"ablation.metric={self.metric}: expected SPLIT.FIGURE such as validation.loss, "
                f"the figure one of {', '.join(LOWER + HIGHER)}"
            )
        if self.tune and (self.split == "validation" or is_extrapolation(self.metric)):
            raise ValueError(
                f"ablation.tune=true ablation.metric={self.metric}: validation picks the learning "
                "rates and cannot judge them too; give ablation.metric=test.loss, or another split"
            )
        if not SEEDS.fullmatch(self.seeds) or not 1 <= self.fewest <= self.most < TUNING_SEED:
            raise ValueError(
                f"ablation.seeds={self.seeds}: expected 1 to {TUNING_SEED - 1}, or from-to such as "
                "5-20"
            )
        if self.fewest < self.most and self.fewest < FEWEST:
            raise ValueError(
                f"ablation.seeds={self.seeds}: nothing is decided with fewer than {FEWEST} seeds; "
                f"give {FEWEST}-{self.most} or more"
            )
        for key, least in {"learning_rates": 3, "tuning_seeds": 1, "pilot": 0}.items():
            value = getattr(self, key)
            if not least <= value < TUNING_SEED:
                raise ValueError(f"ablation.{key}={value}: expected {least} to {TUNING_SEED - 1}")
        if self.margin is not None and not 0 < self.margin < math.inf:
            raise ValueError(f"ablation.margin={self.margin}: expected more than 0, or null")
        if self.equal not in ("tokens", "time"):
            raise ValueError(f"ablation.equal={self.equal}: expected tokens or time")
        if self.rule is not None:
            clauses(self.rule)

    @property
    def fewest(self) -> int:
        return int(self.seeds.partition("-")[0])

    @property
    def most(self) -> int:
        return int(self.seeds.rpartition("-")[2])

    def warnings(self) -> list[str]:
        """Settings that cannot act, a line each; told before the first job."""
        own = {key: getattr(self, key) for key in ("learning_rates", "tuning_seeds")}
        return [
            f"ablation.{key}={value} acts on tuning alone: give ablation.tune=true"
            for key, value in own.items()
            if not self.tune and value != getattr(AblationConfig, key)
        ]

    def _expect_extrapolation(self) -> None:
        protocol, _, factor = self.split.removeprefix(f"{EXTRAPOLATION}.").partition(".")
        parts = {"PROTOCOL": protocol, "FACTOR": factor, "FIGURE": self.figure}
        options = {"PROTOCOL": PROTOCOLS, "FACTOR": FACTOR_NAMES, "FIGURE": BEYOND}
        for part, value in parts.items():
            if value not in options[part]:
                raise ValueError(
                    f"ablation.metric={self.metric}: expected {EXTRAPOLATION}.PROTOCOL.FACTOR."
                    f"FIGURE, {part} one of {', '.join(options[part])}"
                )

    @property
    def overrides(self) -> tuple[str, ...]:
        """What every arm needs, so that the metric is measured."""
        return ("evaluation.extrapolation=true",) if is_extrapolation(self.metric) else ()

    @property
    def split(self) -> str:
        return self.metric.rpartition(".")[0]

    @property
    def figure(self) -> str:
        return self.metric.rpartition(".")[2]


@dataclass(frozen=True)
class Arm:
    """One thing that is compared: a label, Hydra's overrides, and the configuration they make.

    `levels` are its values of the factors that the sweep varies, the one that is asked about first.
    """

    label: str
    overrides: tuple[str, ...]
    config: dict[str, Any]
    levels: tuple[tuple[str, str], ...] = ()

    @property
    def scheme(self) -> str:
        return self.config["position"]["name"]


@dataclass(frozen=True)
class Job:
    """One run of an arm: its seed, its learning rate and its folder within the sweep's.

    `phase` is "pilot", "tune" or "final"; `share` of the configured length is what it trains.
    """

    arm: Arm
    seed: int
    phase: str
    learning_rate: float
    folder: Path
    config: dict[str, Any]
    overrides: tuple[str, ...]
    share: float = 1.0

    @property
    def status(self) -> str:
        return status(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        return read_summary(self.folder)


def references(arms: Sequence[Arm], baseline: str | None) -> dict[str, str]:
    """The arm that each other one is compared to, label to label.

    A `baseline` that is the label of an arm serves all. One that is a value of the first factor
    (null: the value that comes first) is met within each level of the other factors, for rope of
    five layers is no measure of alibi at two. ValueError where it is neither.
    """
    labels = [arm.label for arm in arms]
    if baseline in labels:
        return {label: baseline for label in labels if label != baseline}
    values = list(dict.fromkeys(arm.levels[0][1] for arm in arms if arm.levels))
    if baseline is not None and baseline not in values:
        expected = ", ".join(dict.fromkeys([*values, *labels]))
        raise ValueError(f"ablation.baseline={baseline}: expected one of {expected}")
    first = baseline or next(iter(values), None)
    measure = {
        arm.levels[1:]: arm.label for arm in arms if arm.levels and arm.levels[0][1] == first
    }
    return {
        arm.label: measure[arm.levels[1:]]
        for arm in arms
        if arm.levels and arm.levels[0][1] != first and arm.levels[1:] in measure
    }


def make_job(
    sweep: Path,
    arm: Arm,
    seed: int,
    phase: str,
    learning_rate: float | None = None,
    share: float = 1.0,
) -> Job:
    """The job of an arm with this seed; `learning_rate` replaces the configured one.

    All learning rates of the optimiser are scaled alike. Tuning reads no split but validation.
    """
    config = copy.deepcopy(arm.config)
    config["seed"] = seed
    changes = {"seed": seed}
    optimizer = config["optimizer"]
    if learning_rate is not None:
        factor = learning_rate / optimizer[LEARNING_RATE]
        for key in (key for key in optimizer if key.endswith(LEARNING_RATE)):
            optimizer[key] = float(f"{optimizer[key] * factor:.6g}")
            changes[f"optimizer.{key}"] = optimizer[key]
    for key in LENGTHS if share != 1 else ():
        length = config["training"][key]
        if length is not None:
            length = length * share if key == "epochs" else max(1, round(length * share))
            config["training"][key] = changes[f"training.{key}"] = length
    if phase == "tune":
        config["evaluation"] |= {"splits": ["validation"], "extrapolation": False}
        changes |= {"evaluation.splits": "[validation]", "evaluation.extrapolation": "false"}
    folder = sweep / f"{arm.scheme}-{short_hash(config)}-seed{seed}"
    overrides = (*arm.overrides, *(f"{key}={value}" for key, value in changes.items()))
    return Job(arm, seed, phase, optimizer[LEARNING_RATE], folder, config, overrides, share)


def short_hash(config: Mapping[str, Any]) -> str:
    """Six hex digits that differ where anything does that could change a result, the seed apart."""
    config = copy.deepcopy(dict(config))
    for *groups, key in UNNAMED:
        place = config
        for group in groups:
            place = place[group]
        place.pop(key, None)
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:6]
