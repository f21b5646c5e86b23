"""Where order can enter a decoder.

Shapes: B batch, T query slots, S key slots, D width, H heads, G key-value heads, K head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Role = Literal["query", "key"]


@dataclass(frozen=True)
class Shape:
    """What a scheme may know of its decoder and of what it was trained on, in tokens.

    A row may hold `context`; the longest that training has holds `trained`, at positions below
    `positions` (more of them with training.random_offset).
    """

    width: int
    heads: int
    head_width: int
    context: int
    layers: int
    trained: int
    positions: int


class PositionScheme(nn.Module):
    """The scheme `none`: every hook is the identity, so order enters through the causal mask alone.

    A subclass overrides the hooks it needs. A causal decoder without positions is studied in
    "The Impact of Positional Encoding on Length Generalization in Transformers"
    (Kazemnejad, Padhi, Natesan Ramamurthy, Das, Reddy, 2023), where it is called NoPE.
    """

    # Whether `rotate` does the same to queries and keys, whatever their head.
    turns_alike = True
    # Whether adding one number to all positions changes no logit.
    shift_invariant = True

    @dataclass(frozen=True)
    class Config:
        name: str = "none"

    @classmethod
    def parts(cls, config: Config, shape: Shape) -> list[tuple[Config, Shape]]:
        """The schemes that this one is made of: `build_scheme` makes them and hands them over."""
        return []

    def __init__(self, config: Config, shape: Shape):
        super().__init__()
        self.config = config
        self.shape = shape

    def limit(self, prompt: int = 1) -> int | None:
        """How many tokens a row that begins with `prompt` of them may come to hold.

        None where the scheme runs past its trained length.
        """
        return None

    def place(
        self, positions_BT: Tensor, keys_BT: Tensor | None = None, longest: int | Tensor = 0
    ) -> Tensor:
        """The numbers that positions get; called once for each forward pass, before all else.

        `keys_BT` names the example that a slot belongs to (None: each row is one, all of one name),
        `longest` is the length that rows with a cache may still grow to, each its own (B, 1) or all
        the same; a scheme's `limit` where it has one.
        """
        return positions_BT

    def embed(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        """Token embeddings (RMS 1) with positions added."""
        return x_BTD

    def rotate(self, x_BHTK: Tensor, positions_BT: Tensor, role: Role) -> Tensor:
        """Queries or keys, turned by their positions."""
        return x_BHTK

    def shift(self, k_BGSK: Tensor, segments_BS: Tensor | None) -> Tensor:
        """All keys that queries read, after `rotate`; the cache keeps what is given here.

        `segments_BS` is another where another message begins, or padding (None: one in each row).
        """
        return k_BGSK

    def bias(self, q_positions_BT: Tensor, k_positions_BS: Tensor) -> Tensor | None:
        """What is added to the scaled scores, (B or 1, H, T, S), or None for nothing."""
        return None

    def token_value(self, x_BTD: Tensor) -> Tensor | None:
        """A value of each token and head, (B, H, T), from a layer's input; the cache keeps it."""
        return None

    def value_bias(self, values_BHS: Tensor, queries: int) -> Tensor:
        """The bias (B, H, T, S) of the last T slots over all S, from the values of all."""
        raise NotImplementedError(
            f"{type(self).__name__} gives tokens values but no bias from them"
        )

    def untrained(self, q_positions_BT: Tensor, k_positions_BS: Tensor) -> Tensor | None:
        """Where a query reads a key by what training never gave it, (B, T, S); None for nowhere.

        By a bucket, a row of a table, a position or a distance, of pairs in one layer.
        """
        return None

    def content_bias(
        self, q_BHTK: Tensor, k_BGSK: Tensor, q_positions_BT: Tensor, k_positions_BS: Tensor
    ) -> Tensor | None:
        """What queries and keys, as they enter the scores, add to them once they are scaled.

        (B, H, T, S) for the last T of S slots, or None for nothing.
        """
        return None

    def progress(self, share: float) -> None:
        """Told the share of training that is done, 0 to 1, before each step and when loading."""

    def window(self, layer: int) -> int | None:
        """How many slots a query of this layer may look back; None leaves it to model.window."""
        return None

    def for_layer(self, layer: int) -> PositionScheme:
        """The scheme of one layer."""
        return self

    def initial_value(self, name: str, generator: torch.Generator) -> Tensor:
        """The value that the scheme's own parameter `name` starts from."""
        raise NotImplementedError(f"{type(self).__name__} gives no initial value for {name}")

    def warnings(self) -> list[str]:
        """Settings that cannot act at this shape, a line each; logged before training."""
        return []


def beyond_distance(q_positions_BT: Tensor, k_positions_BS: Tensor, trained: float) -> Tensor:
    """True where a key stands `trained` or more before its query, (B, T, S)."""
    return q_positions_BT[:, :, None] - k_positions_BS[:, None, :] >= trained


def beyond_position(q_positions_BT: Tensor, k_positions_BS: Tensor, positions: int) -> Tensor:
    """True where a query or its key stands at `positions` or behind it, (B, T, S)."""
    return (q_positions_BT[:, :, None] >= positions) | (k_positions_BS[:, None, :] >= positions)


class ByDistance(PositionScheme):
    """Reads a key by its distance: one that no row of training had is untrained."""

    def untrained(self, q_positions_BT: Tensor, k_positions_BS: Tensor) -> Tensor:
        return beyond_distance(q_positions_BT, k_positions_BS, self.shape.trained)


def float64_positions(positions_BT: Tensor) -> Tensor:
    """Positions in float64, on the CPU where the device has no float64 (mps)."""
    if positions_BT.device.type == "mps":
        positions_BT = positions_BT.cpu()
    return positions_BT.double()


def expect_base(base: float) -> None:
    """ValueError for a base whose frequencies do not fall."""
    if not 1 < base < math.inf:  # false for NaN as well
        raise ValueError(f"position.base={base}: expected a number above 1")


def wide(x: torch.Tensor) -> torch.Tensor:
    """float64 as it is, everything else in float32: for what a cast of the model must not blur."""
    return x if x.dtype == torch.float64 else x.float()


def scaled_scores(q_BHTK: Tensor, k_BGSK: Tensor) -> Tensor:
    """Q K^T / sqrt(K), (B, H, T, S), at least float32; neighbouring query heads may share keys."""
    with torch.autocast(q_BHTK.device.type, enabled=False):
        q_BGRTK = wide(q_BHTK).unflatten(1, (k_BGSK.shape[1], -1))
        scores_BGRTS = q_BGRTK @ wide(k_BGSK)[:, :, None].mT
    return scores_BGRTS.flatten(1, 2) * q_BHTK.shape[-1] ** -0.5
