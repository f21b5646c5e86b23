"""What the tests of several families share."""

import math

import torch

from wherelm.schemes import SCHEMES, build_scheme
from wherelm.schemes.base import Shape

FAR = 65_536


def scheme(
    name: str,
    width: int = 8,
    heads: int = 2,
    context: int = 16,
    layers: int = 2,
    trained: int | None = None,
    **options,
):
    trained = trained or context
    shape = Shape(width, heads, width // heads, context, layers, trained, trained)
    return build_scheme(SCHEMES[name].Config(**options), shape)


def sinusoid_in_double(position: int, width: int, base: float) -> torch.Tensor:
    values = []
    for i in range(width // 2):
        angle = position * base ** (-2 * i / width)
        values += [math.sin(angle), math.cos(angle)]
    return torch.tensor(values, dtype=torch.float64)
