"""A decoder-only Transformer.

Shapes: B batch, T query slots, S key slots, D width, F inner width of the MLP, H heads,
K head width, V vocabulary, N targets.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wherelm.model.attention import SCORE_SCALES, Attention
from wherelm.model.cache import KeyValueCache
from wherelm.model.cross_entropy import capped, head_cross_entropy
from wherelm.model.dtypes import for_products
from wherelm.model.masks import Mask, visible
from wherelm.schemes.base import PositionScheme, Shape
from wherelm.seeds import torch_generator

if TYPE_CHECKING:
    from wherelm.batches.batch import Batch

NORMS = ("rmsnorm", "layernorm")
MLPS = ("swiglu", "gelu", "relu2")


@dataclass(frozen=True)
class ModelConfig:
    """The decoder's shape.

    `context` is where rows of training and evaluation are cut, and `window` how far back a query
    reads (null: over the whole row), both in tokens. `score_scale` is what scores are multiplied by
    beside 1/sqrt(K): see `Attention`.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int | None = None
    context: int = 128
    norm: str = "rmsnorm"
    mlp: str = "relu2"
    mlp_width: int | None = None
    qk_norm: bool = True
    score_scale: str = "fixed"
    bias: bool = False
    tied: bool = False
    softcap: float | None = None
    dropout: float = 0.0
    window: int | None = None

    def __post_init__(self):
        choices = {"norm": NORMS, "mlp": MLPS, "score_scale": SCORE_SCALES}
        for key, options in choices.items():
            value = getattr(self, key)
            if value not in options:
                raise ValueError(f"model.{key}={value}: expected one of {', '.join(options)}")
        for key in (
            "layers",
            "width",
            "heads",
            "context",
            "kv_heads",
            "mlp_width",
            "softcap",
            "window",
        ):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ValueError(f"model.{key}={value}: expected a number above 0")
        if self.width % self.heads:
            raise ValueError(f"model.heads={self.heads}: expected a divisor of width={self.width}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(
                f"model.kv_heads={self.kv_heads}: expected a divisor of heads={self.heads}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout={self.dropout}: expected 0 or more and below 1")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def inner_width(self) -> int:
        """F: as given, else 4 D, or for the three matrices of SwiGLU 8/3 D in steps of 32."""
        if self.mlp_width is not None:
            return self.mlp_width
        return round(8 * self.width / 3 / 32) * 32 if self.mlp == "swiglu" else 4 * self.width

    @property
    def shape(self) -> Shape:
        """As if rows of training filled the whole context."""
        context = self.context
        return Shape(
            self.width, self.heads, self.head_width, context, self.layers, context, context
        )


def norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.width, eps=1e-6)
    return nn.LayerNorm(config.width, bias=config.bias)


class MLP(nn.Module):
    """GELU or squared ReLU (So et al., 2021) between two matrices, or SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind = config.mlp
        self.up = nn.Linear(config.width, config.inner_width, bias=config.bias)
        if self.kind == "swiglu":
            self.gate = nn.Linear(config.width, config.inner_width, bias=config.bias)
        self.down = nn.Linear(config.inner_width, config.width, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = self.up(x_BTD)
        if self.kind == "swiglu":
            h_BTF = F.silu(self.gate(x_BTD)) * h_BTF
        elif self.kind == "gelu":
            h_BTF = F.gelu(h_BTF)
        else:
            r_BTF = F.relu(h_BTF)
            h_BTF = r_BTF * r_BTF
        return self.down(h_BTF)


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)): the pre-norm form."""

    def __init__(self, config: ModelConfig, layer: int, trained: int):
        super().__init__()
        self.layer = layer
        self.attention_norm = norm(config)
        self.attention = Attention(
            config.width,
            config.heads,
            config.head_width,
            kv_heads=config.kv_heads,
            bias=config.bias,
            qk_norm=config.qk_norm,
            dropout=config.dropout,
            score_scale=config.score_scale,
            trained=trained,
        )
        self.mlp_norm = norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x_BTD: Tensor,
        scheme: PositionScheme,
        positions_BT: Tensor,
        mask: Mask,
        bias_BHTS: Tensor | None,
        cache: KeyValueCache | None,
        first: int = 0,
    ) -> Tensor:
        """The slots from `first` on; those before are only read: `mask` has no rows for them."""
        h_BSD = for_products(self.attention_norm(x_BTD))
        h_BTD, q_positions_BT = h_BSD, positions_BT
        if first:
            x_BTD, h_BTD = x_BTD[:, first:], h_BSD[:, first:]
            q_positions_BT = positions_BT[:, first:]
        y_BTD = self.attention(
            h_BTD, h_BSD, scheme, q_positions_BT, positions_BT, mask, bias_BHTS, cache, self.layer
        )
        x_BTD = x_BTD + self.dropout(y_BTD)
        return x_BTD + self.dropout(self.mlp(for_products(self.mlp_norm(x_BTD))))


class Decoder(nn.Module):
    """Tokens to logits. Order enters through `scheme` alone, and through the causal mask."""

    def __init__(self, config: ModelConfig, scheme: PositionScheme, vocab_size: int):
        super().__init__()
        self.config, self.scheme, self.vocab_size = config, scheme, vocab_size
        self.embedding = nn.Embedding(vocab_size, config.width)
        self.blocks = nn.ModuleList(
            Block(config, layer, scheme.shape.trained) for layer in range(config.layers)
        )
        self.final_norm = norm(config)
        self.head = nn.Linear(config.width, vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.mask_path = ""
        self.compiled: Callable[..., Tensor] | None = None

    def compile_training(self) -> None:
        """From now on batches are read by a compiled graph while training: one for each shape."""
        # Rotations are complex products, which the compiler leaves to torch: no loss to speak of.
        warnings.filterwarnings("ignore", "Torchinductor does not support code gen", UserWarning)
        self.compiled = torch.compile(self.hidden_at, dynamic=False)

    def hidden(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        key_mask_BT: Tensor | None = None,
        segments_BT: Tensor | None = None,
        side: str = "right",
        cache: KeyValueCache | None = None,
        first: int = 0,
        keys_BT: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states, (B, T, D), of tokens (B, T) at positions (B or 1, T).

        Only of the slots from `first` on: the last block takes keys and values alone of the others.
        `key_mask_BT` is True where a real token stands (None: everywhere), `segments_BT` tells
        packed messages apart, `side` is where the padding is, `keys_BT` names the example of a slot
        to a scheme that draws positions. With a cache the T tokens follow the ones that it holds.
        """
        longest = 0 if cache is None else cache.longest_B1
        # Outside the compiled part: no graph holds the drawing of positions.
        placed_BT = self.scheme.place(positions_BT, keys_BT, longest)
        use_graph = self.training and self.compiled is not None
        hidden_at = self.compiled if use_graph else self.hidden_at
        return hidden_at(tokens_BT, placed_BT, key_mask_BT, segments_BT, side, cache, first)

    def hidden_at(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        key_mask_BT: Tensor | None,
        segments_BT: Tensor | None,
        side: str,
        cache: KeyValueCache | None,
        first: int,
    ) -> Tensor:
        """`hidden` of tokens at the numbers that the scheme has given their positions."""
        length = tokens_BT.shape[1]
        k_positions_BS, keys = positions_BT, length
        if cache is not None:
            cache.advance(positions_BT, key_mask_BT)
            keys, side = cache.length, "left"
            k_positions_BS = cache.read_positions_BS
            key_mask_BT = cache.key_mask_BS[:, :keys] if cache.any_padding else None

        x_BTD = self.embedding(tokens_BT) * self.config.width**0.5
        x_BTD = self.scheme.embed(x_BTD, positions_BT)
        masks: dict[int | None, Mask] = {}
        biases: dict[tuple[PositionScheme, int | None], Tensor | None] = {}
        for block in self.blocks:
            scheme, window = self.scheme.for_layer(block.layer), self.window(block.layer)
            if window not in masks:
                masks[window] = visible(
                    key_mask_BT, length, keys, tokens_BT.device, side, segments_BT, window
                )
            mask = masks[window]
            if (scheme, window) not in biases:
                bias_BHTS = scheme.bias(positions_BT, k_positions_BS)
                biases[scheme, window] = None if bias_BHTS is None else mask.additive(bias_BHTS)
            bias_BHTS, skipped = biases[scheme, window], 0
            if block is self.blocks[-1] and first:
                skipped, mask = first, mask.from_slot(first, length, keys, tokens_BT.device)
                bias_BHTS = None if bias_BHTS is None else bias_BHTS[:, :, first:]
            x_BTD = block(x_BTD, scheme, positions_BT, mask, bias_BHTS, cache, skipped)
        self.mask_path = "; ".join(mask.path for mask in masks.values())
        return self.final_norm(x_BTD)

    def read(self, batch: Batch, first: int = 0) -> Tensor:
        """`hidden` of a whole batch."""
        return self.hidden(
            batch.tokens_BT,
            batch.positions_BT,
            batch.key_mask_BT,
            batch.segments_BT,
            batch.side,
            first=first,
            keys_BT=batch.keys_BT,
        )

    def window(self, layer: int) -> int | None:
        """How many slots a query of this layer looks back: the scheme's pattern decides first."""
        own = self.scheme.window(layer)
        return self.config.window if own is None else own

    def logits(self, x: Tensor) -> Tensor:
        """Scores of the next token, (…, V), at least float32."""
        scores = self.head(x)
        scores = scores if scores.dtype == torch.float64 else scores.float()
        return capped(scores, self.config.softcap)

    def forward(self, *inputs, **named) -> Tensor:
        """Logits (B, T, V) of the same inputs as `hidden`."""
        return self.logits(self.hidden(*inputs, **named))


def next_token_loss(model: Decoder, batch: Batch) -> Tensor:
    """Sum of -log p over the targets that the loss mask keeps, in nats.

    Only the N kept targets pass through the vocabulary head. The caller divides by the number of
    such targets in all micro-batches of its step, once.
    """
    x_ND, targets_N = learned(model, batch)
    return head_cross_entropy(x_ND, model.head.weight, targets_N, model.config.softcap)


def learned_logits(model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits (N, V) and targets (N,) where the loss mask is True, row by row."""
    x_ND, targets_N = learned(model, batch)
    return model.logits(x_ND), targets_N


def learned(model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """Last hidden states (N, D) and targets (N,) where the loss mask is True, row by row."""
    x_BTD = model.read(batch, batch.first)
    learned_BT = batch.loss_mask_BT[:, batch.first :]
    return x_BTD[learned_BT], batch.targets_BT[:, batch.first :][learned_BT]


def initialize(model: Decoder, seed: int) -> None:
    """Gives every parameter the value that (seed, its name) determines.

    So two decoders that differ only in scheme start from the same shared weights. Embeddings are
    drawn at 1/sqrt(D) and read at sqrt(D): they enter at RMS 1. Matrices are drawn at
    1/sqrt(inputs); those that write into the residual stream, and an untied head, start at zero
    (so in Zhang et al., 2019, "Fixup"), norms and gains at one, biases at zero.
    """
    for name, parameter in model.named_parameters():
        generator = torch_generator(seed, "parameter", name)
        with torch.no_grad():
            parameter.copy_(initial_value(model, name, parameter, generator))


def initial_value(
    model: Decoder, name: str, parameter: Tensor, generator: torch.Generator
) -> Tensor:
    if name.startswith("scheme."):
        return model.scheme.initial_value(name.removeprefix("scheme."), generator)
    if name == "embedding.weight":
        return torch.randn(parameter.shape, generator=generator) * model.config.width**-0.5
    if name.endswith(("norm.weight", "gain_H")):
        return torch.ones(parameter.shape)
    if parameter.ndim < 2 or name.endswith(("output.weight", "down.weight", "head.weight")):
        return torch.zeros(parameter.shape)
    return torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
