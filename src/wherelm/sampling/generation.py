"""Text from a decoder: batched sampling with a key-value cache.

Shapes: B rows, T prompt slots, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wherelm.batches.sampler import cut
from wherelm.model.cache import KeyValueCache
from wherelm.model.decoder import Decoder
from wherelm.sampling.drawing import Chooser, Sampling
from wherelm.sampling.stepper import Stepper

BATCH_SLOTS = 16_384  # prompt and reply slots of one batch in `generate`; bounds the cache


Stop = Callable[[int, int], bool]


class Chosen(NamedTuple):
    """A token chosen for a row; `finish` says why it was the row's last, None where it was not.

    "end": the token is the end; "stop": the caller's `stop` said so; "length": no room for more.
    """

    row: int
    token: int
    finish: str | None


@dataclass
class Reply:
    """The tokens of a finished row, its end left out, and why it finished (see `Chosen`)."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""


@torch.inference_mode()
def stream_tokens(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    end: int | None,
    rows: Sequence[int] | None = None,
    stop: Stop | None = None,
) -> Iterator[list[Chosen]]:
    """Continues all prompts in one batch; gives, step by step, the token of each unfinished row.

    `rows` numbers the prompts (0, 1, … by default): what is drawn in a row depends on
    (sampling.seed, its number) and not on its neighbours. `stop(row, token)` is told of every
    token but `end`; True finishes the row. With `end` None no token ends a reply. Each prompt holds
    one token or more. A scheme with a limit raises its ValueError for a prompt beyond it, and
    finishes the replies that reach it.
    """
    assert prompts, "nothing to continue"
    assert all(prompts), "a prompt holds at least <BOS>"
    rows = list(range(len(prompts)) if rows is None else rows)
    assert len(set(rows)) == len(prompts), "one number for each prompt"
    device, training = model.embedding.weight.device, model.training
    model.eval()
    try:
        limits = [model.scheme.limit(len(prompt)) for prompt in prompts]
        room = [
            _room(len(prompt), sampling.max_tokens, limit)
            for prompt, limit in zip(prompts, limits, strict=True)
        ]
        tokens_BT, positions_BT, key_mask_BT = _left_padded(prompts, device)
        capacity = tokens_BT.shape[1] + max(room) - 1
        # A limit does not depend on max_tokens, so that a shorter reply begins as a longer one.
        longest = [
            [limit or len(prompt) + left - 1]  # the last token of a reply is never read
            for prompt, left, limit in zip(prompts, room, limits, strict=True)
        ]
        longest_B1 = torch.tensor(longest, device=device)
        cache = KeyValueCache(len(model.blocks), len(prompts), capacity, device, longest_B1)
        chooser = Chooser(model.vocab_size, prompts, rows, max(room), sampling, end)
        x_BTD = model.hidden(
            tokens_BT,
            positions_BT,
            None if bool(key_mask_BT.all()) else key_mask_BT,
            side="left",
            cache=cache,
            first=tokens_BT.shape[1] - 1,
        )
        logits_BV, positions_B1 = model.logits(x_BTD[:, -1]), positions_BT[:, -1:]
        stepper = Stepper(model, cache)
        while True:
            tokens_B = chooser.choose(logits_BV)
            room = [left - 1 for left in room]
            chosen = [
                Chosen(row, token, _finish(row, token, left, end, stop))
                for row, token, left in zip(rows, tokens_B.tolist(), room, strict=True)
            ]
            yield chosen
            live = [i for i, choice in enumerate(chosen) if choice.finish is None]
            if not live:
                return
            if len(live) < len(rows):
                keep = torch.tensor(live, device=device)
                stepper.keep_rows(keep)
                chooser.keep_rows(live)
                tokens_B, positions_B1 = tokens_B[keep], positions_B1[keep]
                rows, room = [rows[i] for i in live], [room[i] for i in live]
            positions_B1 = positions_B1 + 1
            logits_BV = stepper(tokens_B, positions_B1)
    finally:
        model.train(training)


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    end: int | None,
    rows: Sequence[int] | None = None,
    stop: Stop | None = None,
) -> list[Reply]:
    """The whole reply to each prompt, in their order, whatever their number and lengths.

    As `stream_tokens`, in batches of prompts of similar length.
    """
    rows = list(range(len(prompts)) if rows is None else rows)
    replies = {row: Reply() for row in rows}
    lengths = np.array([len(prompt) + sampling.max_tokens for prompt in prompts], dtype=np.int64)
    for group in cut(lengths, np.argsort(lengths, kind="stable"), BATCH_SLOTS):
        batch = [prompts[i] for i in group]
        numbers = [rows[i] for i in group]
        for step in stream_tokens(model, batch, sampling, end, numbers, stop):
            for row, token, finish in step:
                if finish != "end":
                    replies[row].tokens.append(token)
                if finish is not None:
                    replies[row].finish = finish
    return [replies[row] for row in rows]


def _left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and key mask, (B, T) each: every row ends in its newest token.

    Empty slots hold token 0, which the key mask hides.
    """
    width = max(map(len, prompts))
    tokens_BT = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    lengths_B1 = torch.tensor([[len(prompt)] for prompt in prompts])
    positions_BT = torch.arange(width) - (width - lengths_B1)
    tensors = (tokens_BT, positions_BT.clamp(min=0), positions_BT >= 0)
    return tuple(tensor.to(device) for tensor in tensors)


def _room(prompt: int, max_tokens: int, limit: int | None) -> int:
    """How many tokens may follow a prompt: the last one is never read, so it needs no position."""
    return max_tokens if limit is None else max(1, min(max_tokens, limit - prompt + 1))


def _finish(row: int, token: int, left: int, end: int | None, stop: Stop | None) -> str | None:
    if token == end:
        return "end"
    if stop is not None and stop(row, token):
        return "stop"
    return "length" if left == 0 else None
