"""What the tests of several claims share."""

import pytest
import torch
from torch import Tensor

from wherelm.model.attention import Attention
from wherelm.model.masks import Mask
from wherelm.schemes import SCHEMES, build_scheme
from wherelm.schemes.base import PositionScheme, Shape

CPU = torch.device("cpu")
EVERYTHING = Mask(False, None, "no mask")
CAUSAL = Mask(True, None, "causal flag")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def scheme(name: str, width: int = 8, heads: int = 2, **options) -> PositionScheme:
    shape = Shape(width, heads, width // heads, context=16, layers=2, trained=16, positions=16)
    return build_scheme(SCHEMES[name].Config(**options), shape)


def self_attention(module: Attention, x_BLD: Tensor, mask: Mask = EVERYTHING) -> Tensor:
    """Without positions."""
    positions = torch.arange(x_BLD.shape[1])[None]
    return module(x_BLD, x_BLD, scheme("none"), positions, positions, mask)
