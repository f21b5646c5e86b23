"""Claims 10 to 13: masks.

Shapes: B rows, T slots.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import torch
from torch import Tensor

from wherelm.batches.batch import Batch, collate
from wherelm.batches.store import TokenStore
from wherelm.batches.view import Slot
from wherelm.model.attention import attend_textbook
from wherelm.model.decoder import Decoder, learned, next_token_loss
from wherelm.model.masks import Mask, visible
from wherelm.pages.lecture.claim import (
    CPU,
    Claim,
    Claims,
    Shown,
    difference,
    logits_of,
    matrix,
    normal,
    random_decoder,
    small,
    weights,
)
from wherelm.pages.page import Picture, table
from wherelm.schemes import SCHEMES

WORDS = ("<PAD>", "please", "send", "the", "report", "<EOS>")
PAD, PLEASE, SEND, THE, REPORT, END = range(6)
SIDES = ("right", "left")


def two_messages(side: str = "right") -> Batch:
    """`please send the report` and `send report`, each followed by its last target."""
    examples = [[PLEASE, SEND, THE, REPORT, END], [SEND, REPORT, END]]
    store = TokenStore.from_lists([(ids, [True] * len(ids)) for ids in examples])
    return collate(store, [0, 1], pad=PAD, side=side)


def token_pictures(batch: Batch) -> list[Picture]:
    pictures = []
    positions_BT = batch.positions_BT.expand_as(batch.tokens_BT)
    for b in range(len(batch.tokens_BT)):
        slots = [
            Slot(
                WORDS[batch.tokens_BT[b, t]],
                WORDS[batch.targets_BT[b, t]],
                int(positions_BT[b, t]),
                int(batch.segments_BT[b, t]),
                bool(batch.key_mask_BT[b, t]),
                bool(batch.loss_mask_BT[b, t]),
            )
            for t in range(batch.tokens_BT.shape[1])
        ]
        pictures.append(
            {"kind": "tokens", "name": f"row {b + 1}", "slots": list(map(asdict, slots))}
        )
    return pictures


@torch.no_grad()
def batch_logits(model: Decoder, batch: Batch) -> Tensor:
    return model.logits(model.read(batch))


def causal_mask() -> Claim:
    words = ("send", "the", "report", "now")
    allowed = visible(None, 4, 4, CPU).dense(4, 4, CPU)
    added = torch.zeros(4, 4).masked_fill(~allowed[0, 0], float("-inf"))
    q, k, v = normal(3, 1, 1, 4, 4, name="causal")
    a = attend_textbook(q, k, v, 0.5, allowed)[1][0, 0]
    model, tokens = random_decoder("rope"), list(range(1, 8))
    before = logits_of(model, tokens)
    changes = torch.zeros(7, 7)
    for later in range(7):
        changed = [*tokens[:later], 20, *tokens[later + 1 :]]
        changes[:, later] = (logits_of(model, changed) - before).abs().amax(-1)
    names = [str(i) for i in range(7)]
    pictures = [
        matrix("M", words, words, added, digits=0, cell=36),
        weights("A = softmax(S + M)", words, words, a),
        matrix(
            "Change of the logits",
            names,
            names,
            changes,
            cell=34,
            between=" when token changes: position ",
        ),
    ]
    pictures[2]["details"] = [
        [
            f"token {t} changed: the logits at position {p} move by up to {changes[p, t]:.3g}"
            for t in range(7)
        ]
        for p in range(7)
    ]
    caption = (
        "Right: a random decoder of two layers; each column changes one token, each row shows how "
        "far the logits of a position move. Above the diagonal nothing moves: exactly 0."
    )
    return Claim(
        10,
        "Causal mask",
        "<i>M</i><sub>ℓj</sub> = 0 for <i>j</i> ≤ ℓ, −∞ for <i>j</i> &gt; ℓ; &nbsp; "
        "<i>A</i> = softmax<sub>rows</sub>(<i>S</i> + <i>M</i>)",
        "At position ℓ, which predicts token ℓ + 1, nothing after ℓ is read. Changing any later "
        "token changes no earlier logit.",
        (visible, Mask.additive),
        [Shown(pictures, caption)],
    )


def key_mask() -> Claim:
    rows = []
    for name in SCHEMES:
        model = random_decoder(name)
        cells = [name]
        for side in SIDES:
            batch = two_messages(side)
            real = batch.key_mask_BT[1]
            logits = batch_logits(model, batch)[1, real]
            tokens_BT = batch.tokens_BT.masked_fill(~batch.key_mask_BT, 17)
            other = batch_logits(model, replace(batch, tokens_BT=tokens_BT))[1, real]
            cells.append(small(difference(other, logits)))
        rows.append(cells)
    columns = ("scheme", "padding right: change", "padding left: change")
    caption = "The two messages of the lecture in one batch. Point at a slot."
    return Claim(
        11,
        "Key mask",
        "<i>a</i><sub>ℓj</sub> = 0 wherever <i>j</i> is padding",
        "Two messages share a batch. Padded positions supply no value to any real query, in every "
        "layer, with every scheme, on either padding side: other ids in the padding change the "
        "real logits of the second message by what the table says.",
        (visible, collate),
        [Shown(token_pictures(two_messages()), caption, table(columns, rows))],
    )


def loss_mask() -> Claim:
    batch, model = two_messages(), random_decoder("rope")
    targets_BT = batch.targets_BT.masked_fill(~batch.loss_mask_BT, 17)
    rows = []
    for name, given in (
        ("as collated", batch),
        ("other targets in the padding", replace(batch, targets_BT=targets_BT)),
    ):
        loss, (gradient,) = _loss_and_gradient(model, given)
        first = gradient.shape[1] - batch.tokens_BT.shape[1]
        sizes = gradient.norm(dim=-1)[~batch.loss_mask_BT[:, first:]]
        rows.append([name, f"{loss.item():.6f}", str(given.targets), small(sizes.max().item())])
    columns = ("batch", "sum of −log p", "targets", "gradient at padded slots")
    return Claim(
        12,
        "Loss mask",
        "loss = Σ<sub>learned</sub> −log <i>p</i>(target) / number of learned targets",
        "Padded targets contribute nothing to the training loss or its gradient.",
        (next_token_loss, learned),
        [Shown([], "", table(columns, rows))],
    )


def _loss_and_gradient(model: Decoder, batch: Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The summed loss, and its gradient at the outputs of the last norm."""
    states: list[Tensor] = []
    handle = model.final_norm.register_forward_hook(lambda *call: states.append(call[2]))
    loss = next_token_loss(model, batch)
    handle.remove()
    return loss.detach(), torch.autograd.grad(loss, states)


def both_at_once() -> Claim:
    pictures = []
    for side in SIDES:
        batch = two_messages(side)
        mask = visible(batch.key_mask_BT, 4, 4, CPU, side)
        allowed = mask.dense(4, 4, CPU).expand(2, 1, 4, 4)[1, 0]
        names = [WORDS[token] for token in batch.tokens_BT[1].tolist()]
        values = torch.where(allowed, 1.0, float("-inf"))
        details = [
            [
                f"{q} (slot {i}) {'may' if allowed[i, j] else 'may not'} read {k} (slot {j})"
                for j, k in enumerate(names)
            ]
            for i, q in enumerate(names)
        ]
        pictures.append(
            matrix(
                f"padding on the {side}",
                names,
                names,
                values,
                most=3,
                digits=0,
                cell=36,
                details=details,
            )
        )
    caption = (
        "1: may be read. An empty slot may read itself, so that no row is fully masked; with right "
        "padding its row is never looked at, and the causal mask alone already hides every padded "
        "key from the real queries."
    )
    return Claim(
        13,
        "Both at once",
        "allowed<sub>ℓj</sub> = (<i>j</i> ≤ ℓ) and (<i>j</i> is real)",
        "The causal mask still applies inside each real prefix of a padded row, here "
        "<code>send report</code>.",
        (visible,),
        [Shown(pictures, caption)],
    )


CLAIMS: Claims = [causal_mask, key_mask, loss_mask, both_at_once]
