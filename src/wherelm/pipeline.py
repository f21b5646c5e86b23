"""From files to token stores: sources, messages and tokeniser in one line, and the ledger of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wherelm.batches import (
    BATCHINGS,
    POOL,
    Sampler,
    TokenStore,
    padding_ledger,
    token_ledger,
)
from wherelm.config import RunConfig
from wherelm.sources import load_examples
from wherelm.tokenizer import Tokenizer, tokenize

ENDLESS = 1 << 40  # tokens: no example is as long


@dataclass(frozen=True)
class Data:
    """What a run trains and measures on; the ledger counts messages, split by split."""

    tokenizer: Tokenizer
    stores: dict[str, TokenStore]
    ledger: dict[str, dict[str, Any]]


def prepare(
    config: RunConfig, root: Path, splits: Sequence[str], tokenizer: Tokenizer | None = None
) -> Data:
    """Reads and tokenises the named splits; the tokeniser comes from train if none is given."""
    wanted = list(dict.fromkeys(splits))
    examples = load_examples(config.data, root, wanted)
    if tokenizer is None:
        tokenizer = Tokenizer.build(config.tokenizer, examples["train"], root)
    stores, ledger = {}, {}
    for split in wanted:
        table, counts = tokenize(
            examples[split],
            tokenizer,
            learn=config.data.learn,
            overflow=config.data.overflow,
            context=config.model.context,
        )
        stores[split] = TokenStore.from_table(table)
        ledger[split] = {"messages": examples[split].counts, "rows": counts}
    return Data(tokenizer, stores, ledger)


def whole_texts(config: RunConfig, root: Path, split: str, tokenizer: Tokenizer) -> TokenStore:
    """The examples of a split as they are, not cut at model.context."""
    examples = load_examples(config.data, root, [split])[split]
    table, _ = tokenize(
        examples, tokenizer, learn=config.data.learn, overflow="split", context=ENDLESS
    )
    return TokenStore.from_table(table)


def full_ledger(
    data: Data, sampler: Sampler, budget: int, shape: tuple[int, int] | None = None
) -> dict[str, Any]:
    """The ledger with tokens: the sampler's first epoch, and how often each position is trained.

    Micro-batches hold `budget` slots at most, or all are of one shape (rows, slots).
    `padding_by_batching` is what each way of batching would leave, on one pool of examples.
    """
    train = data.stores["train"]
    ledger = {}
    for split, counts in data.ledger.items():
        ledger[split] = counts | {"tokens": token_ledger(data.stores[split])}
    ledger["train"]["tokens"] |= padding_ledger(train, sampler, budget, shape)
    pool = train.first(POOL)
    shares = {}
    for batching in BATCHINGS:
        other = replace(sampler, lengths=pool.lengths, batching=batching, epoch=0, position=0)
        shares[batching] = padding_ledger(pool, other, budget)["padding_share"]
    return ledger | {
        "padding_by_batching": shares,
        "trained_positions": train.trained_positions().tolist(),
    }


def ledger_table(ledger: dict[str, Any]) -> str:
    """What was read, kept and left out of each split, and its tokens, as aligned text.

    "unlearned" are rows that were left out for nothing in them is to be learned.
    """
    columns = {
        "read": ("messages", "read"),
        "empty": ("messages", "empty"),
        "malformed": ("messages", "malformed"),
        "too long": ("rows", "too_long"),
        "truncated": ("rows", "truncated"),
        "unlearned": ("rows", "nothing_learned"),
        "rows": ("rows", "pieces"),
        "in train": ("messages", "in_train"),
        "supervised": ("tokens", "supervised"),
        "read only": ("tokens", "read_only"),
    }
    lines = [f"{'':12}" + "".join(f"{name:>11}" for name in columns)]
    for split, counts in ledger.items():
        if "messages" not in counts:
            continue
        cells = [counts[part].get(key) for part, key in columns.values()]
        shown = ["-" if cell is None else f"{cell:,}" for cell in cells]
        lines.append(f"{split:12}" + "".join(f"{cell:>11}" for cell in shown))
        lines += [f"  skipped {place}" for place in counts["messages"]["first_malformed"]]
    positions = np.array(ledger["trained_positions"])
    share = ledger["train"]["tokens"]["padding_share"]
    others = ", ".join(f"{name} {part:.1%}" for name, part in ledger["padding_by_batching"].items())
    lines.append(
        f"padding {share:.1%} of all slots (one pool: {others}); targets at positions "
        f"{np.flatnonzero(positions)[0]} to {len(positions) - 1}, half of them before "
        f"{_median(positions)}"
    )
    return "\n".join(lines)


def _median(histogram: np.ndarray) -> int:
    return int(np.searchsorted(histogram.cumsum(), histogram.sum() / 2))
