"""From files to token stores: sources, messages and tokeniser in one line, and the ledger of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherelm.batches.store import TokenStore
from wherelm.config import RunConfig
from wherelm.data.sources import load_examples
from wherelm.tokenizer.table import tokenize
from wherelm.tokenizer.tokenizer import Tokenizer
from wherelm.tokenizer.training import build_tokenizer

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
    examples = load_examples(config.data.of_seed(config.seed), root, wanted)
    if tokenizer is None:
        tokenizer = build_tokenizer(config.tokenizer, examples["train"], root)
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


def starts_with_bos(config: RunConfig) -> bool:
    """Whether rows of training begin with <BOS>: pieces of a text that was split begin anywhere."""
    return config.data.overflow != "split"
