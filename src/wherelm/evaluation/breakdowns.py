"""Where the loss lies: by position, length and turn, and exact match by group.

Shapes: E tokens of a whole store, N of them targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wherelm.evaluation.measures import exact_matches, replies
from wherelm.run_folder import write_scores

if TYPE_CHECKING:
    from wherelm.batches.store import TokenStore
    from wherelm.evaluation.measures import Scores
    from wherelm.tokenizer.tokenizer import Tokenizer

MOST_GROUPS = 64  # more are names of rows rather than of groups

Bins = list[dict[str, Any]]


def breakdowns(scores: Scores, store: TokenStore, tokenizer: Tokenizer) -> dict[str, Bins]:
    """The targets of a store, each counted once under every heading that applies.

    - `position`: where its input, the token before it, stands in its example, from 0;
    - `length`: the tokens of its example;
    - `turn`: which reply of its row it belongs to, from 1 (absent where nobody replies);
    - `group`: the group of its row (absent where no row has one).

    Every entry has `targets` and `loss` (nats a target), and but for `position` `replies` and
    `exact_match` where complete replies lie in it.
    """
    at_N = np.flatnonzero(scores.scored_E)
    nats_N = scores.nats_E[at_N]
    example_E = store.example_E
    reply_E = replies(store, tokenizer)
    reply_at, exact = first_targets(scores, reply_E), exact_matches(scores, reply_E)

    def counted(label_E: np.ndarray) -> Bins:
        return _binned(label_E[at_N], nats_N, label_E[reply_at], exact)

    position_N = at_N - store.offsets[example_E[at_N]] - 1
    length_E = np.diff(store.offsets)[example_E]
    result = {"position": _binned(position_N, nats_N), "length": counted(length_E)}
    turn_E = turns(store, tokenizer)
    if turn_E[at_N].any():
        result["turn"] = [entry for entry in counted(turn_E) if entry["to"] > 0]
    if store.groups is not None:
        names = sorted({name for name in store.groups if name is not None}, key=_natural)
        number = {name: i for i, name in enumerate(names)}
        if 0 < len(names) <= MOST_GROUPS:
            group_E = np.array([number.get(name, -1) for name in store.groups])[example_E]
            result["group"] = [
                {"group": names[i]}
                | _figures(nats_N[group_E[at_N] == i], exact[group_E[reply_at] == i])
                for i in range(len(names))
            ]
    return result


def save_examples(
    folder: Path, split: str, scores: Scores, store: TokenStore, tokenizer: Tokenizer
) -> None:
    """Writes `nats`, `targets`, `replies` and `exact` of each example, (N,).

    `exact` counts the complete replies that greedy decoding gives to the last token. Examples are
    in the order of the split, so those of two runs on the same data are pairs.
    """
    example_E, reply_E = store.example_E, replies(store, tokenizer)
    reply_example = example_E[first_targets(scores, reply_E)]
    exact = exact_matches(scores, reply_E)

    def summed(of_N: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(of_N, weights, minlength=len(store))

    write_scores(
        folder,
        split,
        nats=summed(example_E, scores.nats_E).astype(np.float32),
        targets=summed(example_E[scores.scored_E]).astype(np.int32),
        replies=summed(reply_example).astype(np.int32),
        exact=summed(reply_example, exact).astype(np.int32),
    )


def first_targets(scores: Scores, reply_E: np.ndarray) -> np.ndarray:
    """Where each reply that `exact_matches` judges begins to be scored, in the same order."""
    inside = np.flatnonzero(scores.scored_E & (reply_E >= 0))
    return inside[np.unique(reply_E[inside], return_index=True)[1]]


def turns(store: TokenStore, tokenizer: Tokenizer) -> np.ndarray:
    """Which reply of its row a token belongs to, counted from 1, its <EOS> included; else 0."""
    opens_E = store.ids == tokenizer.assistant
    before_E = np.cumsum(opens_E) - opens_E
    example_E = store.example_E
    number_E = before_E - before_E[store.offsets[:-1]][example_E]
    roles = (tokenizer.assistant, tokenizer.user, tokenizer.system)
    opened_at_E = np.where(np.isin(store.ids, roles), np.arange(len(store.ids)), -1)
    opened_at_E = np.maximum.accumulate(opened_at_E)
    own_E = opened_at_E >= store.offsets[:-1][example_E]
    said_E = own_E & opens_E[opened_at_E] & ~opens_E
    return np.where(said_E, number_E, 0)


def edges(largest: int) -> np.ndarray:
    """Where bins begin: 0, 1, 2, 3, 4, 6, 8, 12, 16, …, powers of two and the middles between.

    They do not depend on the data, so that bins of two runs or splits are the same.
    """
    powers = 2 ** np.arange(largest.bit_length() + 1)
    return np.unique(np.concatenate(([0], powers, powers * 3 // 2)))


def histogram(counts_P: Sequence[int]) -> Bins:
    """Targets at each position, in the same bins."""
    starts = edges(len(counts_P))
    sums = np.add.reduceat(np.array(counts_P), starts[starts < len(counts_P)])
    return [
        {"from": int(first), "to": int(after) - 1, "targets": int(count)}
        for first, after, count in zip(starts, starts[1:], sums, strict=False)
    ]


def _binned(
    value_N: np.ndarray,
    nats_N: np.ndarray,
    value_R: np.ndarray | None = None,
    exact_R: np.ndarray | None = None,
) -> Bins:
    starts = edges(int(value_N.max()))
    bin_N = np.searchsorted(starts, value_N, side="right") - 1
    bin_R = None if value_R is None else np.searchsorted(starts, value_R, side="right") - 1
    return [
        {"from": int(starts[i]), "to": int(starts[i + 1]) - 1}
        | _figures(nats_N[bin_N == i], None if bin_R is None else exact_R[bin_R == i])
        for i in np.unique(bin_N)
    ]


def _figures(nats_N: np.ndarray, exact_R: np.ndarray | None) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "targets": len(nats_N),
        "loss": float(nats_N.mean()) if len(nats_N) else None,
    }
    if exact_R is not None and len(exact_R):
        figures |= {"replies": len(exact_R), "exact_match": float(exact_R.mean())}
    return figures


def _natural(name: str) -> tuple[bool, float, str]:
    """Numbers first and by their value."""
    try:
        return (False, float(name), name)
    except ValueError:
        return (True, 0.0, name)


def text(split: str, found: dict[str, Bins]) -> str:
    """The breakdowns of one split as aligned text."""
    lines = []
    for heading, bins in found.items():
        lines.append(f"{f'{split} by {heading}':24}{'targets':>10}{'loss':>10}{'exact':>10}")
        for entry in bins:
            label = entry.get("group") or _label(entry["from"], entry["to"])
            loss = "-" if entry["loss"] is None else f"{entry['loss']:.4f}"
            exact = f"{entry['exact_match']:.1%}" if "exact_match" in entry else "-"
            lines.append(f"  {label:22}{entry['targets']:>10,}{loss:>10}{exact:>10}")
    return "\n".join(lines)


def _label(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
