"""How much of the loss is owed to the order of what was read before.

Shapes: E tokens of an example.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from wherelm.batches.store import TokenStore
from wherelm.evaluation.measures import evaluate
from wherelm.model.decoder import Decoder
from wherelm.seeds import numpy_generator
from wherelm.tokenizer.tokenizer import Tokenizer


def shuffled_prefix(
    model: Decoder,
    store: TokenStore,
    tokenizer: Tokenizer,
    batch_tokens: int,
    autocast: contextlib.AbstractContextManager | None = None,
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """`loss` of the same targets with their prefix as it is and as `shuffled_loss`, and `change`.

    The targets are those of each reply, and its prefix all that stands before it; an example
    without replies is shuffled in its first half and scored in its second. Control tokens stay
    in place, all others change places with each other. Replies that are complete also give
    `exact_match` and `shuffled_exact_match`. ValueError where nothing is learned.
    """
    plain = evaluate(model, prefixes(store, tokenizer), tokenizer, batch_tokens, autocast)
    shuffled_store = prefixes(store, tokenizer, seed)
    shuffled = evaluate(model, shuffled_store, tokenizer, batch_tokens, autocast)
    assert plain["targets"] == shuffled["targets"]
    keys = [key for key in ("loss", "exact_match") if key in plain]
    return (
        {key: plain[key] for key in keys}
        | {f"shuffled_{key}": shuffled[key] for key in keys}
        | {"change": shuffled["loss"] - plain["loss"], "targets": plain["targets"], "seed": seed}
    )


def prefixes(store: TokenStore, tokenizer: Tokenizer, seed: int | None = None) -> TokenStore:
    """An example for each reply, up to its end, in which it alone is learned.

    With a seed what stands before it is shuffled.
    """
    t = tokenizer
    control = (t.pad, t.bos, t.eos, t.user, t.assistant, t.system)
    result = []
    for index in range(len(store)):
        ids_E, learned_E = store[index]
        for number, (start, stop) in enumerate(_scored(ids_E, tokenizer)):
            ids, own = ids_E[:stop].copy(), learned_E[:stop] & (np.arange(stop) >= start)
            if not own[1:].any():
                continue
            if seed is not None:
                text = np.flatnonzero(~np.isin(ids[:start], control))
                generator = numpy_generator(seed, "shuffled prefix", index, number)
                ids[text] = ids[generator.permutation(text)]
            result.append((ids, own))
    return TokenStore.from_lists(result)


def _scored(ids_E: np.ndarray, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Where each reply starts and stops, its <EOS> included; without one, the second half."""
    starts = np.flatnonzero(ids_E == tokenizer.assistant) + 1
    if not len(starts):
        return [(len(ids_E) // 2, len(ids_E))]
    ends = np.flatnonzero(ids_E == tokenizer.eos) + 1
    after = np.append(ends, len(ids_E))[np.searchsorted(ends, starts)]
    return list(zip(starts.tolist(), after.tolist(), strict=True))


def table(splits: dict[str, dict[str, Any]]) -> str:
    """The figures of several splits as aligned text."""
    lines = [f"{'':12}{'loss':>10}{'shuffled':>10}{'change':>10}{'exact':>10}{'shuffled':>10}"]
    for split, found in splits.items():
        losses = (found["loss"], found["shuffled_loss"], found["change"])
        matches = (found.get("exact_match"), found.get("shuffled_exact_match"))
        cells = [f"{loss:.4f}" for loss in losses]
        cells += ["-" if match is None else f"{match:.1%}" for match in matches]
        lines.append(f"{split:12}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)
