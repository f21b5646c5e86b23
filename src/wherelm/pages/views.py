"""What a model does with one or two messages: their answers, their attention.

Shapes: B rows (one a message), T slots, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from wherelm.batches.batch import Batch, collate
from wherelm.batches.store import TokenStore
from wherelm.batches.view import Slot, slots
from wherelm.checkpoint import Loaded
from wherelm.data.messages import Message, prompt_spans
from wherelm.evaluation.heads import (
    attention_weights,
    by_distance,
    plain_lists,
    readable,
    uniform_weights,
)
from wherelm.sampling.drawing import Sampling
from wherelm.sampling.generation import generate

PAIR = ("Send the report before the slides.", "Send the slides before the report.")
MOST_SLOTS = 512  # a page holds layers x heads x slots² weights
REPLY_TOKENS = 64


@dataclass(frozen=True)
class View:
    """What is shown of one message.

    `slots` are all slots of its row, `weights` (layers, H, T, T) hold only the real ones, `reply`
    is the model's greedy answer and `asks` the slot that predicts its first token.
    """

    message: str
    reply: str
    ended: bool
    slots: list[Slot]
    weights: np.ndarray
    by_distance: list[list[list[float | None]]]
    uniform: list[float | None]
    asks: int

    @property
    def names(self) -> list[str]:
        return [slot.token for slot in self.slots if slot.real]


def look(loaded: Loaded, texts: Sequence[str], raw: bool = False) -> tuple[list[View], Batch]:
    """Each message answered, then read together with its answer in one padded batch.

    ValueError for a text that the tokenizer cannot hold, or more than MOST_SLOTS tokens.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    spans = [prompt_spans([Message("text" if raw else "user", text)]) for text in texts]
    prompts = [tokenizer.encode_spans(example)[0] for example in spans]
    longest = max(map(len, prompts))
    if longest + REPLY_TOKENS > MOST_SLOTS:
        raise ValueError(
            f"a message of {longest} tokens: expected at most {MOST_SLOTS - REPLY_TOKENS}"
        )
    replies = generate(
        model, prompts, Sampling(greedy=True, max_tokens=REPLY_TOKENS), tokenizer.eos
    )
    examples = []
    for prompt, reply in zip(prompts, replies, strict=True):
        end = [tokenizer.eos] if reply.finish == "end" else []
        answer = [*reply.tokens, *end]
        examples.append(([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)))
    batch = collate(TokenStore.from_lists(examples), range(len(texts)), tokenizer.pad)
    readable_BTS = readable(batch)
    # (layers, B, H, T, T)
    weights = torch.stack(attention_weights(model, batch))
    views = []
    for b, (text, reply, row) in enumerate(
        zip(texts, replies, slots(batch, tokenizer), strict=True)
    ):
        real = int(batch.key_mask_BT[b].sum())
        own, allowed = weights[:, b : b + 1, :, :real, :real], readable_BTS[b : b + 1, :real, :real]
        uniform = by_distance(uniform_weights(allowed), allowed)[0]
        views.append(
            View(
                text,
                tokenizer.decode(reply.tokens).strip(),
                reply.finish == "end",
                row,
                own[:, 0].numpy(),
                [plain_lists(by_distance(layer, allowed)) for layer in own],
                plain_lists(uniform),
                len(prompts[b]) - 1,
            )
        )
    return views, batch
