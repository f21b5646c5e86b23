"""What an optimiser does to its parameters: Muon and AdamW."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_update

from wherelm.runtime import multiplies_bfloat16

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
