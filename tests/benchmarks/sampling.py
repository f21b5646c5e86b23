"""Greedy sampling beside Hugging Face's `generate`, with the same weights and equal replies.

Two Llama shapes with random weights, exported into transformers' own Llama; replies are compared
token by token before anything is timed. One prompt at a time, and sixteen ragged prompts in one
left-padded batch.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.benchmarks.decoders import decoder
from tests.benchmarks.measure import (
    Times,
    Work,
    circumstances,
    in_turns,
    left_out,
    spread,
    write,
)
from wherelm import runtime
from wherelm.model.decoder import Decoder
from wherelm.sampling.drawing import Sampling
from wherelm.sampling.generation import generate
from wherelm.seeds import torch_generator

DEVICE = runtime.choose_device("auto")
VOCABULARY, PROMPT, REPLY, ROWS = 4096, 16, 128, 16
LAP = 0.6  # seconds at least, for the count of what others used
SHAPES = {
    "S": {"layers": 6, "width": 128, "heads": 4, "mlp_width": 384, "tied": True},
    "L": {"layers": 6, "width": 384, "heads": 6, "mlp_width": 768},
}
SAMPLING = Sampling(greedy=True, max_tokens=REPLY)


def random_llama(shape: dict) -> Decoder:
    """`configs/model/llama.yaml` in this shape, every parameter random.

    Norms of either sign keep a tied head from repeating the token that it read: equal replies would
    say little then.
    """
    model = decoder("llama", "rope", VOCABULARY, torch.device("cpu"), {"context": 256, **shape})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch_generator(0, "parameter", name))
            parameter.copy_(noise if parameter.ndim < 2 else noise * parameter.shape[-1] ** -0.5)
    return model.to(DEVICE).eval()


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key matrix, pairs (0, 1), (2, 3), … moved to (0, K/2), (1, K/2 + 1), …"""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def as_transformers(model: Decoder):
    """The same decoder as a `LlamaForCausalLM`.

    Embeddings are stored at the size that they are read at; a tied head is made up for in the
    final norm.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.inner_width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads or config.heads,
            max_position_embeddings=config.context,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": model.scheme.config.base},
            tie_word_embeddings=config.tied,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    size = math.sqrt(config.width)
    weights = {
        "model.embed_tokens.weight": model.embedding.weight * size,
        "model.norm.weight": model.final_norm.weight / (size if config.tied else 1),
        "lm_head.weight": model.head.weight * (size if config.tied else 1),
    }
    for i, block in enumerate(model.blocks):
        attention, mlp = block.attention, block.mlp
        parts = {
            "input_layernorm": block.attention_norm.weight,
            "self_attn.q_proj": half_split(attention.query.weight, attention.heads),
            "self_attn.k_proj": half_split(attention.key.weight, attention.kv_heads),
            "self_attn.v_proj": attention.value.weight,
            "self_attn.o_proj": attention.output.weight,
            "post_attention_layernorm": block.mlp_norm.weight,
            "mlp.gate_proj": mlp.gate.weight,
            "mlp.up_proj": mlp.up.weight,
            "mlp.down_proj": mlp.down.weight,
        }
        weights |= {f"model.layers.{i}.{name}.weight": part for name, part in parts.items()}
    llama.load_state_dict(weights, strict=True)
    return llama.to(DEVICE).eval()


def random_prompts(rows: int) -> list[list[int]]:
    """One prompt of PROMPT tokens; several, of one token to twice PROMPT."""
    generator = torch_generator(0, "prompts", rows)
    lengths = [PROMPT] if rows == 1 else torch.linspace(1, 2 * PROMPT, rows).int().tolist()
    return [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@dataclass
class Contest:
    """Both sides of one line of the table: calls that give the replies, REPLY tokens a row."""

    shape: str
    rows: int
    weights: str
    ours: Work
    theirs: Work

    @property
    def label(self) -> str:
        return f"{self.shape}, {self.rows} row{'s' if self.rows > 1 else ''}, {self.weights}"

    def repeats(self) -> int:
        """How often both are called in a lap, so that the faster one's is long enough."""
        durations = []
        for work in (self.ours, self.theirs):
            started = time.perf_counter()
            work()
            durations.append(time.perf_counter() - started)
        return math.ceil(LAP / min(durations))

    def run(self, rounds: int) -> tuple[Times, int]:
        count = self.repeats()
        jobs = {
            name: lambda work=work: [work() for _ in range(count)]
            for name, work in (("ours", self.ours), ("theirs", self.theirs))
        }
        return in_turns(jobs, rounds, self.label), count * self.rows * REPLY


def contest(model: Decoder, llama, shape: str, rows: int, weights: str) -> Contest:
    """Checked to give equal replies, where both compute in float32."""
    prompts = random_prompts(rows)
    longest = max(map(len, prompts))
    tokens_BT = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=DEVICE)
    # No prompt holds token 0.
    key_mask_BT = (tokens_BT != 0).long()

    def ours() -> list[list[int]]:
        return [reply.tokens for reply in generate(model, prompts, SAMPLING, end=None)]

    def theirs() -> list[list[int]]:
        out_BT = llama.generate(
            tokens_BT,
            attention_mask=key_mask_BT,
            max_new_tokens=REPLY,
            do_sample=False,
            use_cache=True,
        )
        return out_BT[:, longest:].tolist()

    mine, other = ours(), theirs()
    assert all(len(reply) == REPLY for reply in mine + other)
    if weights == "float32":
        assert mine == other, "both sides must reply alike before they are timed"
        assert len({token for reply in mine for token in reply}) > REPLY // 4, "too easy to agree"
    return Contest(shape, rows, weights, ours, theirs)


def contests(shapes: Sequence[str], rows: Sequence[int], half: bool) -> list[Contest]:
    several = []
    for name in shapes:
        model = random_llama(SHAPES[name])
        llama = as_transformers(model)
        several += [contest(model, llama, name, count, "float32") for count in rows]
        if half and ROWS in rows:
            cast = random_llama(SHAPES[name]).bfloat16()
            several.append(contest(cast, llama, name, ROWS, "bfloat16"))
    return several


def measure(several: Sequence[Contest], rounds: int) -> str:
    """The report, as Markdown."""
    lines = [
        "# Greedy sampling beside Hugging Face's generate",
        "",
        f"Llama shapes with {VOCABULARY:,} tokens of vocabulary, S: width 128, L: width 384, six "
        f"layers each. {REPLY} new tokens a row, behind one prompt of {PROMPT} tokens or behind "
        f"{ROWS} prompts of 1 to {2 * PROMPT} tokens in one left-padded batch. Hugging Face's side "
        "is `generate` of the same weights in float32, greedy, with its dynamic cache; ours with "
        "float32 weights gives the same replies, token by token. Both take turns in one process; "
        f"medians of {rounds} rounds, in brackets the extremes. The ratio is that of one round.",
        "",
        "| model | rows | our weights | ours, tokens/s | Hugging Face, tokens/s | times as fast |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    everything = []
    for each in several:
        times, tokens = each.run(rounds)
        everything.append(times)
        cells = (
            each.shape,
            str(each.rows),
            each.weights,
            spread(times.rates("ours", tokens), ",.0f"),
            spread(times.rates("theirs", tokens), ",.0f"),
            spread(times.ratios("ours", "theirs")),
        )
        lines.append(f"| {' | '.join(cells)} |")
    foot = circumstances("sampling", DEVICE, ["transformers"])
    return "\n".join([*lines, "", f"{foot} {left_out(everything)}", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.sampling", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds to take the median of")
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="which models"
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", choices=[1, ROWS], default=[1, ROWS], help="batch sizes"
    )
    parser.add_argument("--float32", action="store_true", help="leave bfloat16 weights out")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected 1 or more")
    runtime.keep_freed_memory()
    several = contests(options.shapes, options.rows, half=not options.float32)
    write(measure(several, options.rounds), "sampling")
    return 0


if __name__ == "__main__":
    sys.exit(main())
