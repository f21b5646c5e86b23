"""Position schemes by name; a new one is a class in its family's file, a line here, and a YAML."""

from wherelm.schemes.absolute import Learned, Sinusoidal
from wherelm.schemes.base import PositionScheme, Shape
from wherelm.schemes.rotary import Rope

SCHEMES: dict[str, type[PositionScheme]] = {
    "none": PositionScheme,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rope": Rope,
}

__all__ = ["SCHEMES", "PositionScheme", "Shape"]
