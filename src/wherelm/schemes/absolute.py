"""Schemes that add a vector for each position to the token embeddings.

Shapes: B batch, T slots, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wherelm.schemes.base import (
    PositionScheme,
    Shape,
    beyond_position,
    expect_base,
    float64_positions,
)

STARTS = ("random", "sinusoid")


def sinusoid_table(positions_BT: Tensor, width: int, base: float) -> Tensor:
    """The sinusoid at each position, (B, T, width), float32 from float64 angles.

    p[l, 2i] = sin(l w_i), p[l, 2i+1] = cos(l w_i), w_i = base^(-2i/width), for even `width`.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    positions = float64_positions(positions_BT)
    angles = positions[..., None] * (base**-exponents).to(positions.device)
    table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    return table.float().to(positions_BT.device)


class Sinusoidal(PositionScheme):
    """x_l = E[w_l] + p_l with fixed sines and cosines.

    "Attention Is All You Need" (Vaswani et al., 2017), section 3.5. Acts on the embeddings. The
    sinusoid has RMS 1/sqrt(2) beside token embeddings of RMS 1: neither drowns the other.
    """

    shift_invariant = False

    @dataclass(frozen=True)
    class Config:
        name: str = "sinusoidal"
        base: float = 10_000.0

        def __post_init__(self):
            expect_base(self.base)

    def __init__(self, config: Config, shape: Shape):
        super().__init__(config, shape)
        if shape.width % 2:
            raise ValueError(f"position=sinusoidal needs an even model.width, not {shape.width}")

    def embed(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        table = sinusoid_table(positions_BT, self.shape.width, self.config.base)
        return x_BTD + table.to(x_BTD.dtype)

    def untrained(self, q_positions_BT: Tensor, k_positions_BS: Tensor) -> Tensor:
        return beyond_position(q_positions_BT, k_positions_BS, self.shape.positions)


class Learned(PositionScheme):
    """x_l = E[w_l] + P[l], one learned vector for each position below model.context.

    "Convolutional Sequence to Sequence Learning" (Gehring et al., 2017), section 3.1; so in GPT-2.
    Acts on the embeddings. `start`: random at the sinusoid's RMS, so that both are comparable, or
    the sinusoid itself. Where no row of training fills the context, the last vectors stay as they
    start; rows that are longer read them, and `untrained` tells.
    """

    shift_invariant = False

    @dataclass(frozen=True)
    class Config:
        name: str = "learned"
        start: str = "random"

        def __post_init__(self):
            if self.start not in STARTS:
                options = ", ".join(STARTS)
                raise ValueError(f"position.start={self.start}: expected one of {options}")

    def __init__(self, config: Config, shape: Shape):
        super().__init__(config, shape)
        if config.start == "sinusoid" and shape.width % 2:
            raise ValueError(
                f"position.start=sinusoid needs an even model.width, not {shape.width}"
            )
        self.table_LD = nn.Parameter(torch.empty(shape.context, shape.width))

    def embed(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        # A compiled graph would break in two where a number leaves it; it only trains.
        if not torch.compiler.is_compiling():
            self.check(int(positions_BT.max()))
        return x_BTD + nn.functional.embedding(positions_BT, self.table_LD).to(x_BTD.dtype)

    def limit(self, prompt: int = 1) -> int:
        return self.shape.context

    def untrained(self, q_positions_BT: Tensor, k_positions_BS: Tensor) -> Tensor:
        return beyond_position(q_positions_BT, k_positions_BS, self.shape.positions)

    def check(self, last: int) -> None:
        """ValueError where the table has no vector for the last position."""
        if last >= self.shape.context:
            raise ValueError(
                f"position=learned has vectors for {self.shape.context} positions and was asked "
                f"for position {last}: train with model.context={last + 1} or more, or choose a "
                "scheme that runs past its trained length"
            )

    def initial_value(self, name: str, generator: torch.Generator) -> Tensor:
        if self.config.start == "sinusoid":
            positions_1L = torch.arange(self.shape.context)[None]
            return sinusoid_table(positions_1L, self.shape.width, 10_000.0)[0]
        return torch.randn(self.table_LD.shape, generator=generator) * 0.5**0.5
