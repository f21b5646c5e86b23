"""How fast the pairs of a rotary scheme turn, and how that is stretched beyond the trained length.

Shapes: P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def rotary_frequencies(width: int, base: float) -> Tensor:
    """Radians for each step of position, one for each pair of `width`: base^(-2i/width)."""
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)


def linear_scaling(frequencies_P: Tensor, factor: float, base: float, length: int) -> Tensor:
    """Every frequency divided by `factor`: positions squeezed into the trained length.

    "Extending Context Window of Large Language Models via Positional Interpolation" (Chen, Wong,
    Chen, Tian, 2023).
    """
    return frequencies_P / factor


def ntk_scaling(frequencies_P: Tensor, factor: float, base: float, length: int) -> Tensor:
    """The base raised so that the slowest pair slows down by `factor` and the fastest not at all.

    base' = base factor^(K / (K - 2)): "NTK-aware scaled RoPE" (bloc97, 2023).
    """
    width = 2 * len(frequencies_P)
    return rotary_frequencies(width, base * factor ** (width / max(width - 2, 1)))


def yarn_turns(length: int) -> float:
    """How many turns over the trained length make a pair fast enough to be left alone.

    32 at the 4,096 tokens of the original; at other lengths the same share, on a log scale, of
    the turns that the fastest pair completes.
    """
    turn = 2 * math.pi
    if length <= turn:
        return 1.0
    return 32 ** (math.log(length / turn) / math.log(4096 / turn))


def yarn_ramp(width: int, base: float, length: int, alpha: float, beta: float) -> Tensor:
    """1 for pairs that keep their frequency, 0 for those that are interpolated, a line between.

    The line is drawn over the pair's index, as in Hugging Face's transformers, so that exports
    agree; the paper draws it over the number of turns, which gives other frequencies between.
    """

    def index_of(turns: float) -> float:
        return width * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = max(math.floor(index_of(beta)), 0), min(math.ceil(index_of(alpha)), width - 1)
    index_P = torch.arange(width // 2, dtype=torch.float64)
    return 1 - ((index_P - low) / max(high - low, 1e-3)).clamp(0, 1)


def yarn_scaling(frequencies_P: Tensor, factor: float, base: float, length: int) -> Tensor:
    """Fast pairs kept, slow ones divided by `factor`, a ramp between.

    "YaRN: Efficient Context Window Extension of Large Language Models" (Peng, Quesnelle, Fan,
    Shippole, 2023), equations 16-20, with alpha = 1 and beta = `yarn_turns(length)`.
    """
    kept_P = yarn_ramp(2 * len(frequencies_P), base, length, 1.0, yarn_turns(length))
    return frequencies_P * kept_P + frequencies_P / factor * (1 - kept_P)


def yarn_magnitude(factor: float) -> float:
    """What YaRN lengthens queries and keys by, 0.1 ln(factor) + 1: a sharper softmax."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


SCALINGS: dict[str, Callable[[Tensor, float, float, int], Tensor]] = {
    "linear": linear_scaling,
    "ntk": ntk_scaling,
    "yarn": yarn_scaling,
}
