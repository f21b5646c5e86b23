"""One self-contained HTML page: text, tables and figures, with style and script inside it.

A picture is a plain mapping with a `kind` that web/page.js draws: matrix, lines, bars, plane,
tokens, attention, or frames (a slider over other pictures).
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WEB = Path(__file__).with_name("web")

NOT_IMPORTANCE = (
    "Attention weights say what a head blends; they are not importance, nor probabilities that a "
    "token is true or important."
)

Picture = dict[str, Any]


@dataclass
class Page:
    """Collects a page from top to bottom; `html` is the finished text."""

    title: str
    parts: list[str] = field(default_factory=list)
    figures: list[list[Picture]] = field(default_factory=list)

    def add(self, *parts: str) -> None:
        self.parts += parts

    def figure(self, pictures: Sequence[Picture], caption: str) -> str:
        """Pictures side by side over one caption (HTML).

        A picture of attention marks itself, and the caption then says what weights are not.
        """
        self.figures.append(list(pictures))
        attention = any(map(shows_attention, pictures))
        caption = f"{caption} {NOT_IMPORTANCE}" if attention else caption
        kind = ' class="shows-attention"' if attention else ""
        return (
            f'<figure{kind}><div class="pictures" data-figure="{len(self.figures) - 1}"></div>'
            f"<figcaption>{caption}</figcaption></figure>"
        )

    @property
    def html(self) -> str:
        style, script = ((WEB / name).read_text(encoding="utf-8") for name in FILES)
        # Inside a script element only "<" could end it.
        data = json.dumps(self.figures, allow_nan=False, separators=(",", ":"))
        data = data.replace("<", "\\u003c")
        return HEAD.format(title=html.escape(self.title), policy=POLICY, style=style) + (
            "\n".join(self.parts)
            + f'\n<script type="application/json" id="data">{data}</script>'
            + f"\n<script>\n{script}</script>\n</body>\n</html>\n"
        )


FILES = ("page.css", "page.js")

# The browser itself refuses whatever would leave the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
"""


def shows_attention(picture: Picture) -> bool:
    """Whether a picture, or one in its frames, shows attention weights."""
    inner = (p for frame in picture.get("frames", ()) for p in frame["pictures"])
    return bool(picture.get("attention")) or any(map(shows_attention, inner))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells and headings are HTML."""
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    inside = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{inside}</table></div>'


def write(path: Path, content: str | bytes) -> None:
    """Writes a file; ValueError in one line where that is impossible."""
    try:
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--out {path}: cannot be written ({error.strerror})") from error
