"""Schemes whose sense of distance depends on what stands between.

Shapes: B batch, T query slots, S key slots, D width, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wherelm.schemes.base import PositionScheme, Shape, wide


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
