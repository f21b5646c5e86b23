"""What a claim of the lecture consists of, and what several demonstrations share.

Shapes: L positions, D width, H heads, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wherelm.model.attention import Attention
from wherelm.model.decoder import Decoder, ModelConfig, initialize
from wherelm.model.masks import Mask
from wherelm.pages.page import Picture
from wherelm.schemes import SCHEMES, build_scheme
from wherelm.schemes.base import PositionScheme, Shape
from wherelm.seeds import torch_generator

CPU = torch.device("cpu")
EVERYTHING = Mask(False, None, "no mask")
CAUSAL = Mask(True, None, "causal flag")
VOCABULARY, CONTEXT = 23, 16
WORDS = ("please", "send", "the", "report")


@dataclass(frozen=True)
class Shown:
    """A figure: pictures side by side, their caption (HTML), and HTML such as a table below it."""

    pictures: list[Picture]
    caption: str
    below: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim with its equation and text (HTML), the code that carries it, and its pictures.

    The pictures' numbers are computed by the project's own code when the claim is made.
    """

    number: int
    title: str
    equation: str
    text: str
    code: Sequence[Any]
    shown: list[Shown] = field(default_factory=list)


Claims = list[Callable[[], Claim]]


def code_name(code: Any) -> str:
    """`attention.py: Attention.forward`, from the function or class itself."""
    module = code.__module__.removeprefix("wherelm.").replace(".", "/")
    return f"{module}.py: {code.__qualname__}"


def source(code: Any) -> str:
    return inspect.cleandoc(inspect.getsource(code))


def normal(*shape: int, name: str = "x", dtype: torch.dtype = torch.float32) -> Tensor:
    """The same standard normal numbers on every run."""
    return torch.randn(shape, generator=torch_generator(0, "lecture", name), dtype=dtype)


def scheme(name: str = "none", width: int = 8, heads: int = 2, **options: Any) -> PositionScheme:
    shape = Shape(width, heads, width // heads, CONTEXT, 2, CONTEXT, CONTEXT)
    return build_scheme(SCHEMES[name].Config(**options), shape)


@torch.no_grad()
def random_attention(width: int, heads: int, head_width: int, **options: Any) -> Attention:
    """An attention module with random projections."""
    module = Attention(width, heads, head_width, **options)
    for name, parameter in module.named_parameters():
        parameter.copy_(normal(*parameter.shape, name=name) * parameter.shape[-1] ** -0.5)
    return module


@torch.no_grad()
def self_attention(
    module: Attention, x_LD: Tensor, mask: Mask = EVERYTHING
) -> tuple[Tensor, Tensor]:
    """Outputs (L, D) and weights (H, L, L) without positions."""
    positions, module.keep_weights = torch.arange(len(x_LD))[None], True
    y = module(x_LD[None], x_LD[None], scheme(), positions, positions, mask)
    return y[0], module.weights_BHTS[0]


@torch.no_grad()
def random_decoder(name: str, layers: int = 2, dtype: torch.dtype = torch.float32) -> Decoder:
    """A small decoder whose every parameter is random: one as initialised answers zeros alone."""
    config = ModelConfig(layers=layers, width=16, heads=4, context=CONTEXT)
    built = build_scheme(SCHEMES[name].Config(), config.shape)
    model = Decoder(config, built, VOCABULARY)
    initialize(model, 0)
    for key, parameter in model.named_parameters():
        size = 0.3 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
        parameter.add_(normal(*parameter.shape, name=key) * size)
    return model.to(dtype).eval()


@torch.no_grad()
def logits_of(model: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits (L, V) of one row."""
    return model(torch.tensor([tokens]), torch.arange(len(tokens))[None])[0]


def difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def embeddings(words: Sequence[str], width: int = 8) -> Tensor:
    """A fixed random vector for each word, (L, D)."""
    return torch.stack([normal(width, name=f"word {word}") for word in words])


def numbers(values: Tensor) -> list:
    """Nested lists for JSON; what is not finite becomes None."""
    if values.ndim:
        return [numbers(row) for row in values]
    value = values.item()
    return round(value, 6) if torch.isfinite(values) else None


def matrix(
    name: str, rows: Sequence[str], columns: Sequence[str], values: Tensor, **more: Any
) -> Picture:
    return {
        "kind": "matrix",
        "name": name,
        "rows": list(rows),
        "columns": list(columns),
        "values": numbers(values),
        **more,
    }


def weights(name: str, rows: Sequence[str], columns: Sequence[str], values: Tensor) -> Picture:
    """A matrix of attention weights."""
    return matrix(name, rows, columns, values, attention=True, most=1, between=" reads ", cell=36)


def small(value: float) -> str:
    """A number for a table: an exact zero stands out from a rounding error."""
    if value == 0:
        return "0"
    return f"{value:.1e}".replace("-", "−") if abs(value) < 1e-3 else f"{value:.4f}"
