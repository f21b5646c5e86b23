"""From files to token stores: sources, messages and tokeniser in one line, and the ledger of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wherelm.batches import TokenStore, token_ledger
from wherelm.config import RunConfig
from wherelm.sources import load_examples
from wherelm.tokenizer import Tokenizer, tokenize


@dataclass(frozen=True)
class Data:
    """What a run trains and measures on; the ledger counts messages, split by split."""

    tokenizer: Tokenizer
    stores: dict[str, TokenStore]
    ledger: dict[str, dict[str, Any]]


def prepare(
    config: RunConfig, root: Path, splits: Sequence[str], tokenizer: Tokenizer | None = None
) -> Data:
    """Reads and tokenises the named splits; trains the tokeniser on train if none is given."""
    examples = load_examples(config.data, root)
    if tokenizer is None:
        tokenizer = Tokenizer.build(config.tokenizer, examples["train"], root)
    stores, ledger = {}, {}
    for split in dict.fromkeys(splits):
        dataset, counts = tokenize(
            examples[split],
            tokenizer,
            learn=config.data.learn,
            overflow=config.data.overflow,
            context=config.model.context,
        )
        stores[split] = TokenStore.from_dataset(dataset)
        ledger[split] = examples[split].counts | counts
    return Data(tokenizer, stores, ledger)


def full_ledger(data: Data, batches: list[np.ndarray]) -> dict[str, Any]:
    """The ledger with tokens: `batches` is the first epoch of training."""
    tokens = {
        split: token_ledger(store, batches if split == "train" else [])
        for split, store in data.stores.items()
    }
    ledger = {split: counts | {"tokens": tokens[split]} for split, counts in data.ledger.items()}
    return ledger | {"trained_positions": data.stores["train"].trained_positions().tolist()}
