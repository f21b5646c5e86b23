"""How soon things answer: help, a first sampled token, a first training step, data read again.

Commands run as processes of their own and are ended at the sign that is waited for, so that their
times include what `import torch` alone takes, which they are compared with.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tests.benchmarks.measure import ROOT, Times, circumstances, in_turns, left_out, spread, write
from wherelm import pipeline
from wherelm.config import RunConfig, run_config

TORCH, HELP, TOKEN = "`import torch` alone", "`sample.py --help`", "first sampled token"
STEP, VERY_FIRST = "first training step", "the same, nothing in `data.cache` yet"
FIRST, SECOND = "first start", "second start"
MUST = {HELP: 0.25, TOKEN: 1.6, STEP: 2.5}  # times `import torch`
MUST_AGAIN = 0.1  # of the first start
BYTES = 20_000_000
PROMPT = "Send the report before the slides."
# What Python has compiled once it finds again, as on most machines.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def run_until(command: Sequence[str], sign: str) -> None:
    """Runs a command until it has printed the sign (any character, if that is empty)."""
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        seen = b""
        while not seen or sign.encode() not in seen:
            new = os.read(process.stdout.fileno(), 4096)
            if not new:
                raise SystemExit(f"{' '.join(command)}: ended without {sign!r}")
            seen += new
        process.kill()


def run_whole(command: Sequence[str]) -> None:
    subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True
    )


def show_help(times: int = 10) -> int:
    """Several times, for one is too short to tell what other processes took meanwhile."""
    for _ in range(times):
        run_whole(["sample.py", "--help"])
    return times


def train(cache: str | Path) -> None:
    """The default job until its first step."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"data.cache='{cache}'", f"hydra.run.dir='{folder}/run'"]
        run_until(["train.py", *paths], "first step after")


def train_anew() -> None:
    with tempfile.TemporaryDirectory() as cache:
        train(cache)


def write_messages(path: Path, size: int) -> None:
    """Prompts and completions of made-up words, whose lengths are log-normal and ranks Zipf's."""
    generator = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = [
        "".join(generator.choice(letters, length)) for length in generator.integers(2, 9, 9000)
    ]

    def text() -> str:
        count = int(np.clip(generator.lognormal(np.log(12), 0.9), 2, 120))
        chosen = np.minimum(generator.zipf(1.3, count), len(words)) - 1
        return " ".join(words[i] for i in chosen).capitalize() + "."

    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            file.write(json.dumps({"prompt": text(), "completion": text()}) + "\n")


def data_config(messages: Path, cache: Path) -> RunConfig:
    return run_config(
        {
            "name": "startup",
            "seed": 0,
            "model": {"context": 256},
            "position": {"name": "rope"},
            "data": {"train": str(messages), "cache": str(cache)},
            "tokenizer": {"kind": "bpe", "vocab_size": 4096},
            "optimizer": {"name": "muon"},
            "schedule": {"name": "wsd"},
            "training": {"steps": 1},
            "evaluation": {},
            "tracking": {"name": "none"},
        }
    )


def prepare(messages: Path, cache: Path) -> None:
    """Reads, splits and tokenises in a process that has torch, but nothing that reading imports."""
    arguments = (data_config(messages, cache), ROOT, ("train", "validation"))
    process = multiprocessing.get_context("fork").Process(target=pipeline.prepare, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit("the messages could not be prepared")


def measure(rounds: int) -> str:
    """The report, as Markdown."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        messages, warm = folder / "messages.jsonl", folder / "warm"
        write_messages(messages, BYTES)

        def prepare_anew() -> None:
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                prepare(messages, Path(cache))

        prepare(messages, warm)
        again = in_turns(
            {FIRST: prepare_anew, SECOND: lambda: prepare(messages, warm)}, rounds, "data"
        )
        train(warm)
        commands = {
            TORCH: lambda: run_until(["-c", "import torch; print('imported')"], "imported"),
            HELP: show_help,
            TOKEN: lambda: run_until(
                ["sample.py", "--run", "data/pretrained/errands", "--greedy", PROMPT], ""
            ),
            STEP: lambda: train(warm),
            VERY_FIRST: train_anew,
        }
        soon = in_turns(commands, rounds, "commands")
    return report(soon, again)


def report(soon: Times, again: Times) -> str:
    """The two tables."""
    lines = [
        "# From the command to the answer",
        "",
        "Warm disk; the default job and the shipped checkpoint. Medians (smallest – largest); "
        "ratios within a round.",
        "",
        "| until | seconds | × `import torch` | wanted |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, seconds in soon.seconds.items():
        ratios = "1" if name == TORCH else spread(soon.ratios(TORCH, name))
        wanted = f"≤ {MUST[name]}" if name in MUST else ""
        lines.append(f"| {name} | {spread(seconds)} | {ratios} | {wanted} |")
    lines += [
        "",
        f"{BYTES // 10**6} MB of made-up messages, from the imported program to token ids of two "
        "splits:",
        "",
        "| | seconds | × first start | wanted |",
        "| --- | ---: | ---: | ---: |",
        f"| {FIRST} | {spread(again.seconds[FIRST])} | 1 | |",
        f"| {SECOND} | {spread(again.seconds[SECOND])} | "
        f"{spread(again.ratios(FIRST, SECOND), '.3f')} | ≤ {MUST_AGAIN} |",
        "",
        circumstances("startup", torch.device("cpu")) + " " + left_out([soon, again]),
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.startup", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds to take the median of")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected 1 or more")
    write(measure(options.rounds), "startup")
    return 0


if __name__ == "__main__":
    sys.exit(main())
