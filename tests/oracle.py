"""A decoder in float64 and plain loops, written from the equations: the conformance suite's oracle.

It shares no code with the package. It reads one message, token by token, without padding, cache or
kernels. A scheme has one entry in `ORACLES`.

Shapes: T tokens, D width, K head width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np


class Pair(NamedTuple):
    """One query and one key: where they stand, and what their layer reads."""

    layer: int
    head: int
    query: int
    key: int
    positions: list[float]
    inputs_TD: list[np.ndarray]

    @property
    def query_position(self) -> float:
        return self.positions[self.query]

    @property
    def key_position(self) -> float:
        return self.positions[self.key]


class NaiveNone:
    """No positions. Another scheme overrides what it changes.

    `shift_invariant`: adding one number to all positions changes no logit; None is not tested.
    `weights` holds the scheme's own parameters by name.
    """

    shift_invariant: bool | None = True

    def __init__(self, config: Any, shape: Any, weights: dict[str, np.ndarray]):
        self.config, self.shape, self.weights = config, shape, weights

    def embed(self, x_D: np.ndarray, position: float) -> np.ndarray:
        return x_D

    def score(self, q_K: np.ndarray, k_K: np.ndarray, pair: Pair) -> float:
        """What enters the softmax."""
        return float(q_K @ k_K) / math.sqrt(self.shape.head_width)


class NaiveSinusoidal(NaiveNone):
    shift_invariant = False

    def embed(self, x_D, position):
        width = self.shape.width
        vector = np.zeros(width)
        for i in range(width // 2):
            frequency = self.config.base ** (-2 * i / width)
            vector[2 * i] = math.sin(position * frequency)
            vector[2 * i + 1] = math.cos(position * frequency)
        return x_D + vector


class NaiveLearned(NaiveNone):
    shift_invariant = False

    def embed(self, x_D, position):
        return x_D + self.weights["table_LD"][position]


class NaiveRope(NaiveNone):
    def turned(self, x_K: np.ndarray, position: float) -> np.ndarray:
        """R(position) x with R built as one block-diagonal matrix."""
        matrix = np.eye(len(x_K))
        width = 2 * round(self.config.fraction * len(x_K) / 2)
        for i in range(width // 2):
            angle = position * self.config.base ** (-2 * i / width)
            cosine, sine = math.cos(angle), math.sin(angle)
            matrix[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[cosine, -sine], [sine, cosine]]
        return matrix @ x_K

    def score(self, q_K, k_K, pair):
        q_K = self.turned(q_K, pair.query_position)
        return super().score(q_K, self.turned(k_K, pair.key_position), pair)


ORACLES: dict[str, type[NaiveNone]] = {
    "none": NaiveNone,
    "sinusoidal": NaiveSinusoidal,
    "learned": NaiveLearned,
    "rope": NaiveRope,
}


def oracle_for(name: str) -> type[NaiveNone]:
    assert name in ORACLES, f"the scheme {name} has no entry in ORACLES of tests/oracle.py: add one"
    return ORACLES[name]


def _rms_norm(x: np.ndarray) -> np.ndarray:
    return x / math.sqrt(float(np.mean(x**2)) + 1e-6)


def _activation(kind: str, value: float) -> float:
    if kind == "gelu":
        return value * (1 + math.erf(value / math.sqrt(2))) / 2
    if kind == "relu2":
        return max(value, 0.0) ** 2
    return value / (1 + math.exp(-value))


class NaiveDecoder:
    """The decoder that has the parameters of `model`, whose settings and names alone it reads."""

    def __init__(self, model):
        self.config, self.weights = model.config, {}
        for name, parameter in model.named_parameters():
            self.weights[name] = parameter.detach().double().numpy()
        own = {k[7:]: v for k, v in self.weights.items() if k.startswith("scheme.")}
        naive_scheme = oracle_for(model.scheme.config.name)
        self.scheme = naive_scheme(model.scheme.config, model.config.shape, own)

    def logits(self, tokens: list[int], positions: list[float] | None = None) -> np.ndarray:
        """(T, V) of one message."""
        positions = list(range(len(tokens))) if positions is None else positions
        scale = math.sqrt(self.config.width)
        embedding = self.weights["embedding.weight"]
        x_TD = [
            self.scheme.embed(embedding[token] * scale, position)
            for token, position in zip(tokens, positions, strict=True)
        ]
        for layer in range(self.config.layers):
            h_TD = [self._norm(x, f"blocks.{layer}.attention_norm") for x in x_TD]
            y_TD = self._attention(h_TD, layer, positions)
            x_TD = [x + y for x, y in zip(x_TD, y_TD, strict=True)]
            x_TD = [x + self._mlp(self._norm(x, f"blocks.{layer}.mlp_norm"), layer) for x in x_TD]
        head = self.weights["embedding.weight" if self.config.tied else "head.weight"]
        scores = np.array([head @ self._norm(x, "final_norm") for x in x_TD])
        cap = self.config.softcap
        return scores if cap is None else cap * np.tanh(scores / cap)

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = self.weights[f"{name}.weight"] @ x
        return y + self.weights[f"{name}.bias"] if self.config.bias else y

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        if self.config.norm == "rmsnorm":
            return _rms_norm(x) * self.weights[f"{name}.weight"]
        y = (x - x.mean()) / math.sqrt(float(x.var()) + 1e-5) * self.weights[f"{name}.weight"]
        return y + self.weights[f"{name}.bias"] if self.config.bias else y

    def _mlp(self, x: np.ndarray, layer: int) -> np.ndarray:
        name = f"blocks.{layer}.mlp"
        inner = self._linear(x, f"{name}.up")
        if self.config.mlp == "swiglu":
            gates = self._linear(x, f"{name}.gate")
            inner = inner * np.array([_activation("swiglu", g) for g in gates])
        else:
            inner = np.array([_activation(self.config.mlp, value) for value in inner])
        return self._linear(inner, f"{name}.down")

    def _attention(self, h_TD: list[np.ndarray], layer: int, positions: list[float]) -> list:
        name, width = f"blocks.{layer}.attention", self.config.width // self.config.heads
        sharing = self.config.heads // (self.config.kv_heads or self.config.heads)
        queries, keys, values = (
            [self._linear(h, f"{name}.{part}").reshape(-1, width) for h in h_TD]
            for part in ("query", "key", "value")
        )
        outputs = []
        for query in range(len(h_TD)):
            heads = []
            for head in range(self.config.heads):
                q_K = queries[query][head]
                scores = []
                for key in range(query + 1):
                    k_K = keys[key][head // sharing]
                    if self.config.qk_norm:
                        q_K = _rms_norm(queries[query][head])
                        k_K = _rms_norm(k_K)
                    pair = Pair(layer, head, query, key, positions, h_TD)
                    scores.append(self.scheme.score(q_K, k_K, pair))
                weights = [math.exp(score - max(scores)) for score in scores]
                heads.append(
                    sum(w * values[key][head // sharing] for key, w in enumerate(weights))
                    / sum(weights)
                )
            outputs.append(self._linear(np.concatenate(heads), f"{name}.output"))
        return outputs
