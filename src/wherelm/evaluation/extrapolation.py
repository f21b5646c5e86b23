"""Loss beyond the trained length, three ways that answer different questions.

- `fixed_targets`, the headline: the same targets, each with more and more of the text before it.
  Nothing but the context changes, so a loss that rises tells of a model that longer context harms.
- `windows`: the text is cut into windows that do not overlap. A longer window gives more context
  and has fewer early tokens, which have little: the loss falls for either reason.
- `sliding`: a window moves over the text by a stride, and every target is scored once, by the
  first window that holds it, which gives it the most context ("Train Short, Test Long", Press,
  Smith, Lewis, 2022, appendix B; there the strides are one token and whole windows). The longest
  window is as long as its stretch and has nowhere to slide to. What context the targets of each
  entry really had stands beside it.

A text is one document of a split, tokenised whole. Documents are never joined: windows lie inside
of one. Every factor reads the same stretches of text, and so scores the same targets, each of a
protocol's once. Documents take turns in giving stretches, and none gives more than half of them.

Shapes: E tokens of all documents, D documents, S stretches, W windows, N targets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wherelm.batches.store import TokenStore
from wherelm.evaluation.measures import Scores, measures, score
from wherelm.evaluation.untrained import untrained_reads
from wherelm.model.decoder import Decoder
from wherelm.run_folder import EXTRAPOLATION, FACTORS, write_scores
from wherelm.tokenizer.tokenizer import Tokenizer

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
    """Stretches of so many inputs, evenly drawn, their ends at least `step` tokens apart.

    In turn from each document that holds any, and from none more than from all others together.
    """
    starts_D = [
        np.arange(first, first + length - inputs + 1, step)
        for first, length in zip(store.offsets, store.lengths, strict=False)
        if length >= inputs
    ]
    starts_D = [starts_D[i] for i in evenly(len(starts_D), most)]
    found_D = np.array([len(starts) for starts in starts_D])
    taken_D = np.zeros_like(found_D)
    while (room := most - taken_D.sum()) > 0 and (taken_D < found_D).any():
        taken_D[np.flatnonzero(taken_D < found_D)[:room]] += 1
    if len(taken_D) > 1:
        taken_D = np.minimum(taken_D, taken_D.sum() - taken_D)
    chosen = [
        starts[evenly(len(starts), taken)]
        for starts, taken in zip(starts_D, taken_D.tolist(), strict=True)
    ]
    return [Stretch(start, start + inputs + 1) for starts in chosen for start in starts.tolist()]


def evenly(size: int, most: int) -> np.ndarray:
    """At most so many of `size` indices, evenly spread."""
    return np.unique(np.linspace(0, size - 1, min(most, size)).round().astype(int))


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
    folder: Path | None = None,
) -> dict[str, dict[str, dict[str, Any]]]:
    """{protocol: {factor: figures}} at multiples of the trained length, the headline first.

    `store` holds whole documents. `starts_with_bos`: rows of training all began with <BOS>, so
    windows do too. Figures are `length` (inputs of a window), `loss` (nats a target),
    `ratio_to_1` (that loss over the loss at factor 1), `bits_per_byte`, `targets`, `windows`,
    `documents` that they come from, `context` (tokens before a target within its window: mean,
    least and most), `untrained_reads`, and of `sliding` its `stride`, half the trained length.
    Where a factor cannot be measured `loss` is None and `reason` says why. With a run folder the
    sums of each stretch are written as scores-extrapolation.PROTOCOL.FACTOR.npz.
    """
    trained = model.scheme.shape.trained
    lengths = {factor: round(factor * trained) for factor in sorted(factors)}
    longest = int(store.lengths.max())
    fitting = [length for length in lengths.values() if length <= longest]
    # Every target but a stretch's first then has at least half the trained length before it.
    stride = max(1, trained // 2)
    inputs = max(fitting, default=0)
    scored = stretches(store, inputs, inputs, max(1, TARGETS // inputs)) if fitting else []
    ends = stretches(store, inputs, stride, max(1, FIXED_TARGETS // stride)) if fitting else []
    protocols: dict[str, tuple[list[Stretch], Callable[[Stretch, int], list[Window]]]] = {
        "fixed_targets": (ends, lambda stretch, length: fixed_targets(stretch, length, stride)),
        "windows": (scored, windows),
        "sliding": (scored, lambda stretch, length: sliding(stretch, length, stride)),
    }

    result: dict[str, dict[str, dict[str, Any]]] = {}
    for name, (places, windows_of) in protocols.items():
        result[name] = {}
        nats_at_1: np.ndarray | None = None
        for factor, length in lengths.items():
            entry = result[name][f"{factor:g}"] = {"length": length}
            if name == "sliding":
                entry["stride"] = stride
            if length > longest:
                reason = f"needs a text of {length + 1} tokens; the longest has {longest + 1}"
                entry |= {"loss": None, "reason": reason}
                continue
            parts = [windows_of(place, length) for place in places]
            stretch_W = np.repeat(np.arange(len(places)), [len(part) for part in parts])
            flat = [window for part in parts for window in part]
            examples = cut_out(store, flat, tokenizer.bos if starts_with_bos else None)
            try:
                scores = score(model, examples, tokenizer.pad, batch_tokens, autocast)
                found = measures(scores, examples, tokenizer)
            except ValueError as error:  # a scheme with a limit says so itself
                entry |= {"loss": None, "reason": str(error)}
                continue
            nats_S, targets_S = stretch_sums(scores, examples, stretch_W)
            nats_at_1 = nats_S if factor == 1 else nats_at_1
            entry |= {key: found[key] for key in ("loss", "bits_per_byte", "targets")}
            sums = {"nats": nats_S, "targets": targets_S}
            if nats_at_1 is not None:
                entry["ratio_to_1"] = float(nats_S.sum() / nats_at_1.sum())
                sums["ratio"] = ratio_sums(nats_S, nats_at_1, targets_S)
            starts = [place.start for place in places]
            documents = np.searchsorted(store.offsets, starts, side="right")
            entry |= {
                "windows": len(flat),
                "documents": len(np.unique(documents)),
                "context": context_of(scores, examples),
                "untrained_reads": untrained_reads(model, examples.lengths),
            }
            if folder is not None:
                write_scores(folder, f"{EXTRAPOLATION}.{name}.{factor:g}", **sums)
    return result


def stretch_sums(
    scores: Scores, examples: TokenStore, stretch_W: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Nats and targets of each stretch, (S,), from those of its windows."""
    stretch_E = stretch_W[examples.example_E]
    nats_S = np.bincount(stretch_E, scores.nats_E)
    return nats_S, np.bincount(stretch_E[scores.scored_E], minlength=len(nats_S))


def ratio_sums(nats_S: np.ndarray, nats_at_1_S: np.ndarray, targets_S: np.ndarray) -> np.ndarray:
    """What each stretch adds to the ratio of two losses on the same targets, (S,).

    Their sum over the number of targets is the ratio r = a / b, as a figure of examples must be,
    and they vary over stretches as r does to first order (the delta method): r is a quotient of
    sums whose divisor differs from run to run.
    """
    ratio = nats_S.sum() / nats_at_1_S.sum()
    mean_at_1 = nats_at_1_S.sum() / targets_S.sum()
    return targets_S * ratio + (nats_S - ratio * nats_at_1_S) / mean_at_1


def context_of(scores: Scores, examples: TokenStore) -> dict[str, float | int]:
    """How many tokens stood before the targets in their windows: `mean`, `least` and `most`."""
    at_N = np.flatnonzero(scores.scored_E)
    before_N = at_N - examples.offsets[examples.example_E[at_N]]
    return {
        "mean": float(before_N.mean()),
        "least": int(before_N.min()),
        "most": int(before_N.max()),
    }


def table(result: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Loss by protocol and multiple of the trained length as aligned text, and what is missing."""
    found = [entry for entries in result.values() for entry in entries.values()]
    if all(entry["loss"] is None for entry in found):
        return (
            f"beyond the trained length: not measured; it {found[0]['reason']}. For such "
            "messages see the breakdowns by length and position of a split of longer ones "
            "(data.extra), which model.context=N reads whole."
        )
    factors = list(next(iter(result.values())))
    heads = [f"{factor} x" for factor in factors]
    lines = [f"{'loss at':26}" + "".join(f"{head:>12}" for head in heads)]
    reasons: dict[str, list[str]] = {}
    counts: list[str] = []
    for name, entries in result.items():
        for factor, entry in entries.items():
            if "reason" in entry and factor not in reasons.setdefault(entry["reason"], []):
                reasons[entry["reason"]].append(factor)
        stride = next((entry["stride"] for entry in entries.values() if "stride" in entry), None)
        label = name if stride is None else f"{name} by {stride}"
        if name == "fixed_targets":
            label += " (headline)"
            lines += _rows(entries, {label: _loss, "  over that at 1 x": _ratio})
        else:
            lines += _rows(entries, {label: _loss})
        lines += _rows(entries, {"  context, mean": _mean, "  context, least-most": _range})
        if any(entry.get("untrained_reads") for entry in entries.values()):
            lines += _rows(entries, {"  untrained reads": _untrained})
        measured = next((entry for entry in entries.values() if entry["loss"] is not None), None)
        if measured is not None:
            several = "s" * (measured["documents"] != 1)
            of = f"{measured['targets']:,} targets of {measured['documents']:,} document{several}"
            counts.append(f"{name}: {of}")
    lines.append("; ".join(counts))
    lines += [f"{', '.join(f'{f} x' for f in found)}: {why}" for why, found in reasons.items()]
    return "\n".join(lines)


def _rows(
    entries: dict[str, dict[str, Any]], cells: dict[str, Callable[[dict[str, Any]], str]]
) -> list[str]:
    """A line for each kind of cell; "-" where an entry was not measured."""
    return [
        f"{label:26}"
        + "".join(
            f"{'-' if entry['loss'] is None else cell(entry):>12}" for entry in entries.values()
        )
        for label, cell in cells.items()
    ]


def _loss(entry: dict[str, Any]) -> str:
    return f"{entry['loss']:.4f}"


def _ratio(entry: dict[str, Any]) -> str:
    return f"{entry['ratio_to_1']:.4f}" if "ratio_to_1" in entry else "-"


def _mean(entry: dict[str, Any]) -> str:
    return f"{entry['context']['mean']:.1f}"


def _range(entry: dict[str, Any]) -> str:
    return f"{entry['context']['least']}-{entry['context']['most']}"


def _untrained(entry: dict[str, Any]) -> str:
    return f"{entry['untrained_reads']:.1%}"
