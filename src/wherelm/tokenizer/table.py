"""Examples to a table of token ids, cut to the context and kept on disk."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from wherelm.data.cache import code_of, key_of, stored
from wherelm.data.messages import Span, messages_of, spans
from wherelm.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

    from wherelm.data.examples import Examples

COUNTED = ("truncated", "split", "too_long", "pieces", "nothing_learned", "prompt_too_long")
WHOLE = 0.95  # of the examples are to fit into the context that is proposed


def tokenize(
    examples: Examples, tokenizer: Tokenizer, *, learn: str, overflow: str, context: int
) -> tuple[pa.Table, dict[str, Any]]:
    """A table with the columns `ids` (int32), `learned` (bool) and `group`, and counts.

    An example may hold context + 1 tokens: context inputs, each with a next token as its target.
    One that is longer is cut at its end ("truncate"; it then has no <EOS>), cut into consecutive
    pieces that overlap by one token, so that every token but the first is a target exactly once
    ("split"), or left out ("skip"). What holds no learned target is left out.

    Counts of examples: truncated, split, too_long (left out); counts of pieces: pieces (the rows
    of the table) and nothing_learned (left out), among them prompt_too_long, whose reply begins
    behind the cut. Of all `tokens`, `lost_tokens` stand behind cuts or in examples that are too
    long; `fitting_context` would keep `fitting_share` of the examples whole. The result is kept in
    the examples' cache, by their content, the tokenizer and the options. ValueError if nothing is
    left.
    """

    def build() -> tuple[datasets.Dataset, dict[str, Any]]:
        import datasets

        with _collector_off():
            table, counts = _tokenized(examples.dataset, tokenizer, learn, overflow, context)
        if len(table) == 0:
            why = _why_nothing_is_left(counts, learn, context)
            raise ValueError(f"no example is left of {len(examples.table)}: {why}")
        return datasets.Dataset(table, fingerprint=name[:16]), counts

    code = code_of("data.messages", "tokenizer.tokenizer", "tokenizer.table")
    name = key_of(code, examples.key, tokenizer.fingerprint, learn, overflow, context)
    return stored(examples.cache, f"tokens-{name[:32]}", build)


def _why_nothing_is_left(counts: dict[str, Any], learn: str, context: int) -> str:
    """The causes with their numbers, and what helps."""
    reasons = {
        f"longer than model.context={context} (data.overflow=skip)": counts["too_long"],
        f"with a prompt that alone is longer than model.context={context}, so that no reply is "
        "left to learn": counts["prompt_too_long"],
        "without anything to learn": counts["nothing_learned"] - counts["prompt_too_long"],
    }
    fix = f"model.context={counts['fitting_context']} keeps {fitting_share(counts)} whole"
    if counts["too_long"]:
        fix += ", data.overflow=split loses nothing"
    elif not counts["prompt_too_long"]:
        fix = "expected texts of two tokens or more"
        if learn == "replies":
            fix = "none has a reply by the assistant; data.learn=all learns every turn"
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
    return f"{why} ({fix})"


def fitting_share(counts: dict[str, Any]) -> str:
    """How much of a split `fitting_context` keeps whole, as a percentage that is not too high."""
    return f"{int(100 * counts['fitting_share'])} %"


def fitting_context(lengths: np.ndarray) -> int:
    """The smallest context, of 4, 6, 8, 12, 16, …, that WHOLE of the examples fit into.

    `lengths` are those of whole examples in tokens, one more than the context each needs.
    """
    needed = max(4, int(np.quantile(lengths, WHOLE, method="inverted_cdf")) - 1)
    power = 1 << (needed - 1).bit_length()
    return power * 3 // 4 if needed <= power * 3 // 4 else power


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """For millions of small objects and no cycles: looking for some takes as long as the work."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _tokenized(
    examples: datasets.Dataset, tokenizer: Tokenizer, learn: str, overflow: str, context: int
) -> tuple[pa.Table, dict[str, Any]]:
    import pyarrow as pa

    counts: dict[str, Any] = dict.fromkeys((*COUNTED, "tokens", "lost_tokens"), 0)
    groups = examples.with_format("arrow")[:]["group"].combine_chunks()
    tables, lengths_of_all, read = [], [], 0
    for batch in _batches(spans(messages, learn) for messages in messages_of(examples)):
        ids, learned, ends = tokenizer.encode_flat(batch)
        starts, stops = _cuts(ends, overflow, context, counts)
        # The first token of a piece has nothing before it that could predict it.
        learned_before = np.concatenate(([0], np.cumsum(learned)))
        kept = learned_before[stops] > learned_before[np.minimum(starts + 1, stops)]
        counts["pieces"] += int(kept.sum())
        counts["nothing_learned"] += int((~kept).sum())
        if overflow == "truncate":
            late = ~kept & (learned_before[ends[1:]] > learned_before[stops])
            counts["prompt_too_long"] += int(late.sum())
            counts["lost_tokens"] += int((stops - starts)[late].sum())
        lengths_of_all.append(np.diff(ends))
        starts, lengths = starts[kept], (stops - starts)[kept]
        examples_of_pieces = read + np.searchsorted(ends, starts, side="right") - 1
        read += len(batch)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        source = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        lists = [
            pa.ListArray.from_arrays(offsets.astype(np.int32), pa.array(values[source]))
            for values in (ids, learned)
        ]
        columns = [*lists, groups.take(pa.array(examples_of_pieces))]
        tables.append(pa.table(columns, names=["ids", "learned", "group"]))
    whole = np.concatenate(lengths_of_all)
    counts["tokens"] = int(whole.sum())
    counts["fitting_context"] = fitting_context(whole)
    counts["fitting_share"] = float((whole <= counts["fitting_context"] + 1).mean())
    return pa.concat_tables(tables), counts


def _cuts(
    ends: np.ndarray, overflow: str, context: int, counts: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Where the pieces start and stop; example i is [ends[i] : ends[i + 1]]."""
    starts, stops = ends[:-1], ends[1:]
    long = stops - starts > context + 1
    if overflow == "truncate":
        counts["truncated"] += int(long.sum())
        counts["lost_tokens"] += int((stops - starts - context - 1)[long].sum())
        return starts, np.minimum(stops, starts + context + 1)
    if overflow == "skip":
        counts["too_long"] += int(long.sum())
        counts["lost_tokens"] += int((stops - starts)[long].sum())
        return starts[~long], stops[~long]
    assert overflow == "split", overflow
    counts["split"] += int(long.sum())
    pieces = np.maximum(1, -(-(stops - starts - 1) // context))
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    cuts = np.repeat(starts, pieces) + number * context
    return cuts, np.minimum(cuts + context + 1, np.repeat(stops, pieces))


def _batches(examples: Iterable[list[Span]], size: int = 4096) -> Iterator[list[list[Span]]]:
    batch = []
    for example in examples:
        batch.append(example)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
