"""The optimisers by name, and those of a run as one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from wherelm.optim.schedules import Schedule, learning_rate_factor
from wherelm.optim.updates import AdamW, Groups, Muon


@dataclass(frozen=True)
class OptimizerConfig:
    """What every optimiser has; ValueError for a number that no update can be made with."""

    name: str
    learning_rate: float

    def __post_init__(self):
        # NaN is in no range.
        for key, value in vars(self).items():
            if key == "name":
                continue
            if key in ("momentum", "beta1", "beta2"):
                valid, expected = 0 <= value < 1, "0 or more, below 1"
            elif key == "weight_decay":
                valid, expected = 0 <= value < math.inf, "0 or more"
            else:
                valid, expected = 0 < value < math.inf, "a number above 0"
            if not valid:
                raise ValueError(f"optimizer.{key}={value}: expected {expected}")


@dataclass(frozen=True)
class AdamWConfig(OptimizerConfig):
    """`learning_rate` for all; decay (times the learning rate) on the decoder's matrices."""

    name: str = "adamw"
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8


@dataclass(frozen=True)
class MuonConfig(OptimizerConfig):
    """Muon for the matrices of the blocks, AdamW for the embedding, the head and all vectors."""

    name: str = "muon"
    learning_rate: float = 0.005
    momentum: float = 0.95
    weight_decay: float = 0.0
    embedding_learning_rate: float = 0.01
    head_learning_rate: float = 0.004
    vector_learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-10


def adamw(model: nn.Module, config: AdamWConfig) -> list[Groups]:
    # None on a scheme's parameters: whether they are a matrix or a vector is their scheme's whim.
    named = list(model.named_parameters())
    decays = [p.ndim >= 2 and not name.startswith("scheme.") for name, p in named]
    matrices = [p for (_, p), decayed in zip(named, decays, strict=True) if decayed]
    vectors = [p for (_, p), decayed in zip(named, decays, strict=True) if not decayed]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group | {"lr": config.learning_rate} for group in groups if group["params"]]
    return [_adamw(groups, config)]


def muon(model: nn.Module, config: MuonConfig) -> list[Groups]:
    groups: dict[str, list[nn.Parameter]] = {
        "matrix": [],
        "embedding": [],
        "head": [],
        "vector": [],
    }
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.") and parameter.ndim == 2:
            groups["matrix"].append(parameter)
        elif name == "embedding.weight":
            groups["embedding"].append(parameter)
        elif name == "head.weight":
            groups["head"].append(parameter)
        else:
            groups["vector"].append(parameter)
    rest = [
        {
            "params": groups[kind],
            "lr": getattr(config, f"{kind}_learning_rate"),
            "weight_decay": 0.0,
        }
        for kind in ("embedding", "head", "vector")
        if groups[kind]
    ]
    matrices = Muon(
        [{"params": groups["matrix"], "lr": config.learning_rate}],
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    return [matrices, _adamw(rest, config)]


def _adamw(groups: list[dict], config: AdamWConfig | MuonConfig) -> AdamW:
    return AdamW(groups, beta1=config.beta1, beta2=config.beta2, eps=config.eps)


# The settings of each, and what makes its parts for a model.
OPTIMIZERS: dict[str, tuple[type[OptimizerConfig], Callable[..., list[Groups]]]] = {
    "adamw": (AdamWConfig, adamw),
    "muon": (MuonConfig, muon),
}


class Optimizer:
    """The optimisers of a run as one, with one schedule over them.

    Its state is a flat mapping "parameter name.key" -> tensor, so that it needs no pickle.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, schedule: Schedule):
        self.parts = OPTIMIZERS[config.name][1](model, config)
        self.schedule = schedule
        self.peaks = [[group["lr"] for group in part.param_groups] for part in self.parts]
        self.parameters = dict(model.named_parameters())
        self.learning_rate = config.learning_rate
        self.peak = config.learning_rate

    def step(self, progress: float, clip: float | None) -> float:
        """One update at this share of training; returns the gradient's norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), clip or math.inf)
        factor = learning_rate_factor(self.schedule, progress)
        self.learning_rate = self.peak * factor
        for part, peaks in zip(self.parts, self.peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            part.step()
        for parameter in self.parameters.values():
            parameter.grad = None
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for part in self.parts
            for key, value in part.state.get(parameter, {}).items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            for part in self.parts:
                if not any(parameter is p for g in part.param_groups for p in g["params"]):
                    continue
                prefix = f"{name}."
                part.state[parameter] = {
                    key.removeprefix(prefix): value.to(parameter.device)
                    for key, value in state.items()
                    if key.startswith(prefix) and "." not in key.removeprefix(prefix)
                }
