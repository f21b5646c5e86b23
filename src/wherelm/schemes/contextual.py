"""Schemes whose sense of distance depends on what stands between.

Shapes: B batch, T query slots, S key slots, D width, H query heads, G key-value heads,
K head width, N rows of a table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wherelm.schemes.base import PositionScheme, Shape, scaled_scores, wide


class ForgetGate(PositionScheme):
    """The gates of one layer; see `Fox`."""

    def __init__(self, config: Fox.Config, shape: Shape):
        super().__init__(config, shape)
        self.weight_HD = nn.Parameter(torch.empty(shape.heads, shape.width))
        self.bias_H = nn.Parameter(torch.empty(shape.heads))

    def token_value(self, x_BTD: Tensor) -> Tensor:
        # Not in bfloat16, which would round the logarithm of an open gate by percents.
        with torch.autocast(x_BTD.device.type, enabled=False):
            gates_BTH = F.linear(wide(x_BTD), wide(self.weight_HD), wide(self.bias_H))
        return F.logsigmoid(gates_BTH).transpose(1, 2)

    def value_bias(self, values_BHS: Tensor, queries: int) -> Tensor:
        # A difference of long sums: float64 where the device has it.
        exact = values_BHS if values_BHS.device.type == "mps" else values_BHS.double()
        total_BHS = exact.cumsum(-1)
        bias_BHTS = total_BHS[:, :, -queries:, None] - total_BHS[:, :, None, :]
        return bias_BHTS.to(values_BHS.dtype)


class Fox(PositionScheme):
    """b_ij = sum over l = j+1 … i of log f_l, f_l = sigmoid(w_h x_l + b_h).

    "Forgetting Transformer: Softmax Attention with a Forget Gate" (Lin, Nikishin, He, Courville,
    2025). Acts on the scores of every layer, from that layer's own input; uses no position numbers
    at all. A constant gate f is ALiBi with the slope -log f. Gates start nearly open: b starts at
    log(trained length), so that 1/e of a key's weight is left after so many tokens. (The authors'
    code starts it at 0, which leaves half of it after one.)
    """

    @dataclass(frozen=True)
    class Config:
        name: str = "fox"

    def __init__(self, config: Config, shape: Shape):
        super().__init__(config, shape)
        self.layers = nn.ModuleList(ForgetGate(config, shape) for _ in range(shape.layers))

    def for_layer(self, layer: int) -> PositionScheme:
        return self.layers[layer]

    def initial_value(self, name: str, generator: torch.Generator) -> Tensor:
        if name.endswith("bias_H"):
            return torch.full((self.shape.heads,), float(self.shape.trained)).log()
        shape = (self.shape.heads, self.shape.width)
        return torch.randn(shape, generator=generator) * 0.1 * self.shape.width**-0.5


class GatePositions(PositionScheme):
    """The table of one layer; see `Cope`."""

    def __init__(self, config: Cope.Config, shape: Shape):
        super().__init__(config, shape)
        self.table_NK = nn.Parameter(torch.empty(config.positions, shape.head_width))

    def content_bias(
        self, q_BHTK: Tensor, k_BGSK: Tensor, q_positions_BT: Tensor, k_positions_BS: Tensor
    ) -> Tensor:
        scores_BHTS = scaled_scores(q_BHTK, k_BGSK)
        queries, keys = scores_BHTS.shape[-2:]
        # Slots behind the query have no gate; those before it count from the key on.
        gates_BHTS = scores_BHTS.sigmoid().tril(keys - queries)
        counted_BHTS = gates_BHTS.flip(-1).cumsum(-1).flip(-1).clamp(max=len(self.table_NK) - 1)
        rows_BHTN = scaled_scores(q_BHTK, self.table_NK[None, None])
        below_BHTS = counted_BHTS.floor()
        share_BHTS = counted_BHTS - below_BHTS
        lower_BHTS = rows_BHTN.gather(-1, below_BHTS.long())
        upper_BHTS = rows_BHTN.gather(-1, counted_BHTS.ceil().long())
        return torch.lerp(lower_BHTS, upper_BHTS, share_BHTS)


class Cope(PositionScheme):
    """b_ij = q_i e[p_ij] / sqrt(K), p_ij = sum over l = j … i of sigmoid(q_i k_l / sqrt(K)).

    "Contextual Position Encoding: Learning to Count What's Important" (Golovneva, Wang, Weston,
    Sukhbaatar, 2024), equations 3-6. Acts on the scores of every layer; uses no position numbers:
    a key stands as far back as gates that the query chose are open from it to the query. Between
    two whole numbers e is interpolated; from the last of `positions` on all distances are one. e is
    learned for each layer, shared by its heads, and starts at 0, where p has no effect. (The
    authors' code divides q k by sqrt(K) and q e not.) Takes maps of scores of its own: memory grows
    with T S.
    """

    @dataclass(frozen=True)
    class Config:
        name: str = "cope"
        positions: int = 32

        def __post_init__(self):
            if self.positions < 2:
                raise ValueError(f"position.positions={self.positions}: expected 2 or more")

    def __init__(self, config: Config, shape: Shape):
        super().__init__(config, shape)
        self.layers = nn.ModuleList(GatePositions(config, shape) for _ in range(shape.layers))

    def for_layer(self, layer: int) -> PositionScheme:
        return self.layers[layer]

    def initial_value(self, name: str, generator: torch.Generator) -> Tensor:
        return torch.zeros(self.config.positions, self.shape.head_width)

    def warnings(self) -> list[str]:
        if self.config.positions <= self.shape.context + 1:
            return []
        return [
            f"position.positions={self.config.positions}: over model.context={self.shape.context} "
            f"tokens at most {self.shape.context + 1} can be reached"
        ]
