"""Optimisers, and learning rates as pure functions of the progress of training."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_update

from wherelm.runtime import multiplies_bfloat16


def expect_in_range(config: AdamWConfig | MuonConfig) -> None:
    """ValueError for a number that no update can be made with, NaN among them."""
    for key, value in vars(config).items():
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
class AdamWConfig:
    """`learning_rate` for every parameter; decay (times the learning rate) on matrices alone."""

    name: str = "adamw"
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    def __post_init__(self):
        expect_in_range(self)


@dataclass(frozen=True)
class MuonConfig:
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

    def __post_init__(self):
        expect_in_range(self)


@dataclass(frozen=True)
class Constant:
    """1 after the warm-up. `warmup`, like every length here, is a share of the run."""

    name: str = "constant"
    warmup: float = 0.02

    def __post_init__(self):
        for key, value in vars(self).items():
            if key != "name" and not 0 <= value <= 1:
                raise ValueError(f"schedule.{key}={value}: expected a share, 0 to 1")

    def after_warmup(self, progress: float) -> float:
        return 1.0


@dataclass(frozen=True)
class Cosine(Constant):
    """Half a cosine from 1 to `final` ("SGDR", Loshchilov and Hutter, 2017)."""

    name: str = "cosine"
    final: float = 0.0

    def after_warmup(self, progress: float) -> float:
        share = (progress - self.warmup) / (1 - self.warmup)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class Linear(Constant):
    """A straight line from 1 to `final`."""

    name: str = "linear"
    final: float = 0.0

    def after_warmup(self, progress: float) -> float:
        share = (progress - self.warmup) / (1 - self.warmup)
        return 1 - (1 - self.final) * share


@dataclass(frozen=True)
class WarmupStableDecay(Constant):
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


Schedule = Constant | Cosine | Linear | WarmupStableDecay
SCHEDULES = {kind().name: kind for kind in (Constant, Cosine, Linear, WarmupStableDecay)}


def learning_rate_factor(schedule: Schedule, progress: float) -> float:
    """What the peak learning rate is multiplied with after this share of training, 0 to 1."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < schedule.warmup:
        return progress / schedule.warmup
    return schedule.after_warmup(progress) if schedule.warmup < 1 else 1.0


# Odd polynomials whose composition takes singular values in (0, 1] close to 1, one a step:
# "The Polar Express" (Amsel, Persson, Musco, Gower, 2025), computed there for five steps.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonalize(matrices: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices, nearly: U V^T of each matrix of a stack (N, R, C).

    float32 is multiplied in bfloat16 where that is faster, for the result is a rough one anyway.
    """
    half = matrices.dtype == torch.float32 and multiplies_bfloat16(matrices.device)
    x = matrices.bfloat16() if half else matrices
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Groups:
    """Groups of parameters, each with its settings, and the state of every parameter.

    All that is needed of `torch.optim.Optimizer`, whose first use imports torch's compiler: longer
    than everything else that a run does before its first step, but for importing torch itself.
    """

    def __init__(self, groups: list[dict], **defaults: float):
        self.param_groups = [defaults | group for group in groups]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = defaultdict(dict)


class Muon(Groups):
    """Momentum, orthogonalised: "Muon" (Jordan et al., 2024).

    Matrices of one shape are orthogonalised as one stack, which on small models is several times
    faster than one after the other. Updates are scaled to RMS 0.2, the RMS of a typical AdamW
    update, so that learning rates compare ("Muon is Scalable for LLM Training", Liu et al., 2025).
    """

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            stacks: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    stacks[parameter.shape].append(parameter)
            for shape, parameters in stacks.items():
                updates = torch.stack([self._momentum(p, group["momentum"]) for p in parameters])
                updates = orthogonalize(updates) * (0.2 * max(shape) ** 0.5)
                for parameter, update in zip(parameters, updates.unbind(), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(update, alpha=group["lr"])

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """Nesterov's: the gradient, looked at once more after it has entered the average."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["momentum"], momentum)


class AdamW(Groups):
    """ "Decoupled Weight Decay Regularization" (Loshchilov and Hutter, 2019), by torch's kernel."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self._state(p) for p in parameters]
            adamw_update(
                parameters,
                [p.grad for p in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=group["beta1"],
                beta2=group["beta2"],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def adamw(model: nn.Module, config: AdamWConfig) -> list[Groups]:
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
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


OPTIMIZERS = {"adamw": (AdamWConfig, adamw), "muon": (MuonConfig, muon)}


class Optimizer:
    """The optimisers of a run as one, with one schedule over them.

    Its state is a flat mapping "parameter name.key" -> tensor, so that it needs no pickle.
    """

    def __init__(self, model: nn.Module, config: AdamWConfig | MuonConfig, schedule: Schedule):
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
