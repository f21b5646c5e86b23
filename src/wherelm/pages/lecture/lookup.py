"""Claims 1 to 5: what attention computes.

Shapes: L positions, D width, K key width, H heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wherelm.model.attention import Attention, attend_textbook
from wherelm.pages.lecture.claim import (
    EVERYTHING,
    WORDS,
    Claim,
    Claims,
    Shown,
    difference,
    embeddings,
    matrix,
    normal,
    random_attention,
    scheme,
    self_attention,
    small,
    weights,
)
from wherelm.pages.page import NOT_IMPORTANCE, Picture, table


def one_matrix_operation() -> Claim:
    width, d_k = 6, 4
    module, x_LD = random_attention(width, 1, d_k), embeddings(WORDS, width)
    q, k, v = (x_LD @ part.weight.T for part in (module.query, module.key, module.value))
    y, a = attend_textbook(q[None, None], k[None, None], v[None, None], module.scale)
    scores = q @ k.T * module.scale
    products = [
        [
            f"q({query}) · k({key}) / √{d_k} = ("
            + " + ".join(f"{x:.2f}·{z:.2f}" for x, z in zip(q[i], k[j], strict=True))
            + f") / 2 = {scores[i, j]:.3f}"
            for j, key in enumerate(WORDS)
        ]
        for i, query in enumerate(WORDS)
    ]
    pictures = [
        matrix("Scores Q Kᵀ / √d_k", WORDS, WORDS, scores, signed=True, details=products, cell=36),
        weights("A: every row sums to 1", WORDS, WORDS, a[0, 0].detach()),
        matrix(
            "Y = A V", WORDS, [str(i) for i in range(d_k)], y[0, 0].detach(), signed=True, cell=36
        ),
    ]
    caption = "Point at a score: it is one inner product of a query and a key."
    return Claim(
        1,
        "One matrix operation",
        "<i>A</i> = softmax<sub>rows</sub>(<i>Q K</i>ᵀ / √<i>d</i><sub>k</sub>), &nbsp; "
        "<i>Y</i> = <i>A V</i>, &nbsp; <i>Q</i> = <i>X W</i><sub>Q</sub>ᵀ, "
        "<i>K</i> = <i>X W</i><sub>K</sub>ᵀ, <i>V</i> = <i>X W</i><sub>V</sub>ᵀ",
        "A has L rows and L columns, one row for each output position; no weight is negative, and "
        "every row sums to 1.",
        (attend_textbook, Attention),
        [Shown(pictures, caption)],
    )


def soft_lookup() -> Claim:
    keys = torch.tensor([0.0, math.log(2), math.log(3)]).view(1, 1, 3, 1)
    values = torch.tensor([[1.0, 0.0], [0.0, 2.0], [2.0, 2.0]])
    names = ("please", "send", "the")

    def frame(query: float) -> dict:
        q = torch.tensor(query).view(1, 1, 1, 1)
        y, a = attend_textbook(q, keys, values[None, None], scale=1.0)
        a, y = a.flatten().tolist(), y.flatten().tolist()
        points = [
            {"name": f"{name} [{v[0]:g}, {v[1]:g}]", "x": v[0], "y": v[1], "weight": round(w, 5)}
            for name, v, w in zip(names, values.tolist(), a, strict=True)
        ]
        blend = {"name": "y", "x": round(y[0], 5), "y": round(y[1], 5), "main": True}
        return {
            "name": f"q = [{query:g}]",
            "text": f"y = [{y[0]:.4f}, {y[1]:.4f}]"
            + (" = [7/6, 5/3], from the weights 1/6, 2/6, 3/6" if query == 1 else ""),
            "pictures": [
                {
                    "kind": "bars",
                    "attention": True,
                    "name": "Weights",
                    "labels": names,
                    "values": [round(w, 6) for w in a],
                    "most": 1,
                    "digits": 4,
                },
                {
                    "kind": "plane",
                    "name": "The blend of the values",
                    "range": [-0.4, 2.6],
                    "points": [*points, blend],
                    "size": 250,
                },
            ],
        }

    queries = [i / 4 for i in range(-16, 25)]
    slider: Picture = {
        "kind": "frames",
        "label": "query",
        "frames": [frame(query) for query in queries],
        "start": queries.index(1.0),
        "wide": True,
    }
    return Claim(
        2,
        "Soft lookup, by hand",
        "<i>q</i> = [1]; keys 0, log 2, log 3; values [1, 0], [0, 2], [2, 2]; "
        "<i>d</i><sub>k</sub> = 1 &nbsp;⟹&nbsp; weights 1/6, 2/6, 3/6 and "
        "<i>y</i> = [7/6, 5/3]",
        "A dictionary selects one value; attention blends the values of every key. A larger query "
        "moves the blend towards the largest key's value, q = [0] to the mean of all.",
        (attend_textbook,),
        [Shown([slider], "Move the query.")],
    )


def stable_softmax() -> Claim:
    zeros, values = torch.zeros(1, 1, 1, 1), torch.eye(3)[None, None]
    rows = []
    for scores in ([0.5, 1.0, 2.0], [100.5, 101.0, 102.0], [1e4, -1e4, 1e4 - 1]):
        row = torch.tensor(scores)
        naive = row.exp() / row.exp().sum()
        bias = row.view(1, 1, 1, 3)
        a = attend_textbook(zeros, zeros.expand(1, 1, 3, 1), values, 1.0, bias_BHTS=bias)[1]
        rows.append(
            [", ".join(f"{s:g}" for s in scores), _listed(naive), f"<b>{_listed(a.flatten())}</b>"]
        )
    columns = ("scores", "exp(s) / Σ exp(s) in float32", "with the maximum subtracted")
    return Claim(
        3,
        "Stable softmax",
        "softmax(<i>s</i>)<sub>j</sub> = exp(<i>s</i><sub>j</sub> − max <i>s</i>) / "
        "Σ<sub>i</sub> exp(<i>s</i><sub>i</sub> − max <i>s</i>)",
        "Subtracting the row's maximum leaves the weights unchanged and keeps huge scores finite. "
        + NOT_IMPORTANCE,
        (attend_textbook,),
        [Shown([], "", table(columns, rows))],
    )


def _listed(values: Tensor) -> str:
    return ", ".join("not a number" if v != v else f"{v:.3f}" for v in values.tolist())


def scaling() -> Claim:
    keys = torch.zeros(1, 1, 2, 20)
    keys[0, 0, 1] = math.sqrt(20) / 20
    q, zeros = torch.ones(1, 1, 1, 20), torch.zeros(1, 1, 2, 1)
    bars = []
    for name, scale in (("unscaled: scores 0, √20", 1.0), ("scaled: scores 0, 1", 20**-0.5)):
        a = attend_textbook(q, keys, zeros, scale)[1].flatten().tolist()
        shown = [f"{100 * w:.1f} %" for w in a]
        bars.append(
            {
                "kind": "bars",
                "attention": True,
                "name": name,
                "labels": ["key 1", "key 2"],
                "values": [round(w, 6) for w in a],
                "shown": shown,
                "most": 1,
            }
        )
    widths = [2, 4, 8, 16, 32, 64, 128, 256]
    raw, scaled = [], []
    for width in widths:
        a, b = normal(400, width, name=f"q{width}"), normal(400, width, name=f"k{width}")
        raw.append((a @ b.T).std().item())
        scaled.append((a @ b.T * Attention(width, 1, width).scale).std().item())
    deviation = {
        "kind": "lines",
        "name": "Standard deviation of a score",
        "x": widths,
        "across": "d_k",
        "series": [
            {"name": "q · k", "y": [round(v, 4) for v in raw]},
            {"name": "q · k / √d_k", "y": [round(v, 4) for v in scaled]},
        ],
    }
    return Claim(
        4,
        "Scaling",
        "Var(<i>q</i>ᵀ<i>k</i>) = <i>d</i><sub>k</sub> &nbsp;⟹&nbsp; "
        "Var(<i>q</i>ᵀ<i>k</i> / √<i>d</i><sub>k</sub>) = 1",
        "Without the division a wide head saturates its softmax: nearly all of the weight falls on "
        "one key, and the gradients vanish.",
        (Attention,),
        [
            Shown(
                [*bars, deviation],
                "Left: d<sub>k</sub> = 20. Right: 160,000 random scores a width.",
            )
        ],
    )


@torch.no_grad()
def cross_attention() -> Claim:
    question, passage = ("what", "comes", "first"), ("send", "the", "report", "before", "slides")
    module = random_attention(6, 2, 4, context_width=10)
    x, c = embeddings(question, 6)[None], embeddings(passage, 10)[None]
    positions = torch.arange(3)[None], torch.arange(5)[None]
    module.keep_weights = True
    y = module(x, c, scheme(), *positions, EVERYTHING)
    a = module.weights_BHTS[0]
    pictures = [
        *(weights(f"A of head {h + 1}: 3 × 5", question, passage, a[h]) for h in range(2)),
        matrix(
            "Y: a row a question token",
            question,
            [str(i) for i in range(6)],
            y[0],
            signed=True,
            cell=36,
        ),
    ]
    own = random_attention(8, 2, 4)
    wide = Attention(8, 2, 4, context_width=8)
    wide.load_state_dict(own.state_dict())
    x_BLD, where = embeddings(WORDS)[None], torch.arange(4)[None]
    cross = wide(x_BLD, x_BLD.clone(), scheme(), where, where, EVERYTHING)
    same = difference(cross[0], self_attention(own, x_BLD[0])[0])
    return Claim(
        5,
        "Cross-attention",
        "<i>Q</i> from <i>X</i> (<i>L</i><sub>q</sub> × <i>d</i><sub>x</sub>), <i>K</i> and "
        "<i>V</i> from <i>C</i> (<i>L</i><sub>c</sub> × <i>d</i><sub>c</sub>): "
        "<i>A</i> is <i>L</i><sub>q</sub> × <i>L</i><sub>c</sub>",
        "Question tokens query a passage. Self-attention is the case C = X: with C = X the same "
        f"module differs from self-attention by {small(same)}.",
        (Attention.forward,),
        [Shown(pictures, "Random projections; question of width 6, passage of width 10.")],
    )


CLAIMS: Claims = [
    one_matrix_operation,
    soft_lookup,
    stable_softmax,
    scaling,
    cross_attention,
]
