"""How well a model predicts: every target scored once, every figure a quotient of two sums.

Shapes: N targets of a batch, E tokens of a whole store.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from wherelm.batches.batch import collate
from wherelm.batches.sampler import cut
from wherelm.batches.store import TokenStore
from wherelm.model.decoder import Decoder, learned_logits
from wherelm.run_folder import HIGHER
from wherelm.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Scores:
    """What the model makes of each token of a store; `scored_E` is True where it was a target."""

    scored_E: np.ndarray
    nats_E: np.ndarray
    correct_E: np.ndarray


@torch.inference_mode()
def score(
    model: Decoder,
    store: TokenStore,
    pad: int,
    batch_tokens: int,
    autocast: contextlib.AbstractContextManager | None = None,
) -> Scores:
    """-log p in nats, and whether the likeliest token was right, of every learned token."""
    device = model.embedding.weight.device
    nats_E = np.zeros(len(store.ids))
    correct_E = np.zeros(len(store.ids), dtype=bool)
    scored_E = np.zeros(len(store.ids), dtype=bool)
    training = model.training
    model.eval()
    for indices in cut(store.widths, np.argsort(store.lengths, kind="stable"), batch_tokens):
        batch = collate(store, indices, pad)
        rows, slots = np.nonzero(batch.loss_mask_BT.numpy())
        if not len(rows):
            continue
        batch = batch.to(device)
        with autocast or contextlib.nullcontext():
            logits_NV, targets_N = learned_logits(model, batch)
        at_N = store.offsets[indices][rows] + slots + 1
        nats_E[at_N] = F.cross_entropy(logits_NV, targets_N, reduction="none").cpu()
        correct_E[at_N] = (logits_NV.argmax(-1) == targets_N).cpu()
        scored_E[at_N] = True
    model.train(training)
    return Scores(scored_E, nats_E, correct_E)


def replies(store: TokenStore, tokenizer: Tokenizer) -> np.ndarray:
    """Which complete reply each token of the store belongs to, its <EOS> included; -1 for none."""
    reply_E = np.full(len(store.ids), -1)
    starts = np.flatnonzero(store.ids == tokenizer.assistant) + 1
    ends = np.flatnonzero(store.ids == tokenizer.eos) + 1
    # A truncated reply has no <EOS>: the next one stands behind the end of its example.
    nearest = np.searchsorted(ends, starts)
    limits = store.offsets[np.searchsorted(store.offsets, starts - 1, side="right")]
    for number, (start, end, limit) in enumerate(zip(starts, nearest, limits, strict=True)):
        if end < len(ends) and ends[end] <= limit:
            reply_E[start : ends[end]] = number
    return reply_E


def exact_matches(scores: Scores, reply_E: np.ndarray) -> np.ndarray:
    """For each reply, whether greedy decoding gives it to the last token.

    Greedy decoding reproduces a reply exactly when the likeliest token after each of its prefixes
    is its next one, so the pass that gives the loss gives this too.
    """
    inside = scores.scored_E & (reply_E >= 0)
    totals = np.bincount(reply_E[inside], minlength=1)
    hits = np.bincount(reply_E[inside], weights=scores.correct_E[inside], minlength=1)
    return hits[totals > 0] == totals[totals > 0]


def measures(scores: Scores, store: TokenStore, tokenizer: Tokenizer) -> dict[str, float | int]:
    """Loss (nats a target), perplexity, accuracy, bits per byte, and exact match of replies.

    Bits per byte divide by the UTF-8 bytes of the targets, so they compare across tokenisers.
    """
    targets = int(scores.scored_E.sum())
    if targets == 0:
        raise ValueError("no learned target in this split, so there is nothing to measure")
    nats = float(scores.nats_E.sum())
    text_bytes = int(tokenizer.byte_lengths[store.ids[scores.scored_E]].sum())
    result = {
        "loss": nats / targets,
        "perplexity": math.exp(min(nats / targets, 700.0)),
        "accuracy": float(scores.correct_E.sum()) / targets,
        "bits_per_byte": nats / math.log(2) / text_bytes if text_bytes else math.nan,
        "targets": targets,
    }
    reply_E = replies(store, tokenizer)
    exact = exact_matches(scores, reply_E)
    if len(exact):
        result |= {"exact_match": float(exact.mean()), "replies": len(exact)}
        result["chance"] = chance(store, reply_E)
    return result


def chance(store: TokenStore, reply_E: np.ndarray) -> float:
    """The share of replies that the commonest of them is: what always saying the same gets."""
    at_N = np.flatnonzero(reply_E >= 0)
    starts = np.flatnonzero(np.diff(reply_E[at_N], prepend=-1))
    said = Counter(part.tobytes() for part in np.split(store.ids[at_N], starts[1:]))
    return said.most_common(1)[0][1] / said.total()


def evaluate(
    model: Decoder,
    store: TokenStore,
    tokenizer: Tokenizer,
    batch_tokens: int,
    autocast: contextlib.AbstractContextManager | None = None,
) -> dict[str, float | int]:
    """`score` and `measures` in one."""
    scores = score(model, store, tokenizer.pad, batch_tokens, autocast)
    return measures(scores, store, tokenizer)


def table(splits: dict[str, dict[str, float | int]]) -> str:
    """The figures of several splits as aligned text; untrained reads where there are any."""
    hidden = {"targets", "chance"}
    if not any(values.get("untrained_reads") for values in splits.values()):
        hidden.add("untrained_reads")
    columns = dict.fromkeys(key for values in splits.values() for key in values)
    columns = [column for column in columns if column not in hidden]
    titles = [column.removesuffix("_reads").replace("_", " ") for column in columns]
    lines = [f"{'':12}" + "".join(f"{title:>14}" for title in titles)]
    for split, values in splits.items():
        cells = [_cell(column, values.get(column)) for column in columns]
        lines.append(f"{split:12}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def _cell(column: str, value: float | int | None) -> str:
    if value is None:
        return "-"
    if column in (*HIGHER, "untrained_reads"):
        return f"{100 * value:.1f} %"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
