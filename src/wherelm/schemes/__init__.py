"""Position schemes by name; a new one is a class in its family's file, a line here, and a YAML."""

from wherelm.schemes.absolute import Learned, Sinusoidal
from wherelm.schemes.base import PositionScheme, Shape
from wherelm.schemes.contextual import Cope, Fox
from wherelm.schemes.patterns import Hybrid, Randomised
from wherelm.schemes.relative import T5, Alibi, Fire, Kerple
from wherelm.schemes.rotary import Drope, KeyOffset, Pope, Rope

SCHEMES: dict[str, type[PositionScheme]] = {
    "none": PositionScheme,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "randomised": Randomised,
    "rope": Rope,
    "drope": Drope,
    "key_offset": KeyOffset,
    "pope": Pope,
    "alibi": Alibi,
    "t5": T5,
    "kerple": Kerple,
    "fire": Fire,
    "fox": Fox,
    "cope": Cope,
    "hybrid": Hybrid,
}

__all__ = ["SCHEMES", "PositionScheme", "Shape", "build_scheme"]


def build_scheme(config: PositionScheme.Config, shape: Shape) -> PositionScheme:
    """The scheme of a configuration, with the schemes that it is made of."""
    kind = SCHEMES[config.name]
    return kind(config, shape, *(build_scheme(*part) for part in kind.parts(config, shape)))
