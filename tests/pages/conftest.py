import json
import re
from pathlib import Path

import pytest
import torch

from wherelm import checkpoint, visualize
from wherelm.config import run_config
from wherelm.model.decoder import initialize
from wherelm.pages.lecture import trained
from wherelm.pages.lecture.lecture_page import lecture_page as lecture_html
from wherelm.seeds import torch_generator
from wherelm.tokenizer.training import train_tokenizer

MESSAGES = ("Send the report.", "File <b>it</b> & the “slides” $now$.")


def save_model(folder: Path, scheme: str = "rope", layers: int = 2, context: int = 256) -> Path:
    """A checkpoint with random weights over bytes."""
    config = run_config(
        {
            "name": "test",
            "seed": 0,
            "model": {"layers": layers, "width": 16, "heads": 2, "context": context},
            "position": {"name": scheme},
            "data": {},
            "tokenizer": {"kind": "bytes"},
            "optimizer": {"name": "adamw"},
            "schedule": {"name": "constant"},
            "training": {"steps": 1, "batch_tokens": 1024},
            "evaluation": {},
            "tracking": {},
        }
    )
    tokenizer = train_tokenizer(config.tokenizer, ())
    model = checkpoint.build_model(config, tokenizer.vocab_size)
    initialize(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch_generator(0, "noise", name))
            parameter.add_(noise * 0.3)
    state = {"step": 7, "share": 1.0, "validation_loss": 1.0}
    checkpoint.save(folder, model, tokenizer, config, state)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("runs") / "model")


@pytest.fixture(scope="module")
def messages_page(run, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "page.html"
    assert visualize.main([str(run), *MESSAGES, "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def lecture_page(run, tmp_path_factory) -> Path:
    """With the random model, and a random layer without positions beside it."""
    root = tmp_path_factory.mktemp("project")
    save_model(root / trained.WITHOUT, "none", layers=1)
    path = root / "lecture.html"
    path.write_text(lecture_html(root, str(run)), encoding="utf-8")
    return path


def figures_of(path: Path) -> list[list[dict]]:
    text = path.read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(data[1])
