"""How well a model predicts: every target scored once, every figure a quotient of two sums.

Shapes: N targets of a batch, E tokens of a whole store.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from wherelm.batches import TokenStore, collate, cut
from wherelm.command_line import ArgumentParser
from wherelm.model import Decoder, learned_logits
from wherelm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from wherelm.checkpoint import Loaded


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
    exact = exact_matches(scores, replies(store, tokenizer))
    if len(exact):
        result |= {"exact_match": float(exact.mean()), "replies": len(exact)}
    return result


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
    """The figures of several splits as aligned text."""
    columns = ("loss", "perplexity", "accuracy", "bits_per_byte", "exact_match", "replies")
    columns = [c for c in columns if any(c in values for values in splits.values())]
    lines = [f"{'':12}" + "".join(f"{c.replace('_', ' '):>14}" for c in columns)]
    for split, values in splits.items():
        cells = [_cell(column, values.get(column)) for column in columns]
        lines.append(f"{split:12}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def _cell(column: str, value: float | int | None) -> str:
    if value is None:
        return "-"
    if column in ("accuracy", "exact_match"):
        return f"{100 * value:.1f} %"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="python -m wherelm.evaluate",
        description="Measures checkpoints on splits: loss, bits per byte, exact match of replies.",
        epilog="examples: python -m wherelm.evaluate runs/errands/… evaluation.splits=[test,longer]"
        "; … position.scaling=yarn position.factor=4 reads the same weights with another rotary "
        "extension; … model.context=512 reads texts up to that length, whatever was trained. What "
        "heads do: python -m wherelm.probes RUN.",
    )
    parser.add_argument(
        "run",
        nargs="*",
        metavar="RUN | key=value",
        help="run or checkpoint folders (default: the newest run, else the shipped checkpoint), "
        "and overrides",
    )
    parser.add_argument(
        "--breakdowns",
        action="store_true",
        help="loss by position, length and turn as well, and exact match by group",
    )
    parser.add_argument(
        "--shuffled-prefix",
        action="store_true",
        help="the loss of replies when the tokens before each are shuffled",
    )
    parser.add_argument(
        "--extrapolation",
        action="store_true",
        help="the validation loss at 1 to 8 times the trained context, measured in three ways",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    options = parser.parse_intermixed_args(arguments)

    from wherelm import checkpoint, runtime
    from wherelm.config import project_root

    root = project_root()
    pairs = [word for word in options.run if "=" in word and not Path(word).exists()]
    try:
        for path in [word for word in options.run if word not in pairs] or [None]:
            folder = checkpoint.find(path, root)
            trained = checkpoint.load(folder)
            loaded = checkpoint.reread(trained, pairs)
            for line in loaded.model.scheme.warnings():
                if line not in trained.model.scheme.warnings():
                    print(f"warning: {line}", file=sys.stderr)
            # As in the run's own final measurement.
            device = loaded.model.embedding.weight.device
            precision = runtime.choose_precision(loaded.config.training.precision, device)
            found = _measured(loaded, root, options, precision)
            if options.json:
                line = {"checkpoint": str(path or folder), "precision": precision}
                print(json.dumps(line | found))
            else:
                print(f"{path or folder}, step {loaded.state['step']}, {precision}")
                print(_shown(found))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _measured(
    loaded: Loaded, root: Path, options: argparse.Namespace, precision: str
) -> dict[str, dict[str, Any]]:
    """All that is asked for, each under its name in the JSON, and split by split within."""
    from wherelm import pipeline, runtime
    from wherelm.breakdowns import breakdowns
    from wherelm.extrapolation import beyond_context
    from wherelm.shuffled_prefix import shuffled_prefix

    config = loaded.config
    model, tokenizer, budget = loaded.model, loaded.tokenizer, config.evaluation.batch_tokens
    splits = config.final_splits
    data = pipeline.prepare(config, root, splits, tokenizer)
    autocast = runtime.autocast(precision, model.embedding.weight.device)
    found: dict[str, dict[str, Any]] = {"splits": {}}
    for split in splits:
        store = data.stores[split]
        scores = score(model, store, tokenizer.pad, budget, autocast)
        found["splits"][split] = measures(scores, store, tokenizer)
        if options.breakdowns:
            found.setdefault("breakdowns", {})[split] = breakdowns(scores, store, tokenizer)
        if options.shuffled_prefix:
            found.setdefault("shuffled_prefix", {})[split] = shuffled_prefix(
                model, store, tokenizer, budget, autocast, seed=config.seed
            )
    if options.extrapolation or config.evaluation.extrapolation:
        found["extrapolation"] = beyond_context(model, tokenizer, config, root, autocast)
    return found


def _shown(found: dict[str, dict[str, Any]]) -> str:
    from wherelm import breakdowns, extrapolation, shuffled_prefix

    parts = [table(found["splits"])]
    if "shuffled_prefix" in found:
        parts.append(shuffled_prefix.table(found["shuffled_prefix"]))
    if "extrapolation" in found:
        parts.append(extrapolation.table(found["extrapolation"]))
    parts += [breakdowns.text(*item) for item in found.get("breakdowns", {}).items()]
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
