"""A batch made readable: every slot with its token, target, position, segment and masks."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from wherelm.batches.batch import Batch
from wherelm.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Slot:
    """One slot of a row; `real` is its key mask, `learned` its loss mask."""

    token: str
    target: str
    position: int
    segment: int
    real: bool
    learned: bool


def slots(batch: Batch, tokenizer: Tokenizer) -> list[list[Slot]]:
    """The slots of each row; an empty one shows <PAD> whatever id stands there."""
    positions_BT = batch.positions_BT.expand_as(batch.tokens_BT)
    columns = (
        batch.tokens_BT,
        batch.targets_BT,
        positions_BT,
        batch.segments_BT,
        batch.key_mask_BT,
        batch.loss_mask_BT,
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [[_slot(tokenizer, *values) for values in zip(*row, strict=True)] for row in rows]


def _slot(
    tokenizer: Tokenizer,
    token: int,
    target: int,
    position: int,
    segment: int,
    real: bool,
    learned: bool,
) -> Slot:
    if not real:
        return Slot("<PAD>", "", position, segment, False, learned)
    texts = tokenizer.token_text(token), tokenizer.token_text(target)
    return Slot(*texts, position, segment, True, learned)


def batch_text(batch: Batch, tokenizer: Tokenizer, rows: int = 4, width: int | None = None) -> str:
    """The first `rows` rows of a batch for a terminal of `width` columns (None: this one's).

    Tokens stand above their targets, positions, segments and masks; x is True in a mask.
    """
    width = width or shutil.get_terminal_size((100, 24)).columns
    every = slots(batch, tokenizer)
    height, length = batch.tokens_BT.shape
    real, learned = int(batch.key_mask_BT.sum()), int(batch.loss_mask_BT.sum())
    lines = [
        f"first batch: {height} rows of {length} slots, {batch.side}; {real} real, "
        f"{height * length - real} empty, {learned} learned targets"
    ]
    for number, row in enumerate(every[:rows], start=1):
        lines += [f"row {number}", *_columns(row, width)]
    if height > rows:
        lines.append(f"… and {height - rows} more rows")
    return "\n".join(lines)


def _columns(row: list[Slot], width: int) -> list[str]:
    labels = ("token", "target", "position", "segment", "key mask", "loss mask")
    margin = 2 + max(map(len, labels))
    columns = [
        (s.token, s.target, str(s.position), str(s.segment), ".x"[s.real], ".x"[s.learned])
        for s in row
    ]
    blocks: list[list[str]] = []
    for column in columns:
        cell = 1 + max(map(len, column))
        if not blocks or len(blocks[-1][0]) + cell > width:
            blocks.append([f"  {label:{margin}}" for label in labels])
        blocks[-1] = [
            line + f"{text:<{cell}}" for line, text in zip(blocks[-1], column, strict=True)
        ]
    # A blank line between blocks, for their labels repeat.
    return [line.rstrip() for block in blocks for line in (*block, "")][:-1]
