"""How soon a character model is good, beside the well-known recipe for a GPT on a CPU.

The recipe is nanoGPT's for small machines, written here as a plain loop: GPT-2's shape with 4
layers, 4 heads, width 128, context 64; 2,000 steps of 12 random windows, AdamW. Beside it
`experiment=shakespeare_characters` as it stands, and in about the recipe's time. Every run is a
process of its own, timed from launch to exit, start-up, tokenising and evaluation included.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from tests.benchmarks.measure import DISTURBED, ROOT, TRIES, Lap, circumstances, lap, spread, write

TEXT = ROOT.parent / "shared" / "corpora" / "tinyshakespeare.txt"
RECIPE, OURS = "the recipe", "`experiment=shakespeare_characters`"
LONGER = ["model.context=256", "training.batch_tokens=3072", "training.steps=1400"]
OURS_LONGER = f"the same, `{' '.join(LONGER)}`"

LAYERS, HEADS, WIDTH, CONTEXT = 4, 4, 128, 64
STEPS, WARMUP, ROWS = 2000, 100, 12
PEAK, FINAL = 1e-3, 1e-4

Figures = dict[str, float | int]  # loss, and the targets that it is the mean of
Job = Callable[[Path, int, Path], Figures]  # of a text, a seed and an empty folder


class Block(nn.Module):
    """GPT-2's, without biases and dropout."""

    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH, bias=False)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.query_key_value(self.attention_norm(x_BTD)).split(WIDTH, -1)
        q_BHTK, k_BHTK, v_BHTK = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in parts)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.output(y_BHTK.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.mlp_norm(x_BTD))))


class GPT(nn.Module):
    """Learned positions and a tied head; drawn at 0.02, less where the residual stream adds up."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.final_norm = nn.LayerNorm(WIDTH, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                adds = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if adds else 0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V)."""
        x_BTD = self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        return self.final_norm(self.blocks(x_BTD)) @ self.tokens.weight.T


def learning_rate(step: int) -> float:
    """A straight line to the peak, then half a cosine."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    share = (step - WARMUP) / (STEPS - WARMUP)
    return FINAL + (PEAK - FINAL) * (1 + math.cos(math.pi * share)) / 2


def train(model: nn.Module, ids_E: Tensor, steps: int = STEPS) -> None:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.99), fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        starts = torch.randint(len(ids_E) - CONTEXT, (ROWS,)).tolist()
        windows_BS = torch.stack([ids_E[start : start + CONTEXT + 1] for start in starts])
        logits_BTV = model(windows_BS[:, :-1])
        F.cross_entropy(logits_BTV.flatten(0, 1), windows_BS[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torch.inference_mode()
def whole_split(model: nn.Module, ids_E: Tensor) -> Figures:
    """Nats a character over full windows, the last one shorter; every character scored once."""
    count = len(ids_E) - 1
    nats = 0.0
    full = count - count % CONTEXT
    windows = list(
        zip(
            ids_E[:full].view(-1, CONTEXT).split(128),
            ids_E[1 : full + 1].view(-1, CONTEXT).split(128),
            strict=True,
        )
    )
    if full < count:
        windows.append((ids_E[None, full:-1], ids_E[None, full + 1 :]))
    for tokens_BT, targets_BT in windows:
        logits_BTV = model(tokens_BT)
        nats += F.cross_entropy(
            logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum"
        ).item()
    return {"loss": nats / count, "targets": count}


def recipe(text: str, seed: int) -> Figures:
    """The recipe from a text to the loss of its last tenth."""
    torch.manual_seed(seed)
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    ids_E = torch.tensor([alphabet[character] for character in text])
    end = int(len(ids_E) * 0.9)
    model = GPT(len(alphabet))
    train(model, ids_E[:end])
    return whole_split(model, ids_E[end:])


def run_recipe(text: Path, seed: int, folder: Path) -> Figures:
    """`recipe` in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.recipe", "--text", text, "--recipe", seed]
    return json.loads(run([str(part) for part in command]))


def run_ours(text: Path, seed: int, folder: Path, overrides: Sequence[str] = ()) -> Figures:
    """`python train.py experiment=shakespeare_characters`, its cache empty."""
    run(
        [
            *(sys.executable, str(ROOT / "train.py"), "experiment=shakespeare_characters"),
            *(f"data.train='{text}'", f"data.cache='{folder / 'cache'}'", f"seed={seed}"),
            *(f"hydra.run.dir='{folder / 'run'}'", *overrides),
        ]
    )
    summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    return summary["splits"]["validation"]


def run(command: Sequence[str]) -> str:
    """What a command prints; its own words where it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


JOBS = {
    RECIPE: run_recipe,
    OURS: run_ours,
    OURS_LONGER: lambda *arguments: run_ours(*arguments, LONGER),
}


def timed(job: Job, text: Path, seed: int) -> tuple[Lap, Figures]:
    """A job in a folder of its own: how long it took, and what it found.

    A run that others disturbed is repeated, TRIES times at most; the least disturbed one counts.
    """
    laps, figures = [], Figures()
    while not laps or (laps[-1].others > DISTURBED and len(laps) < TRIES):
        with tempfile.TemporaryDirectory() as folder:
            laps.append(lap(lambda f=folder: figures.update(job(text, seed, Path(f)))))
    return min(laps, key=lambda lap: lap.others), figures


def measure(text: Path, seeds: int) -> str:
    """The report, as Markdown: all jobs take turns, seed after seed."""
    seconds, losses = defaultdict(list), defaultdict(list)
    counts, disturbed = set(), 0.0
    with tqdm(total=seeds * len(JOBS), desc="runs", disable=None) as bar:
        for seed in range(seeds):
            for name, job in JOBS.items():
                taken, figures = timed(job, text, seed)
                seconds[name].append(taken.seconds)
                losses[name].append(figures["loss"])
                counts.add(figures["targets"])
                disturbed = max(disturbed, taken.others)
                bar.update()
    assert len(counts) == 1, "not the same characters were scored"
    lines = [
        "# A character model beside the well-known recipe",
        "",
        f"`{text.name}`: the first 90 % are learned, and each of the last "
        f"{counts.pop() + 1:,} characters but the first is scored once. Whole processes from "
        "launch to exit, with start-up, tokenising (nothing cached) and evaluation, in turns; "
        f"{seeds} seeds, the median and in brackets the smallest and the largest.",
        "",
        "| | seconds | validation, nats a character | sooner than the recipe |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in JOBS:
        ratios = [a / b for a, b in zip(seconds[RECIPE], seconds[name], strict=True)]
        cells = (name, spread(seconds[name], ".1f"), spread(losses[name], ".3f"), spread(ratios))
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"The recipe: GPT-2's shape, {LAYERS} layers, {HEADS} heads, width {WIDTH}, context "
        f"{CONTEXT}, {STEPS:,} steps of {ROWS} random windows, AdamW (fused) from {PEAK:g} to "
        f"{FINAL:g} by a cosine, float32.",
        "",
        f"{circumstances('recipe', torch.device('cpu'))} "
        f"Others took at most {disturbed:.0%} of the machine during a run that counts.",
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.recipe", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--text", type=Path, default=TEXT, help="a .txt file")
    parser.add_argument("--recipe", type=int, metavar="SEED", help="only the recipe, as JSON")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: expected 1 or more")
    if not options.text.is_file():
        parser.error(f"--text {options.text}: no such file")
    if options.recipe is not None:
        print(json.dumps(recipe(options.text.read_text(encoding="utf-8"), options.recipe)))
        return 0
    write(measure(options.text.resolve(), options.seeds), "recipe")
    return 0


if __name__ == "__main__":
    sys.exit(main())
