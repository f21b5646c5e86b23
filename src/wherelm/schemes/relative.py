"""Schemes that add to each score a bias that depends on how far back the key stands.

The bias is added after the division by sqrt(K). Only keys at or before the query count, so
distances below zero, which the causal mask forbids, are read as zero.

Shapes: B batch, T query slots, S key slots, H heads, F inner width of FIRE's network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wherelm.schemes.base import ByDistance, PositionScheme, Shape, wide


def distances(q_positions_BT: Tensor, k_positions_BS: Tensor) -> Tensor:
    """How far each key stands before each query, (B, T, S), at least 0."""
    return (q_positions_BT[:, :, None] - k_positions_BS[:, None, :]).clamp(min=0)


def alibi_slopes(heads: int) -> Tensor:
    """2^(-8 i / heads), i = 1 … heads, for a power of two, float64.

    Else those of the next lower power of two, then every other one of twice that power.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2 ** (-4 * i / power) for i in range(1, 2 * power + 1, 2)]
    return torch.tensor(slopes + between[: heads - power], dtype=torch.float64)


class Alibi(ByDistance):
    """b = -m_h d, with a fixed slope for each head.

    "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation"
    (Press, Smith, Lewis, 2022). Acts on the scores of every layer.
    """

    @dataclass(frozen=True)
    class Config:
        name: str = "alibi"

    def bias(self, q_positions_BT: Tensor, k_positions_BS: Tensor) -> Tensor:
        slopes_H = alibi_slopes(self.shape.heads).float().to(q_positions_BT.device)
        d_BTS = distances(q_positions_BT, k_positions_BS)
        return -slopes_H[:, None, None] * d_BTS[:, None]


def t5_bucket(d: Tensor, buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance: exact for the lower half of them, then logarithmic to the last.

    The causal half of the rule in "Exploring the Limits of Transfer Learning with a Unified
    Text-to-Text Transformer" (Raffel et al., 2020), section 2.1.
    """
    exact = buckets // 2
    share = (d.clamp(min=exact).float() / exact).log() / math.log(max_distance / exact)
    far = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
    return torch.where(d < exact, d.long(), far)


class T5(PositionScheme):
    """b = table[bucket(d), h], learned, shared by all layers as in the original.

    "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (Raffel et
    al., 2020). T5 itself leaves out the division by sqrt(K); here scores are divided, as for every
    other scheme. In T5 all distances from 128 of 512 tokens on share a bucket: `max_distance` null
    keeps that share, a quarter of the trained length.
    """

    @dataclass(frozen=True)
    class Config:
        name: str = "t5"
        buckets: int = 32
        max_distance: int | None = None

        def __post_init__(self):
            if self.buckets < 2 or self.buckets % 2:
                raise ValueError(f"position.buckets={self.buckets}: expected an even number")
            if self.max_distance is not None and self.max_distance <= self.buckets // 2:
                raise ValueError(
                    f"position.max_distance={self.max_distance}: expected more than half of "
                    f"position.buckets={self.buckets}, which are exact distances"
                )

    def __init__(self, config: Config, shape: Shape):
        super().__init__(config, shape)
        least = config.buckets // 2 + 1
        self.max_distance = config.max_distance or max(least, shape.trained // 4)
        self.table_NH = nn.Parameter(torch.empty(config.buckets, shape.heads))

    def bias(self, q_positions_BT: Tensor, k_positions_BS: Tensor) -> Tensor:
        d_BTS = distances(q_positions_BT, k_positions_BS)
        buckets_BTS = t5_bucket(d_BTS, self.config.buckets, self.max_distance)
        return F.embedding(buckets_BTS, self.table_NH).permute(0, 3, 1, 2)

    @property
    def reached(self) -> int:
        """How many buckets training reaches: those up to its longest distance."""
        longest = torch.tensor(self.shape.trained - 1)
        return int(t5_bucket(longest, self.config.buckets, self.max_distance)) + 1

    def untrained(self, q_positions_BT: Tensor, k_positions_BS: Tensor) -> Tensor:
        """A far distance in a bucket that nearer ones have trained is none."""
        d_BTS = distances(q_positions_BT, k_positions_BS)
        return t5_bucket(d_BTS, self.config.buckets, self.max_distance) >= self.reached

    def initial_value(self, name: str, generator: torch.Generator) -> Tensor:
        return torch.randn(self.table_NH.shape, generator=generator) * self.shape.width**-0.5

    def warnings(self) -> list[str]:
        if self.reached == self.config.buckets:
            return []
        return [
            f"position.buckets={self.config.buckets} up to position.max_distance="
            f"{self.max_distance}: training, whose longest row has {self.shape.trained} tokens, "
            f"reaches the first {self.reached} alone"
        ]


class Kerple(ByDistance):
    """b = -r1 log(1 + r2 d), or in its power form -r1 d^r2, with learned r1, r2 for each head.

    "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation" (Chi, Fan,
    Ramadge, Rudnicky, 2022), equations 8 and 9. Shared by all layers. Softplus keeps r1 and r2 of
    the logarithm above 0, and 2 sigmoid keeps the exponent between 0 and 2, as the kernel needs.
    """

    @dataclass(frozen=True)
    class Config:
        name: str = "kerple"
        form: str = "log"

        def __post_init__(self):
            if self.form not in ("log", "power"):
                raise ValueError(f"position.form={self.form}: expected one of log, power")

    def __init__(self, config: Config, shape: Shape):
        super().__init__(config, shape)
        self.raw1_H = nn.Parameter(torch.empty(shape.heads))
        self.raw2_H = nn.Parameter(torch.empty(shape.heads))

    def bias(self, q_positions_BT: Tensor, k_positions_BS: Tensor) -> Tensor:
        raw1_H11, raw2_H11 = (wide(raw_H)[:, None, None] for raw_H in (self.raw1_H, self.raw2_H))
        d_B1TS = distances(q_positions_BT, k_positions_BS)[:, None].to(raw1_H11.dtype)
        if self.config.form == "log":
            return -F.softplus(raw1_H11) * torch.log1p(F.softplus(raw2_H11) * d_B1TS)
        return -F.softplus(raw1_H11) * d_B1TS ** (2 * raw2_H11.sigmoid())

    def initial_value(self, name: str, generator: torch.Generator) -> Tensor:
        """r1 uniform in 0 to 2 and r2 in 0 to 1, as the authors draw them; exponents start at 1."""
        uniform_H = torch.rand(self.shape.heads, generator=generator).clamp(min=0.01)
        if name == "raw1_H":
            return (2 * uniform_H).expm1().log()
        return (
            torch.zeros_like(uniform_H) if self.config.form == "power" else uniform_H.expm1().log()
        )


class Fire(ByDistance):
    """b = f(psi(d) / psi(max(L, i))) for the query at i, psi(x) = log(c x + 1), f a small network.

    "Functional Interpolation for Relative Positions Improves Long Context Transformers" (Li et
    al., 2024), equations 4-6, in its form shared by all layers (FIRE-S there). c starts at 0.1;
    L, learned too, starts at a quarter of the trained length, the share that 512 is of the 2,048
    in the original. f has one layer of ReLUs and no last bias: the same for all keys, it would
    cancel in the softmax. Depends on the difference alone only while i < L.
    """

    shift_invariant = False

    @dataclass(frozen=True)
    class Config:
        name: str = "fire"
        inner: int = 32

        def __post_init__(self):
            if self.inner < 1:
                raise ValueError(f"position.inner={self.inner}: expected 1 or more")

    def __init__(self, config: Config, shape: Shape):
        super().__init__(config, shape)
        self.c = nn.Parameter(torch.empty(1))
        self.threshold = nn.Parameter(torch.empty(1))
        self.up_F1 = nn.Parameter(torch.empty(config.inner, 1))
        self.up_bias_F = nn.Parameter(torch.empty(config.inner))
        self.down_HF = nn.Parameter(torch.empty(shape.heads, config.inner))

    def bias(self, q_positions_BT: Tensor, k_positions_BS: Tensor) -> Tensor:
        c = wide(self.c).abs()
        d_BTS = distances(q_positions_BT, k_positions_BS).to(c.dtype)
        # `threshold` is relative to its start, so that one learning rate serves it as well.
        limit = (wide(self.threshold) * self.start).abs()
        i_BT1 = torch.maximum(q_positions_BT.to(c.dtype), limit)[:, :, None]
        share_BTS1 = torch.log1p(c * d_BTS) / torch.log1p(c * i_BT1).clamp(min=1e-6)
        share_BTS1 = share_BTS1[..., None]
        # Not in bfloat16, which cannot tell neighbouring distances apart.
        with torch.autocast(share_BTS1.device.type, enabled=False):
            h_BTSF = F.relu(F.linear(share_BTS1, wide(self.up_F1), wide(self.up_bias_F)))
            bias_BTSH = F.linear(h_BTSF, wide(self.down_HF))
        return bias_BTSH.permute(0, 3, 1, 2)

    @property
    def start(self) -> float:
        """Where L starts, in tokens."""
        return max(1.0, self.shape.trained / 4)

    def initial_value(self, name: str, generator: torch.Generator) -> Tensor:
        parameter = getattr(self, name)
        constants = {"c": 0.1, "threshold": 1.0}
        if name in constants:
            return torch.full(parameter.shape, constants[name])
        bound = 1.0 if name.startswith("up") else self.config.inner**-0.5
        return (2 * torch.rand(parameter.shape, generator=generator) - 1) * bound
