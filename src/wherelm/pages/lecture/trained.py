"""The pair of sentences, answered by trained models.

Shapes: V vocabulary.
"""

from __future__ import annotations

import html
import os
from pathlib import Path

import torch

from wherelm import checkpoint
from wherelm.checkpoint import Loaded
from wherelm.data.messages import Message, prompt_spans
from wherelm.pages.lecture.claim import difference, small
from wherelm.pages.message_page import answer, attention_picture
from wherelm.pages.page import Page, Picture
from wherelm.pages.views import PAIR, View, look

WITHOUT = Path("data/pretrained/errands-one-layer-none")
ABSENT = "No run and no shipped checkpoint is here: train one with <code>python train.py</code>."
ABSENT_WITHOUT = f"<code>{WITHOUT}</code> is absent here, so this model cannot answer."
LIKELIEST = 4


def flipping_pair(page: Page, root: Path, run: str | None) -> list[str]:
    """A card for a model with positions, and one for a single layer without any.

    Where a checkpoint is absent its card says so; a `run` that was asked for must be there.
    """
    return [
        "<p>Both sentences hold the same tokens; only their order differs. A model that is told "
        "positions can answer them differently. In one layer without positions the last output "
        "depends on the multiset of the tokens before it, so its answers cannot differ.</p>",
        '<div class="pair">',
        _card(page, "With positions", _folder(root, run), root, ABSENT),
        _card(page, "One layer, no positions", _present(root / WITHOUT), root, ABSENT_WITHOUT),
        "</div>",
    ]


def _folder(root: Path, run: str | None) -> Path | None:
    if run is not None:
        return checkpoint.find(run, root)
    try:
        return checkpoint.find(None, root)
    except ValueError:
        return None


def _present(folder: Path) -> Path | None:
    return folder if (folder / checkpoint.WEIGHTS).is_file() else None


def _card(page: Page, title: str, folder: Path | None, root: Path, absent: str) -> str:
    if folder is None:
        return f'<section class="card"><h3>{title}</h3><p class="note">{absent}</p></section>'
    loaded = checkpoint.load(folder)
    views, _ = look(loaded, PAIR)
    logits = [_first_logits(loaded, view) for view in views]
    apart = difference(*logits)
    config = loaded.model.config
    parts = [
        f"<h3>{title}</h3>",
        f'<p class="note"><code>{html.escape(_shown(folder, root))}</code>: '
        f"{config.layers} layer{'s' if config.layers > 1 else ''}, position scheme "
        f"{loaded.model.scheme.config.name}</p>",
        *(answer(view.message, view.reply, view.ended) for view in views),
        f"<p>The logits of the answer's first token differ between the sentences by up to "
        f"<b>{small(apart)}</b>.</p>",
        page.figure(
            [_likeliest(loaded, v, x) for v, x in zip(views, logits, strict=True)],
            "The likeliest first tokens of the answer, with their probabilities.",
        ),
    ]
    for view in views:
        picture = attention_picture(view.names, view.weights, view.asks)
        caption = f"Attention in “{html.escape(view.message)}”; point at a token."
        parts.append(page.figure([picture], caption))
    return f'<section class="card">{"".join(parts)}</section>'


def _shown(folder: Path, root: Path) -> str:
    inside = folder.resolve().is_relative_to(root.resolve())
    return os.path.relpath(folder, root) if inside else str(folder)


@torch.inference_mode()
def _first_logits(loaded: Loaded, view: View) -> torch.Tensor:
    """Logits (V,) of the answer's first token."""
    ids, _ = loaded.tokenizer.encode_spans(prompt_spans([Message("user", view.message)]))
    return loaded.model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, -1]


def _likeliest(loaded: Loaded, view: View, logits_V: torch.Tensor) -> Picture:
    top = logits_V.softmax(-1).topk(min(LIKELIEST, len(logits_V)))
    return {
        "kind": "bars",
        "name": view.message,
        "labels": [loaded.tokenizer.token_text(i) for i in top.indices.tolist()],
        "values": [round(p, 5) for p in top.values.tolist()],
        "most": 1,
        "width": 260,
    }
