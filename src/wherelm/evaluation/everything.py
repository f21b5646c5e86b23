"""All that can be measured of one checkpoint, and the same as text."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from wherelm import pipeline
from wherelm.checkpoint import Loaded
from wherelm.evaluation import breakdowns as parts
from wherelm.evaluation import extrapolation as beyond
from wherelm.evaluation import shuffled_prefix as shuffled
from wherelm.evaluation.measures import measures, score, table
from wherelm.evaluation.untrained import untrained_reads


def measured(
    loaded: Loaded,
    root: Path,
    autocast: contextlib.AbstractContextManager | None = None,
    *,
    breakdowns: bool = False,
    shuffled_prefix: bool = False,
    extrapolation: bool = False,
) -> dict[str, dict[str, Any]]:
    """The figures of every final split, and what else is asked for, each under its name."""
    config = loaded.config
    model, tokenizer, budget = loaded.model, loaded.tokenizer, config.evaluation.batch_tokens
    data = pipeline.prepare(config, root, config.final_splits, tokenizer)
    found: dict[str, dict[str, Any]] = {"splits": {}}
    for split in config.final_splits:
        store = data.stores[split]
        scores = score(model, store, tokenizer.pad, budget, autocast)
        found["splits"][split] = measures(scores, store, tokenizer)
        found["splits"][split]["untrained_reads"] = untrained_reads(model, store.lengths)
        if breakdowns:
            found.setdefault("breakdowns", {})[split] = parts.breakdowns(scores, store, tokenizer)
        if shuffled_prefix:
            found.setdefault("shuffled_prefix", {})[split] = shuffled.shuffled_prefix(
                model, store, tokenizer, budget, autocast, seed=config.seed
            )
    if extrapolation or config.evaluation.extrapolation:
        found["extrapolation"] = beyond.extrapolate(
            model,
            pipeline.whole_texts(config, root, "validation", tokenizer),
            tokenizer,
            budget,
            autocast,
            starts_with_bos=pipeline.starts_with_bos(config),
        )
    return found


def text(found: dict[str, dict[str, Any]]) -> str:
    """What `measured` found, as aligned text."""
    tables = [table(found["splits"])]
    if "shuffled_prefix" in found:
        tables.append(shuffled.table(found["shuffled_prefix"]))
    if "extrapolation" in found:
        tables.append(beyond.table(found["extrapolation"]))
    tables += [parts.text(*item) for item in found.get("breakdowns", {}).items()]
    return "\n\n".join(tables)
