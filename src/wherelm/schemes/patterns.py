"""Schemes made of other schemes.

Shapes: B batch, T slots, N placed positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from wherelm.schemes.base import PositionScheme, Shape
from wherelm.schemes.rotary import Rope


@dataclass(frozen=True)
class Layer:
    """One entry of a pattern: a scheme, and how many slots its layers look back (null: all)."""

    scheme: PositionScheme.Config
    window: int | None = None

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"position.pattern.window={self.window}: expected 1 or more, or null")


class Hybrid(PositionScheme):
    """A pattern of schemes, repeated over the layers: layer i has entry i modulo their number.

    RoPE in some layers and none in the others: "Rope to Nope and Back Again: A New Hybrid Attention
    Strategy" (Yang et al., 2025). What entries add to the embeddings is added once each, for it
    reaches every layer.
    """

    @dataclass(frozen=True)
    class Config:
        name: str = "hybrid"
        pattern: tuple[Layer, ...] = field(
            default_factory=lambda: (*[Layer(Rope.Config())] * 3, Layer(PositionScheme.Config()))
        )

        def __post_init__(self):
            if not self.pattern:
                raise ValueError("position.pattern=[]: expected a list of {scheme: {name: …}}")

    def __init__(self, config: Config, shape: Shape):
        super().__init__(config, shape)
        self.schemes = nn.ModuleList(build(layer.scheme, shape) for layer in config.pattern)

    def place(
        self, positions_BT: Tensor, keys_BT: Tensor | None = None, longest: int = 0
    ) -> Tensor:
        for scheme in self.schemes:
            positions_BT = scheme.place(positions_BT, keys_BT, longest)
        return positions_BT

    def embed(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        for scheme in self.schemes:
            x_BTD = scheme.embed(x_BTD, positions_BT)
        return x_BTD

    def progress(self, share: float) -> None:
        for scheme in self.schemes:
            scheme.progress(share)

    def window(self, layer: int) -> int | None:
        entry = layer % len(self.schemes)
        own = self.config.pattern[entry].window
        return own if own is not None else self.schemes[entry].window(layer)

    def for_layer(self, layer: int) -> PositionScheme:
        return self.schemes[layer % len(self.schemes)].for_layer(layer)

    def initial_value(self, name: str, generator: torch.Generator) -> Tensor:
        _, entry, rest = name.split(".", 2)
        return self.schemes[int(entry)].initial_value(rest, generator)

    def warnings(self) -> list[str]:
        return [line for scheme in self.schemes for line in scheme.warnings()]


class Randomised(PositionScheme):
    """Another scheme at positions that are a sorted random subset of 0 … L_max - 1.

    "Randomized Positional Encodings Boost Length Generalization of Transformers" (Ruoss et al.,
    2023), section 3: training meets all positions that longer texts will need. Drawn anew for each
    example and epoch in training, and in evaluation too. The subset has as many members as the
    trained length, or as the next multiple of it that a longer row needs, and a row takes the
    first of them: so a prefix keeps its positions when tokens follow. `length` is L_max; null is
    eight times the trained length.
    """

    @dataclass(frozen=True)
    class Config:
        name: str = "randomised"
        scheme: PositionScheme.Config = field(default_factory=Rope.Config)
        length: int | None = None

    def __init__(self, config: Config, shape: Shape):
        super().__init__(config, shape)
        self.length = config.length or 8 * shape.context
        if self.length < shape.context:
            raise ValueError(
                f"position.length={self.length}: expected at least model.context={shape.context}"
            )
        self.inner = build(config.scheme, replace(shape, context=self.length))

    def place(
        self, positions_BT: Tensor, keys_BT: Tensor | None = None, longest: int = 0
    ) -> Tensor:
        context = self.shape.context
        size = context * -(-max(longest, 1) // context)
        if size > self.length:
            raise ValueError(
                f"position=randomised draws from {self.length} positions and was asked for "
                f"{longest}: raise position.length"
            )
        if keys_BT is None:
            keys_BT = torch.zeros_like(positions_BT, dtype=torch.long)
        keys_U, which_BT = keys_BT.unique(return_inverse=True)
        table_UN = torch.stack([self._subset(int(key), size) for key in keys_U.tolist()])
        placed_BT = table_UN.to(positions_BT.device)[which_BT, positions_BT.clamp(max=size - 1)]
        return self.inner.place(placed_BT)

    def _subset(self, key: int, size: int) -> Tensor:
        generator = torch.Generator().manual_seed(key)
        return torch.randperm(self.length, generator=generator)[:size].sort().values

    def embed(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        return self.inner.embed(x_BTD, positions_BT)

    def progress(self, share: float) -> None:
        self.inner.progress(share)

    def window(self, layer: int) -> int | None:
        return self.inner.window(layer)

    def for_layer(self, layer: int) -> PositionScheme:
        return self.inner.for_layer(layer)

    def initial_value(self, name: str, generator: torch.Generator) -> Tensor:
        return self.inner.initial_value(name.removeprefix("inner."), generator)

    def warnings(self) -> list[str]:
        return self.inner.warnings()


def build(config: PositionScheme.Config, shape: Shape) -> PositionScheme:
    """The scheme of a configuration."""
    from wherelm.schemes import SCHEMES

    return SCHEMES[config.name](config, shape)
