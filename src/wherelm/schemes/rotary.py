"""Schemes that turn queries and keys by an angle that grows with their position.

Shapes: B batch, H heads, T slots, K head width, P pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wherelm.schemes.base import (
    ByDistance,
    PositionScheme,
    Role,
    Shape,
    beyond_distance,
    expect_base,
    float64_positions,
    scaled_scores,
    wide,
)
from wherelm.schemes.scalings import (
    SCALINGS,
    dynamic_frequencies,
    message_lengths,
    rotary_frequencies,
    self_extend_groups,
    slow_pairs,
    yarn_magnitude,
    yarn_turns,
)


def rotation_table(positions_BT: Tensor, frequencies: Tensor) -> Tensor:
    """cos + i sin of every pair's angle, complex64 (B, T, P), computed in float64.

    `frequencies` are (P,), or (B, T, P) where they depend on the slot.
    """
    positions = float64_positions(positions_BT)
    angles = positions[..., None] * frequencies.to(positions.device)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(positions_BT.device)


def rotate_pairs(x_BHTK: Tensor, table_BTP: Tensor) -> Tensor:
    """Turns neighbouring entries (x0, x1), (x2, x3), … as vectors of the plane.

    [x0, x1] becomes [x0 cos a - x1 sin a, x0 sin a + x1 cos a]: a complex product, which is the
    fastest form on a CPU. float64 stays float64; everything else is turned in float32.
    """
    pairs = torch.view_as_complex(wide(x_BHTK).view(*x_BHTK.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table_BTP.unsqueeze(1)).flatten(-2).to(x_BHTK.dtype)


class Rope(PositionScheme):
    """Pair i of every query and key at position l is rotated by l base^(-2i/K).

    "RoFormer: Enhanced Transformer with Rotary Position Embedding" (Su et al., 2021), equations
    14-16. Acts on queries and keys, so that scores depend on differences of position; nothing is
    added to the embeddings.

    `fraction`: only the first entries of each head rotate, with frequencies spread over those
    (GPT-NeoX's `rotary_pct`). `p`: only the int(p K/2) fastest of all pairs rotate ("Round and
    Round We Go! What makes Rotary Positional Encodings useful?", Barbero et al., 2025).
    `scaling`, `factor`: how a model that was trained without it is read at `factor` times its
    trained length; `dynamic` goes by the length of each message. So beyond the trained length a
    token changes the rotations of those before it. With a cache the length that a row may grow to
    is known in advance and taken, for keys that are rotated once keep their rotation. `self_extend`
    groups the positions of keys that are far back.
    """

    @dataclass(frozen=True)
    class Config:
        name: str = "rope"
        base: float = 10_000.0
        fraction: float = 1.0
        p: float = 1.0
        scaling: str | None = None
        factor: float = 1.0

        def __post_init__(self):
            for key in ("fraction", "p"):
                if not 0 <= getattr(self, key) <= 1:
                    raise ValueError(f"position.{key}={getattr(self, key)}: expected 0 to 1")
            expect_base(self.base)
            if self.scaling is not None and self.scaling not in SCALINGS:
                options = ", ".join(["null", *SCALINGS])
                raise ValueError(f"position.scaling={self.scaling}: expected one of {options}")
            if self.factor < 1:
                raise ValueError(f"position.factor={self.factor}: expected 1 or more")
            if self.factor > 1 and self.scaling is None:
                raise ValueError(
                    f"position.factor={self.factor} has nothing to act on: give position.scaling, "
                    f"one of {', '.join(SCALINGS)}"
                )

    def __init__(self, config: Config, shape: Shape):
        super().__init__(config, shape)
        if shape.head_width % 2:
            raise ValueError(
                f"position={config.name} rotates pairs and needs an even head width, "
                f"not {shape.head_width}: choose model.width and model.heads accordingly"
            )
        self.frequencies_P = self.frequencies()
        self.positions_BT: Tensor | None = None
        scaling = getattr(config, "scaling", None)
        self.dynamic, self.group = scaling == "dynamic", 1
        if scaling == "self_extend":
            self.group, self.near = self_extend_groups(config.factor, shape.trained)
        self.lengths_BT: Tensor | None = None

    @property
    def shift_invariant(self) -> bool:
        return self.group == 1  # groups of positions begin at multiples of their size

    def frequencies(self) -> Tensor:
        """Radians for each step of position, float64, one for each rotating pair."""
        config = self.config
        frequencies_P = rotary_frequencies(
            2 * round(config.fraction * self.shape.head_width / 2), config.base
        )
        if config.scaling is not None and len(frequencies_P):
            scale = SCALINGS[config.scaling]
            frequencies_P = scale(frequencies_P, config.factor, config.base, self.shape.trained)
        return frequencies_P[: int(config.p * len(frequencies_P))]

    def place(
        self, positions_BT: Tensor, keys_BT: Tensor | None = None, longest: int | Tensor = 0
    ) -> Tensor:
        # A new forward pass: the same tensor may hold other numbers, or come from inference mode.
        self.positions_BT = None
        if self.dynamic:
            self.lengths_BT = message_lengths(positions_BT, keys_BT, longest)
        return positions_BT

    def table(self, positions_BT: Tensor) -> Tensor:
        """The rotations at these positions; every layer of a forward pass asks for the same."""
        if positions_BT is not self.positions_BT:
            self.positions_BT = positions_BT
            frequencies = self.frequencies_P
            if self.lengths_BT is not None:
                frequencies = self.frequencies_of(self.lengths_BT[:, -positions_BT.shape[1] :])
            self.table_BTP = rotation_table(positions_BT, frequencies) * self.magnitude()
        return self.table_BTP

    def frequencies_of(self, lengths_BT: Tensor) -> Tensor:
        """The same (B, T, P) for messages of these lengths, with the scaling `dynamic`."""
        config, trained = self.config, self.shape.trained
        width = 2 * round(config.fraction * self.shape.head_width / 2)
        frequencies_BTP = dynamic_frequencies(
            lengths_BT, width, config.factor, config.base, trained
        )
        return frequencies_BTP[..., : len(self.frequencies_P)]

    def magnitude(self) -> float:
        """What queries and keys are lengthened by."""
        return yarn_magnitude(self.config.factor) if self.config.scaling == "yarn" else 1.0

    def rotate(self, x_BHTK: Tensor, positions_BT: Tensor, role: Role) -> Tensor:
        return self.turned(x_BHTK, self.table(positions_BT))

    def turned(self, x_BHTK: Tensor, table_BTP: Tensor) -> Tensor:
        """The first entries of each head turned by the table, which has a column for each pair."""
        width = 2 * len(self.frequencies_P)
        if width == 0:
            return x_BHTK
        if width == x_BHTK.shape[-1]:
            return rotate_pairs(x_BHTK, table_BTP)
        turned, still = x_BHTK.split((width, x_BHTK.shape[-1] - width), dim=-1)
        return torch.cat((rotate_pairs(turned, table_BTP), still), dim=-1)

    def untrained(self, q_positions_BT: Tensor, k_positions_BS: Tensor) -> Tensor | None:
        """An extension by `factor` reaches so many times farther, `dynamic` as far as is asked."""
        if not len(self.frequencies_P) or self.dynamic:
            return None
        reach = self.shape.trained * self.config.factor
        return beyond_distance(q_positions_BT, k_positions_BS, reach)

    def content_bias(
        self, q_BHTK: Tensor, k_BGSK: Tensor, q_positions_BT: Tensor, k_positions_BS: Tensor
    ) -> Tensor | None:
        if self.group == 1:
            return None
        # What is far is turned on from its own position to that of its group.
        start = self.near - self.near // self.group
        q_moves_BT = q_positions_BT // self.group + start - q_positions_BT
        k_moves_BS = k_positions_BS // self.group - k_positions_BS
        far_BHTS = scaled_scores(
            self.turned(q_BHTK, rotation_table(q_moves_BT, self.frequencies_P)),
            self.turned(k_BGSK, rotation_table(k_moves_BS, self.frequencies_P)),
        )
        back_BTS = q_positions_BT[:, :, None] - k_positions_BS[:, None]
        change_BHTS = far_BHTS - scaled_scores(q_BHTK, k_BGSK)
        return change_BHTS.masked_fill((back_BTS < self.near)[:, None], 0.0)

    def warnings(self) -> list[str]:
        trained = self.shape.trained
        lines = slow_pairs(self.frequencies_P, self.config.base, trained)
        if not len(self.frequencies_P):
            lines.append(
                f"position.fraction={self.config.fraction:g}, position.p={self.config.p:g}: no "
                "pair is left to rotate, as with position=none"
            )
        if self.config.scaling not in (None, "dynamic") and self.config.factor == 1:
            lines.append(
                f"position.scaling={self.config.scaling} changes nothing with position.factor=1"
            )
        turns = trained / (2 * math.pi)
        if self.config.scaling == "yarn" and turns < yarn_turns(trained):
            lines.append(
                f"position.scaling=yarn: no pair completes {yarn_turns(trained):.1f} turns within "
                f"the {trained} tokens of the longest row, so none keeps its frequency"
            )
        return lines


class Drope(Rope):
    """RoPE that is dropped at a share of training: from there on nothing rotates.

    "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (Gelberg,
    Eguchi, Akiba, Cetin, 2025): positions help early in training, and after a short recalibration
    without them nothing ties the model to its trained length. A checkpoint is read as it was at
    its own share of training.
    """

    @dataclass(frozen=True)
    class Config:
        name: str = "drope"
        base: float = 10_000.0
        drop_at: float = 0.8

        def __post_init__(self):
            expect_base(self.base)
            if not 0 <= self.drop_at <= 1:
                raise ValueError(f"position.drop_at={self.drop_at}: expected a share, 0 to 1")

    def __init__(self, config: Config, shape: Shape):
        super().__init__(config, shape)
        self.dropped = config.drop_at == 0

    def frequencies(self) -> Tensor:
        return rotary_frequencies(self.shape.head_width, self.config.base)

    def magnitude(self) -> float:
        return 1.0

    def progress(self, share: float) -> None:
        self.dropped = share >= self.config.drop_at

    def rotate(self, x_BHTK: Tensor, positions_BT: Tensor, role: Role) -> Tensor:
        return x_BHTK if self.dropped else super().rotate(x_BHTK, positions_BT, role)

    def untrained(self, q_positions_BT: Tensor, k_positions_BS: Tensor) -> Tensor | None:
        if self.dropped:
            return None
        return beyond_distance(q_positions_BT, k_positions_BS, self.shape.trained)

    def warnings(self) -> list[str]:
        lines = slow_pairs(self.frequencies_P, self.config.base, self.shape.trained)
        if self.config.drop_at in (0, 1):
            when = "nothing ever rotates" if self.config.drop_at == 0 else "nothing is recalibrated"
            lines.append(f"position.drop_at={self.config.drop_at:g}: {when}; give a share between")
        return lines


class KeyOffset(Rope):
    """RoPE on the first entries of each head; the others' keys are those of the token before.

    "Partial key offset" of the speed records of modded-nanogpt (pull request 169, 2025). With
    k = (r, s), r rotated, the key at slot j is (R(l_j) r_j, s_(j-1)). A token is then found by what
    stood before it: a query for the present token reads what followed that token earlier, in one
    layer, for which "In-context Learning and Induction Heads" (Olsson et al., 2022) finds that
    plain attention needs two. The first token of a message keeps its own s. `fraction` is the
    share of entries that rotate. All keys are shifted each time they are read, so the cache holds
    plain ones.
    """

    @dataclass(frozen=True)
    class Config:
        name: str = "key_offset"
        base: float = 10_000.0
        fraction: float = 0.5

        def __post_init__(self):
            expect_base(self.base)
            if not 0 <= self.fraction <= 1:
                raise ValueError(f"position.fraction={self.fraction}: expected 0 to 1")

    def frequencies(self) -> Tensor:
        width = 2 * round(self.config.fraction * self.shape.head_width / 2)
        return rotary_frequencies(width, self.config.base)

    def magnitude(self) -> float:
        return 1.0

    def shift(self, k_BGSK: Tensor, segments_BS: Tensor | None) -> Tensor:
        width = 2 * len(self.frequencies_P)
        turned, own = k_BGSK.split((width, k_BGSK.shape[-1] - width), dim=-1)
        before = torch.cat((own[:, :, :1], own[:, :, :-1]), dim=2)
        if segments_BS is not None:
            begins_BS = F.pad(segments_BS[:, 1:] != segments_BS[:, :-1], (1, 0))
            before = torch.where(begins_BS[:, None, :, None], own, before)
        return torch.cat((turned, before), dim=-1)

    def untrained(self, q_positions_BT: Tensor, k_positions_BS: Tensor) -> Tensor | None:
        if not len(self.frequencies_P):
            return None
        return beyond_distance(q_positions_BT, k_positions_BS, self.shape.trained)

    def warnings(self) -> list[str]:
        lines = slow_pairs(self.frequencies_P, self.config.base, self.shape.trained)
        if 2 * len(self.frequencies_P) == self.shape.head_width:
            lines.append(
                f"position.fraction={self.config.fraction:g}: every entry rotates and no key is "
                "offset, as with position=rope"
            )
        return lines


class Pope(ByDistance):
    """Scores are sums of softplus(q_c) softplus(k_c) cos((s - l) theta_c + delta_c).

    "Decoupling the 'What' and 'Where' With Polar Coordinate Positional Embeddings" (Gopalakrishnan,
    Csordas, Schmidhuber, Mozer, 2025). Content decides magnitudes alone and position angles alone.
    Acts on queries and keys: each entry becomes a vector of the plane, so both get twice as wide
    while the scale stays 1/sqrt(K). theta_c = base^(-c/K); delta, learned for each head and entry,
    starts at 0, the paper's choice for extrapolation. The paper binds it to -2 pi … 0; an angle is
    periodic, so here it is free. It is subtracted from the query's angle, which is the same as
    added to the key's and serves shared keys too.
    """

    turns_alike = False

    @dataclass(frozen=True)
    class Config:
        name: str = "pope"
        base: float = 10_000.0

        def __post_init__(self):
            expect_base(self.base)

    def __init__(self, config: Config, shape: Shape):
        super().__init__(config, shape)
        self.frequencies_K = rotary_frequencies(2 * shape.head_width, config.base)
        self.delta_HK = nn.Parameter(torch.empty(shape.heads, shape.head_width))
        self.positions_BT: Tensor | None = None

    def place(
        self, positions_BT: Tensor, keys_BT: Tensor | None = None, longest: int = 0
    ) -> Tensor:
        # A new forward pass: the same tensor may hold other numbers, or come from inference mode.
        self.positions_BT = None
        return positions_BT

    def rotate(self, x_BHTK: Tensor, positions_BT: Tensor, role: Role) -> Tensor:
        if positions_BT is not self.positions_BT:
            self.positions_BT = positions_BT
            self.table_BTK = rotation_table(positions_BT, self.frequencies_K)
        magnitudes_BHTK = F.softplus(wide(x_BHTK))
        turned = magnitudes_BHTK * self.table_BTK[:, None]
        if role == "query":
            delta_H1K = self.delta_HK.to(magnitudes_BHTK.dtype)[:, None]
            turned = turned * torch.polar(torch.ones_like(delta_H1K), -delta_H1K)
        return torch.view_as_real(turned).flatten(-2).to(x_BHTK.dtype)

    def initial_value(self, name: str, generator: torch.Generator) -> Tensor:
        return torch.zeros(self.delta_HK.shape)

    def warnings(self) -> list[str]:
        return slow_pairs(self.frequencies_K, self.config.base, self.shape.trained)
