"""The lecture "Attention and Position" as a page: every claim with its equation, code and picture.

The claims are those of David I. Inouye's lecture (sequence-model architectures, October 2026).
"""

from __future__ import annotations

import html
from pathlib import Path

from wherelm.pages.lecture import heads, lookup, masks, positions
from wherelm.pages.lecture.claim import Claim, Claims, code_name, source
from wherelm.pages.lecture.trained import flipping_pair
from wherelm.pages.page import Page

PARTS: dict[str, Claims] = {
    "Attention": lookup.CLAIMS + heads.CLAIMS,
    "Masks": masks.CLAIMS,
    "Position": positions.CLAIMS,
}


def lecture_page(root: Path, run: str | None = None) -> str:
    """The page as HTML; `run` answers the pair of sentences (None: the default checkpoint)."""
    result = Page("Attention and Position")
    claims = {part: [make() for make in makes] for part, makes in PARTS.items()}
    result.add(
        "<h1>Attention and Position</h1>",
        '<p class="lead">The lecture by David I. Inouye, claim by claim: the equation, the code '
        "that carries it with its source, and a picture whose numbers that very code computed when "
        "this page was written. Point at the pictures and move the sliders.</p>",
        "<nav>",
        *(
            f'<a href="#claim-{c.number}">{c.number}. {c.title}</a>'
            for part in claims.values()
            for c in part
        ),
        '<a href="#pair">The pair of sentences</a>',
        "</nav>",
    )
    for part, members in claims.items():
        result.add(f"<h2>{part}</h2>", *(_card(result, claim) for claim in members))
    result.add('<h2 id="pair">The pair of sentences</h2>', *flipping_pair(result, root, run))
    return result.html


def _card(page: Page, claim: Claim) -> str:
    figures = [
        (page.figure(shown.pictures, shown.caption) if shown.pictures else "") + shown.below
        for shown in claim.shown
    ]
    code = [
        f'<details class="code"><summary><code>{html.escape(code_name(part))}</code></summary>'
        f"<pre>{html.escape(source(part))}</pre></details>"
        for part in claim.code
    ]
    return (
        f'<section class="card" id="claim-{claim.number}">'
        f'<h3><span class="number">{claim.number}</span>{claim.title}</h3>'
        f'<div class="equation">{claim.equation}</div><p>{claim.text}</p>'
        + "".join((*figures, *code))
        + "</section>"
    )
