"""What heads do: attention by distance, previous-token and induction scores, entropy.

Shapes: B rows, T query slots, S key slots, H heads; N slots of a repeated block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wherelm.batches.batch import Batch, collate
from wherelm.batches.store import TokenStore
from wherelm.model.decoder import Decoder
from wherelm.seeds import torch_generator
from wherelm.tokenizer.tokenizer import Tokenizer

EXAMPLES = 64  # held-out examples that the averages are taken over
REPEATS, BLOCK = 16, 32  # rows of repeated random tokens, and the longest block in them


@contextlib.contextmanager
def kept_weights(model: Decoder) -> Iterator[list]:
    """While it lasts each attention keeps the weights of its last call in `weights_BHTS`.

    Gives the attention modules, layer by layer. Afterwards the fast path runs again.
    """
    modules = [block.attention for block in model.blocks]
    try:
        for module in modules:
            module.keep_weights = True
        yield modules
    finally:
        for module in modules:
            module.keep_weights, module.weights_BHTS = False, None


def attention_weights(model: Decoder, batch: Batch) -> list[Tensor]:
    """The weights A (B, H, T, T) of every layer, float32; empty queries have rows too."""
    with kept_weights(model) as modules, torch.inference_mode():
        model.read(batch)
        return [module.weights_BHTS.float().clone() for module in modules]


def readable(batch: Batch) -> Tensor:
    """True where a real query may read a real key of its own message, (B, T, S)."""
    length = batch.tokens_BT.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=batch.tokens_BT.device).tril()
    same = batch.segments_BT[:, :, None] == batch.segments_BT[:, None, :]
    return causal & same & batch.key_mask_BT[:, :, None] & batch.key_mask_BT[:, None, :]


def uniform_weights(readable_BTS: Tensor) -> Tensor:
    """The weights (B, 1, T, S) of a head that reads all of its i keys with 1/i each."""
    counts_BT1 = readable_BTS.sum(-1, keepdim=True).clamp(min=1)
    return (readable_BTS / counts_BT1)[:, None]


def by_distance(weights_BHTS: Tensor, readable_BTS: Tensor) -> Tensor:
    """Mean weight on the key that stands d slots back, (H, T) for d = 0 … T - 1.

    The mean at d is over the queries that have such a key; NaN where none has.
    """
    length = weights_BHTS.shape[-1]
    columns = []
    for d in range(length):
        there = readable_BTS.diagonal(-d, -2, -1)
        sums_H = (weights_BHTS.diagonal(-d, -2, -1) * there[:, None]).sum((0, 2))
        columns.append(sums_H / there.sum())
    return torch.stack(columns, dim=1)


def entropy(weights_BHTS: Tensor, readable_BTS: Tensor) -> Tensor:
    """Mean entropy of a real query's row in nats, (H,): 0 reads one key alone."""
    # 0 log 0 counts as 0.
    rows_BHT = torch.special.entr(weights_BHTS).sum(-1)
    real_BT = readable_BTS.any(-1)
    return (rows_BHT * real_BT[:, None]).sum((0, 2)) / real_BT.sum()


def first_token(weights_BHTS: Tensor, readable_BTS: Tensor) -> Tensor:
    """Mean weight of later queries on the first token of their message, (H,): an attention sink.

    "Efficient Streaming Language Models with Attention Sinks" (Xiao et al., 2023).
    """
    first_BT1 = readable_BTS.int().argmax(-1, keepdim=True)
    later_BT = readable_BTS.sum(-1) > 1
    at_BHT = weights_BHTS.gather(-1, first_BT1[:, None].expand(-1, weights_BHTS.shape[1], -1, -1))[
        ..., 0
    ]
    return (at_BHT * later_BT[:, None]).sum((0, 2)) / later_BT.sum()


def repeated_blocks(
    tokenizer: Tokenizer, context: int, rows: int = REPEATS, seed: int = 0
) -> tuple[Batch, int]:
    """<BOS> and a block of N random tokens twice, and N; ValueError where the context is too short.

    No token occurs twice in a block (as far as the vocabulary goes), so only the first copy tells
    what follows in the second.
    """
    block = min(BLOCK, (context - 1) // 2)
    if block < 2:
        raise ValueError(f"model.context={context}: repeated blocks need a context of 5 or more")
    texts = [i for i in range(tokenizer.vocab_size) if tokenizer.control_name(i) is None]
    examples = []
    for row in range(rows):
        generator = torch_generator(seed, "repeats", row)
        order = torch.randperm(len(texts), generator=generator)[torch.arange(block) % len(texts)]
        half = [texts[i] for i in order]
        # The last token is a target alone: collate makes inputs of all but it.
        ids = [tokenizer.bos, *half, *half, tokenizer.eos]
        examples.append((ids, [False, *[True] * (len(ids) - 1)]))
    return collate(TokenStore.from_lists(examples), range(rows), tokenizer.pad), block


def previous_token_score(weights_BHTS: Tensor) -> Tensor:
    """Mean weight on the slot just before the query's, (H,), over full rows of one message."""
    return weights_BHTS.diagonal(-1, -2, -1).mean((0, 2))


def induction_score(weights_BHTS: Tensor, block: int) -> Tensor:
    """Mean weight of the second copy on the token that followed its own in the first, (H,).

    "In-context Learning and Induction Heads" (Olsson et al., 2022): the key N - 1 slots back.
    Rows are <BOS> and twice a block of N.
    """
    diagonal_BHT = weights_BHTS.diagonal(1 - block, -2, -1)
    # The diagonal begins at query N - 1; the second copy begins at slot N + 1.
    return diagonal_BHT[..., 2:].mean((0, 2))


def held_out(store: TokenStore, pad: int) -> Batch:
    """EXAMPLES of a split, evenly drawn, as one batch."""
    chosen = np.unique(np.linspace(0, len(store) - 1, EXAMPLES).round().astype(int))
    return collate(store, chosen, pad)


def measure(model: Decoder, tokenizer: Tokenizer, batch: Batch) -> dict[str, Any]:
    """All probes as plain lists, [layer][head] each: of the batch, and of repeated random blocks.

    `by_distance` is [layer][head][d], `uniform_by_distance` [d] what equal weights would give on
    the same queries; null where no query has a key so far back.
    """
    readable_BTS = readable(batch)
    weights = attention_weights(model, batch)
    repeats, block = repeated_blocks(tokenizer, model.config.context)
    repeated = attention_weights(model, repeats)
    uniform = by_distance(uniform_weights(readable_BTS), readable_BTS)[0]
    return {
        "position": model.scheme.config.name,
        "layers": len(weights),
        "heads": weights[0].shape[1],
        "examples": len(batch.tokens_BT),
        "by_distance": [plain_lists(by_distance(layer, readable_BTS)) for layer in weights],
        "uniform_by_distance": plain_lists(uniform),
        "entropy": [plain_lists(entropy(layer, readable_BTS)) for layer in weights],
        "first_token": [plain_lists(first_token(layer, readable_BTS)) for layer in weights],
        "block": block,
        "previous_token": [plain_lists(previous_token_score(layer)) for layer in repeated],
        "induction": [plain_lists(induction_score(layer, block)) for layer in repeated],
    }


def plain_lists(values: Tensor) -> list:
    """Nested lists for JSON, which has no NaN."""
    if values.ndim > 1:
        return [plain_lists(row) for row in values]
    return [None if value != value else round(value, 6) for value in values.tolist()]
