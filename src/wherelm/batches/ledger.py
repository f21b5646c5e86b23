"""The count of what a run reads: messages, rows, tokens and padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from wherelm.batches.batch import padded_width
from wherelm.batches.sampler import BATCHINGS, POOL, Sampler
from wherelm.batches.store import TokenStore
from wherelm.tokenizer.table import fitting_share

MOST_CUT = 0.01  # of a split's examples, before it is said


def token_ledger(store: TokenStore) -> dict[str, int]:
    """Input slots of a store whose next token is learned, and those that are only read."""
    real = int(store.lengths.sum())
    supervised = int(store.learned.sum()) - int(store.learned[store.offsets[:-1]].sum())
    return {"supervised": supervised, "read_only": real - supervised}


def padding_ledger(
    store: TokenStore, sampler: Sampler, budget: int, shape: tuple[int, int] | None = None
) -> dict[str, float]:
    """Empty slots that the first epoch of a sampler holds, and their share of all slots.

    `budget` and `shape` are those of micro-batches, as for `Sampler.micro_batches` and `collate`.
    """
    real = int(store.lengths.sum())
    batches = sampler.batches if sampler.epoch == 0 else sampler.batches_of(0)
    parts = [part for rows in batches for part in sampler.micro_batches(rows, budget)]
    if shape is None:
        slots = sum(len(rows) * padded_width(store, rows) for rows in parts)
    else:
        slots = len(parts) * shape[0] * shape[1]
    return {"padding": slots - real, "padding_share": round(1 - real / slots, 4)}


def full_ledger(
    counted: dict[str, dict[str, Any]],
    stores: dict[str, TokenStore],
    sampler: Sampler,
    budget: int,
    shape: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """What is `counted` of each split, with its tokens, and how often each position is trained.

    Micro-batches hold `budget` slots at most, or all are of one shape (rows, slots).
    `padding_by_batching` is what each way of batching would leave, on one pool of examples.
    """
    train = stores["train"]
    ledger = {}
    for split, counts in counted.items():
        ledger[split] = counts | {"tokens": token_ledger(stores[split])}
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


def cut_warning(
    ledger: dict[str, Any], context: int, overflow: str, batch_tokens: int
) -> str | None:
    """One line on the splits of which more than MOST_CUT do not fit into the context: what is lost.

    It ends with what would help, in numbers. None where all splits fit.
    """
    shares = {}
    for split, counts in ledger.items():
        if "rows" in counts:
            cut = counts["rows"]["truncated"] + counts["rows"]["too_long"]
            shares[split] = cut / counts["messages"]["kept"]
    splits = [split for split, share in shares.items() if share > MOST_CUT]
    if not splits:
        return None
    rows = [ledger[split]["rows"] for split in splits]
    lost, late = (sum(each[key] for each in rows) for key in ("lost_tokens", "prompt_too_long"))
    most = max(rows, key=lambda each: each["fitting_context"])
    fits = most["fitting_context"]
    fix = f"model.context={fits}" + f" training.batch_tokens={fits}" * (fits > batch_tokens)
    parts = ", ".join(f"{_percent(shares[split])} of {split}" for split in splits)
    done = "are cut" if overflow == "truncate" else "are left out"
    share = _percent(lost / sum(each["tokens"] for each in rows))
    return (
        f"examples longer than model.context={context} {done}: {parts}, and with them {lost:,} "
        f"tokens ({share})"
        + f"; {late:,} have a prompt that alone is longer and teach nothing" * bool(late)
        + f"; {fix} keeps {fitting_share(most)} whole, data.overflow=split loses nothing"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if share > 0.1 else 1}f} %"


def ledger_table(ledger: dict[str, Any]) -> str:
    """What was read, kept and left out of each split, and its tokens, as aligned text.

    "unlearned" are rows that were left out for nothing in them is to be learned.
    """
    columns = {
        "read": ("messages", "read"),
        "held out": ("messages", "held_out"),
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
