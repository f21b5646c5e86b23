"""Loss beyond the trained length, three ways that answer different questions.

- `windows`: the text is cut into windows that do not overlap. A longer window gives more context
  and has fewer early tokens, which have little: the loss falls for either reason.
- `sliding`: a window moves over the text by a stride, and every target is scored once, by the
  first window that holds it, which gives it the most context ("Train Short, Test Long", Press,
  Smith, Lewis, 2022, appendix B; there the strides are one token and whole windows).
- `fixed_targets`: the same targets, each with more and more of the text before it. Nothing but the
  context changes, so a loss that rises tells of a model that longer context harms.

A text is one document of a split, tokenised whole. Documents are never joined: windows lie inside
of one. Every factor reads the same stretches of text, and so scores the same targets, each of a
protocol's once.

Shapes: E tokens of all documents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from wherelm.batches.store import TokenStore
from wherelm.evaluation.measures import measures, score
from wherelm.model.decoder import Decoder
from wherelm.tokenizer.tokenizer import Tokenizer

FACTORS = (1.0, 1.25, 1.5, 2.0, 4.0, 8.0)
TARGETS = 16_384  # of `windows` and of `sliding`, about
FIXED_TARGETS = 4096  # of `fixed_targets`, about


class Stretch(NamedTuple):
    """Text that is scored: the tokens behind `start`, up to and with `stop` (exclusive)."""

    start: int
    stop: int


class Window(NamedTuple):
    """Tokens [start, stop) of a store, of which those from `scored` on are targets."""

    start: int
    stop: int
    scored: int


def windows(stretch: Stretch, length: int) -> list[Window]:
    """Windows of so many inputs that do not overlap; the last may be shorter."""
    starts = range(stretch.start, stretch.stop - 1, length)
    return [Window(s, min(s + length + 1, stretch.stop), s + 1) for s in starts]


def sliding(stretch: Stretch, length: int, stride: int) -> list[Window]:
    """Windows of so many inputs, each a stride further; each scores what none did before."""
    result = []
    scored = stretch.start + 1
    while scored < stretch.stop:
        stop = min(max(scored + stride, stretch.start + length + 1), stretch.stop)
        result.append(Window(max(stretch.start, stop - length - 1), stop, scored))
        scored = stop
    return result


def fixed_targets(stretch: Stretch, length: int, count: int) -> list[Window]:
    """The one window of so many inputs that ends with the stretch; its last `count` are targets."""
    return [Window(stretch.stop - length - 1, stretch.stop, stretch.stop - count)]


def stretches(store: TokenStore, inputs: int, step: int, most: int) -> list[Stretch]:
    """Evenly drawn stretches of so many inputs, their ends at least `step` tokens apart."""
    found = [
        Stretch(int(start), int(start) + inputs + 1)
        for first, length in zip(store.offsets, store.lengths, strict=False)
        for start in range(first, first + length - inputs + 1, step)
    ]
    chosen = np.unique(np.linspace(0, len(found) - 1, min(most, len(found))).round().astype(int))
    return [found[i] for i in chosen]


def cut_out(store: TokenStore, parts: Sequence[Window], bos: int | None) -> TokenStore:
    """The windows as examples, in which only their own targets are learned.

    With `bos` the first input of every window is <BOS>, in place of the token that stands there.
    """
    ids, learned = [], []
    for part in parts:
        tokens, flags = store.ids[part.start : part.stop], store.learned[part.start : part.stop]
        own = np.arange(part.start, part.stop) >= part.scored
        ids.append(tokens if bos is None else np.concatenate(([bos], tokens[1:])))
        learned.append(flags & own)
    offsets = np.concatenate(([0], np.cumsum([len(tokens) for tokens in ids])))
    return TokenStore(np.concatenate(ids), np.concatenate(learned), offsets)


def extrapolate(
    model: Decoder,
    store: TokenStore,
    tokenizer: Tokenizer,
    batch_tokens: int,
    autocast: contextlib.AbstractContextManager | None = None,
    *,
    starts_with_bos: bool,
    factors: Sequence[float] = FACTORS,
) -> dict[str, dict[str, dict[str, Any]]]:
    """{protocol: {factor: figures}} at multiples of the trained context.

    `store` holds whole documents. `starts_with_bos`: rows of training all began with <BOS>, so
    windows do too. Figures are `length` (inputs of a window), `loss` (nats a target),
    `bits_per_byte`, `targets`, `windows`, and of `sliding` its `stride`, half the trained context.
    Where a factor cannot be measured `loss` is None and `reason` says why.
    """
    context = model.config.context
    lengths = {factor: round(factor * context) for factor in sorted(factors)}
    longest = int(store.lengths.max())
    fitting = [length for length in lengths.values() if length <= longest]
    # Every target but a stretch's first then has at least half the context before it.
    stride = max(1, context // 2)
    inputs = max(fitting, default=0)
    scored = stretches(store, inputs, inputs, max(1, TARGETS // inputs)) if fitting else []
    ends = stretches(store, inputs, stride, max(1, FIXED_TARGETS // stride)) if fitting else []
    protocols: dict[str, Callable[[int], list[Window]]] = {
        "windows": lambda length: [w for s in scored for w in windows(s, length)],
        "sliding": lambda length: [w for s in scored for w in sliding(s, length, stride)],
        "fixed_targets": lambda length: [w for s in ends for w in fixed_targets(s, length, stride)],
    }

    def figures(parts: list[Window]) -> dict[str, Any]:
        examples = cut_out(store, parts, tokenizer.bos if starts_with_bos else None)
        try:
            scores = score(model, examples, tokenizer.pad, batch_tokens, autocast)
            found = measures(scores, examples, tokenizer)
        except ValueError as error:  # a scheme with a limit says so itself
            return {"loss": None, "reason": str(error)}
        kept = {key: found[key] for key in ("loss", "bits_per_byte", "targets")}
        return kept | {"windows": len(parts)}

    result: dict[str, dict[str, dict[str, Any]]] = {}
    for name, parts_of in protocols.items():
        result[name] = {}
        for factor, length in lengths.items():
            entry: dict[str, Any] = {"length": length}
            if name == "sliding":
                entry["stride"] = stride
            if length > longest:
                reason = f"needs a text of {length + 1} tokens; the longest has {longest + 1}"
                entry |= {"loss": None, "reason": reason}
            else:
                entry |= figures(parts_of(length))
            result[name][f"{factor:g}"] = entry
    return result


def table(result: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Loss by protocol and multiple of the trained context as aligned text, and what is missing."""
    found = [entry for entries in result.values() for entry in entries.values()]
    if all(entry["loss"] is None for entry in found):
        return (
            f"beyond the trained context: not measured; it {found[0]['reason']}. For such "
            "messages see the breakdowns by length and position of a split of longer ones "
            "(data.extra), which model.context=N reads whole."
        )
    factors = list(next(iter(result.values())))
    lines = [f"{'loss at':16}" + "".join(f"{f'{factor} x':>10}" for factor in factors)]
    reasons: dict[str, list[str]] = {}
    for name, entries in result.items():
        cells = []
        for factor, entry in entries.items():
            cells.append("-" if entry["loss"] is None else f"{entry['loss']:.4f}")
            if "reason" in entry and factor not in reasons.setdefault(entry["reason"], []):
                reasons[entry["reason"]].append(factor)
        stride = next((entry["stride"] for entry in entries.values() if "stride" in entry), None)
        label = name if stride is None else f"{name} by {stride}"
        lines.append(f"{label:16}" + "".join(f"{cell:>10}" for cell in cells))
    lines += [f"{', '.join(f'{f} x' for f in found)}: {why}" for why, found in reasons.items()]
    return "\n".join(lines)
