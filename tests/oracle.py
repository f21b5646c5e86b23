"""A decoder in float64 and plain loops, written from the equations: the conformance suite's oracle.

It shares no code with the package. It reads one message, token by token, without padding, cache or
kernels. A scheme has one entry in `ORACLES`.

Shapes: T tokens, D width, K head width.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch


class Pair(NamedTuple):
    """One query and one key: where they stand, and what their layer reads."""

    layer: int
    head: int
    query: int
    key: int
    positions: list[float]
    inputs_TD: list[np.ndarray]
    keys_TK: list[np.ndarray]  # of this head
    sharpness: float  # what a score is multiplied by beside 1/sqrt(K)

    @property
    def query_position(self) -> float:
        return self.positions[self.query]

    @property
    def key_position(self) -> float:
        return self.positions[self.key]

    @property
    def back(self) -> float:
        return self.query_position - self.key_position


class NaiveNone:
    """No positions. Another scheme overrides what it changes.

    `weights` holds the scheme's own parameters by name.
    """

    def __init__(self, config: Any, shape: Any, weights: dict[str, np.ndarray]):
        self.config, self.shape, self.weights = config, shape, weights

    def place(self, positions: list[float], key: int) -> list[float]:
        return positions

    def embed(self, x_D: np.ndarray, position: float) -> np.ndarray:
        return x_D

    def score(self, q_K: np.ndarray, k_K: np.ndarray, pair: Pair) -> float:
        """What enters the softmax."""
        return pair.sharpness * float(q_K @ k_K) / math.sqrt(len(k_K)) + self.bias(pair)

    def bias(self, pair: Pair) -> float:
        return 0.0

    def window(self, layer: int) -> int | None:
        """How many of the newest tokens a query reads; None leaves it to the model."""
        return None

    def inner(self, config: Any, prefix: str) -> NaiveNone:
        """A scheme inside this one, with its part of the weights."""
        own = {k[len(prefix) :]: v for k, v in self.weights.items() if k.startswith(prefix)}
        return oracle_for(config.name)(config, self.shape, own)


class NaiveSinusoidal(NaiveNone):
    def embed(self, x_D, position):
        width = self.shape.width
        vector = np.zeros(width)
        for i in range(width // 2):
            frequency = self.config.base ** (-2 * i / width)
            vector[2 * i] = math.sin(position * frequency)
            vector[2 * i + 1] = math.cos(position * frequency)
        return x_D + vector


class NaiveLearned(NaiveNone):
    def embed(self, x_D, position):
        return x_D + self.weights["table_LD"][position]


class NaiveRope(NaiveNone):
    @property
    def extends(self) -> bool:
        return getattr(self.config, "scaling", None) == "self_extend"

    @property
    def shift_invariant(self) -> bool:
        # Groups begin at multiples of their size.
        return not self.extends

    def angles(self, width: int) -> list[float]:
        """Radians for each step of position; pairs beyond them stand still."""
        config = self.config
        rotating = 2 * round(config.fraction * width / 2)
        base, factor = config.base, config.factor
        if config.scaling == "dynamic":
            factor = max(1.0, factor * self.length / self.shape.context - factor + 1)
        if config.scaling in ("ntk", "dynamic"):
            base *= factor ** (rotating / (rotating - 2))
        angles = [base ** (-2 * i / rotating) for i in range(rotating // 2)]
        if config.scaling == "linear":
            angles = [angle / factor for angle in angles]
        if config.scaling == "yarn":
            kept = [self.yarn_kept(i, rotating) for i in range(rotating // 2)]
            angles = [a * k + a / factor * (1 - k) for a, k in zip(angles, kept, strict=True)]
        if config.scaling == "llama3":
            angles = [self.llama3(angle) for angle in angles]
        return angles[: int(config.p * (rotating // 2))]

    def llama3(self, angle: float) -> float:
        wavelength, length = 2 * math.pi / angle, self.shape.context
        if wavelength < length / 4:
            return angle
        if wavelength > length:
            return angle / self.config.factor
        smooth = (length / wavelength - 1) / (4 - 1)
        return (1 - smooth) * angle / self.config.factor + smooth * angle

    def yarn_kept(self, i: int, width: int) -> float:
        length, base = self.shape.trained, self.config.base
        turns = length / (2 * math.pi)
        beta = 32 ** (math.log(turns) / math.log(4096 / (2 * math.pi)))
        low = math.floor(width * math.log(turns / beta) / (2 * math.log(base)))
        high = math.ceil(width * math.log(turns) / (2 * math.log(base)))
        return min(max((high - i) / (high - low), 0.0), 1.0)

    def turned(self, x_K: np.ndarray, position: float) -> np.ndarray:
        """R(position) x with R built as one block-diagonal matrix."""
        matrix = np.eye(len(x_K))
        length = 1.0
        if getattr(self.config, "scaling", None) == "yarn":
            length += 0.1 * math.log(self.config.factor)
        for i, frequency in enumerate(self.angles(len(x_K))):
            cosine = length * math.cos(position * frequency)
            sine = length * math.sin(position * frequency)
            matrix[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[cosine, -sine], [sine, cosine]]
        return matrix @ x_K

    def score(self, q_K, k_K, pair):
        self.length = max(pair.positions) + 1
        query, key = pair.query_position, pair.key_position
        if self.extends:
            near = self.shape.context // 4
            room = self.shape.context - near
            group = math.ceil((self.config.factor * self.shape.context - near) / room)
            if pair.back >= near:
                query, key = query // group + near - near // group, key // group
        return super().score(self.turned(q_K, query), self.turned(k_K, key), pair)


class NaiveDrope(NaiveRope):
    """Before the drop, or with drop_at = 0 after it."""

    def angles(self, width):
        pairs = width // 2 if self.config.drop_at else 0
        return [self.config.base ** (-2 * i / width) for i in range(pairs)]


class NaiveKeyOffset(NaiveRope):
    def angles(self, width):
        rotating = 2 * round(self.config.fraction * width / 2)
        return [self.config.base ** (-2 * i / rotating) for i in range(rotating // 2)]

    def score(self, q_K, k_K, pair):
        rotating = 2 * len(self.angles(len(k_K)))
        before_K = pair.keys_TK[max(pair.key - 1, 0)]
        return super().score(q_K, np.concatenate((k_K[:rotating], before_K[rotating:])), pair)


class NaivePope(NaiveNone):
    def score(self, q_K, k_K, pair):
        total, width = 0.0, len(q_K)
        back = pair.key_position - pair.query_position
        for c in range(width):
            size = math.log1p(math.exp(q_K[c])) * math.log1p(math.exp(k_K[c]))
            angle = back * self.config.base ** (-c / width) + self.weights["delta_HK"][pair.head, c]
            total += size * math.cos(angle)
        return pair.sharpness * total / math.sqrt(width)


class NaiveAlibi(NaiveNone):
    def bias(self, pair):
        assert self.shape.heads in (2, 4, 8), "the rule for other numbers of heads is longer"
        return -pair.back * 2 ** (-8 * (pair.head + 1) / self.shape.heads)


class NaiveT5(NaiveNone):
    def bias(self, pair):
        buckets = self.config.buckets
        exact = buckets // 2
        largest = self.config.max_distance or max(exact + 1, self.shape.trained // 4)
        bucket = pair.back
        if bucket >= exact:
            share = math.log(pair.back / exact) / math.log(largest / exact)
            bucket = min(exact + int(share * (buckets - exact)), buckets - 1)
        return float(self.weights["table_NH"][bucket, pair.head])


class NaiveKerple(NaiveNone):
    def bias(self, pair):
        raw1, raw2 = self.weights["raw1_H"][pair.head], self.weights["raw2_H"][pair.head]
        r1 = math.log1p(math.exp(raw1))
        if self.config.form == "power":
            return -r1 * pair.back ** (2 / (1 + math.exp(-raw2)))
        return -r1 * math.log(1 + math.log1p(math.exp(raw2)) * pair.back)


class NaiveFire(NaiveNone):
    def bias(self, pair):
        c = abs(float(self.weights["c"][0]))
        start = max(1.0, self.shape.trained / 4)
        threshold = abs(float(self.weights["threshold"][0])) * start
        share = math.log(c * pair.back + 1) / math.log(c * max(pair.query_position, threshold) + 1)
        total = 0.0
        for f in range(self.config.inner):
            inner = share * self.weights["up_F1"][f, 0] + self.weights["up_bias_F"][f]
            total += self.weights["down_HF"][pair.head, f] * max(inner, 0.0)
        return float(total)


class NaiveFox(NaiveNone):
    def bias(self, pair):
        weight_D = self.weights[f"layers.{pair.layer}.weight_HD"][pair.head]
        bias = self.weights[f"layers.{pair.layer}.bias_H"][pair.head]
        total = 0.0
        for token in range(pair.key + 1, pair.query + 1):
            total -= math.log1p(math.exp(-float(weight_D @ pair.inputs_TD[token] + bias)))
        return total


class NaiveCope(NaiveNone):
    def score(self, q_K, k_K, pair):
        scale = pair.sharpness / math.sqrt(len(k_K))
        counted = 0.0
        for token in range(pair.key, pair.query + 1):
            counted += 1 / (1 + math.exp(-scale * float(q_K @ pair.keys_TK[token])))
        table = self.weights[f"layers.{pair.layer}.table_NK"]
        counted = min(counted, len(table) - 1)
        row = int(counted)
        e_K = table[row] + (counted - row) * (table[min(row + 1, len(table) - 1)] - table[row])
        return scale * float(q_K @ (k_K + e_K))


class NaiveHybrid(NaiveNone):
    def __init__(self, config, shape, weights):
        super().__init__(config, shape, weights)
        self.entries = [
            self.inner(entry.scheme, f"schemes.{i}.") for i, entry in enumerate(config.pattern)
        ]

    def embed(self, x_D, position):
        for entry in self.entries[: self.shape.layers]:
            x_D = entry.embed(x_D, position)
        return x_D

    def score(self, q_K, k_K, pair):
        turn, entry = divmod(pair.layer, len(self.entries))
        return self.entries[entry].score(q_K, k_K, pair._replace(layer=turn))

    def window(self, layer):
        return self.config.pattern[layer % len(self.entries)].window


class NaiveRandomised(NaiveNone):
    def __init__(self, config, shape, weights):
        super().__init__(config, shape, weights)
        self.length = config.length or max(8 * shape.trained, shape.context)
        self.shape = replace(shape, context=self.length, trained=self.length)
        self.scheme = self.inner(config.scheme, "inner.")
        self.embed, self.score = self.scheme.embed, self.scheme.score

    def place(self, positions, key):
        generator = torch.Generator().manual_seed(key)
        size = max(positions) + 1
        drawn = sorted(torch.randperm(self.length, generator=generator)[:size].tolist())
        return [drawn[position] for position in positions]


ORACLES: dict[str, type[NaiveNone]] = {
    "none": NaiveNone,
    "sinusoidal": NaiveSinusoidal,
    "learned": NaiveLearned,
    "randomised": NaiveRandomised,
    "rope": NaiveRope,
    "drope": NaiveDrope,
    "key_offset": NaiveKeyOffset,
    "pope": NaivePope,
    "alibi": NaiveAlibi,
    "t5": NaiveT5,
    "kerple": NaiveKerple,
    "fire": NaiveFire,
    "fox": NaiveFox,
    "cope": NaiveCope,
    "hybrid": NaiveHybrid,
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
        self.scheme = naive_scheme(model.scheme.config, model.scheme.shape, own)

    def logits(
        self, tokens: list[int], positions: list[float] | None = None, key: int = 0
    ) -> np.ndarray:
        """(T, V) of one message; `key` is the number of the example."""
        positions = list(range(len(tokens))) if positions is None else positions
        positions = self.scheme.place(positions, key)
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

    def _sharpness(self, layer: int, head: int, keys: int, window: float) -> float:
        if self.config.score_scale == "learned":
            return self.weights[f"blocks.{layer}.attention.gain_H"][head]
        if self.config.score_scale == "log":
            return math.log(keys) / math.log(min(self.config.context, window))
        return 1.0

    def _attention(self, h_TD: list[np.ndarray], layer: int, positions: list[float]) -> list:
        name, width = f"blocks.{layer}.attention", self.config.width // self.config.heads
        sharing = self.config.heads // (self.config.kv_heads or self.config.heads)
        queries, keys, values = (
            [self._linear(h, f"{name}.{part}").reshape(-1, width) for h in h_TD]
            for part in ("query", "key", "value")
        )
        window = self.scheme.window(layer) or self.config.window or math.inf
        outputs = []
        if self.config.qk_norm:
            keys = [[_rms_norm(k_K) for k_K in heads] for heads in keys]
        for query in range(len(h_TD)):
            read = range(max(0, query + 1 - min(window, len(h_TD))), query + 1)
            heads = []
            for head in range(self.config.heads):
                q_K = queries[query][head]
                if self.config.qk_norm:
                    q_K = _rms_norm(q_K)
                own_TK = [token[head // sharing] for token in keys]
                sharpness = self._sharpness(layer, head, len(read), window)
                scores = []
                for key in read:
                    pair = Pair(layer, head, query, key, positions, h_TD, own_TK, sharpness)
                    scores.append(self.scheme.score(q_K, own_TK[key], pair))
                weights = [math.exp(score - max(scores)) for score in scores]
                heads.append(
                    sum(
                        w * values[key][head // sharing]
                        for key, w in zip(read, weights, strict=True)
                    )
                    / sum(weights)
                )
            outputs.append(self._linear(np.concatenate(heads), f"{name}.output"))
        return outputs
