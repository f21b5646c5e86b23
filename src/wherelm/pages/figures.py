"""The pictures of one or two messages as a PNG for papers."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wherelm.pages.page import NOT_IMPORTANCE

if TYPE_CHECKING:
    from wherelm.checkpoint import Loaded
    from wherelm.pages.views import View

DPI = 200
SIDE, LEFT, TOP, BOTTOM = 1.1, 0.75, 0.55, 0.65  # of a map, and the margins, in inches


def message_figure(views: Sequence[View], loaded: Loaded) -> bytes:
    """For each message, side by side: A of every head, and mean attention by distance.

    Tokens are named on the maps where they stay readable.
    """
    from matplotlib.figure import Figure

    layers, heads = views[0].weights.shape[:2]
    # The caption alone needs 4.6 inches.
    width = max(heads * SIDE + LEFT + 0.1, 4.6 / len(views))
    height = TOP + (layers + 1.3) * (SIDE + 0.15) + BOTTOM
    figure = Figure(figsize=(len(views) * width, height))
    columns = figure.subfigures(1, len(views), squeeze=False)[0]
    for part, view in zip(columns, views, strict=True):
        _column(part, view, layers, heads, width, height)
    name = loaded.model.scheme.config.name
    figure.text(
        0.5, 0.08 / height, f"Position scheme {name}.\n{NOT_IMPORTANCE}", ha="center", fontsize=6
    )
    file = io.BytesIO()
    with warnings.catch_warnings():
        # A character that the font lacks is drawn as a box; no need to say so.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def _column(part: Any, view: View, layers: int, heads: int, width: float, height: float) -> None:
    reply = view.reply if view.ended else f"{view.reply} …"
    part.suptitle(f"“{_plain(view.message)}”\n→ {_plain(reply)}", fontsize=8, y=1 - 0.08 / height)
    grid = part.add_gridspec(
        layers + 1,
        heads,
        height_ratios=[*[1] * layers, 1.3],
        left=LEFT / width,
        right=1 - 0.1 / width,
        top=1 - TOP / height,
        bottom=BOTTOM / height,
        wspace=0.08,
        hspace=0.2,
    )
    for layer in range(layers):
        for head in range(heads):
            axes = part.add_subplot(grid[layer, head])
            # The square root keeps small weights visible.
            axes.imshow(view.weights[layer, head] ** 0.5, cmap="Blues", vmin=0, vmax=1)
            axes.set_title(f"layer {layer + 1} head {head + 1}", fontsize=6, pad=2)
            axes.set_xticks([])
            _name_rows(axes, view.names if head == 0 else [])
    axes = part.add_subplot(grid[layers, :])
    for layer, curves in enumerate(view.by_distance):
        for head, y in enumerate(curves):
            label = f"layer {layer + 1}" if head == 0 else None
            axes.plot(_numbers(y), color=f"C{layer % 10}", linewidth=0.8, alpha=0.8, label=label)
    axes.plot(_numbers(view.uniform), "k--", linewidth=1, label="uniform 1/i")
    axes.set_xlabel("slots back", fontsize=7)
    axes.set_ylabel("mean weight", fontsize=7)
    axes.tick_params(labelsize=6)
    axes.legend(fontsize=6, frameon=False)


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    if not names or len(names) > 40:
        axes.set_yticks([])
        return
    axes.set_yticks(
        range(len(names)), [_plain(n) for n in names], fontsize=min(5, 100 / len(names))
    )
    axes.tick_params(axis="y", length=0, pad=1)


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if v is None else v for v in values]


def _plain(text: str) -> str:
    """On one line, and without the meaning that matplotlib gives to dollar signs."""
    printable = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return textwrap.shorten(printable, 80, placeholder=" …").replace("$", r"\$")
