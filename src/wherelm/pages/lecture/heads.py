"""Claims 6 to 9: paths, projections, heads and what their weights are not.

Shapes: L positions, D width, H heads.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from wherelm.model.attention import Attention, attend_textbook
from wherelm.pages.lecture.claim import (
    CAUSAL,
    EVERYTHING,
    WORDS,
    Claim,
    Claims,
    Shown,
    difference,
    embeddings,
    matrix,
    normal,
    numbers,
    random_attention,
    scheme,
    self_attention,
    small,
    weights,
)
from wherelm.pages.page import table


def no_sequential_chain() -> Claim:
    length = 6
    names = [str(i) for i in range(length)]
    sizes = {}
    for kind, layer in (("attention", _attention_outputs), ("recurrent", _recurrent_states)):
        rows = [
            [_direct(layer, source, target, length) for source in range(length)]
            for target in range(length)
        ]
        sizes[kind] = torch.tensor(rows)
    lengths = [2, 4, 8, 16, 32]
    depths = {
        "attention": [_depth(lambda x: _attend(x)[-1], n) for n in lengths],
        "recurrent network": [_depth(lambda x: _recurrent_states(x)[-1], n) for n in lengths],
    }
    chain = {
        "kind": "lines",
        "name": "Operations in a row, input to last output",
        "x": lengths,
        "across": "positions",
        "series": [{"name": name, "y": y} for name, y in depths.items()],
    }
    between = {"between": " ← input ", "cell": 32}
    pictures = [
        matrix("Attention: direct paths", names, names, sizes["attention"], **between),
        matrix("Recurrent: direct paths", names, names, sizes["recurrent"], **between),
        chain,
    ]
    caption = (
        "Size of the gradient from an input (column) to an output (row) along paths that cross no "
        "other position's output."
    )
    return Claim(
        6,
        "No sequential chain",
        "<i>y</i><sub>ℓ</sub> = Σ<sub>j ≤ ℓ</sub> <i>a</i><sub>ℓj</sub> <i>v</i><sub>j</sub> "
        "&nbsp; against &nbsp; <i>h</i><sub>ℓ</sub> = f(<i>x</i><sub>ℓ</sub>, "
        "<i>h</i><sub>ℓ−1</sub>)",
        "Within a layer all outputs are computed together, each directly from every allowed input. "
        "In a recurrent network position ℓ waits for the state before it.",
        (Attention.forward,),
        [Shown(pictures, caption)],
    )


def _attend(x_LD: Tensor) -> Tensor:
    module, positions = random_attention(8, 2, 4), torch.arange(len(x_LD))[None]
    return module(x_LD[None], x_LD[None], scheme(), positions, positions, CAUSAL)[0]


def _attention_outputs(x_LD: Tensor) -> list[Tensor]:
    """Each output by a call of its own, from its own query and the inputs that it may read."""
    module, x_BLD, where = random_attention(8, 2, 4), x_LD[None], torch.arange(len(x_LD))[None]
    return [
        module(
            x_BLD[:, i : i + 1],
            x_BLD[:, : i + 1],
            scheme(),
            where[:, i : i + 1],
            where[:, : i + 1],
            EVERYTHING,
        )[0]
        for i in range(len(x_LD))
    ]


@torch.no_grad()
def _cell(width: int) -> nn.RNNCell:
    cell = nn.RNNCell(width, width)
    for name, parameter in cell.named_parameters():
        parameter.copy_(normal(*parameter.shape, name=name) * width**-0.5)
    return cell


def _recurrent_states(x_LD: Tensor) -> list[Tensor]:
    cell, states = _cell(x_LD.shape[-1]), [torch.zeros(1, x_LD.shape[-1])]
    for x_D in x_LD:
        states.append(cell(x_D[None], states[-1]))
    return states[1:]


def _direct(layer, source: int, target: int, length: int) -> float:
    x_LD = normal(length, 8).requires_grad_()
    outputs = layer(x_LD)
    for position, output in enumerate(outputs):
        if position != target:
            output.register_hook(torch.zeros_like)
    (gradient,) = torch.autograd.grad(outputs[target].sum(), x_LD)
    return gradient[source].norm().item()


def _depth(layer, length: int) -> int:
    """Operations in a row between the input and what the layer makes of it."""
    depths: dict = {}
    stack = [(layer(normal(length, 8).requires_grad_()).grad_fn, False)]
    while stack:
        node, ready = stack.pop()
        before = [n for n, _ in node.next_functions if n is not None]
        if ready:
            depths[node] = 1 + max((depths[n] for n in before), default=0)
        elif node not in depths:
            stack += [(node, True), *((n, False) for n in before)]
    return max(depths.values())


def fixed_projections() -> Claim:
    module = random_attention(8, 1, 8)
    other = ("send", "the", "please", "slides")
    pictures, prints = [], []
    for words in (WORDS, other):
        pictures.append(
            weights(" ".join(words), words, words, self_attention(module, embeddings(words))[1][0])
        )
        prints.append(
            hashlib.sha256(module.query.weight.detach().numpy().tobytes()).hexdigest()[:12]
        )
    return Claim(
        7,
        "Fixed projections, input-dependent weights",
        "<i>W</i><sub>Q</sub>, <i>W</i><sub>K</sub>, <i>W</i><sub>V</sub> fixed; &nbsp; "
        "<i>A</i> = <i>A</i>(<i>X</i>)",
        "The learned matrices do not change with the input; the combination weights do. The "
        f"hash of W<sub>Q</sub> was <code>{prints[0]}</code> for the first sentence and "
        f"<code>{prints[1]}</code> for the second.",
        (Attention,),
        [Shown(pictures, "The same module reads two sentences.")],
    )


@torch.no_grad()
def multi_head() -> Claim:
    heads, d_k = 4, 3
    module, x_LD = random_attention(8, heads, d_k), embeddings(WORDS)
    y, a = self_attention(module, x_LD, CAUSAL)
    allowed = CAUSAL.dense(4, 4, x_LD.device)
    outputs = []
    for h in range(heads):
        own = slice(h * d_k, (h + 1) * d_k)
        q, k, v = (
            (x_LD @ part.weight[own].T)[None, None]
            for part in (module.query, module.key, module.value)
        )
        outputs.append(attend_textbook(q, k, v, d_k**-0.5, allowed)[0][0, 0])
    by_hand = torch.cat(outputs, dim=-1) @ module.output.weight.T
    pictures = [weights(f"A of head {h + 1}", WORDS, WORDS, a[h]) for h in range(heads)]
    return Claim(
        8,
        "Multi-head attention",
        "<i>Y</i> = Concat(<i>Y</i><sub>1</sub> … <i>Y</i><sub>b</sub>) <i>W</i><sub>O</sub>ᵀ",
        "Each head has its own query, key and value projections, and every head obeys the allowed "
        "context. Four single heads, concatenated and projected by hand, differ from the module by "
        f"{small(difference(y, by_hand))}.",
        (Attention,),
        [Shown(pictures, "Four heads, one causal mask.")],
    )


def what_weights_are_not() -> Claim:
    values = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]])
    names = ("report", "file", "the")
    pictures, rows = [], []
    for title, scores in (("mostly “report”", [3.0, 0.5, 1.0]), ("mostly “file”", [0.5, 3.0, 1.0])):
        bias, zeros = torch.tensor(scores).view(1, 1, 1, 3), torch.zeros(1, 1, 1, 1)
        y, a = attend_textbook(
            zeros, zeros.expand(1, 1, 3, 1), values[None, None], 1.0, bias_BHTS=bias
        )
        pictures.append(
            {
                "kind": "bars",
                "attention": True,
                "name": title,
                "labels": names,
                "values": numbers(a.flatten()),
                "most": 1,
            }
        )
        rows.append([title, ", ".join(f"{v:.6f}" for v in y.flatten().tolist())])
    below = table(("weights", "output y"), rows)
    return Claim(
        9,
        "What the weights are not",
        "<i>y</i><sub>ℓ</sub> = Σ<sub>j</sub> <i>a</i><sub>ℓj</sub> <i>v</i><sub>j</sub>: &nbsp; "
        "<i>a</i> says how much of <i>v</i> is blended, not what <i>v</i> says",
        "Attention weights are not probabilities that a token is true or important. Here two "
        "tokens have the same value vector: the weights exchange, and the output stays the same.",
        (attend_textbook,),
        [Shown(pictures, "Values: report [1, 2], file [1, 2], the [0, 0].", below)],
    )


CLAIMS: Claims = [no_sequential_chain, fixed_projections, multi_head, what_weights_are_not]
