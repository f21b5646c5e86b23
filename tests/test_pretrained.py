"""The checkpoints that ship with the project."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from wherelm import checkpoint
from wherelm.data.messages import Message, prompt_spans
from wherelm.sampling.drawing import Sampling
from wherelm.sampling.generation import generate

ROOT = Path(__file__).resolve().parents[1]
PRETRAINED = ROOT / "data" / "pretrained"


def asked(lines, loaded):
    rows = [json.loads(line)["messages"] for line in lines]
    prompts = [loaded.tokenizer.encode_spans(prompt_spans([Message(**row[0])]))[0] for row in rows]
    sampling = Sampling(greedy=True, max_tokens=24)
    replies = generate(loaded.model, prompts, sampling, loaded.tokenizer.eos)
    return [
        loaded.tokenizer.decode(reply.tokens) == row[1]["content"]
        for reply, row in zip(replies, rows, strict=True)
    ]


def test_the_shipped_checkpoint_answers_twenty_test_requests():
    loaded = checkpoint.load(PRETRAINED / "errands")
    lines = (ROOT / "data/errands/test.jsonl").read_text().splitlines()[:20]
    assert sum(asked(lines, loaded)) >= 16


def test_the_shipped_checkpoint_tells_the_two_orders_apart():
    result = subprocess.run(
        [
            sys.executable,
            str(ROOT / "sample.py"),
            "--run",
            str(PRETRAINED / "errands"),
            "--greedy",
            "--json",
            "Send the report before the slides.",
            "Send the slides before the report.",
        ],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    texts = [json.loads(line)["text"] for line in result.stdout.splitlines()]
    assert texts == ["report, then slides.", "slides, then report."]
    assert "pretrained" in result.stderr


@pytest.mark.parametrize("folder", sorted(p.name for p in PRETRAINED.iterdir() if p.is_dir()))
def test_what_ships_is_small_and_names_no_place_of_its_own(folder):
    files = list((PRETRAINED / folder).iterdir())
    assert sum(path.stat().st_size for path in files) <= 4e6
    assert not (PRETRAINED / folder / "optimizer.safetensors").exists()
    for path in files:
        if path.suffix in (".yaml", ".json"):
            assert not re.search(r"[\s\"']/\w+/", path.read_text()), path
