"""Text from a decoder: batched sampling with a key-value cache.

Shapes: B rows, T prompt slots, D width, V vocabulary, N tokens at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wherelm.attention import KeyValueCache
from wherelm.batches import TokenStore, cut
from wherelm.model import Decoder
from wherelm.seeds import torch_generator
from wherelm.stepper import Stepper

if TYPE_CHECKING:
    from wherelm.tokenizer import Tokenizer

BATCH_SLOTS = 16_384  # prompt and reply slots of one batch in `generate`; bounds the cache

Stop = Callable[[int, int], bool]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the model's distribution.

    temperature         divides the logits; 0 is greedy
    top_k               only the k likeliest tokens (None: all)
    top_p               only the fewest likeliest tokens that hold this probability (1: all)
    min_p               only tokens at least this likely, relative to the likeliest (0: all)
    repetition_penalty  above 1 makes tokens that the row already holds less likely (1: off)
    max_tokens          the longest reply in tokens, its end included
    greedy              always the likeliest token (after the repetition penalty); nothing is drawn
    seed                with a row's number, the source of all that is drawn in it
    """

    temperature: float = 0.7
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 128
    greedy: bool = False
    seed: int = 0

    def __post_init__(self):
        # Each condition is false for NaN as well.
        rules = (
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or a number above it"),
            ("top_k", self.top_k is None or self.top_k >= 1, "a whole number of 1 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and up to 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "0 (off) to 1"),
            # Logits and memory have room for no more.
            ("repetition_penalty", 1e-6 <= self.repetition_penalty <= 1e6, "1e-6 to 1e6; 1 is off"),
            ("max_tokens", 1 <= self.max_tokens <= 10**6, "a whole number, 1 to 1,000,000"),
        )
        for name, valid, expected in rules:
            if not valid:
                raise ValueError(f"{name}={getattr(self, name)}: expected {expected}")

    @property
    def takes_likeliest(self) -> bool:
        return self.greedy or self.temperature == 0


def penalize_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Logits of seen tokens divided by `penalty` where positive, else multiplied by it.

    "CTRL: A Conditional Transformer Language Model for Controllable Generation" (Keskar et al.,
    2019), section 4.1, in the form that lowers negative logits too.
    """
    penalized_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, penalized_BV, logits_BV)


def divide_by_temperature(logits_BV: Tensor, temperature: float) -> Tensor:
    """Logits over temperature, shifted so that the largest is 0: finite however cold it gets."""
    least = torch.finfo(logits_BV.dtype).tiny  # below it a temperature would be 0
    return (logits_BV - logits_BV.amax(-1, keepdim=True)) / max(temperature, least)


def keep_top_k(logits_BV: Tensor, k: int) -> Tensor:
    """-inf for all but the k largest logits of a row; those that tie with the k-th stay."""
    kth_B1 = logits_BV.topk(min(k, logits_BV.shape[-1])).values[:, -1:]
    return logits_BV.masked_fill(logits_BV < kth_B1, -math.inf)


def keep_top_p(logits_BV: Tensor, p: float) -> Tensor:
    """-inf for all but the fewest likeliest tokens whose probabilities sum to at least p.

    "The Curious Case of Neural Text Degeneration" (Holtzman et al., 2020), section 3.1.
    """
    sorted_BV, order_BV = logits_BV.sort(descending=True, stable=True)
    p_BV = sorted_BV.softmax(-1)
    likelier_BV = p_BV.cumsum(-1) - p_BV
    dropped_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
    dropped_BV.scatter_(-1, order_BV, likelier_BV >= max(p, torch.finfo(p_BV.dtype).tiny))
    return logits_BV.masked_fill(dropped_BV, -math.inf)


def keep_min_p(logits_BV: Tensor, p: float) -> Tensor:
    """-inf for tokens less than p times as likely as the likeliest.

    "Turning Up the Heat: Min-p Sampling" (Nguyen et al., 2024), section 3.
    """
    floor_B1 = logits_BV.amax(-1, keepdim=True) + math.log(p)
    return logits_BV.masked_fill(logits_BV < floor_B1, -math.inf)


def sampling_probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution (B, V) that is drawn from: temperature, then top-k, top-p and min-p."""
    logits_BV = divide_by_temperature(logits_BV, sampling.temperature)
    if sampling.top_k is not None:
        logits_BV = keep_top_k(logits_BV, sampling.top_k)
    if sampling.top_p < 1:
        logits_BV = keep_top_p(logits_BV, sampling.top_p)
    if sampling.min_p > 0:
        logits_BV = keep_min_p(logits_BV, sampling.min_p)
    return logits_BV.softmax(-1)


def draw(probabilities_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The token of each row at quantile `uniform_B` (0 or more, below 1) of its distribution, (B,).

    The first token whose cumulated probability exceeds the quantile: never one of probability 0.
    """
    cumulated_BV = probabilities_BV.double().cumsum(-1)
    quantiles_B = uniform_B.double() * cumulated_BV[:, -1]
    return torch.searchsorted(cumulated_BV, quantiles_B[:, None], right=True)[:, 0]


class Chosen(NamedTuple):
    """A token chosen for a row; `finish` says why it was the row's last, None where it was not.

    "end": the token is the end; "stop": the caller's `stop` said so; "length": no room for more.
    """

    row: int
    token: int
    finish: str | None


@dataclass
class Reply:
    """The tokens of a finished row, its end left out, and why it finished (see `Chosen`)."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""


@torch.inference_mode()
def stream_tokens(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    end: int | None,
    rows: Sequence[int] | None = None,
    stop: Stop | None = None,
) -> Iterator[list[Chosen]]:
    """Continues all prompts in one batch; gives, step by step, the token of each unfinished row.

    `rows` numbers the prompts (0, 1, … by default): what is drawn in a row depends on
    (sampling.seed, its number) and not on its neighbours. `stop(row, token)` is told of every
    token but `end`; True finishes the row. With `end` None no token ends a reply. Each prompt holds
    one token or more. A scheme with a limit raises its ValueError for a prompt beyond it, and
    finishes the replies that reach it.
    """
    assert prompts, "nothing to continue"
    assert all(prompts), "a prompt holds at least <BOS>"
    rows = list(range(len(prompts)) if rows is None else rows)
    assert len(set(rows)) == len(prompts), "one number for each prompt"
    device, training = model.embedding.weight.device, model.training
    model.eval()
    try:
        room = [_room(len(prompt), sampling.max_tokens, model.scheme.limit) for prompt in prompts]
        tokens_BT, positions_BT, key_mask_BT = _left_padded(prompts, device)
        capacity = tokens_BT.shape[1] + max(room) - 1
        # The last token of a reply is never read.
        longest = [[len(p) + left - 1] for p, left in zip(prompts, room, strict=True)]
        longest_B1 = torch.tensor(longest, device=device)
        cache = KeyValueCache(len(model.blocks), len(prompts), capacity, device, longest_B1)
        chooser = _Chooser(model.vocab_size, prompts, rows, max(room), sampling, end)
        x_BTD = model.hidden(
            tokens_BT,
            positions_BT,
            None if bool(key_mask_BT.all()) else key_mask_BT,
            side="left",
            cache=cache,
            first=tokens_BT.shape[1] - 1,
        )
        logits_BV, positions_B1 = model.logits(x_BTD[:, -1]), positions_BT[:, -1:]
        stepper = Stepper(model, cache)
        while True:
            tokens_B = chooser.choose(logits_BV)
            room = [left - 1 for left in room]
            chosen = [
                Chosen(row, token, _finish(row, token, left, end, stop))
                for row, token, left in zip(rows, tokens_B.tolist(), room, strict=True)
            ]
            yield chosen
            live = [i for i, choice in enumerate(chosen) if choice.finish is None]
            if not live:
                return
            if len(live) < len(rows):
                keep = torch.tensor(live, device=device)
                stepper.keep_rows(keep)
                chooser.keep_rows(live)
                tokens_B, positions_B1 = tokens_B[keep], positions_B1[keep]
                rows, room = [rows[i] for i in live], [room[i] for i in live]
            positions_B1 = positions_B1 + 1
            logits_BV = stepper(tokens_B, positions_B1)
    finally:
        model.train(training)


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    end: int | None,
    rows: Sequence[int] | None = None,
    stop: Stop | None = None,
) -> list[Reply]:
    """The whole reply to each prompt, in their order, whatever their number and lengths.

    As `stream_tokens`, in batches of prompts of similar length.
    """
    rows = list(range(len(prompts)) if rows is None else rows)
    replies = {row: Reply() for row in rows}
    lengths = np.array([len(prompt) + sampling.max_tokens for prompt in prompts], dtype=np.int64)
    for group in cut(lengths, np.argsort(lengths, kind="stable"), BATCH_SLOTS):
        batch = [prompts[i] for i in group]
        numbers = [rows[i] for i in group]
        for step in stream_tokens(model, batch, sampling, end, numbers, stop):
            for row, token, finish in step:
                if finish != "end":
                    replies[row].tokens.append(token)
                if finish is not None:
                    replies[row].finish = finish
    return [replies[row] for row in rows]


def write_samples(model: Decoder, tokenizer: Tokenizer, store: TokenStore, count: int = 3) -> str:
    """Greedy replies to `count` examples of a store, each below its prompt, as text.

    A conversation is cut before its last reply, a plain text after a third of it.
    """
    chosen = np.linspace(0, len(store) - 1, min(count, len(store))).round().astype(int)
    prompts = []
    for index in chosen:
        ids = store[index][0].tolist()[: model.config.context]
        starts = [i + 1 for i, token in enumerate(ids) if token == tokenizer.assistant]
        prompts.append(ids[: starts[-1] if starts else max(1, len(ids) // 3)])
    sampling = Sampling(greedy=True, max_tokens=max(1, model.config.context // 2))
    replies = generate(model, prompts, sampling, tokenizer.eos)
    return "\n".join(
        f"{_turns(prompt, tokenizer)}\n{tokenizer.decode(reply.tokens)}\n"
        for prompt, reply in zip(prompts, replies, strict=True)
    )


def _turns(prompt: Sequence[int], tokenizer: Tokenizer) -> str:
    """A prompt as text, a line a turn: the control tokens stand between them."""
    turns: list[list[int]] = [[]]
    for token in prompt:
        if tokenizer.control_name(token) is None:
            turns[-1].append(token)
        elif turns[-1]:
            turns.append([])
    return "\n".join(f"> {tokenizer.decode(turn)}" for turn in turns if turn)


class _Chooser:
    """Chooses a token for each row, and keeps what that needs: random numbers and tokens seen.

    Filters and draws run on the CPU, so that a seed means the same on every device.
    """

    def __init__(
        self,
        vocab_size: int,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        steps: int,
        sampling: Sampling,
        end: int | None,
    ):
        self.sampling, self.end, self.step = sampling, end, 0
        self.seen_BV: Tensor | None = None
        self.uniform_BN: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen_BV = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
            for seen_V, prompt in zip(self.seen_BV, prompts, strict=True):
                seen_V[torch.tensor(prompt)] = True
            self._forget_end()
        if not sampling.takes_likeliest:
            generators = [torch_generator(sampling.seed, "sampling", row) for row in rows]
            self.uniform_BN = torch.stack([torch.rand(steps, generator=g) for g in generators])

    def choose(self, logits_BV: Tensor) -> Tensor:
        """The next token of each row, (B,), on the device of the logits."""
        device = logits_BV.device
        if self.seen_BV is not None:
            logits_BV = logits_BV.cpu()
            penalty = self.sampling.repetition_penalty
            logits_BV = penalize_repetition(logits_BV, self.seen_BV, penalty)
        if self.uniform_BN is None:
            # On a CPU numpy's takes a tenth of the time of torch's.
            on_cpu = logits_BV.device.type == "cpu"
            tokens_B = torch.as_tensor((logits_BV.numpy() if on_cpu else logits_BV).argmax(-1))
        else:
            probabilities_BV = sampling_probabilities(logits_BV.cpu(), self.sampling)
            tokens_B = draw(probabilities_BV, self.uniform_BN[:, self.step])
        self.step += 1
        if self.seen_BV is not None:
            self.seen_BV.scatter_(1, tokens_B[:, None], True)
            self._forget_end()
        return tokens_B.to(device)

    def _forget_end(self) -> None:
        # Every earlier turn of a conversation holds an end; this one has to end all the same.
        if self.end is not None:
            self.seen_BV[:, self.end] = False

    def keep_rows(self, rows: Sequence[int]) -> None:
        if self.seen_BV is not None:
            self.seen_BV = self.seen_BV[rows]
        if self.uniform_BN is not None:
            self.uniform_BN = self.uniform_BN[rows]


def _left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and key mask, (B, T) each: every row ends in its newest token.

    Empty slots hold token 0, which the key mask hides.
    """
    width = max(map(len, prompts))
    tokens_BT = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    lengths_B1 = torch.tensor([[len(prompt)] for prompt in prompts])
    positions_BT = torch.arange(width) - (width - lengths_B1)
    tensors = (tokens_BT, positions_BT.clamp(min=0), positions_BT >= 0)
    return tuple(tensor.to(device) for tensor in tensors)


def _room(prompt: int, max_tokens: int, limit: int | None) -> int:
    """How many tokens may follow a prompt: the last one is never read, so it needs no position."""
    return max_tokens if limit is None else max(1, min(max_tokens, limit - prompt + 1))


def _finish(row: int, token: int, left: int, end: int | None, stop: Stop | None) -> str | None:
    if token == end:
        return "end"
    if stop is not None and stop(row, token):
        return "stop"
    return "length" if left == 0 else None
