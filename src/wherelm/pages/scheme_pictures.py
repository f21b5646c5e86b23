"""The shape of a position scheme, found through its hooks alone.

Shapes: T positions, D width, H heads, K head width, P rotating pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wherelm.batches.batch import Batch
from wherelm.model.decoder import Decoder
from wherelm.pages.page import Picture
from wherelm.schemes.base import PositionScheme

POSITIONS = 64  # drawn at most
CURVES, HANDS = 6, 6  # entries of the added vector, and pairs, that are drawn


@dataclass(frozen=True)
class SchemeFigure:
    """Pictures of one hook of the scheme of some layers, and a caption of plain text."""

    pictures: list[Picture]
    caption: str


@torch.inference_mode()
def scheme_figures(model: Decoder, batch: Batch) -> list[SchemeFigure]:
    """A figure for each hook through which order enters; `batch` serves contextual schemes.

    Empty if every hook is the identity.
    """
    scheme, length = model.scheme, min(model.config.context, POSITIONS)
    positions_1T = torch.arange(length)[None]
    figures = [*_placed(scheme, positions_1T), *_added(scheme, positions_1T)]
    for own, layers in schemes_by_layer(model):
        figures += [*_rotated(own, positions_1T, layers), *_shifted(own, length, layers)]
        figures += _biased(own, positions_1T, layers)
    return figures + _contextual(model, batch)


def schemes_by_layer(model: Decoder) -> list[tuple[PositionScheme, str]]:
    """The different schemes of the layers, each with the words for its layers."""
    layers: dict[Hashable, list[int]] = {}
    for layer in range(model.config.layers):
        scheme = model.scheme.for_layer(layer)
        # Schemes without parameters are the same where their configurations are.
        learned = next(scheme.parameters(), None) is not None
        layers.setdefault(scheme if learned else scheme.config, []).append(layer)
    result = []
    for own in layers.values():
        words = ", ".join(str(layer + 1) for layer in own)
        words = f"layer{'s' if len(own) > 1 else ''} {words}" if len(layers) > 1 else "every layer"
        result.append((model.scheme.for_layer(own[0]), words))
    return result


def _placed(scheme: PositionScheme, positions_1T: Tensor) -> Iterator[SchemeFigure]:
    length = positions_1T.shape[1]
    placed = scheme.place(positions_1T, None, length)[0]
    if torch.equal(placed, positions_1T[0]):
        return
    picture = _lines(positions_1T, "slot", [("number", placed)]) | {"name": "Numbers of the slots"}
    caption = "place: the numbers that one example's slots get instead of 0, 1, 2, …"
    yield SchemeFigure([picture], caption)


def _added(scheme: PositionScheme, positions_1T: Tensor) -> Iterator[SchemeFigure]:
    width = scheme.shape.width
    added_TD = scheme.embed(torch.zeros(1, positions_1T.shape[1], width), positions_1T)[0]
    if not added_TD.any():
        return
    chosen = _spread(width, CURVES)
    curves = _lines(positions_1T, "position", [(f"entry {i}", added_TD[:, i]) for i in chosen])
    entries = _spread(width, 32)
    everything = {
        "kind": "matrix",
        "name": "The added vectors",
        "rows": [str(i) for i in entries],
        "columns": ["" for _ in added_TD],
        "values": _rounded(added_TD[:, entries].T),
        "details": [
            [f"entry {i} at position {t}: {added_TD[t, i]:.3f}" for t in range(len(added_TD))]
            for i in entries
        ],
        "signed": True,
        "bare": True,
        "cell": 8,
        "hint": "Rows are entries, columns are positions. Point at a cell.",
    }
    caption = f"embed: the vector added to each token's embedding; {len(chosen)} of its {width} "
    yield SchemeFigure(
        [curves | {"name": "Entries of the added vector"}, everything],
        caption + "entries as curves over position.",
    )


def _rotated(scheme: PositionScheme, positions_1T: Tensor, layers: str) -> Iterator[SchemeFigure]:
    directions_TP2 = pair_directions(scheme, positions_1T)
    moving_P = (directions_TP2 - directions_TP2[:1]).abs().amax((0, 2)) > 1e-6
    if not moving_P.any():
        return
    pairs, chosen = directions_TP2.shape[1], _spread(directions_TP2.shape[1], HANDS)
    shown = directions_TP2[:, chosen].tolist()
    frames = [
        {
            "name": f"position {t}",
            "pictures": [
                {
                    "kind": "plane",
                    "name": f"pair {i}",
                    "range": [-1.1, 1.1],
                    "circle": True,
                    "size": 104,
                    "arrows": [{"x": round(x, 4), "y": round(y, 4)}],
                }
                for i, (x, y) in zip(chosen, hands, strict=True)
            ],
        }
        for t, hands in enumerate(shown)
    ]
    slider = {"kind": "frames", "label": "position", "frames": frames, "start": 1, "wide": True}
    # The score of equal contents: each pair gives the cosine of its angle difference.
    score_T = (directions_TP2 * directions_TP2[:1]).sum(-1).mean(-1)
    score = _lines(positions_1T, "distance", [("score of equal contents", score_T)])
    still = pairs - int(moving_P.sum())
    rest = f" {still} pairs do not rotate." if still else ""
    caption = (
        f"rotate, in {layers}: each pair of a key's entries turns with its position (queries "
        f"likewise), {len(chosen)} of {pairs} pairs drawn; so a score depends on the difference "
        f"of positions.{rest}"
    )
    yield SchemeFigure([slider, score | {"name": "Mean cosine over the pairs"}], caption)


def _shifted(scheme: PositionScheme, length: int, layers: str) -> Iterator[SchemeFigure]:
    shape = scheme.shape
    slots_T1 = torch.arange(float(length))[:, None]
    keys = slots_T1.expand(1, shape.heads, length, shape.head_width)
    back_TK = (slots_T1 - scheme.shift(keys, None)[0, 0]).round()
    if not back_TK.any():
        return
    from_TK = (slots_T1 - back_TK).long()
    picture = {
        "kind": "matrix",
        "name": "Which slot an entry of a key comes from",
        "rows": [str(i) for i in range(shape.head_width)],
        "columns": ["" for _ in back_TK],
        "values": _rounded(back_TK.T),
        "details": [
            [f"entry {i} of the key at slot {t}: from slot {from_TK[t, i]}" for t in range(length)]
            for i in range(shape.head_width)
        ],
        "signed": False,
        "bare": True,
        "cell": 8,
        "hint": "Rows are entries of a head, columns are slots. Point at a cell.",
    }
    moved = int(back_TK.any(0).sum())
    caption = (
        f"shift, in {layers}: {moved} of {shape.head_width} entries of a key are those of the slot "
        "before, of the same message; so a token is found by what stood before it."
    )
    yield SchemeFigure([picture], caption)


def pair_directions(scheme: PositionScheme, positions_1T: Tensor) -> Tensor:
    """The unit vector that each pair of a key points to at each position, (T, P, 2).

    The key holds (1, 0) in every pair; a scheme may widen it.
    """
    length, width = positions_1T.shape[1], scheme.shape.head_width
    keys = torch.zeros(1, scheme.shape.heads, length, width)
    keys[..., ::2] = 1
    turned_TP2 = scheme.rotate(keys, positions_1T, "key")[0, 0]
    if turned_TP2.shape[-1] % 2:
        # An odd head cannot hold pairs: then nothing rotates.
        turned_TP2 = turned_TP2[:, :-1]
    turned_TP2 = turned_TP2.unflatten(-1, (-1, 2))
    return turned_TP2 / turned_TP2.norm(dim=-1, keepdim=True)


def _biased(scheme: PositionScheme, positions_1T: Tensor, layers: str) -> Iterator[SchemeFigure]:
    bias_BHTS = scheme.bias(positions_1T[:, -1:], positions_1T)
    if bias_BHTS is None:
        return
    by_distance_HT = bias_BHTS[0, :, 0].flip(-1)
    series = [(f"head {h + 1}", values) for h, values in enumerate(by_distance_HT)]
    picture = _lines(positions_1T, "distance", series) | {"name": "Bias by distance"}
    caption = (
        f"bias, in {layers}: what is added to the score of a key so far back, as seen from "
        f"position {positions_1T.shape[1] - 1}."
    )
    yield SchemeFigure([picture], caption)


def _contextual(model: Decoder, batch: Batch) -> list[SchemeFigure]:
    """Of schemes whose bias comes from the tokens: the bias on the last slot of the first row."""
    inputs: list[Tensor] = []
    # A pre-hook sees what the attention of each layer reads.
    handles = [
        block.attention.register_forward_pre_hook(lambda _, given: inputs.append(given[1]))
        for block in model.blocks
    ]
    schemes = [model.scheme.for_layer(layer) for layer in range(model.config.layers)]
    biases: list[Tensor | None] = []
    for scheme in set(schemes):
        scheme.content_bias = _recorded(scheme.content_bias, biases)
    try:
        model.hidden(batch.tokens_BT[:1], batch.positions_BT[:1], keys_BT=batch.keys_BT[:1])
    finally:
        for handle in handles:
            handle.remove()
        for scheme in set(schemes):
            del scheme.content_bias  # the method is there again
    last = int(batch.key_mask_BT[0].nonzero().max())
    pictures, hooks = [], []
    for layer, (scheme, x_BTD, bias_BHTS) in enumerate(zip(schemes, inputs, biases, strict=True)):
        hook = "content_bias"
        values_BHS = scheme.token_value(x_BTD[:, : last + 1])
        if values_BHS is not None:
            hook, bias_BHTS = "token_value and value_bias", scheme.value_bias(values_BHS, last + 1)
        elif bias_BHTS is None:
            continue
        hooks.append(hook)
        bias_HT = bias_BHTS[0, :, last, : last + 1].flip(-1)
        series = [(f"head {h + 1}", values) for h, values in enumerate(bias_HT)]
        picture = _lines(torch.arange(last + 1)[None], "distance", series)
        pictures.append(picture | {"name": f"layer {layer + 1}"})
    if not pictures:
        return []
    caption = (
        f"{' and '.join(dict.fromkeys(hooks))}: this bias depends on the tokens between key and "
        "query, so it is drawn for the first message, as seen from its last slot."
    )
    return [SchemeFigure(pictures, caption)]


def _recorded(hook: Callable[..., Tensor | None], into: list[Tensor | None]) -> Callable:
    """The hook, each of whose answers is kept too."""

    def recorded(*given: Tensor) -> Tensor | None:
        into.append(hook(*given))
        return into[-1]

    return recorded


def _lines(x_1T: Tensor, across: str, series: list[tuple[str, Tensor]]) -> Picture:
    return {
        "kind": "lines",
        "x": x_1T[0].tolist(),
        "across": across,
        "series": [{"name": name, "y": _rounded(values)} for name, values in series],
    }


def _rounded(values: Tensor) -> list:
    if values.ndim > 1:
        return [_rounded(row) for row in values]
    return [round(v, 4) if math.isfinite(v) else None for v in values.tolist()]


def _spread(count: int, most: int) -> list[int]:
    """At most so many of 0 … count - 1, evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]
