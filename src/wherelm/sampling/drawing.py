"""The next token: filters of a distribution, and draws from it.

Shapes: B rows, V vocabulary, N tokens at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wherelm.seeds import torch_generator


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the model's distribution.

    temperature         divides the logits; 0 is greedy
    top_k               only the k likeliest tokens (None: all)
    top_p               only the fewest likeliest tokens that hold this probability (1: all)
    min_p               only tokens at least this likely, relative to the likeliest (0: all)
    repetition_penalty  above 1 makes tokens that the row already holds less likely (1: off)
    max_tokens          the longest reply in tokens, its end included
    greedy              always the likeliest token (after the repetition penalty); nothing is drawn
    seed                with a row's number, the source of all that is drawn in it
    """

    temperature: float = 0.7
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 128
    greedy: bool = False
    seed: int = 0

    def __post_init__(self):
        # Each condition is false for NaN as well.
        rules = (
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or a number above it"),
            ("top_k", self.top_k is None or self.top_k >= 1, "a whole number of 1 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and up to 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "0 (off) to 1"),
            # Logits and memory have room for no more.
            ("repetition_penalty", 1e-6 <= self.repetition_penalty <= 1e6, "1e-6 to 1e6; 1 is off"),
            ("max_tokens", 1 <= self.max_tokens <= 10**6, "a whole number, 1 to 1,000,000"),
        )
        for name, valid, expected in rules:
            if not valid:
                raise ValueError(f"{name}={getattr(self, name)}: expected {expected}")

    @property
    def takes_likeliest(self) -> bool:
        return self.greedy or self.temperature == 0


def penalize_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Logits of seen tokens divided by `penalty` where positive, else multiplied by it.

    "CTRL: A Conditional Transformer Language Model for Controllable Generation" (Keskar et al.,
    2019), section 4.1, in the form that lowers negative logits too.
    """
    penalized_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, penalized_BV, logits_BV)


def divide_by_temperature(logits_BV: Tensor, temperature: float) -> Tensor:
    """Logits over temperature, shifted so that the largest is 0: finite however cold it gets."""
    least = torch.finfo(logits_BV.dtype).tiny  # below it a temperature would be 0
    return (logits_BV - logits_BV.amax(-1, keepdim=True)) / max(temperature, least)


def keep_top_k(logits_BV: Tensor, k: int) -> Tensor:
    """-inf for all but the k largest logits of a row; those that tie with the k-th stay."""
    kth_B1 = logits_BV.topk(min(k, logits_BV.shape[-1])).values[:, -1:]
    return logits_BV.masked_fill(logits_BV < kth_B1, -math.inf)


def keep_top_p(logits_BV: Tensor, p: float) -> Tensor:
    """-inf for all but the fewest likeliest tokens whose probabilities sum to at least p.

    "The Curious Case of Neural Text Degeneration" (Holtzman et al., 2020), section 3.1.
    """
    sorted_BV, order_BV = logits_BV.sort(descending=True, stable=True)
    p_BV = sorted_BV.softmax(-1)
    likelier_BV = p_BV.cumsum(-1) - p_BV
    dropped_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
    dropped_BV.scatter_(-1, order_BV, likelier_BV >= max(p, torch.finfo(p_BV.dtype).tiny))
    return logits_BV.masked_fill(dropped_BV, -math.inf)


def keep_min_p(logits_BV: Tensor, p: float) -> Tensor:
    """-inf for tokens less than p times as likely as the likeliest.

    "Turning Up the Heat: Min-p Sampling" (Nguyen et al., 2024), section 3.
    """
    floor_B1 = logits_BV.amax(-1, keepdim=True) + math.log(p)
    return logits_BV.masked_fill(logits_BV < floor_B1, -math.inf)


def sampling_probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution (B, V) that is drawn from: temperature, then top-k, top-p and min-p."""
    logits_BV = divide_by_temperature(logits_BV, sampling.temperature)
    if sampling.top_k is not None:
        logits_BV = keep_top_k(logits_BV, sampling.top_k)
    if sampling.top_p < 1:
        logits_BV = keep_top_p(logits_BV, sampling.top_p)
    if sampling.min_p > 0:
        logits_BV = keep_min_p(logits_BV, sampling.min_p)
    return logits_BV.softmax(-1)


def draw(probabilities_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The token of each row at quantile `uniform_B` (0 or more, below 1) of its distribution, (B,).

    The first token whose cumulated probability exceeds the quantile: never one of probability 0.
    """
    cumulated_BV = probabilities_BV.double().cumsum(-1)
    quantiles_B = uniform_B.double() * cumulated_BV[:, -1]
    return torch.searchsorted(cumulated_BV, quantiles_B[:, None], right=True)[:, 0]


class Chooser:
    """Chooses a token for each row, and keeps what that needs: random numbers and tokens seen.

    Filters and draws run on the CPU, so that a seed means the same on every device.
    """

    def __init__(
        self,
        vocab_size: int,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        steps: int,
        sampling: Sampling,
        end: int | None,
    ):
        self.sampling, self.end, self.step = sampling, end, 0
        self.seen_BV: Tensor | None = None
        self.uniform_BN: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen_BV = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
            for seen_V, prompt in zip(self.seen_BV, prompts, strict=True):
                seen_V[torch.tensor(prompt)] = True
            self._forget_end()
        if not sampling.takes_likeliest:
            generators = [torch_generator(sampling.seed, "sampling", row) for row in rows]
            self.uniform_BN = torch.stack([torch.rand(steps, generator=g) for g in generators])

    def choose(self, logits_BV: Tensor) -> Tensor:
        """The next token of each row, (B,), on the device of the logits."""
        device = logits_BV.device
        if self.seen_BV is not None:
            logits_BV = logits_BV.cpu()
            penalty = self.sampling.repetition_penalty
            logits_BV = penalize_repetition(logits_BV, self.seen_BV, penalty)
        if self.uniform_BN is None:
            # On a CPU numpy's takes a tenth of the time of torch's.
            on_cpu = logits_BV.device.type == "cpu"
            tokens_B = torch.as_tensor((logits_BV.numpy() if on_cpu else logits_BV).argmax(-1))
        else:
            probabilities_BV = sampling_probabilities(logits_BV.cpu(), self.sampling)
            tokens_B = draw(probabilities_BV, self.uniform_BN[:, self.step])
        self.step += 1
        if self.seen_BV is not None:
            self.seen_BV.scatter_(1, tokens_B[:, None], True)
            self._forget_end()
        return tokens_B.to(device)

    def _forget_end(self) -> None:
        # Every earlier turn of a conversation holds an end; this one has to end all the same.
        if self.end is not None:
            self.seen_BV[:, self.end] = False

    def keep_rows(self, rows: Sequence[int]) -> None:
        if self.seen_BV is not None:
            self.seen_BV = self.seen_BV[rows]
        if self.uniform_BN is not None:
            self.uniform_BN = self.uniform_BN[rows]
