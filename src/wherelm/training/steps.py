"""Where a run stands, and one step of it: micro-batches, gradient, and what is counted."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from wherelm import pipeline
from wherelm.batches.batch import Batch, Rows, collate, examples_of
from wherelm.batches.sampler import Sampler
from wherelm.batches.store import TokenStore
from wherelm.config import RunConfig
from wherelm.model.decoder import Decoder, next_token_loss
from wherelm.seeds import named_seed


@dataclass
class State:
    """Where a run stands; beside weights and optimiser all that resuming needs.

    `positions` counts the targets that were learned at each position. `turns` is False where all
    that train holds is plain text, so that a prompt can only be continued. `trained_length` is how
    many tokens its longest row reads up to the last that it learns. `digests` tell what each split
    holds.
    """

    step: int = 0
    targets: int = 0
    seconds: float = 0.0
    epoch: int = 0
    position: int = 0
    batches_hash: str = ""
    share: float = 0.0
    validation_loss: float = math.inf
    positions: list[int] = field(default_factory=list)
    turns: bool = True
    trained_length: int = 0
    digests: dict[str, str] = field(default_factory=dict)


def share_done(config: RunConfig, step: int, targets: int, sampler: Sampler) -> float:
    """The share of training done after this many steps, supervised tokens or epochs."""
    length = config.training
    if length.steps is not None:
        return step / length.steps
    if length.tokens is not None:
        return targets / length.tokens
    return sampler.epochs_done / length.epochs


def micro_shape(config: RunConfig) -> tuple[int, tuple[int, int] | None]:
    """The most slots of a micro-batch; for a compiled graph also the shape of all: rows, slots."""
    budget = config.training.micro_tokens or config.training.batch_tokens
    context = config.model.context
    return budget, (max(1, budget // context), context) if config.training.compile else None


def collated(data: pipeline.Data, config: RunConfig, sampler: Sampler, rows: Rows) -> list[Batch]:
    """The micro-batches of one step; for a compiled graph all of one shape."""
    budget, shape = micro_shape(config)
    room = config.model.context if config.training.random_offset else 0
    key = named_seed(config.seed, "positions", sampler.epoch)
    return [
        collate(data.stores["train"], part, data.tokenizer.pad, key=key, shape=shape, room=room)
        for part in sampler.micro_batches(rows, budget)
    ]


def accumulate(
    model: Decoder,
    micro_batches: list[Batch],
    config: RunConfig,
    step: int,
    autocast: Any,
    mark: Callable[[str], None] = lambda part: None,
) -> float:
    """Adds the gradient of the batch's mean loss, micro-batch after micro-batch; returns the loss.

    Each micro-batch gives a sum, divided by the number of targets in the whole batch, so that the
    gradient does not depend on how the batch was cut. `mark` is told what has just been done.
    """
    device = model.embedding.weight.device
    targets = sum(batch.targets for batch in micro_batches)
    total = torch.zeros((), device=device)
    for number, batch in enumerate(micro_batches):
        if config.model.dropout:
            # Torch's dropout takes no generator: reseeding leaves nothing to save and restore.
            torch.manual_seed(named_seed(config.seed, "dropout", step, number))
        with autocast:
            loss = next_token_loss(model, batch.to(device))
        mark("head")
        (loss / targets).backward()
        mark("backward")
        total += loss.detach()
    return float(total) / targets


def counted(former: list[int], micro_batches: list[Batch], model: Decoder) -> list[int]:
    """The targets learned so far at each position, as the scheme numbers them, from 0."""
    places = [
        model.scheme.place(batch.positions_BT, batch.keys_BT, 0)
        .expand_as(batch.loss_mask_BT)[batch.loss_mask_BT]
        .long()
        for batch in micro_batches
    ]
    counts_P = np.bincount(torch.cat(places).numpy(), minlength=len(former))
    counts_P[: len(former)] += np.array(former, dtype=np.int64)
    return counts_P.tolist()


def chained_hash(former: str, rows: Rows, store: TokenStore) -> str:
    """A hash over all batches so far: equal hashes mean equal batches in equal order.

    Of what their examples hold, so that other data or another tokeniser is another hash.
    """
    digest = hashlib.sha256(former.encode())
    for index in examples_of(rows):
        for part in store[index]:
            digest.update(part.tobytes())
    return digest.hexdigest()
