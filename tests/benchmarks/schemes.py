"""What each position scheme costs beside rope: parameters, training speed, sampling speed.

All schemes take turns in one process, round after round, on the default configuration and the same
batches and prompts. A round's ratio compares a scheme with the rope of the same round, so that a
machine that slows down slows both. Written are medians over the rounds, and their extremes.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import hydra
import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from wherelm import checkpoint, pipeline, runtime
from wherelm.batches.batch import Batch
from wherelm.batches.sampler import Sampler
from wherelm.config import RunConfig, run_config
from wherelm.model.decoder import initialize
from wherelm.optim.optimizer import Optimizer
from wherelm.sampling.drawing import Sampling
from wherelm.sampling.generation import generate
from wherelm.schemes import SCHEMES
from wherelm.training.steps import accumulate, collated

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "rope"
PROMPTS, REPLY = 16, 64


def run_configuration(position: str) -> RunConfig:
    """That of `python train.py position=…`."""
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        values = hydra.compose("train", ["name=benchmark", f"position={position}"])
    values = OmegaConf.to_container(values, resolve=True)
    del values["resume"], values["ablation"]  # which train.py reads itself
    return run_config(values)


class Contestant:
    """One scheme's decoder and optimizer, and the two things that are timed."""

    def __init__(self, name: str, vocab_size: int):
        self.config = run_configuration(name)
        device = runtime.choose_device(self.config.training.device)
        self.precision = runtime.choose_precision(self.config.training.precision, device)
        self.autocast = runtime.autocast(self.precision, device)
        self.model = checkpoint.build_model(self.config, vocab_size)
        initialize(self.model, self.config.seed)
        self.model.to(device)
        self.optimizer = Optimizer(self.model, self.config.optimizer, self.config.schedule)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def train(self, steps: Sequence[list[Batch]]) -> None:
        """Forward, backward and update, in the middle of training."""
        self.model.train()
        for step, batches in enumerate(steps):
            self.model.scheme.progress(0.5)
            accumulate(self.model, batches, self.config, step, self.autocast)
            self.optimizer.step(0.5, self.config.training.clip)

    def sample(self, prompts: Sequence[list[int]]) -> None:
        """Greedy replies of a fixed length, all prompts in one batch."""
        with self.autocast:
            generate(self.model, prompts, Sampling(greedy=True, max_tokens=REPLY), end=None)


def seconds(work: Callable[[], None]) -> float:
    """How long `work` takes, until the device is done."""
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def in_turns(
    jobs: dict[str, Callable[[], None]], rounds: int, label: str
) -> dict[str, list[float]]:
    """Seconds of every job in every round; each round starts at another job."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    names = list(jobs)
    with tqdm(total=rounds * len(names), desc=label, disable=None) as bar:
        for number in range(rounds):
            start = number * len(names) // rounds
            for name in names[start:] + names[:start]:
                times[name].append(seconds(jobs[name]))
                bar.update()
    return times


def relative(times: dict[str, list[float]], name: str) -> str:
    """Speed beside the reference: the median round, and the slowest and fastest."""
    ratios = [ours / own for ours, own in zip(times[REFERENCE], times[name], strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f})"


def measure(rounds: int, steps: int) -> str:
    """The report, as Markdown."""
    runtime.keep_freed_memory()
    config = run_configuration(REFERENCE)
    data = pipeline.prepare(config, ROOT, ["train"])
    store = data.stores["train"]
    sampler = Sampler(
        store.lengths,
        config.training.batch_tokens,
        config.training.batching,
        config.seed,
        capacity=config.model.context,
    )
    batches = [collated(data, config, sampler, rows) for rows in sampler.batches_of(0)[:steps]]
    slots = sum(int(part.key_mask_BT.sum()) for step in batches for part in step)
    prompts = [store[i][0][: max(2, len(store[i][0]) // 2)].tolist() for i in range(PROMPTS)]

    contestants = {name: Contestant(name, data.tokenizer.vocab_size) for name in SCHEMES}
    device = next(contestants[REFERENCE].model.parameters()).device
    batches = [[part.to(device) for part in step] for step in batches]
    training = {n: lambda c=c: c.train(batches) for n, c in contestants.items()}
    sampling = {n: lambda c=c: c.sample(prompts) for n, c in contestants.items()}
    # The first calls allocate and choose kernels.
    in_turns({n: lambda c=c: c.train(batches[:2]) for n, c in contestants.items()}, 1, "warm up")
    trained = in_turns(training, rounds, "training")
    sampled = in_turns(sampling, rounds, "sampling")

    rope = contestants[REFERENCE]
    lines = [
        "# What the position schemes cost",
        "",
        f"The default model (`configs/model/small.yaml`, {rope.parameters:,} parameters with "
        f"{REFERENCE}) on batches of {config.training.batch_tokens:,} tokens of errands, context "
        f"{config.model.context}, {rope.precision}. Training: {len(batches)} steps a round, "
        f"forward, backward and update; greedy sampling: {PROMPTS} prompts and {REPLY} tokens "
        f"each. All schemes take turns in one process, {rounds} rounds; ratios to {REFERENCE} in "
        "the same round, the median and in brackets the slowest and the fastest round. "
        "Above 1 is faster.",
        "",
        "| scheme | extra parameters | training, tokens/s | training / rope "
        "| sampling, tokens/s | sampling / rope |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, contestant in contestants.items():
        cells = (
            f"`{name}`",
            f"{contestant.parameters - rope.parameters:,}",
            f"{slots / median(trained[name]):,.0f}",
            relative(trained, name),
            f"{PROMPTS * REPLY / median(sampled[name]):,.0f}",
            relative(sampled, name),
        )
        lines.append(f"| {' | '.join(cells)} |")
    options = shlex.join(["python", "-m", "tests.benchmarks.schemes", *sys.argv[1:]])
    threads = torch.get_num_threads()
    lines += [
        "",
        f"{machine(device)}; {threads} thread{'s' if threads > 1 else ''}; "
        f"Python {platform.python_version()}, torch {torch.__version__}; `{options}`.",
        "",
    ]
    return "\n".join(lines)


def machine(device: torch.device) -> str:
    """The processor in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.schemes", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds to take the median of")
    parser.add_argument("--steps", type=int, default=10, help="training steps of each round")
    parser.add_argument("--threads", type=int, help="torch's threads (default: its own choice)")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "data" / "results" / "schemes.md",
        help="the table's file (default: data/results/schemes.md)",
    )
    options = parser.parse_args(arguments)
    for name in ("rounds", "steps", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: expected 1 or more")
    if options.threads:
        torch.set_num_threads(options.threads)
    report = measure(options.rounds, options.steps)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(report, encoding="utf-8")
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
