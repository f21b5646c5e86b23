"""Schemes made of other schemes.

Shapes: B batch, T slots, N placed positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from wherelm.schemes.base import PositionScheme, Shape
from wherelm.schemes.rotary import Rope


@dataclass(frozen=True)
class Layer:
    """One entry of a pattern: a scheme, and how many slots its layers look back.

    `window` null leaves it to model.window.
    """

    scheme: PositionScheme.Config
    window: int | None = None

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"position.pattern.window={self.window}: expected 1 or more, or null")


class Hybrid(PositionScheme):
    """A pattern of schemes, repeated over the layers: layer i has entry i modulo their number.

    RoPE in some layers and none in the others: "Rope to Nope and Back Again: A New Hybrid Attention
    Strategy" (Yang et al., 2025). What entries add to the embeddings is added once each, for it
    reaches every layer; what it reads untrained counts in its own. Random positions belong around a
    pattern, for there is one set of them.
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
            if any(layer.scheme.name == "randomised" for layer in self.pattern):
                raise ValueError(
                    "position.pattern: randomised cannot stand in a pattern; choose "
                    "position=randomised and put the pattern into position.scheme"
                )

    @classmethod
    def parts(cls, config: Config, shape: Shape) -> list[tuple[PositionScheme.Config, Shape]]:
        """An entry each, told its own number of layers, so that no parameter is left unread."""
        pattern = config.pattern[: shape.layers]
        return [
            (layer.scheme, replace(shape, layers=len(range(i, shape.layers, len(pattern)))))
            for i, layer in enumerate(pattern)
        ]

    def __init__(self, config: Config, shape: Shape, *schemes: PositionScheme):
        super().__init__(config, shape)
        self.pattern = config.pattern[: shape.layers]
        self.schemes = nn.ModuleList(schemes)

    @property
    def shift_invariant(self) -> bool:
        return all(scheme.shift_invariant for scheme in self.schemes)

    def limit(self, prompt: int = 1) -> int | None:
        limits = [scheme.limit(prompt) for scheme in self.schemes]
        return min((limit for limit in limits if limit is not None), default=None)

    def place(
        self, positions_BT: Tensor, keys_BT: Tensor | None = None, longest: int | Tensor = 0
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
        turn, entry = divmod(layer, len(self.pattern))
        own = self.pattern[entry].window
        return own if own is not None else self.schemes[entry].window(turn)

    def for_layer(self, layer: int) -> PositionScheme:
        turn, entry = divmod(layer, len(self.pattern))
        return self.schemes[entry].for_layer(turn)

    def initial_value(self, name: str, generator: torch.Generator) -> Tensor:
        _, entry, rest = name.split(".", 2)
        return self.schemes[int(entry)].initial_value(rest, generator)

    def warnings(self) -> list[str]:
        lines = [line for scheme in self.schemes for line in scheme.warnings()]
        lines += [
            f"position.pattern.window={layer.window} hides nothing in training: no message is "
            f"longer than model.context={self.shape.context}"
            for layer in self.pattern
            if layer.window is not None and layer.window >= self.shape.context
        ]
        if len(self.pattern) < len(self.config.pattern):
            lines.append(
                f"position.pattern has {len(self.config.pattern)} entries and model.layers="
                f"{self.shape.layers}: the last entries have no layer"
            )
        return list(dict.fromkeys(lines))


class Randomised(PositionScheme):
    """Another scheme at positions that are a sorted random subset of 0 … L_max - 1.

    "Randomized Positional Encodings Boost Length Generalization of Transformers" (Ruoss et al.,
    2023), section 3.1: as many members as the text is long, so that short texts train all positions
    that longer ones will need. Drawn anew for each example and epoch in training, and in evaluation
    too. `length` is L_max; null is eight times the trained length, or model.context if that is
    more. A text that is being generated must keep the positions that it has, whatever follows and
    however much may: it takes the first of as many as fill whole trained lengths, those that its
    prompt begins and one more, at the end of which it ends.
    """

    shift_invariant = False

    @dataclass(frozen=True)
    class Config:
        name: str = "randomised"
        scheme: PositionScheme.Config = field(default_factory=Rope.Config)
        length: int | None = None

        def __post_init__(self):
            if self.scheme.name == "randomised":
                raise ValueError("position.scheme.name=randomised: expected another scheme")

    @classmethod
    def parts(cls, config: Config, shape: Shape) -> list[tuple[PositionScheme.Config, Shape]]:
        length = max(8 * shape.trained, shape.context) if config.length is None else config.length
        if length < shape.context:
            raise ValueError(
                f"position.length={length}: expected at least model.context={shape.context}"
            )
        return [(config.scheme, replace(shape, context=length, trained=length, positions=length))]

    def __init__(self, config: Config, shape: Shape, inner: PositionScheme):
        super().__init__(config, shape)
        self.inner, self.length = inner, inner.shape.context

    def limit(self, prompt: int = 1) -> int:
        return min(self.length, self.shape.trained * (math.ceil(prompt / self.shape.trained) + 1))

    def place(
        self, positions_BT: Tensor, keys_BT: Tensor | None = None, longest: int | Tensor = 0
    ) -> Tensor:
        if keys_BT is None:
            which_BT = torch.arange(len(positions_BT), device=positions_BT.device)[:, None]
            keys_U = torch.zeros_like(which_BT[:, 0])
        else:
            keys_U, which_BT = keys_BT.unique(return_inverse=True)
        positions_BT, which_BT = torch.broadcast_tensors(positions_BT, which_BT)
        # By each example's own length: its numbers do not depend on what else is in the batch.
        last_BT = positions_BT.clamp(min=torch.as_tensor(longest, device=positions_BT.device) - 1)
        last_U = torch.zeros_like(keys_U)
        last_U = last_U.scatter_reduce(0, which_BT.flatten(), last_BT.flatten(), "amax")
        sizes = [last + 1 for last in last_U.tolist()]
        if max(sizes) > self.length:
            raise ValueError(
                f"position=randomised draws from {self.length} positions and was asked for "
                f"{max(sizes)}: train with position.length={max(sizes)} or more"
            )
        table_UN = torch.zeros(len(sizes), max(sizes), dtype=torch.long)
        drawn: dict[tuple[int, int], Tensor] = {}
        for row, named in enumerate(zip(keys_U.tolist(), sizes, strict=True)):
            if named not in drawn:
                drawn[named] = self._subset(*named)
            table_UN[row, : named[1]] = drawn[named]
        return self.inner.place(table_UN.to(positions_BT.device)[which_BT, positions_BT])

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
