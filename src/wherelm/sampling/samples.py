"""A few replies to held-out messages as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from wherelm.batches.store import TokenStore
from wherelm.data.messages import ROLES
from wherelm.model.decoder import Decoder
from wherelm.sampling.drawing import Sampling
from wherelm.sampling.generation import generate

if TYPE_CHECKING:
    from wherelm.tokenizer.tokenizer import Tokenizer


def write_samples(model: Decoder, tokenizer: Tokenizer, store: TokenStore, count: int = 3) -> str:
    """Greedy replies to `count` examples of a store, each behind its prompt, as text.

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
        f"{_turns(prompt, tokenizer)}{tokenizer.decode(reply.tokens)}\n"
        for prompt, reply in zip(prompts, replies, strict=True)
    )


def _turns(prompt: Sequence[int], tokenizer: Tokenizer) -> str:
    """A prompt as text, a line a turn after the name of who speaks: the reply's stands there too.

    A plain text, in which nobody speaks, is a line of its own.
    """
    turns: list[tuple[str, list[int]]] = [("", [])]
    for token in prompt:
        name = tokenizer.control_name(token)
        if name is None:
            turns[-1][1].append(token)
        else:
            turns.append((name.strip("<>").lower(), []))
    spoken = [f"{role}: {tokenizer.decode(turn)}" for role, turn in turns if role in ROLES]
    texts = [f"> {tokenizer.decode(turn)}\n" for role, turn in turns if turn]
    return "\n".join(spoken) or "".join(texts)
