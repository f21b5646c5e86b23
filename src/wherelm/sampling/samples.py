"""A few replies to held-out messages as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from wherelm.batches.store import TokenStore
from wherelm.model.decoder import Decoder
from wherelm.sampling.drawing import Sampling
from wherelm.sampling.generation import generate

if TYPE_CHECKING:
    from wherelm.tokenizer.tokenizer import Tokenizer


def write_samples(model: Decoder, tokenizer: Tokenizer, store: TokenStore, count: int = 3) -> str:
    """Greedy replies to `count` examples of a store, each below its prompt, as text.

    A conversation is cut before its last reply, a plain text after a third of it.
    """
    chosen = np.linspace(0, len(store) - 1, min(count, len(store))).round().astype(int)
    prompts = []
    for index in chosen:
        ids = store[index][0].tolist()[: model.config.context]
        starts = [i + 1 for i, token in enumerate(ids) if token == tokenizer.assistant]
        prompts.append(ids[: starts[-1] if starts else max(1, len(ids) // 3)])
    sampling = Sampling(greedy=True, max_tokens=max(1, model.config.context // 2))
    replies = generate(model, prompts, sampling, tokenizer.eos)
    return "\n".join(
        f"{_turns(prompt, tokenizer)}\n{tokenizer.decode(reply.tokens)}\n"
        for prompt, reply in zip(prompts, replies, strict=True)
    )


def _turns(prompt: Sequence[int], tokenizer: Tokenizer) -> str:
    """A prompt as text, a line a turn: the control tokens stand between them."""
    turns: list[list[int]] = [[]]
    for token in prompt:
        if tokenizer.control_name(token) is None:
            turns[-1].append(token)
        elif turns[-1]:
            turns.append([])
    return "\n".join(f"> {tokenizer.decode(turn)}" for turn in turns if turn)
