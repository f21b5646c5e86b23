"""Training beside Hugging Face's Trainer: real target tokens a second, and peak memory.

The same messages, the same two Llama shapes, everything in turns; each at its own default: ours in
the precision that `training.precision=auto` takes here, and beside it in float32, the Trainer in
float32 (on CUDA, where everybody asks for it, in bfloat16). Padding is nobody's target, so it does
not count. Every contestant has a process of its own that waits while another trains: two pools of
OpenMP threads in one process, of which one belongs to the waiting contestant, would halve the speed
of both.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch

from tests.benchmarks.decoders import decoder
from tests.benchmarks.measure import (
    Lap,
    Times,
    Watch,
    circumstances,
    in_turns,
    left_out,
    spread,
    write,
)
from wherelm import runtime
from wherelm.batches.batch import collate
from wherelm.batches.sampler import Sampler
from wherelm.batches.store import TokenStore
from wherelm.optim.optimizer import OPTIMIZERS, Optimizer
from wherelm.optim.schedules import SCHEDULES
from wherelm.seeds import numpy_generator
from wherelm.training.steps import accumulate

MESSAGES, VOCABULARY, LONGEST, PAD = 20_000, 4096, 256, 0
DEVICE = runtime.choose_device("auto")
PRECISION = runtime.choose_precision("auto", DEVICE)
THEIRS = "bfloat16" if DEVICE.type == "cuda" else "float32"
BATCH_TOKENS, BATCH_ROWS = 4096, 32  # ours, that of configs/training/default.yaml; the Trainer's
SHAPES = {
    "S": {"layers": 6, "width": 128, "heads": 4, "mlp_width": 384},
    "L": {"layers": 6, "width": 384, "heads": 6, "mlp_width": 768},
}
# Of a lap. The Trainer sorts by length within 50 batches, long ones first: a lap is all of them.
STEPS = {
    "S": {"ours": 8, "grouped": 50, "random": 6},
    "L": {"ours": 4, "grouped": 50, "random": 4},
}
OFTEN = 10 if DEVICE.type == "cuda" else 1  # laps of so many times the steps of our own
NAMES = {
    "ours": "bucketed, AdamW",
    "float32": "bucketed, AdamW, training.precision=float32",
    "muon": "bucketed, Muon (the default)",
    "packed": "packed, AdamW",
    "compiled": "packed, AdamW, training.compile=true",
    "grouped": "HF Trainer, group_by_length",
    "random": "HF Trainer, its default",
}
OPPONENTS = ("grouped", "random")


def messages() -> TokenStore:
    """Lengths log-normal: median 25, 95th percentile about 150, at most LONGEST; random tokens."""
    generator = numpy_generator(0, "benchmark messages")
    lengths = np.exp(generator.normal(np.log(25), np.log(150 / 25) / 1.645, MESSAGES))
    tokens = np.clip(lengths.round(), 2, LONGEST).astype(np.int64) + 1
    ids = generator.integers(1, VOCABULARY, tokens.sum())
    return TokenStore(ids, np.ones(len(ids), bool), np.concatenate(([0], tokens.cumsum())))


class Turns:
    """A contestant's end of the line: `step` before each step of training waits for its turn."""

    def __init__(self, line: Connection):
        self.line, self.left, self.targets = line, 0, 0
        self.watch: Watch | None = None

    def step(self) -> None:
        """Ends a lap when its steps are done, and waits until the next is asked for."""
        if self.left == 0:
            if self.watch is not None:
                if DEVICE.type == "cuda":
                    torch.cuda.synchronize()
                lap = self.watch.lap(self.targets)
                self.line.send((lap, runtime.peak_memory_mb(DEVICE)))
            self.left, self.targets = self.line.recv(), 0
            self.watch = Watch()
        self.left -= 1


def train_ours(turns: Turns, shape: dict, name: str) -> None:
    """The pieces of `training.fit`, in its order."""
    runtime.keep_freed_memory()
    shape = {"context": LONGEST, "tied": True, **shape}
    model = decoder("llama", "rope", VOCABULARY, DEVICE, shape)
    optimizer = Optimizer(
        model, OPTIMIZERS["muon" if name == "muon" else "adamw"][0](), SCHEDULES["cosine"]()
    )
    run = SimpleNamespace(model=model.config, seed=0)
    store = messages()
    batching = "packed" if name in ("packed", "compiled") else "bucketed"
    rectangle = (BATCH_TOKENS // LONGEST, LONGEST) if name == "compiled" else None
    if name == "compiled":
        model.compile_training()
    autocast = runtime.autocast("float32" if name == "float32" else PRECISION, DEVICE)
    sampler = Sampler(store.lengths, BATCH_TOKENS, batching, 0, capacity=LONGEST)
    for rows in sampler:
        turns.step()
        parts = sampler.micro_batches(rows, BATCH_TOKENS)
        batches = [collate(store, part, PAD, shape=rectangle) for part in parts]
        accumulate(model, batches, run, 0, autocast)
        optimizer.step(0.5, 1.0)
        turns.targets += sum(batch.targets for batch in batches)


def train_theirs(turns: Turns, shape: dict, name: str) -> None:
    """Hugging Face's Trainer on the same messages and shape."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Waits(TrainerCallback):
        def on_step_begin(self, arguments, state, control, **_):
            turns.step()

    def padded(examples: list[dict]) -> dict[str, torch.Tensor]:
        """Padded on the right to the longest; padding is masked and no label."""
        longest = max(len(example["input_ids"]) for example in examples)
        ids = np.full((len(examples), longest), PAD)
        mask = np.zeros((len(examples), longest), dtype=np.int64)
        for row, example in enumerate(examples):
            ids[row, : len(example["input_ids"])] = example["input_ids"]
            mask[row, : len(example["input_ids"])] = 1
        labels = np.where(mask == 1, ids, -100)
        values = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return {name: torch.from_numpy(value) for name, value in values.items()}

    class CountedTrainer(Trainer):
        # Where batches are made they are made ahead of their step.
        def training_step(self, model, inputs, *more, **named):
            turns.targets += int((inputs["labels"][:, 1:] != -100).sum())
            return super().training_step(model, inputs, *more, **named)

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=shape["width"],
            intermediate_size=shape["mlp_width"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["heads"],
            max_position_embeddings=LONGEST,
            tie_word_embeddings=True,
            use_cache=False,
            pad_token_id=PAD,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    store = messages()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=DEVICE.type == "cpu",
            bf16=THEIRS == "bfloat16",
            per_device_train_batch_size=BATCH_ROWS,
            train_sampling_strategy="group_by_length" if name == "grouped" else "random",
            optim="adamw_torch_fused",
            learning_rate=1e-3,
            max_steps=100_000,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
        )
        CountedTrainer(
            model=model,
            args=arguments,
            train_dataset=[{"input_ids": store[i][0]} for i in range(len(store))],
            data_collator=padded,
            callbacks=[Waits()],
        ).train()


class Contestant:
    """A process that trains when it is asked to."""

    def __init__(self, size: str, name: str):
        own = name not in OPPONENTS
        self.steps = STEPS[size]["ours"] * OFTEN if own else STEPS[size][name]
        self.line, end = multiprocessing.Pipe()
        job = partial(train_ours if own else train_theirs, Turns(end), SHAPES[size], name)
        self.process = multiprocessing.get_context("spawn").Process(target=job, daemon=True)
        self.process.start()
        self.memory = 0.0

    def lap(self, steps: int | None = None) -> Lap:
        """Trains so many steps; the lap is for one target."""
        self.line.send(steps or self.steps)
        lap, self.memory = self.line.recv()
        return lap


def measure(size: str, names: Sequence[str], rounds: int) -> tuple[Times, dict[str, float]]:
    """Seconds a target of every contestant, in turns, and the most memory that each held."""
    contestants = {name: Contestant(size, name) for name in names}
    for name, each in contestants.items():
        # The first steps allocate, choose kernels and compile.
        each.lap(each.steps if name == "grouped" else 2)
    times = in_turns({name: each.lap for name, each in contestants.items()}, rounds, size)
    for each in contestants.values():
        each.process.kill()
    return times, {name: each.memory for name, each in contestants.items()}


def product_rate(size: str) -> float:
    """Multiply-adds a second, times two, that products of the model's shapes reach."""
    shape = SHAPES[size]
    width, inner = shape["width"], shape["mlp_width"]
    rates, dtype = [], getattr(torch, PRECISION)
    for inputs, outputs in ((width, width), (width, inner), (inner, width), (width, VOCABULARY)):
        x = torch.randn(BATCH_TOKENS, inputs, dtype=dtype, device=DEVICE)
        w = torch.randn(inputs, outputs, dtype=dtype, device=DEVICE)
        out = torch.empty(BATCH_TOKENS, outputs, dtype=dtype, device=DEVICE)
        times = in_turns({"mm": lambda: [torch.mm(x, w, out=out) for _ in range(60)]}, 3, "mm")  # noqa: B023
        flops = 2 * 60 * BATCH_TOKENS * inputs * outputs
        rates.append(max(times.rates("mm", flops)))
    return max(rates)


def flops_a_target(size: str) -> float:
    """Of the matrix products of a Llama-shaped decoder, forward and backward: 6 a weight."""
    shape = SHAPES[size]
    width, inner = shape["width"], shape["mlp_width"]
    weights = shape["layers"] * (4 * width**2 + 3 * width * inner) + width * VOCABULARY
    return 6.0 * weights


def rows_of(size: str, times: Times) -> Iterator[str]:
    for name, seconds in times.seconds.items():
        cells = [size, NAMES[name], f"{1 / median(seconds):,.0f}"]
        cells += [spread(times.ratios(name, opponent)) for opponent in OPPONENTS]
        yield f"| {' | '.join(cells)} |"


def report(rounds: int, names: Sequence[str]) -> str:
    """The report, as Markdown."""
    found = {size: measure(size, names, rounds) for size in SHAPES}
    measured = {size: times for size, (times, _) in found.items()}
    memory = {size: most for size, (_, most) in found.items()}
    store = messages()
    lengths = store.lengths
    lines = [
        "# Training beside Hugging Face's Trainer",
        "",
        f"{MESSAGES:,} messages, lengths log-normal (median {np.median(lengths):.0f}, 95th "
        f"percentile {np.percentile(lengths, 95):.0f}, at most {lengths.max()}), vocabulary "
        f"{VOCABULARY:,}; Llama shapes S (width 128, 6 layers, FFN 384, 1.8 M parameters) and L "
        f"(width 384, 6 layers, FFN 768, 10.4 M), tied. Ours in {PRECISION} (what "
        f"`training.precision=auto` takes on this machine) and in batches of {BATCH_TOKENS:,} "
        f"tokens, the Trainer in {THEIRS} and in batches of {BATCH_ROWS} messages with fused "
        "AdamW. Rates are real target tokens a second; ratios are to the Trainer in the same "
        f"round, the median of {rounds} rounds and in brackets the smallest and the largest. "
        + left_out(list(measured.values())),
        "",
        "| model | trained by | tokens/s | / HF grouped by length | / HF default |",
        "| --- | --- | ---: | ---: | ---: |",
        *itertools.chain.from_iterable(rows_of(size, times) for size, times in measured.items()),
        "",
        f"| model | matrix products of training, Gflop/s | {PRECISION} torch.mm peak | share |",
        "| --- | ---: | ---: | ---: |",
    ]
    for size, times in measured.items():
        reached = flops_a_target(size) / median(times.seconds["ours"]) / 1e9
        peak = product_rate(size) / 1e9
        lines.append(f"| {size} | {reached:.0f} | {peak:.0f} | {reached / peak:.0%} |")
    lines += [
        "",
        "Peak resident memory of the process:",
        "",
        "| model | ours, MB | HF grouped | ours / HF | HF default | ours / HF |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for size, of in memory.items():
        cells = [size, f"{of['ours']:.0f}"]
        cells += [x for o in OPPONENTS for x in (f"{of[o]:.0f}", f"{of['ours'] / of[o]:.2f}")]
        lines.append(f"| {' | '.join(cells)} |")
    packages = ("transformers", "accelerate")
    lines += ["", circumstances("training", DEVICE, packages), ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.training", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds to take the median of")
    parser.add_argument("--without-compile", action="store_true", help="skip the compiled run")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected 1 or more")
    names = [n for n in NAMES if n != "compiled" or not options.without_compile]
    write(report(options.rounds, names), "training")
    return 0


if __name__ == "__main__":
    sys.exit(main())
