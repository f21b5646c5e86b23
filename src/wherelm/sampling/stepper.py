"""One new token a row through a decoder, laid out for that: what sampling spends its time on.

`Decoder.hidden` is the plain form. A single token meets no causal mask, and its cost on a small
model is that of starting operations and of reading weights, so here there are few operations and
the weights of matrices that read the same input are stacked.

Shapes: B rows, S key slots, D width, F inner width of the MLP, H query heads, G key-value heads,
R query heads that share a key-value head, K head width, V vocabulary, N outputs, C inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wherelm.model.cache import KeyValueCache
from wherelm.model.cross_entropy import capped
from wherelm.model.decoder import Block, Decoder
from wherelm.model.dtypes import for_products, step_dtype
from wherelm.runtime import multiplies_bfloat16
from wherelm.schemes.base import PositionScheme

LARGE = 1 << 15  # weights of a matrix that is worth laying out, and worth bfloat16
# Whether torch has oneDNN's product of laid-out weights, which its own compiler uses on x86.
ONE_DNN = torch.backends.cpu.get_cpu_capability().startswith("AVX")


def fastest_product(weight_NC: Tensor, rows: int) -> str:
    """How so many rows are multiplied with a large matrix in the least time.

    "plain": torch's product. "pieces": a batch of as many pieces of the matrix as there are
    threads, because torch reads float32 weights for one row with one. "packed": oneDNN's product
    of weights that were laid out for it once.
    """
    if weight_NC.device.type != "cpu":
        return "plain"
    if rows == 1 and weight_NC.dtype == torch.float32:
        return "plain" if weight_NC.shape[0] % torch.get_num_threads() else "pieces"
    # Where bfloat16 would be emulated, oneDNN has no such product.
    half = weight_NC.dtype == torch.bfloat16 and multiplies_bfloat16(weight_NC.device)
    return "packed" if ONE_DNN and (half or weight_NC.dtype == torch.float32) else "plain"


class Product:
    """x W^T + b for a few rows, W and b those of linear layers that read the same input.

    On a CPU a small matrix is float32 whatever the model's type is: that takes half the time.
    """

    def __init__(self, rows: int, *layers: nn.Linear):
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        weight_NC = weights[0] if len(layers) == 1 else torch.cat(weights)
        self.bias_N = None if biases[0] is None else torch.cat(biases)
        small = weight_NC.device.type == "cpu" and weight_NC.numel() < LARGE
        weight_NC = weight_NC.to(step_dtype(weight_NC)) if small else for_products(weight_NC)
        self.dtype = weight_NC.dtype
        self.form = "plain" if small else fastest_product(weight_NC, rows)
        if self.form == "packed":
            self.weights = torch.ops.mkldnn._reorder_linear_weight(weight_NC.detach(), rows)
            self.packed_product = torch.ops.mkldnn._linear_pointwise.default
        elif self.form == "pieces":
            self.weights = weight_NC.unflatten(0, (torch.get_num_threads(), -1))
        else:
            self.weights = weight_NC.t()

    def __call__(self, x_BC: Tensor) -> Tensor:
        if x_BC.dtype != self.dtype:
            x_BC = x_BC.to(self.dtype)
        if self.form == "packed":
            y_BN = self.packed_product(x_BC, self.weights, None, "none", [], "")
        elif self.form == "pieces":
            y_BN = torch.bmm(self.weights, x_BC.t().expand(len(self.weights), -1, -1)).view(1, -1)
        else:
            y_BN = torch.mm(x_BC, self.weights)
        return y_BN if self.bias_N is None else y_BN + self.bias_N


class Norm:
    """A norm of the decoder, or of each head's entries.

    torch makes eight operations of an RMS norm on a CPU. Here it is four, none of them with a
    number that would have to become a tensor first: x / sqrt(|x|^2 + D eps) times sqrt(D) g.
    """

    def __init__(
        self, weight_D: Tensor, eps: float, bias_D: Tensor | None = None, rms: bool = True
    ):
        dtype = step_dtype(weight_D)
        self.weight_D, self.eps, self.rms = weight_D.to(dtype), eps, rms
        self.bias_D = None if bias_D is None else bias_D.to(dtype)
        self.quick = rms and weight_D.device.type == "cpu"
        if self.quick:
            size = weight_D.shape[-1]
            self.scaled_D = self.weight_D * size**0.5
            self.least = self.weight_D.new_tensor((size * eps) ** 0.5)

    @classmethod
    def of(cls, module: nn.Module) -> Norm:
        rms = isinstance(module, nn.RMSNorm)
        return cls(module.weight, module.eps, None if rms else module.bias, rms)

    def __call__(self, x: Tensor) -> Tensor:
        if self.quick:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x / torch.hypot(length, self.least) * self.scaled_D
        if self.rms:
            return F.rms_norm(x, x.shape[-1:], self.weight_D, self.eps)
        return F.layer_norm(x, x.shape[-1:], self.weight_D, self.bias_D, self.eps)


class Layer:
    """A block for one query a row."""

    def __init__(self, rows: int, block: Block, scheme: PositionScheme, window: int | None):
        attention, mlp = block.attention, block.mlp
        self.number, self.scheme, self.window = block.layer, scheme, window
        self.heads, self.kv_heads = attention.heads, attention.kv_heads
        self.scale, self.qk_norm = attention.scale, None
        self.sharpened = None if attention.score_scale == "fixed" else attention.sharpened
        if attention.qk_norm:
            ones_K = torch.ones_like(attention.query.weight[: attention.head_width, 0])
            self.qk_norm = Norm(ones_K, eps=1e-6)
        self.attention_norm, self.mlp_norm = Norm.of(block.attention_norm), Norm.of(block.mlp_norm)
        self.project = Product(rows, attention.query, attention.key, attention.value)
        self.output, self.down = Product(rows, attention.output), Product(rows, mlp.down)
        self.kind = mlp.kind
        self.up = Product(rows, *((mlp.gate, mlp.up) if self.kind == "swiglu" else (mlp.up,)))

    def __call__(
        self, x_BD: Tensor, positions_B1: Tensor, bias_BH1S: Tensor | None, cache: KeyValueCache
    ) -> Tensor:
        x_BD = x_BD + self.attend(self.attention_norm(x_BD), positions_B1, bias_BH1S, cache)
        h_BF = self.up(self.mlp_norm(x_BD))
        if self.kind == "swiglu":
            gate_BF, up_BF = h_BF.chunk(2, dim=-1)
            h_BF = F.silu(gate_BF) * up_BF
        elif self.kind == "gelu":
            h_BF = F.gelu(h_BF)
        else:
            r_BF = F.relu(h_BF)
            h_BF = r_BF * r_BF
        return x_BD + self.down(h_BF)

    def attend(
        self, x_BD: Tensor, positions_B1: Tensor, bias_BH1S: Tensor | None, cache: KeyValueCache
    ) -> Tensor:
        rows, heads, kv_heads = x_BD.shape[0], self.heads, self.kv_heads
        projected = self.project(x_BD)
        dtype = step_dtype(projected)
        projected = projected.to(dtype).view(rows, heads + 2 * kv_heads, 1, -1)
        both, v_BG1K = projected.split_with_sizes((heads + kv_heads, kv_heads), 1)
        if self.qk_norm is not None:
            both = self.qk_norm(both)
        if self.scheme.turns_alike:
            both = self.scheme.rotate(both, positions_B1, "key")
        q_BH1K, k_BG1K = both.split_with_sizes((heads, kv_heads), 1)
        if not self.scheme.turns_alike:
            q_BH1K = self.scheme.rotate(q_BH1K, positions_B1, "query")
            k_BG1K = self.scheme.rotate(k_BG1K, positions_B1, "key")
        k_BGSK, v_BGSK = cache.extend(self.number, k_BG1K, v_BG1K)
        values_BHS = cache.extend_values(self.number, self.scheme.token_value(x_BD[:, None]))
        real_BS = cache.key_mask_BS[:, : cache.length] if cache.any_padding else None
        k_BGSK = self.scheme.shift(k_BGSK, real_BS)
        k_positions_BS = cache.read_positions_BS
        if self.window is not None:
            k_BGSK, v_BGSK = k_BGSK[:, :, -self.window :], v_BGSK[:, :, -self.window :]
            k_positions_BS = k_positions_BS[:, -self.window :]
        if self.sharpened is not None:
            first = cache.length - k_BGSK.shape[2]
            counts_B1 = cache.key_mask_BS[:, first : cache.length].sum(1, True)
            q_BH1K = self.sharpened(q_BH1K, counts_B1, self.window)
        own = [self.scheme.content_bias(q_BH1K, k_BGSK, positions_B1, k_positions_BS)]
        if values_BHS is not None:
            own.append(self.scheme.value_bias(values_BHS, 1)[..., -k_BGSK.shape[2] :])
        for own_BH1S in (x for x in own if x is not None):
            bias_BH1S = own_BH1S if bias_BH1S is None else bias_BH1S + own_BH1S
        if kv_heads < heads:
            # The queries that share keys become the rows of one product over them.
            q_BH1K = q_BH1K.reshape(rows, kv_heads, heads // kv_heads, -1)
            if bias_BH1S is not None and bias_BH1S.shape[1] == heads:
                bias_BH1S = bias_BH1S.unflatten(1, (kv_heads, -1)).squeeze(3)
        y_BH1K = F.scaled_dot_product_attention(
            q_BH1K.to(dtype),
            k_BGSK.to(dtype),
            v_BGSK.to(dtype),
            attn_mask=None if bias_BH1S is None else bias_BH1S.to(dtype),
            scale=self.scale,
        )
        return self.output(y_BH1K.reshape(rows, -1))


class Stepper:
    """The next logits of rows whose earlier slots a cache holds.

    Made after the prompts have been read; sees the weights of that moment.
    """

    def __init__(self, model: Decoder, cache: KeyValueCache):
        self.model, self.cache = model, cache
        rows = cache.positions_BS.shape[0]
        self.layers = [
            Layer(rows, block, model.scheme.for_layer(block.layer), model.window(block.layer))
            for block in model.blocks
        ]
        self.final_norm, self.head = Norm.of(model.final_norm), Product(rows, model.head)
        # 0 where a slot may be read and -inf where the prompt is padded.
        self.padding_B11S: Tensor | None = None
        if cache.any_padding:
            hidden_BS = ~cache.key_mask_BS
            hidden_BS[:, cache.length :] = False
            zeros_BS = torch.zeros(hidden_BS.shape, device=hidden_BS.device)
            self.padding_B11S = zeros_BS.masked_fill(hidden_BS, float("-inf"))[:, None, None]

    def __call__(self, tokens_B: Tensor, positions_B1: Tensor) -> Tensor:
        """Logits (B, V) behind tokens (B,) at positions (B, 1), which the cache then holds too."""
        # Each product has chosen its type when it was made.
        with torch.autocast(tokens_B.device.type, enabled=False):
            return self.logits(tokens_B, positions_B1)

    def logits(self, tokens_B: Tensor, positions_B1: Tensor) -> Tensor:
        model, cache = self.model, self.cache
        positions_B1 = model.scheme.place(positions_B1, None, cache.longest_B1)
        cache.advance(positions_B1, None)
        x_BD = F.embedding(tokens_B, model.embedding.weight)
        x_BD = x_BD.to(step_dtype(x_BD)) * model.config.width**0.5
        x_BD = model.scheme.embed(x_BD[:, None], positions_B1)[:, 0]
        biases: dict[tuple[PositionScheme, int | None], Tensor | None] = {}
        for layer in self.layers:
            key = layer.scheme, layer.window
            if key not in biases:
                biases[key] = self.bias(layer, positions_B1)
            x_BD = layer(x_BD, positions_B1, biases[key], cache)
        scores_BV = self.head(self.final_norm(x_BD))
        scores_BV = scores_BV if scores_BV.dtype == torch.float64 else scores_BV.float()
        return capped(scores_BV, model.config.softcap)

    def bias(self, layer: Layer, positions_B1: Tensor) -> Tensor | None:
        """What a scheme and padding add to the scores of the keys that a layer reads."""
        first = 0 if layer.window is None else max(0, self.cache.length - layer.window)
        slots = slice(first, self.cache.length)
        bias_BH1S = layer.scheme.bias(positions_B1, self.cache.positions_BS[:, slots])
        if self.padding_B11S is None:
            return bias_BH1S
        padding_B11S = self.padding_B11S[..., slots]
        return padding_B11S if bias_BH1S is None else bias_BH1S + padding_B11S

    def keep_rows(self, rows: Tensor) -> None:
        """Drops every row of the batch but these."""
        self.cache.keep_rows(rows)
        if self.padding_B11S is not None:
            self.padding_B11S = self.padding_B11S[rows]
