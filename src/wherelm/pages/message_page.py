"""The page of one or two messages.

Shapes: B rows (one a message), T slots, S key slots, H heads.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from torch import Tensor

from wherelm.batches.batch import Batch
from wherelm.checkpoint import Loaded
from wherelm.evaluation.heads import (
    measure,
)
from wherelm.model.masks import visible
from wherelm.pages.page import Page, Picture, table
from wherelm.pages.scheme_pictures import scheme_figures
from wherelm.pages.views import View


def message_page(views: Sequence[View], batch: Batch, loaded: Loaded, name: str) -> str:
    config, scheme = loaded.model.config, loaded.model.scheme
    page = Page(views[0].message if len(views) == 1 else "Two messages, one model")
    page.add(
        f"<h1>{html.escape(page.title)}</h1>",
        f'<p class="lead">Model: <code>{html.escape(name)}</code>, step {loaded.state["step"]}, '
        f"position scheme <b>{scheme.config.name}</b>, {config.layers} layers of {config.heads} "
        f"heads, trained on up to {scheme.shape.trained} tokens. "
        "Every number was computed by it.</p>",
        "<h2>What is read</h2>",
        *_side_by_side([_read(page, view, loaded, batch, row) for row, view in enumerate(views)]),
        "<h2>Where each token looks</h2>",
        "<p>Point at a token, or at a picture of a head: each line below is that token's row of A "
        "in one head. Darker is more.</p>",
        *_side_by_side([_looks(page, view) for view in views]),
        "<h2>How far back heads look</h2>",
        *_side_by_side([_distances(page, view) for view in views]),
        "<h2>What the heads do</h2>",
        _roles(page, measure(loaded.model, loaded.tokenizer, batch)),
        f"<h2>The position scheme: {scheme.config.name}</h2>",
        *_scheme(page, loaded, batch),
    )
    return page.html


def _side_by_side(cards: Sequence[str]) -> list[str]:
    return [
        '<div class="pair">',
        *(f'<section class="card">{c}</section>' for c in cards),
        "</div>",
    ]


def answer(message: str, reply: str, ended: bool = True) -> str:
    """A message and its answer as HTML."""
    tail = "" if ended else " … (no end within the limit)"
    shown = html.escape(reply) or "(nothing)"
    return f'<p class="answer">“{html.escape(message)}”<br>→ <b>{shown}</b>{tail}</p>'


def _read(page: Page, view: View, loaded: Loaded, batch: Batch, row: int) -> str:
    allowed_BTS, path = page_mask(batch, loaded.model.window(0))
    tokens = {"kind": "tokens", "slots": [asdict(slot) for slot in view.slots], "wide": True}
    caption = (
        'Key mask <span class="on">■</span>: a real token stands here and may be read. Loss mask '
        '<span class="learn">■</span>: the target, the next token, is learned. The row is padded '
        "on the right to the length of the longest."
    )
    mask_caption = (
        f"Which slot (row) may read which (column), as <code>masks.visible</code> gives it to "
        f"layer 1 ({html.escape(path)}); padded queries predict nothing."
    )
    return (
        answer(view.message, view.reply, view.ended)
        + page.figure([tokens], caption)
        + page.figure([mask_picture(view, allowed_BTS[row])], mask_caption)
    )


def page_mask(batch: Batch, window: int | None = None) -> tuple[Tensor, str]:
    """What the queries of a batch may read, (B, T, T), and the name of the mask's path."""
    length, device = batch.tokens_BT.shape[1], batch.tokens_BT.device
    mask = visible(batch.key_mask_BT, length, length, device, batch.side, batch.segments_BT, window)
    return mask.dense(length, length, device)[:, 0].expand(len(batch.tokens_BT), -1, -1), mask.path


def mask_picture(view: View, allowed_TS: Tensor) -> Picture:
    length = len(view.slots)
    names = [slot.token for slot in view.slots]
    allowed = allowed_TS.tolist()
    verbs = {True: "may read", False: "may not read"}
    return {
        "kind": "matrix",
        "name": "The mask",
        "rows": [""] * length,
        "columns": [""] * length,
        "values": [[0.4 if on else None for on in line] for line in allowed],
        "details": [
            [
                f"“{names[q]}” (slot {q}) {verbs[allowed[q][k]]} “{names[k]}” (slot {k})"
                for k in range(length)
            ]
            for q in range(length)
        ],
        "most": 1,
        "bare": True,
        "cell": max(3, min(14, 300 // length)),
        "hint": "Point at a cell.",
    }


def attention_picture(names: Sequence[str], weights: np.ndarray, start: int) -> Picture:
    """The picture that answers to the pointer; weights are (layers, H, T, T)."""
    layers, heads = weights.shape[:2]
    packed = (weights.clip(0, 1) * 65535).round().astype("<u2").tobytes()
    return {
        "kind": "attention",
        "attention": True,
        "wide": True,
        "layers": layers,
        "heads": heads,
        "tokens": list(names),
        "weights": base64.b64encode(packed).decode("ascii"),
        "start": start,
    }


def _looks(page: Page, view: View) -> str:
    picture = attention_picture(view.names, view.weights, view.asks)
    caption = "At first: the slot that predicts the answer's first token."
    return f"<h3>“{html.escape(view.message)}”</h3>" + page.figure([picture], caption)


def _distances(page: Page, view: View) -> str:
    x = list(range(len(view.uniform)))
    pictures = [
        {
            "kind": "lines",
            "attention": True,
            "name": f"layer {number}",
            "x": x,
            "across": "slots back",
            "width": 255,
            "height": 170,
            "series": [
                *({"name": f"head {h + 1}", "y": y} for h, y in enumerate(layer)),
                {"name": "uniform 1/i", "y": view.uniform, "dashed": True},
            ],
        }
        for number, layer in enumerate(view.by_distance, start=1)
    ]
    caption = (
        "Mean weight on the key so many slots back. Dashed: what equal weights, 1/i for a query "
        "with i keys, give on the same queries."
    )
    return f"<h3>“{html.escape(view.message)}”</h3>" + page.figure(pictures, caption)


def _roles(page: Page, probes: dict) -> str:
    rows = [f"layer {layer + 1}" for layer in range(probes["layers"])]
    columns = [f"head {head + 1}" for head in range(probes["heads"])]
    kinds = (
        ("previous_token", "Reads the previous token", 1),
        ("induction", "Induction", 1),
        ("first_token", "Reads the first token", 1),
        ("entropy", "Entropy in nats", None),
    )
    pictures = [
        {
            "kind": "matrix",
            "attention": True,
            "name": name,
            "rows": rows,
            "columns": columns,
            "values": probes[key],
            "cell": 46,
            **({} if most is None else {"most": most}),
        }
        for key, name, most in kinds
    ]
    caption = (
        f"Mean weights. Previous token and induction (the token after the same token's first "
        f"occurrence) on {probes['block']} random tokens that stand twice; the others on the "
        "messages above."
    )
    return page.figure(pictures, caption)


def _scheme(page: Page, loaded: Loaded, batch: Batch) -> list[str]:
    model = loaded.model
    figures = scheme_figures(model, batch)
    parts = [
        f'<section class="card">{page.figure(f.pictures, html.escape(f.caption))}</section>'
        for f in figures
    ]
    windows = [(str(n + 1), model.window(n)) for n in range(model.config.layers)]
    if any(window for _, window in windows):
        rows = [(n, f"{w} slots" if w else "everything before") for n, w in windows]
        parts.append(table(("layer", "reads back"), rows))
    if not figures:
        parts.append(
            '<p class="note">No hook of this scheme acts: order enters through the causal mask '
            "alone.</p>"
        )
    return parts
