"""How fast the pairs of a rotary scheme turn, and how that is stretched beyond the trained length.

Shapes: B batch, T slots, P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from wherelm.schemes.base import float64_positions


def rotary_frequencies(width: int, base: float) -> Tensor:
    """Radians for each step of position, one for each pair of `width`: base^(-2i/width)."""
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)


def slow_pairs(frequencies_P: Tensor, base: float, trained: int) -> list[str]:
    """A warning where most pairs turn less than one radian over the trained length."""
    slow = int((frequencies_P * trained < 1).sum())
    if slow * 2 <= len(frequencies_P):
        return []
    return [
        f"position.base={base:g}: {slow} of {len(frequencies_P)} pairs turn less than one radian "
        f"over the {trained} positions of training; a smaller base lets them tell positions apart"
    ]


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


def llama3_scaling(frequencies_P: Tensor, factor: float, base: float, length: int) -> Tensor:
    """Pairs of 4 turns and more over the trained length kept, those below 1 divided by `factor`.

    A line over the number of turns between: "The Llama 3 Herd of Models" (Grattafiori et al.,
    2024), in the form of the code that came with Llama 3.1, with its low_freq_factor = 1 and
    high_freq_factor = 4.
    """
    turns_P = frequencies_P * length / (2 * math.pi)
    kept_P = ((turns_P - 1) / (4 - 1)).clamp(0, 1)
    return frequencies_P * kept_P + frequencies_P / factor * (1 - kept_P)


def dynamic_scaling(frequencies_P: Tensor, factor: float, base: float, length: int) -> Tensor:
    """Nothing within the trained length; see `dynamic_frequencies` for what lies beyond it."""
    return frequencies_P


def dynamic_frequencies(
    lengths_BT: Tensor, width: int, factor: float, base: float, trained: int
) -> Tensor:
    """`ntk_scaling` by what the present length L asks for, (B, T, P), float64.

    Its factor is factor L / trained - (factor - 1) beyond the trained length and 1 within it:
    "Dynamic NTK" (emozilla, 2023), as in Hugging Face's transformers. With position.factor=1 it is
    L / trained, no more than is needed.
    """
    lengths_BT = float64_positions(lengths_BT)
    grown_BT = (factor * lengths_BT / trained - (factor - 1)).clamp(min=1)
    bases_BT1 = (base * grown_BT ** (width / max(width - 2, 1)))[..., None]
    exponents_P = torch.arange(0, width, 2, dtype=torch.float64, device=lengths_BT.device) / width
    return bases_BT1**-exponents_P


def self_extend_scaling(frequencies_P: Tensor, factor: float, base: float, length: int) -> Tensor:
    """Nothing: positions are grouped instead; see `self_extend_groups`."""
    return frequencies_P


def self_extend_groups(factor: float, trained: int) -> tuple[int, int]:
    """How many positions make a group, and from how far back on: a quarter of the trained length.

    "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning" (Jin et al., 2024): a key w or
    more back is read at s // G from t // G + w - w // G, the others at s from t. The group G is the
    least by which no distance within `factor` times the trained length passes the trained ones.
    """
    near = max(1, trained // 4)
    return math.ceil((factor * trained - near) / max(1, trained - near)), near


def message_lengths(
    positions_BT: Tensor, keys_BT: Tensor | None, longest: int | Tensor = 0
) -> Tensor:
    """Each slot's message's last position + 1, (B, T); with a cache what it may grow to."""
    if keys_BT is None:
        last_BT = positions_BT.amax(-1, keepdim=True).expand_as(positions_BT)
    else:
        same_BTT = keys_BT[:, :, None] == keys_BT[:, None, :]
        last_BT = torch.where(same_BTT, positions_BT[:, None, :], 0).amax(-1)
    return (last_BT + 1).clamp(min=torch.as_tensor(longest, device=positions_BT.device))


SCALINGS: dict[str, Callable[[Tensor, float, float, int], Tensor]] = {
    "linear": linear_scaling,
    "ntk": ntk_scaling,
    "yarn": yarn_scaling,
    "llama3": llama3_scaling,
    "dynamic": dynamic_scaling,
    "self_extend": self_extend_scaling,
}
