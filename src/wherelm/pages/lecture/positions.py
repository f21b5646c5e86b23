"""Claims 14 to 19: position.

Shapes: L positions, D width, K key width, P pairs.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from wherelm.model.decoder import Decoder
from wherelm.pages.lecture.claim import (
    CAUSAL,
    Claim,
    Claims,
    Shown,
    difference,
    embeddings,
    logits_of,
    matrix,
    normal,
    numbers,
    random_attention,
    random_decoder,
    scheme,
    self_attention,
    small,
)
from wherelm.pages.page import Picture, table
from wherelm.schemes.absolute import Sinusoidal, sinusoid_table
from wherelm.schemes.base import PositionScheme
from wherelm.schemes.rotary import Rope, rotary_frequencies, rotate_pairs, rotation_table

WORDS = ("send", "the", "report", "now")
PAIR = (
    ("send", "the", "report", "before", "the", "slides", "."),
    ("send", "the", "slides", "before", "the", "report", "."),
)
BASE = 10_000.0
ENTRIES = [str(i) for i in range(8)]


def permutation_equivariance() -> Claim:
    module, x_LD = random_attention(8, 2, 4), embeddings(WORDS)
    y_LD = self_attention(module, x_LD)[0]
    frames = []
    for order in itertools.permutations(range(4)):
        rows = list(order)
        permuted = self_attention(module, x_LD[rows])[0]
        apart = difference(permuted, y_LD[rows])
        words = [WORDS[i] for i in rows]
        frames.append(
            {
                "name": " ".join(words),
                "text": f"SA(P X) differs from P SA(X) by {small(apart)}",
                "pictures": [matrix("Output rows", words, ENTRIES, permuted, signed=True, cell=36)],
            }
        )
    slider = {"kind": "frames", "label": "order", "frames": frames, "wide": True}
    outputs = [self_attention(module, embeddings(words))[0] for words in PAIR]
    pictures = [
        matrix(" ".join(words), words, ENTRIES, y, signed=True, cell=34)
        for words, y in zip(PAIR, outputs, strict=True)
    ]
    here, there = (words.index("report") for words in PAIR)
    apart = difference(outputs[0][here], outputs[1][there])
    return Claim(
        14,
        "Permutation equivariance",
        "SA(<i>P X</i>) = <i>P</i> SA(<i>X</i>) &nbsp; for every permutation <i>P</i>",
        "With no mask and no positions, reordering the inputs reorders the outputs, and nothing "
        "else. In the two sentences the token <code>report</code> gets the same output vector, in "
        f"row {here} and in row {there}: they differ by {small(apart)}.",
        (PositionScheme,),
        [
            Shown([slider], "Move through all 24 orders: every word keeps its output row."),
            Shown(pictures, "The rows of “report” hold the same numbers."),
        ],
    )


def causal_mask_and_order() -> Claim:
    rows, series = [], []
    orders = list(itertools.permutations([3, 8, 5, 12]))
    for layers in (1, 2):
        model = random_decoder("none", layers, torch.float64)
        logits = [logits_of(model, [*order, 7])[-1] for order in orders]
        moves = [difference(other, logits[0]) for other in logits]
        series.append(
            {"name": f"{layers} layer{'s' * (layers > 1)}", "y": [round(m, 6) for m in moves]}
        )
        rows.append([str(layers), small(min(moves[1:])), small(max(moves))])
    module, x_LD = random_attention(8, 2, 4), embeddings(WORDS)
    y_LD = self_attention(module, x_LD, CAUSAL)[0]
    swapped = [1, 0, 2, 3]
    change = difference(self_attention(module, x_LD[swapped], CAUSAL)[0], y_LD[swapped])
    picture = {
        "kind": "lines",
        "name": "Change of the last logits, order by order",
        "x": list(range(len(orders))),
        "across": "order of the prefix",
        "series": series,
        "width": 420,
    }
    columns = ("layers", "least change by another order", "greatest")
    return Claim(
        15,
        "A causal mask restricts access; it does not encode indices or offsets",
        "one layer, no positions: &nbsp; <i>y</i><sub>last</sub> = "
        "<i>f</i>(multiset of the prefix, <i>x</i><sub>last</sub>)",
        "The mask breaks arbitrary equivariance, for reordering changes what may be read: "
        f"exchanging the first two words moves the outputs by {small(change)}. But with one layer "
        "and no positions the last output depends only on the multiset of the prefix; with two "
        "layers it can depend on the order, though nothing was told explicitly.",
        (Decoder.hidden, PositionScheme),
        [
            Shown(
                [picture],
                "The 24 orders of four tokens before the same last token, in random decoders "
                "without positions (float64).",
                table(columns, rows),
            )
        ],
    )


def additive_positions() -> Claim:
    length = 41
    table_LD = sinusoid_table(torch.arange(length)[None], 4, BASE)[0]
    names = ("sin ℓ", "cos ℓ", "sin ℓ/100", "cos ℓ/100")
    curves: Picture = {
        "kind": "lines",
        "name": "The four entries, d = 4",
        "x": list(range(length)),
        "across": "ℓ",
        "series": [{"name": name, "y": numbers(table_LD[:, i])} for i, name in enumerate(names)],
        "marks": [0, 2, 5],
        "width": 520,
        "hint": "Point at a position to read its vector.",
    }
    chosen = [0, 2, 5]
    vectors = matrix(
        "p at positions 0, 2 and 5",
        [f"ℓ = {i}" for i in chosen],
        names,
        table_LD[chosen],
        signed=True,
        digits=3,
        cell=46,
    )
    model = random_decoder("sinusoidal")
    x_LD = model.scheme.embed(
        model.embedding(torch.tensor([[5, 9, 5]])) * model.config.width**0.5,
        torch.arange(3)[None],
    )[0]
    return Claim(
        16,
        "Additive positions",
        "<i>x</i><sub>ℓ</sub> = <i>E</i>[<i>w</i><sub>ℓ</sub>] + <i>p</i><sub>ℓ</sub>, &nbsp; "
        "<i>p</i><sub>ℓ,2i</sub> = sin(ℓ ω<sub>i</sub>), <i>p</i><sub>ℓ,2i+1</sub> = "
        "cos(ℓ ω<sub>i</sub>), &nbsp; ω<sub>i</sub> = 10000<sup>−2i/d</sup>",
        "The same token at positions 0 and 2 gets different vectors: in a random decoder of width "
        f"16 they differ by up to {small(difference(x_LD[0], x_LD[2]))}.",
        (sinusoid_table, Sinusoidal.embed),
        [Shown([curves, vectors], "The marks are positions 0, 2 and 5.")],
    )


def rotating_pairs() -> Claim:
    d_k = 8
    frequencies = rotary_frequencies(d_k, BASE)
    table_LP = rotation_table(torch.arange(101)[None], frequencies)[0]
    ones = torch.tensor([1.0, 0.0] * (d_k // 2)).view(1, 1, 1, d_k)
    frames = []
    for position in range(101):
        turned = rotate_pairs(ones, table_LP[position : position + 1][None]).view(-1, 2)
        frames.append(
            {
                "name": f"ℓ = {position}",
                "text": "angles ℓ θ: "
                + ", ".join(f"{position * f:.3g}" for f in frequencies.tolist())
                + " radians",
                "pictures": [
                    {
                        "kind": "plane",
                        "name": f"pair {i}: θ = {frequency:g}",
                        "range": [-1.1, 1.1],
                        "circle": True,
                        "size": 150,
                        "arrows": [{"x": round(x, 5), "y": round(y, 5)}],
                    }
                    for i, ((x, y), frequency) in enumerate(
                        zip(turned.tolist(), frequencies.tolist(), strict=True)
                    )
                ],
            }
        )
    slider = {"kind": "frames", "label": "position ℓ", "frames": frames, "start": 7, "wide": True}
    waves = 2 * math.pi / frequencies
    rows = [
        [f"pair {i}", f"{f:g}", f"{w:,.1f}"]
        for i, (f, w) in enumerate(zip(frequencies.tolist(), waves.tolist(), strict=True))
    ]
    return Claim(
        17,
        "RoPE",
        "pair <i>i</i> at position ℓ is turned by ℓ θ<sub>i</sub>, &nbsp; "
        "θ<sub>i</sub> = 10000<sup>−2i/d<sub>k</sub></sup>, &nbsp; "
        "<i>R</i>(α) = [[cos α, −sin α], [sin α, cos α]]",
        "Queries and keys are split into pairs and each pair is rotated by its own angle; keys use "
        "the same rotations. Fast and slow pairs cover different scales of distance.",
        (rotate_pairs, rotary_frequencies, Rope),
        [
            Shown(
                [slider],
                "The pairs of a head of width 8 that all held (1, 0).",
                table(("", "θ, radians a step", "positions a turn"), rows),
            )
        ],
    )


def angle_difference() -> Claim:
    unit = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)

    def turned(degrees: float) -> Tensor:
        # At width 2 there is one pair, and a position is its angle in radians.
        table_BTP = rotation_table(
            torch.tensor([[math.radians(degrees)]]), rotary_frequencies(2, BASE)
        )
        return rotate_pairs(unit, table_BTP).flatten()

    frames = []
    for further in range(0, 361, 10):
        q, k = turned(further), turned(60 + further)
        score = (q @ k).item()
        arrows = [
            {"name": name, "x": round(a[0].item(), 5), "y": round(a[1].item(), 5)}
            for name, a in (("q", q), ("k", k))
        ]
        plane = {
            "kind": "plane",
            "range": [-1.15, 1.15],
            "circle": True,
            "size": 260,
            "arrows": arrows,
        }
        frames.append(
            {
                "name": f"{further}° further",
                "text": f"score q · k = {score:.6f}, lengths {q.norm():.6f} and {k.norm():.6f}",
                "pictures": [plane],
            }
        )
    slider: Picture = {
        "kind": "frames",
        "label": "turn both",
        "frames": frames,
        "start": 0,
        "wide": True,
    }
    content = normal(2, 8, name="content")
    pairs = ((1, 3), (2, 4), (11, 13), (101, 103), (1, 4))
    rows = [
        [f"({a}, {b})", str(b - a), f"{_rope_score(*content, a, b):.5f}".replace("-", "−")]
        for a, b in pairs
    ]
    return Claim(
        18,
        "RoPE compares by angle difference",
        "<i>q̃</i><sub>ℓ</sub>ᵀ <i>k̃</i><sub>s</sub> = Σ<sub>i</sub> <i>q</i><sub>ℓ,i</sub>ᵀ "
        "<i>R</i>((s − ℓ) θ<sub>i</sub>) <i>k</i><sub>s,i</sub>",
        "Positions (1, 3) and (2, 4) give the same score for the same content; turning both arrows "
        "further keeps their difference of 60°. Norms are kept, and there is no learned table.",
        (Rope.rotate, rotate_pairs, rotation_table),
        [
            Shown(
                [slider],
                "Turn both: the arrows move together and the score stays.",
                table(("positions (query, key)", "difference", "score at width 8"), rows),
            )
        ],
    )


def _rope_score(q_K: Tensor, k_K: Tensor, q_position: int, k_position: int) -> float:
    rope = scheme("rope", width=8, heads=1)
    q = rope.rotate(q_K.view(1, 1, 1, -1), torch.tensor([[q_position]]), "query")
    k = rope.rotate(k_K.view(1, 1, 1, -1), torch.tensor([[k_position]]), "key")
    return (q @ k.mT).item()


@torch.no_grad()
def rope_is_the_encoding() -> Claim:
    tokens = [5, 9, 3, 7]
    rows = []
    for name in ("none", "sinusoidal", "rope"):
        model = random_decoder(name, layers=1, dtype=torch.float64)
        embedded = model.embedding(torch.tensor([tokens])) * model.config.width**0.5
        added = model.scheme.embed(embedded, torch.arange(4)[None]) - embedded
        moved = difference(logits_of(model, [9, 5, 3, 7])[-1], logits_of(model, tokens)[-1])
        rows.append([name, small(added.abs().max().item()), small(moved)])
    columns = ("scheme", "added to the embeddings", "last logits, first two tokens exchanged")
    return Claim(
        19,
        "RoPE is itself the position encoding",
        "<i>x</i><sub>ℓ</sub> = <i>E</i>[<i>w</i><sub>ℓ</sub>]: &nbsp; nothing is added; order "
        "enters where queries meet keys",
        "RoPE is an alternative to adding vectors (so in Llama 2). Decoders of one layer: only "
        "what a scheme tells can make the last output depend on the order.",
        (Rope, PositionScheme.embed),
        [Shown([], "", table(columns, rows))],
    )


CLAIMS: Claims = [
    permutation_equivariance,
    causal_mask_and_order,
    additive_positions,
    rotating_pairs,
    angle_difference,
    rope_is_the_encoding,
]
