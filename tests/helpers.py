"""Small randomised decoders, ragged examples and their batches, for the tests.

Shapes: B rows, T slots, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wherelm.batches.batch import Batch, collate
from wherelm.batches.store import TokenStore
from wherelm.model.cache import KeyValueCache
from wherelm.model.decoder import Decoder, ModelConfig, initialize
from wherelm.schemes import SCHEMES, build_scheme
from wherelm.seeds import torch_generator

VOCABULARY = 23
CONTEXT = 16
PAD = 0
CPU = torch.device("cpu")


def random_decoder(
    name: str = "rope",
    options: dict | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    trained: int | None = None,
    **changes,
) -> Decoder:
    """A decoder whose every parameter is random, also those that training starts from zero or one.

    `trained` is the longest row of training, the whole context if it is not given.

    At initialisation outputs and head are zero, and every equality of logits would hold vacuously.
    """
    small = {"layers": 2, "width": 16, "heads": 4, "context": CONTEXT}
    config = ModelConfig(**{**small, **changes})
    length = trained or config.context
    shape = replace(config.shape, trained=length, positions=length)
    scheme = build_scheme(SCHEMES[name].Config(**(options or {})), shape)
    model = Decoder(config, scheme, VOCABULARY)
    initialize(model, seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch_generator(seed, "noise", key))
            parameter.add_(noise * (0.3 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5))
    return model.to(dtype).eval()


def ragged_store(lengths: tuple[int, ...] = (9, 1, 6, 4), seed: int = 0) -> TokenStore:
    """Examples of these many inputs, whose targets are learned here and there, and at the end."""
    generator = torch_generator(seed, "examples")
    examples = []
    for length in lengths:
        ids = torch.randint(VOCABULARY, (length + 1,), generator=generator).tolist()
        learned = (torch.rand(length + 1, generator=generator) < 0.5).tolist()
        examples.append((ids, [False, *learned[1:-1], True]))
    return TokenStore.from_lists(examples)


def padded(store: TokenStore, indices: list[int] | range, side: str = "right") -> Batch:
    return collate(store, indices, PAD, side)


def packed(store: TokenStore, rows: list[list[int]], spare: int = 2) -> Batch:
    """Several examples a row, with `spare` empty slots behind the longest row."""
    batch = collate(store, [np.array(row) for row in rows], PAD)
    assert batch.side == "packed"
    names = (field.name for field in fields(batch) if field.name.endswith("_BT"))
    return replace(batch, **{name: F.pad(getattr(batch, name), (0, spare)) for name in names})


def with_random_pads(batch: Batch, seed: int = 1) -> Batch:
    """The same batch with other ids, tokens and targets, wherever no real token stands."""
    generator = torch_generator(seed, "pads")

    def fill(ids_BT: Tensor) -> Tensor:
        noise = torch.randint(VOCABULARY, ids_BT.shape, generator=generator)
        return torch.where(batch.key_mask_BT, ids_BT, noise)

    return replace(batch, tokens_BT=fill(batch.tokens_BT), targets_BT=fill(batch.targets_BT))


def batch_logits(model: Decoder, batch: Batch) -> Tensor:
    """Logits of every slot, (B, T, V)."""
    return model(
        batch.tokens_BT,
        batch.positions_BT,
        batch.key_mask_BT,
        batch.segments_BT,
        batch.side,
        keys_BT=batch.keys_BT,
    )


def real_logits(model: Decoder, batch: Batch) -> list[Tensor]:
    """The logits of each message on its real tokens, row by row and segment by segment."""
    with torch.no_grad():
        logits_BTV = batch_logits(model, batch)
    return [
        logits_BTV[b, segments == segment]
        for b, segments in enumerate(batch.segments_BT)
        for segment in segments[segments > 0].unique()
    ]


def alone_logits(model: Decoder, store: TokenStore, index: int) -> Tensor:
    """Logits (T, V) of one example alone, without padding or masks, under its own number."""
    batch = collate(store, [index], PAD)
    with torch.no_grad():
        return model(batch.tokens_BT, batch.positions_BT, keys_BT=batch.keys_BT)[0]


def row_logits(model: Decoder, tokens: Tensor | list[int], longest: int = 0) -> Tensor:
    """Logits (T, V) of tokens that belong to no numbered example.

    With `longest` of a row that may grow to so many tokens, read at once into an empty cache.
    """
    tokens_1T, cache = torch.as_tensor(tokens)[None], None
    if longest:
        longest_B1 = torch.tensor([[longest]])
        cache = KeyValueCache(model.config.layers, 1, tokens_1T.shape[1], CPU, longest_B1)
    with torch.no_grad():
        return model(tokens_1T, torch.arange(tokens_1T.shape[1])[None], cache=cache)[0]


def inputs(store: TokenStore, index: int) -> Tensor:
    """The input tokens of one example: all but its last."""
    return torch.from_numpy(store[index][0][:-1].copy())


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference; NaN and other shapes fail."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    largest = (actual.double() - expected.double()).abs().max().item()
    assert not math.isnan(largest)
    return largest
